"""Which parameters decay, and the optimizer that moves them."""

from __future__ import annotations

import torch
from torch import nn

from gpt.config import AdamWConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices and tables decay; biases and norms do not.

    Tied weights are one parameter and appear once; the order is the module's, so it is stable.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for _, p in named if p.dim() >= 2]
    rest = [p for _, p in named if p.dim() < 2]
    assert len({id(p) for _, p in named}) == len(decayed) + len(rest)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: AdamWConfig) -> torch.optim.AdamW:
    """AdamW in its fused form: one pass over memory for each parameter."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
