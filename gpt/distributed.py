"""Several ranks: adding up over all, telling all, wrapping the model.

One process needs none of it: every function then does the obvious thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpt.config import Parallel
from gpt.loss import NextTokenLoss
from gpt.ranks import Ranks
from gpt.runtime import Runtime

# One rank may prepare data for hours while the others wait; in training, gpt/stopping.py watches.
TIMEOUT = timedelta(days=2)


def start(ranks: Ranks, machine: Runtime) -> None:
    """Meet the other ranks. Raises ValueError where they can't work the way that is asked for."""
    device = machine.device
    if machine.config.parallel == Parallel.fsdp:
        if machine.dtype == torch.float16:
            raise ValueError(
                "runtime.parallel=fsdp can not scale the loss for float16; only the rank that "
                "holds a shard would see it overflow, and the ranks would part; use "
                "runtime.dtype=bfloat16 or float32, or runtime.parallel=ddp"
            )
        if ranks.world_size == 1:
            machine.notes.append("runtime.parallel=fsdp on one process: there is nothing to shard")
    if ranks.world_size > 1 and (machine.config.device.startswith("cuda:") or device.type == "mps"):
        raise ValueError(
            f"runtime.device={machine.config.device} is one device and there are "
            f"{ranks.world_size} ranks; each needs one of its own; use runtime.device=cuda, where "
            "every rank takes its card, or cpu"
        )
    if ranks.world_size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)


def all_sum(values: Tensor, ranks: Ranks) -> Tensor:
    """Add a tensor up over all ranks, in place; every rank gets the same bits."""
    if ranks.world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def all_max(values: Tensor, ranks: Ranks) -> Tensor:
    """The elementwise maximum over all ranks, in place."""
    if ranks.world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def from_main(value: Any, ranks: Ranks) -> Any:
    """Every rank gets what the main rank holds. JSON values: torch's own way would pickle them."""
    if ranks.world_size == 1:
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    buffer = text if ranks.is_main else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return json.loads(bytes(buffer.tolist()))


def barrier(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.barrier()


# --- tensors that may be sharded over ranks (FSDP): every rank then holds some of the rows.
# What shards is imported where it is used: it takes half a second, which sampling need not wait.


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every rank has to ask, and gets it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, which every rank holds, laid out as a parameter is. No rank is asked.

    A scalar (the optimizer's count of steps) stays whole.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and tensor.dim():
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return tensor.to(parameter.device)


def put(parameter: Tensor, value: Tensor) -> None:
    """Overwrite a parameter by a whole tensor, which every rank holds."""
    parameter.copy_(like(value, parameter))


def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, a scalar of the same bits on every rank."""
    return full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


# --- the model


def wrap(loss_of: NextTokenLoss, ranks: Ranks, machine: Runtime) -> nn.Module:
    """What to call in the place of `loss_of`, so that gradients come out as means over all ranks.

    Alone: the module itself. The blocks are compiled by then, the wrapper is not: its hooks run
    between the blocks.
    """
    if ranks.world_size == 1:
        return loss_of
    if machine.config.parallel == Parallel.fsdp:
        return _shard(loss_of, ranks, machine)
    return _replicate(loss_of, machine)


def _replicate(loss_of: NextTokenLoss, machine: Runtime) -> nn.Module:
    """DDP, with gradients as views of its buckets (one copy less).

    A new DDP sorts its buckets anew after the first backward pass, and with more than two ranks
    another layout adds in another order: a resumed run would differ in the last bits. So two passes
    over a single token, whose gradients are thrown away, come first.
    """
    device = machine.device
    wrapped = DistributedDataParallel(
        loss_of,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.compiler.set_stance("force_eager"), machine.autocast():
        for _ in range(2):  # they are sorted when the second forward begins
            wrapped(token, token).backward()
    forget_gradients(wrapped)
    return wrapped


def _shard(loss_of: NextTokenLoss, ranks: Ranks, machine: Runtime) -> nn.Module:
    """FSDP2, in place: each block is gathered when its turn comes, and its gradients are shared out
    after it; the embeddings and the last norm are one more such group.

    On a GPU blocks are gathered in the run's dtype, half the bytes in bfloat16; gradients are
    reduced in float32. Their inputs are not cast, so that the residual stream stays float32, as
    under autocast alone. On a CPU they are gathered as they are: its autocast leaves layer_norm
    alone, which takes no bfloat16 weight beside a float32 input.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(machine.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=machine.dtype if machine.device.type == "cuda" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in loss_of.model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Resharded after the forward pass too, though backward gathers it again at once: an evaluation
    # would else leave whole parameters in the model, where the optimizer's and a save's are shards.
    fully_shard(loss_of, mesh=mesh, reshard_after_forward=True)
    return loss_of


def forget_gradients(module: nn.Module) -> None:
    """Before the next step adds up its own. DDP's are zeroed where they lie: they are its buckets,
    and let go, micro-batches would add up beside them, in as much memory again."""
    module.zero_grad(set_to_none=not isinstance(module, DistributedDataParallel))


def set_gradient_sync(module: nn.Module, sync: bool) -> None:
    """Whether the coming forward and backward reduce gradients: DDP looks during the forward."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = sync
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(sync)
