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

from gpt.ranks import Ranks
from gpt.runtime import Runtime

# One rank may prepare data for hours while the others wait; in training, gpt/stopping.py watches.
TIMEOUT = timedelta(days=2)


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


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over ranks; every rank has to ask."""
    return tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, of which every rank holds the same, laid out as a parameter is."""
    return tensor.to(parameter.device)


def put(parameter: Tensor, value: Tensor) -> None:
    """Overwrite a parameter by a whole tensor."""
    parameter.copy_(like(value, parameter))


def clip_grad_norm(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale gradients down to a norm of `limit` over all of them; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf"))


def wrap(module: nn.Module, ranks: Ranks, machine: Runtime) -> nn.Module:
    """DDP, with gradients as views of its buckets (one copy less). Alone: the module itself.

    A new DDP sorts its buckets anew after the first backward pass, and with more than two ranks
    another layout adds in another order: a resumed run would differ in the last bits. So one pass
    over a single token, whose gradients are thrown away, comes first.
    """
    if ranks.world_size == 1:
        return module
    device = machine.device
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.compiler.set_stance("force_eager"), machine.autocast():
        for _ in range(2):  # they are sorted when the second forward begins
            wrapped(token, token).backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def set_gradient_sync(module: nn.Module, sync: bool) -> None:
    """Whether the coming forward and backward reduce gradients: DDP looks during the forward."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = sync
