"""Next-token loss from hidden states, without ever holding the (B·T, V) logits.

The head's product is the largest tensor of a small GPT-2: 4 windows of 1,024 tokens over 50,304
columns are 824 MB in float32, several times over in a plain backward. Here rows go through head
and softmax in chunks, and the chunk's gradients are taken on the spot, while its logits exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt.model import GPT

IGNORE = -1  # a target that is no token: it adds nothing to loss or gradient


# (logits [rows, padded V], targets [rows], V, with_grad) → summed loss in float32. With with_grad,
# d loss / d logits takes the logits' place, but for rows without a target.
Softmax = Callable[[Tensor, Tensor, int, bool], Tensor]

CPU_SOFTMAX_ROWS = 16  # at once: 3 MB in float32 with GPT-2's vocabulary, near the caches


def chunk_rows(dtype: torch.dtype) -> int:
    """Rows at once: 206 MB of logits with GPT-2's vocabulary. More would be memory; fewer, more
    passes over the gradient of the weight."""
    return 4096 // dtype.itemsize


def softmax_by_rows(logits: Tensor, targets: Tensor, vocab_size: int, with_grad: bool) -> Tensor:
    """A `Softmax` by torch's kernels. On a CPU a few rows go through all of them before the next:
    their float32 numbers then needn't travel to memory and back between two kernels."""
    logits[:, vocab_size:] = float("-inf")
    at_once = CPU_SOFTMAX_ROWS if logits.device.type == "cpu" else len(logits)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for rows, target in zip(logits.split(at_once), targets.split(at_once)):
        log_p = torch.log_softmax(rows, dim=1, dtype=torch.float32)
        index = target.clamp_min(0).unsqueeze(1)
        total -= (log_p.gather(1, index).squeeze(1) * (target != IGNORE)).sum()
        if with_grad:  # softmax − one-hot
            grad = log_p.exp_()
            rows.copy_(grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0)))
    return total


def softmax_and_gradient(
    logits: Tensor, targets: Tensor, vocab_size: int, with_grad: bool
) -> Tensor:
    """A `Softmax` written to be compiled: that makes a few passes over the logits with nothing of
    their size beside them. For GPUs, which would wait for memory here (docs/decisions.md).
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    x = logits.float().masked_fill(columns >= vocab_size, float("-inf"))
    counted = targets != IGNORE
    index = targets.clamp_min(0).unsqueeze(1)
    top = x.amax(1, keepdim=True)  # written out, so that the compiler sees a softmax in it
    log_sum = top + (x - top).exp().sum(1, keepdim=True).log()
    loss = ((log_sum - x.gather(1, index)).squeeze(1) * counted).sum()
    if with_grad:
        grad = torch.exp(x - log_sum) - (columns == index).float()
        logits.copy_(grad * counted.unsqueeze(1))
    return loss


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
        softmax: Softmax,
    ) -> Tensor:
        w = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros_like(weight) if with_grad else None
        chunks = -(-len(hidden) // chunk_rows(dtype))
        size = -(-len(hidden) // chunks)  # all of a size, for compiled code and the buffers
        # One buffer for all chunks: memory fresh from the system costs as much as the softmax.
        buffer = hidden.new_empty(size, len(weight), dtype=dtype)
        for rows in range(0, len(hidden), size):
            chunk = slice(rows, rows + size)
            x, target = hidden[chunk].to(dtype), targets[chunk]
            grad = torch.mm(x, w.t(), out=buffer[: len(x)])  # [rows, padded V], so far logits
            total += softmax(grad, target, vocab_size, with_grad)
            if d_hidden is not None and d_weight is not None:
                # Where nothing is to be predicted the gradient is 0: set here in C numbers a row.
                counted = (target != IGNORE).unsqueeze(1)
                d_hidden[chunk] = (grad @ w).mul_(counted)
                x = x * counted
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
        return d_hidden.mul_(scale), d_weight.mul_(scale), None, None, None, None, None


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softmax: Softmax = softmax_by_rows,
) -> Tensor:
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
            hidden, weight, targets, vocab_size, dtype, with_grad, softmax
        )
    return out


class NextTokenLoss(nn.Module):
    """model, (x, y) → summed loss. A module of its own, since DDP hooks into a module's forward."""

    def __init__(self, model: GPT, document_end: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.document_end = document_end
        self.softmax: Softmax = softmax_by_rows  # or softmax_and_gradient, compiled

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.model.trunk(x, self.document_end)  # [B, T, C]
        return cross_entropy_sum(
            hidden.flatten(0, 1),
            self.model.wte.weight,
            y.flatten(),
            self.model.vocab_size,
            self.softmax,
        )
