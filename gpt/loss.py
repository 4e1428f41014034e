"""Next-token loss from hidden states, without ever holding the (B·T, V) logits.

The head's product is the largest tensor of a small GPT-2: 4 windows of 1,024 tokens over 50,304
columns are 824 MB in float32, several times over in a plain backward. Here rows go through head
and softmax in chunks, and the chunk's gradients are taken on the spot, while its logits exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpt.model import GPT

IGNORE = -1  # a target that is no token: it adds nothing to loss or gradient


def chunk_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows at once. In float32 on a CPU a chunk's logits should stay near the caches; elsewhere
    each chunk costs a pass over the weight's gradient, so there should be few."""
    return 256 if device.type == "cpu" and dtype == torch.float32 else 2048


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> Tensor:
        w = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros_like(weight) if with_grad else None
        rows_at_once = min(chunk_rows(hidden.device, dtype), len(hidden))
        # Two buffers for all chunks: memory fresh from the system costs as much as the softmax.
        log_p_buffer = hidden.new_empty(rows_at_once, len(weight), dtype=torch.float32)
        logits_buffer = hidden.new_empty(rows_at_once, len(weight), dtype=dtype)
        for rows in range(0, len(hidden), rows_at_once):
            chunk = slice(rows, rows + rows_at_once)
            x, target = hidden[chunk].to(dtype), targets[chunk]
            logits = torch.mm(x, w.t(), out=logits_buffer[: len(x)])  # [rows, padded V]
            logits[:, vocab_size:] = float("-inf")
            log_p = log_p_buffer[: len(x)]
            torch.log_softmax(logits, dim=1, dtype=torch.float32, out=log_p)
            counted = target != IGNORE
            index = target.clamp_min(0).unsqueeze(1)
            total -= (log_p.gather(1, index).squeeze(1) * counted).sum()
            if d_hidden is not None and d_weight is not None:
                # d loss / d logits = softmax − one-hot. Where nothing is to be predicted it is 0,
                # for which C numbers a row are set to zero and not V.
                grad = log_p.exp_()
                grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0))
                if dtype != torch.float32:
                    grad = logits.copy_(grad)
                d_hidden[chunk] = (grad @ w).mul_(counted.unsqueeze(1))
                x = x * counted.unsqueeze(1)
                if dtype == torch.float32:
                    d_weight.addmm_(grad.t(), x)
                else:
                    d_weight += grad.t() @ x
        if d_hidden is not None and d_weight is not None:
            ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        # In place: a copy of the weight's gradient would count in the step's peak memory. A second
        # backward over the same graph is refused by torch, since saved tensors have changed.
        return d_hidden.mul_(scale), d_weight.mul_(scale), None, None, None, None


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum of −log p(target) in nats, float32.

    hidden [N, C], weight [padded V, C], targets int64 [N] (−1: not counted) → scalar. Columns from
    `vocab_size` on are padding: no probability, no gradient. Under autocast the products run in
    its dtype, softmax and sum in float32 always.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    # Inside, grad mode is off always, and a parameter needs its gradient under no_grad as well.
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        out: Tensor = _ChunkedCrossEntropy.apply(
            hidden, weight, targets, vocab_size, dtype, with_grad
        )
    return out


class NextTokenLoss(nn.Module):
    """model, (x, y) → summed loss. A module of its own, since DDP hooks into a module's forward."""

    def __init__(self, model: GPT, document_end: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.document_end = document_end

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.model.trunk(x, self.document_end)  # [B, T, C]
        return cross_entropy_sum(
            hidden.flatten(0, 1), self.model.wte.weight, y.flatten(), self.model.vocab_size
        )
