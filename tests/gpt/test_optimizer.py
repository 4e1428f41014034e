"""Which parameters decay, and that the update is AdamW's."""

import torch

from gpt.config import AdamWConfig
from gpt.model import GPT, GPTConfig
from gpt.optimizer import build_optimizer, parameter_groups


def tiny() -> GPT:
    shape = {"block_size": 8, "vocab_size": 60, "n_layer": 2, "n_head": 2, "n_embd": 16}
    return GPT(GPTConfig(**shape, embd_dropout=0.0, attn_dropout=0.0, resid_dropout=0.0))


def test_every_parameter_is_in_one_group() -> None:
    """Tied weights once, 1-D tensors undecayed, none left out, the order stable."""
    model = tiny()
    decayed, rest = (group["params"] for group in parameter_groups(model, 0.1))
    assert isinstance(decayed, list) and isinstance(rest, list)
    everything = [*decayed, *rest]
    assert len({id(p) for p in everything}) == len(everything) == len(list(model.parameters()))
    assert sum(p.numel() for p in everything) == sum(p.numel() for p in model.parameters())
    assert all(p.dim() == 2 for p in decayed) and all(p.dim() == 1 for p in rest)
    assert [g["weight_decay"] for g in parameter_groups(model, 0.1)] == [0.1, 0.0]
    again = parameter_groups(model, 0.1)[0]["params"]
    assert isinstance(again, list) and [id(p) for p in again] == [id(p) for p in decayed]


def test_three_updates_are_adamw_by_its_formula() -> None:
    """Loshchilov & Hutter 2019, algorithm 2, in float64 by hand."""
    model = tiny()
    lr, b1, b2, eps, decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    optimizer = build_optimizer(
        model, AdamWConfig(lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay)
    )
    p = model.h[0].mlp.c_fc.weight
    bias = model.h[0].mlp.c_fc.bias
    generator = torch.Generator().manual_seed(0)
    expected = {q: (q.detach().double(), 0.0, 0.0) for q in (p, bias)}
    for t in range(1, 4):
        for q in (p, bias):
            q.grad = torch.randn(q.shape, generator=generator)
            w, m, v = expected[q]
            g = q.grad.double()
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w * (1 - lr * (decay if q is p else 0.0))
            w = w - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
            expected[q] = (w, m, v)
        optimizer.step()
    for q in (p, bias):
        torch.testing.assert_close(q.detach().double(), expected[q][0], atol=1e-7, rtol=1e-6)
