"""Ranks: who am I, adding up over all, leaving in good order. Rank variables are read only here.

One process needs none of it: every function then does the obvious thing.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(minutes=30)  # one rank may prepare data while the others wait


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def find_ranks() -> Ranks:
    """This process's place, as torchrun set it; alone where nothing is set."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Ranks()
    return Ranks(int(env["RANK"]), int(env.get("LOCAL_RANK", env["RANK"])), int(env["WORLD_SIZE"]))


def start(ranks: Ranks, device: torch.device) -> None:
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


def wrap(module: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """DDP, with gradients as views of its buckets (one copy less). Alone: the module itself."""
    if ranks.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def set_gradient_sync(module: nn.Module, sync: bool) -> None:
    """Whether the coming forward and backward reduce gradients: DDP looks during the forward."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = sync


def leave(ranks: Ranks, code: int) -> NoReturn:
    """End the process with this code.

    With gloo, interpreter shutdown races against its threads and aborts now and then, after all
    work is done. So ranks leave together, flushed, without it.
    """
    if ranks.world_size > 1:
        if dist.is_initialized() and code in (0, 130, 143):
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
