"""The validation loss against torch's own, over all tokens at once."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt.config import DType, GPTConfig
from gpt.evaluation import evaluate
from gpt.loss import IGNORE, NextTokenLoss
from gpt.model import GPT
from gpt.ranks import Ranks
from gpt.runtime import resolve
from tests.gpt.test_runtime import config

T, V = 8, 50


class Text:
    """A stream of ids as windows that lie one after another, the last of them short."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids, self.n_eval = ids, -(-(len(ids) - 1) // T)

    def eval_batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(len(indices), T, dtype=torch.int64)
        y = torch.full((len(indices), T), IGNORE)
        for row, index in enumerate(indices.tolist()):
            part = self.ids[index * T : (index + 1) * T + 1]
            x[row, : len(part) - 1], y[row, : len(part) - 1] = part[:-1], part[1:]
        return x, y


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
def test_every_token_weighs_the_same(batch_size: int) -> None:
    """Seven windows, of which the last has 3 targets, in batches that they fill or don't: the mean
    over the 51 tokens, and their bits over their bytes."""
    shape = {"block_size": T, "vocab_size": V, "n_layer": 1, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**shape, embd_dropout=0.5, attn_dropout=0.5, resid_dropout=0.5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.wte.weight *= 20  # far from uniform, so that tokens differ
    ids = torch.randint(0, V, (6 * T + 3 + 1,), generator=generator)
    token_bytes = torch.randint(0, 9, (V,), generator=generator)

    model.eval()
    losses = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, T):
            part = ids[start : start + T + 1]
            logits = model(part[None, :-1])[0].double()
            losses.append(F.cross_entropy(logits, part[1:], reduction="none"))
    every = torch.cat(losses)
    assert len(every) == 51 and every.std() > 0.5
    nats = float(every.mean())
    bits = float(every.sum()) / math.log(2) / int(token_bytes[ids[1:]].sum())

    model.train()
    loss_of = NextTokenLoss(model).train()
    machine = resolve(config(dtype=DType.float32))
    found = evaluate(loss_of, Text(ids), 100, batch_size, token_bytes, machine, Ranks())
    assert found == pytest.approx((nats, bits), rel=1e-6)
    assert loss_of.training
