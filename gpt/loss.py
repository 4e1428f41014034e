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


# What `softmax_and_gradient` does, as it is or compiled.
Softmax = Callable[[Tensor, Tensor, int, bool], Tensor]


def chunk_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows at once. In float32 on a CPU a chunk's logits should stay near the caches; elsewhere
    each chunk costs a pass over the weight's gradient, so there should be few."""
    return 256 if device.type == "cpu" and dtype == torch.float32 else 2048


def softmax_and_gradient(
    logits: Tensor, targets: Tensor, vocab_size: int, with_grad: bool
) -> Tensor:
    """Summed loss of a chunk, float32; with_grad, d loss / d logits takes the logits' place.

    logits [rows, padded V], targets int64 [rows]. Written to be compiled: that makes a few passes
    over the logits with nothing of their size beside them, where torch's kernels, one after the
    other, write a float32 copy and go over it again and again. A GPU waits for memory here
    (docs/decisions.md), a CPU doesn't.
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
        softmax: Softmax | None,
    ) -> Tensor:
        w = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros_like(weight) if with_grad else None
        chunks = -(-len(hidden) // chunk_rows(hidden.device, dtype))
        size = -(-len(hidden) // chunks)  # all of a size, for compiled code and the buffers
        # Buffers for all chunks: memory fresh from the system costs as much as the softmax.
        logits_buffer = hidden.new_empty(size, len(weight), dtype=dtype)
        log_p_buffer = torch.empty_like(logits_buffer, dtype=torch.float32) if not softmax else None
        for rows in range(0, len(hidden), size):
            chunk = slice(rows, rows + size)
            x, target = hidden[chunk].to(dtype), targets[chunk]
            counted = target != IGNORE
            logits = torch.mm(x, w.t(), out=logits_buffer[: len(x)])  # [rows, padded V]
            if log_p_buffer is None:
                assert softmax is not None
                total += softmax(logits, target, vocab_size, with_grad)
                grad = logits
            else:
                logits[:, vocab_size:] = float("-inf")
                log_p = log_p_buffer[: len(x)]
                torch.log_softmax(logits, dim=1, dtype=torch.float32, out=log_p)
                index = target.clamp_min(0).unsqueeze(1)
                total -= (log_p.gather(1, index).squeeze(1) * counted).sum()
                if with_grad:
                    # d loss / d logits = softmax − one-hot. Where nothing is to be predicted it is
                    # 0, for which C numbers a row are set to zero below and not V.
                    grad = log_p.exp_()
                    grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0))
                    if dtype != torch.float32:
                        grad = logits.copy_(grad)
            if d_hidden is not None and d_weight is not None:
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
        return d_hidden.mul_(scale), d_weight.mul_(scale), None, None, None, None, None


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softmax: Softmax | None = None,
) -> Tensor:
    """Sum of −log p(target) in nats, float32.

    hidden [N, C], weight [padded V, C], targets int64 [N] (−1: not counted) → scalar. Columns from
    `vocab_size` on are padding: no probability, no gradient. Under autocast the products run in
    its dtype, softmax and sum in float32 always. `softmax`: `softmax_and_gradient`, compiled; None
    where it isn't.
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
        self.softmax: Softmax | None = None  # or that, compiled

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.model.trunk(x, self.document_end)  # [B, T, C]
        return cross_entropy_sum(
            hidden.flatten(0, 1),
            self.model.wte.weight,
            y.flatten(),
            self.model.vocab_size,
            self.softmax,
        )
