"""Causal attention with dropout on a CPU, in memory that grows with T and not with T².

torch's scaled_dot_product_attention leaves its fast CPU kernel as soon as weights are to be
dropped. Here queries go in blocks, a few heads at a time, over the keys that they may see: a
block's scores, softmax and mask fit the caches, and the backward pass makes them again
(Dao et al. 2022, "FlashAttention", section 3.1 and appendix B). What is dropped is a hash of
(seed, window, head, row, column), so it is the same in both passes, for any size of blocks, and in
the attention that is written out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

QUERY_ROWS = 128  # in a block, which works on half as many columns too many
SCORES_PER_THREAD = 2**18  # in a block; tried: docs/decisions.md

# Odd constants that spread bits: Steele, Lea & Flood 2014 (SplitMix64), and one of 32 bits.
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_32 = 0x2C1B3C6D


def _signed(x: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    return x - 2**64 if x >= 2**63 else x


def _splitmix(x: Tensor) -> Tensor:
    """SplitMix64's finisher on int64: near numbers → unrelated ones. Shifts are made logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & (2**33 - 1))


def _keys(seed: Tensor, B: int, H: int, T: int) -> tuple[Tensor, Tensor]:
    """An odd int32 for each row and each column of each head: two of [B, H, T]."""
    head = torch.arange(B * H, device=seed.device).view(B, H, 1)
    place = (head << 32) + torch.arange(T, device=seed.device)
    mixed = _splitmix(_splitmix(seed) + place * _signed(_GAMMA))
    return (mixed >> 32).int() | 1, mixed.int() | 1  # .int() keeps the low half


