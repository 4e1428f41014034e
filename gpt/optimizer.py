"""Which parameters decay, and the optimizer that moves them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019). `lr` is the peak; the schedule multiplies it."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(
                f"optimizer.lr={self.lr} is not positive; nothing would be learned; "
                "choose a rate above 0, such as 6e-4"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} is outside [0, 1); "
                    "it is the weight of the past in a running mean; choose one below 1"
                )
        if self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"optimizer.eps={self.eps}, optimizer.weight_decay={self.weight_decay}: the first "
                "must be above 0, the second not below; the update is undefined or grows weights; "
                "use 1e-8 and 0.1"
            )


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
