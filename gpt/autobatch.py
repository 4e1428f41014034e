"""trainer.micro_batch_size=auto: the most windows at once that a device holds, found by trial."""

from __future__ import annotations

import torch

from gpt import distributed, runtime
from gpt.loss import NextTokenLoss
from gpt.ranks import Ranks
from gpt.runtime import Runtime

MOST_TOKENS = 65_536  # at once: a GPU is busy long before
MOST_TOKENS_CPU = 4_096  # there, more is not faster, and memory that runs out ends the process
SPARE = 2**30  # bytes of a GPU for cuBLAS, NCCL and the allocator's holes


def find_micro_batch_size(
    loss_of: NextTokenLoss, batch_tokens: int, machine: Runtime, ranks: Ranks
) -> int:
    """Windows a micro-batch, which divide the step's share of a rank.

    On a GPU each candidate runs forward and backward once, not compiled, with room kept for the
    optimizer's moments and what libraries take; where memory runs out, the next is at most half.
    On a CPU nothing is tried. The smallest over all ranks. Raises ValueError where not even one
    window fits.
    """
    block_size = loss_of.model.config.block_size
    share = batch_tokens // (block_size * ranks.world_size)
    on_gpu = machine.device.type == "cuda"
    most = max(1, (MOST_TOKENS if on_gpu else MOST_TOKENS_CPU) // block_size)
    sizes = [d for d in range(min(share, most), 0, -1) if share % d == 0]
    found = sizes[0]
    while on_gpu and not _fits(loss_of, found, machine):
        if found == 1:
            raise ValueError(
                f"not even one window of {block_size} tokens fits into {machine.device}'s memory; "
                "this model can't be trained there as it is; set "
                "runtime.activation_checkpointing=true if it isn't, or shard it over several "
                "devices with runtime.parallel=fsdp"
            )
        found = next(d for d in sizes if d <= found // 2)
    return -int(distributed.all_max(torch.tensor(-found), ranks))


def _fits(loss_of: NextTokenLoss, windows: int, machine: Runtime) -> bool:
    """Whether one micro-batch of so many windows runs; leaves no trace in the model."""
    model, device = loss_of.model, machine.device
    runtime.recompute_blocks(model, machine.config.activation_checkpointing)
    try:
        loss_of.to(device).train()
        kept = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
        kept.append(torch.empty(SPARE, dtype=torch.uint8, device=device))
        ids = torch.zeros(windows, model.config.block_size, dtype=torch.int64, device=device)
        with machine.autocast():
            loss_of(ids, ids).backward()
        del kept
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True