def _hash(rows: Tensor, columns: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """Keys [..., R, 1] and [..., 1, K] → int32 [..., R, K], spread over all int32."""
    torch.mul(rows, columns, out=out)
    torch.bitwise_right_shift(out, 15, out=spare)
    return out.bitwise_xor_(spare).mul_(_MIX_32)


def _threshold(dropout: float) -> int:
    """A hash is kept if it is above this: `dropout` of all int32 are not, to 1e-9."""
    return round(dropout * 2**32) - 1 - 2**31


def keep_mask(seed: Tensor, B: int, H: int, T: int, dropout: float) -> Tensor:
    """What `attend` keeps, whole: bool [B, H, T, T], on any device. seed: int64, one number."""
    rows, columns = _keys(seed, B, H, T)
    out, spare = torch.empty(2, B, H, T, T, dtype=torch.int32, device=seed.device)
    return _hash(rows.unsqueeze(-1), columns.unsqueeze(-2), out, spare) > _threshold(dropout)


class _Blocks:
    """The weights of dropped attention, a block at a time, the same in both passes."""

    def __init__(
        self, qkv: Tensor, n_head: int, dropout: float, seed: Tensor, mask: Tensor | None
    ) -> None:
        B, T, C3 = qkv.shape
        assert 0 < dropout < 1, dropout
        D = C3 // 3 // n_head
        self.qkv = qkv.view(B, T, 3, n_head, D).permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
        self.narrow = qkv.dtype  # of the products
        self.wide = torch.float32 if self.narrow.itemsize < 4 else self.narrow  # of the softmax
        self.scale, self.dropout, self.mask = 1 / math.sqrt(D), dropout, mask
        self.row_keys, self.column_keys = _keys(seed, B, n_head, T)
        R = min(QUERY_ROWS, T)
        G = max(1, min(n_head, SCORES_PER_THREAD * torch.get_num_threads() // (R * T)))
        self.later = torch.ones(R, R, dtype=torch.bool).triu(1)
        self.groups = [  # windows, and a few heads of each
            (b, slice(h, min(h + G, n_head))) for b in range(B) for h in range(0, n_head, G)
        ]
        self.rows = [slice(t, min(t + R, T)) for t in range(0, T, R)]
        # One set of buffers for all blocks: they stay in the caches.
        self.scores = torch.empty(G * R * T, dtype=self.narrow)
        self.p, self.kept, self.d_scores = torch.empty(3, G * R * T, dtype=self.wide)
        self.bits, self.spare = torch.empty(2, G * R * T, dtype=torch.int32)

    def heads(self, b: int, heads: slice) -> list[Tensor]:
        """q, k, v of a few heads of one window: [G, T, D] each."""
        return [part.contiguous() for part in self.qkv[:, b, heads]]

    def weights(
        self, b: int, heads: slice, rows: slice, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All rows of q and k [G, T, D] → of these rows the softmax and what dropout leaves of it,
        not yet scaled: [G, R, K] each, K the columns up to the last row."""
        shape = (len(q), rows.stop - rows.start, rows.stop)
        s, p, kept, bits, spare = (
            x[: math.prod(shape)].view(shape)
            for x in (self.scores, self.p, self.kept, self.bits, self.spare)
        )
        keys = k[:, : rows.stop].transpose(1, 2)
        torch.baddbmm(s, q[:, rows], keys, beta=0, alpha=self.scale, out=s)
        if self.mask is None:
            s[:, :, rows].masked_fill_(self.later[: shape[1], : shape[1]], float("-inf"))
        else:
            s.masked_fill_(~self.mask[b, :, rows, : rows.stop], float("-inf"))
        torch.softmax(s, -1, dtype=self.wide, out=p)
        _hash(
            self.row_keys[b, heads, rows].unsqueeze(-1),
            self.column_keys[b, heads, : rows.stop].unsqueeze(-2),
            bits,
            spare,
        )
        # 0 where bits ≤ threshold, in one vectorised pass over floats taken as integers:
        # masked_fill, or comparing and multiplying, takes several times as long.
        integer = torch.int32 if p.dtype == torch.float32 else torch.int64
        torch.ops.aten.threshold_backward.grad_input(
            p.view(integer),
            bits.to(integer),
            _threshold(self.dropout),
            grad_input=kept.view(integer),
        )
        return p, kept


# Opaque operators: compiled and eager code then run the same kernels, and give the same bits.
@torch.library.custom_op("gpt::attend", mutates_args=(), device_types="cpu")
def attend(
    qkv: Tensor, n_head: int, dropout: float, seed: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Causal attention in training, on a CPU: qkv [B, T, 3C] → [B, T, C].

    dropout(softmax(QKᵀ/√D))V (Vaswani et al. 2017, eq. 1): `keep_mask(seed, …)` of the weights is
    kept, and scaled by 1 / (1 − dropout), which is above 0. `mask`: bool [B, 1, T, T], True where a
    row may look, which is never later than itself. Of bf16, the softmax is in float32.
    """
    blocks = _Blocks(qkv, n_head, dropout, seed, mask)
    B, T, C3 = qkv.shape
    out = qkv.new_empty(B, T, n_head, C3 // 3 // n_head)
    for b, heads in blocks.groups:
        q, k, v = blocks.heads(b, heads)
        for rows in blocks.rows:
            _, kept = blocks.weights(b, heads, rows, q, k)
            y = torch.bmm(kept.to(v.dtype), v[:, : rows.stop])
            out[b, rows, heads] = y.mul_(1 / (1 - dropout)).transpose(0, 1)
    return out.flatten(2)


@torch.library.custom_op("gpt::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    qkv: Tensor,
    n_head: int,
    dropout: float,
    seed: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """From the gradient of `attend`'s output [B, T, C] that of qkv [B, T, 3C]."""
    blocks = _Blocks(qkv, n_head, dropout, seed, mask)
    B, T, C3 = qkv.shape
    d_qkv = torch.empty(B, T, 3, n_head, C3 // 3 // n_head, dtype=qkv.dtype)  # [B, T, 3, H, D]
    grad, out = (x.reshape(B, T, n_head, -1).transpose(1, 2) for x in (grad, out))  # [B, H, T, D]
    # A softmax's gradient is P ∘ (dP − the row's sum of dP ∘ P); that sum is one of dO ∘ O.
    row_sums = (grad.to(blocks.wide) * out).sum(-1, keepdim=True)
    for b, heads in blocks.groups:
        q, k, v = blocks.heads(b, heads)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=blocks.wide), torch.zeros_like(v, dtype=blocks.wide)
        for rows in blocks.rows:
            seen = slice(0, rows.stop)
            p, kept = blocks.weights(b, heads, rows, q, k)
            d_out = grad[b, heads, rows].mul(1 / (1 - dropout)).contiguous()
            ds = blocks.d_scores[: p.numel()].view_as(p)
            _product(d_out, v[:, seen].transpose(1, 2), ds)
            ds.mul_(kept).addcmul_(p, row_sums[b, heads, rows], value=-1)
            _product(kept.to(v.dtype).transpose(1, 2), d_out, dv[:, seen], add=True)
            ds = ds.to(q.dtype)
            dq[:, rows] = torch.bmm(ds, k[:, seen]).mul_(blocks.scale)
            _product(ds.transpose(1, 2), q[:, rows], dk[:, seen], add=True)
        dk.mul_(blocks.scale)
        for i, d in enumerate((dq, dk, dv)):
            d_qkv[b, :, i, heads] = d.transpose(0, 1)
    return d_qkv.flatten(2)


def _product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out (+)= a b, a head at a time; where out is wider than a and b, it is widened into it."""
    if out.dtype == a.dtype:
        torch.baddbmm(out, a, b, beta=int(add), out=out)
    elif add:
        out += torch.bmm(a, b)
    else:
        out.copy_(torch.bmm(a, b))


@attend.register_fake
def _(qkv: Tensor, n_head: int, dropout: float, seed: Tensor, mask: Tensor | None = None) -> Tensor:
    B, T, C3 = qkv.shape
    return qkv.new_empty(B, T, C3 // 3)


@_attend_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    qkv: Tensor,
    n_head: int,
    dropout: float,
    seed: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, ctx.n_head, ctx.dropout, seed, mask = inputs
    ctx.save_for_backward(output, qkv, seed, mask)


def _backward(ctx: Any, grad: Tensor) -> Any:
    out, qkv, seed, mask = ctx.saved_tensors
    d_qkv = _attend_backward(grad, out, qkv, ctx.n_head, ctx.dropout, seed, mask)
    return d_qkv, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
