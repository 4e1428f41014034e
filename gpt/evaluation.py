"""Validation loss: the fixed windows of the held-back text, shared among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gpt import distributed
from gpt.loss import IGNORE
from gpt.metrics import bits_per_byte
from gpt.ranks import Ranks
from gpt.runtime import Runtime


class EvalData(Protocol):
    n_eval: int

    def eval_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]: ...


@torch.no_grad()
def evaluate(
    loss_of: nn.Module,
    data: EvalData,
    n_windows: int,
    batch_size: int,
    token_bytes: Tensor,
    machine: Runtime,
    ranks: Ranks,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, float] | None:
    """Loss on `n_windows` spread over the whole split: (nats a token, bits a byte).

    `loss_of` maps (x, y) to a sum in nats; `token_bytes` [V] holds the bytes of each id. Every
    rank makes the same number of passes, of one shape; None where a rank was asked to stop.
    """
    count = min(data.n_eval, n_windows)
    chosen = np.arange(count) * data.n_eval // count
    mine = chosen[ranks.rank :: ranks.world_size]
    longest = -(-count // ranks.world_size)
    passes = -(-longest // batch_size)
    # Losses and counts are added up in float64, so the order of ranks can't be seen.
    sums = torch.zeros(3, dtype=torch.float64)
    was_training = loss_of.training
    loss_of.eval()
    try:
        for i in range(passes):
            indices = mine[i * batch_size : (i + 1) * batch_size]
            padded = np.append(indices, np.full(batch_size - len(indices), chosen[0]))
            x, y = data.eval_batch(padded)
            y[len(indices) :] = IGNORE  # a full batch, so that compiled code sees one shape
            x, y = x.to(machine.device), y.to(machine.device)
            with machine.autocast():
                loss = loss_of(x, y)
            counted = y != IGNORE
            n_bytes = (token_bytes[y.clamp_min(0)] * counted).sum()
            # float32 holds both counts of a batch exactly; MPS has no float64.
            sums += torch.stack([loss, counted.sum(), n_bytes]).cpu().double()
            if int(distributed.all_max(torch.tensor(int(stopped())), ranks)):
                return None
    finally:
        loss_of.train(was_training)
    nats, tokens, n_bytes = distributed.all_sum(sums, ranks).tolist()
    return nats / tokens, bits_per_byte(nats / tokens, n_bytes / tokens)
