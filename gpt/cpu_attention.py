"""Causal attention on a CPU, with dropout or without, in memory that grows with T and not with T².

Queries go in blocks, a few heads at a time, over the keys that they may see: a block's scores and
weights fit the caches, and the backward pass makes them again (Dao et al. 2022, "FlashAttention",
section 3.1 and appendix B). In bf16 that is faster than scaled_dot_product_attention, which is slow
on a CPU when it drops weights, in any format (docs/decisions.md). What is dropped is a hash of
(seed, window, head, row, column), so it is the same in both passes, for any size of blocks, and in
the attention that is written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

QUERY_ROWS = 128  # in a block, which works on half as many columns too many
SCORES_PER_THREAD = 2**19  # in a block; tried: docs/decisions.md

# Odd constants that spread bits: Steele, Lea & Flood 2014 (SplitMix64), and one of 32 bits.
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_32 = 0x2C1B3C6D
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def _signed(x: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    return x - 2**64 if x >= 2**63 else x


def _splitmix(x: Tensor) -> Tensor:
    """SplitMix64's finisher on int64: near numbers → unrelated ones. Shifts are made logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & (2**33 - 1))


def _keys(seed: Tensor, heads: int, T: int) -> tuple[Tensor, Tensor]:
    """An odd int32 for each row of each head, and for each two columns: [heads, T], [heads, T/2].

    `heads` counts those of all windows."""
    head = torch.arange(heads, device=seed.device).unsqueeze(1)
    place = (head << 32) + torch.arange(T, device=seed.device)
    mixed = _splitmix(_splitmix(seed) + place * _signed(_GAMMA))
    # .int() keeps the low half
    return (mixed >> 32).int() | 1, mixed[:, : -(-T // 2)].int() | 1


def _hash(rows: Tensor, columns: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """Keys [..., R, 1] and [..., 1, K/2] → int16 [..., R, K], spread over all int16: the halves of
    an int32 are the bits of two columns."""
    torch.mul(rows, columns, out=out)
    torch.bitwise_right_shift(out, 15, out=spare)
    return out.bitwise_xor_(spare).mul_(_MIX_32).view(torch.int16)


def _threshold(dropout: float) -> int:
    """A hash is kept if it is above this: `dropout` of all int16 are not, to 8e-6; never none, and
    never all."""
    return min(max(round(dropout * 2**16), 1), 2**16 - 1) - 1 - 2**15


def keep_mask(seed: Tensor, B: int, H: int, T: int, dropout: float) -> Tensor:
    """What `attend` keeps, whole: bool [B, H, T, T], on any device. seed: int64, one number."""
    rows, columns = _keys(seed, B * H, T)
    shape = (2, B * H, T, columns.shape[1])
    out, spare = torch.empty(shape, dtype=torch.int32, device=seed.device)
    bits = _hash(rows.unsqueeze(2), columns.unsqueeze(1), out, spare)[:, :, :T]
    return (bits > _threshold(dropout)).view(B, H, T, T)


class _Blocks:
    """The weights of attention, a block at a time, the same in both passes."""

    def __init__(
        self, qkv: Tensor, n_head: int, dropout: float, seed: Tensor | None, mask: Tensor | None
    ) -> None:
        B, T, C3 = qkv.shape
        D = C3 // 3 // n_head
        # Contiguous, for the products; windows' heads in one row: [B·H, T, D] each.
        parts = qkv.view(B, T, 3, n_head, D).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = parts.reshape(3, B * n_head, T, D)
        self.scale, self.dropout, self.mask = 1 / math.sqrt(D), dropout, mask
        R = min(QUERY_ROWS, T)
        G = max(1, min(B * n_head, SCORES_PER_THREAD * torch.get_num_threads() // (R * T)))
        self.window = torch.arange(B * n_head) // n_head
        self.groups = [slice(h, min(h + G, B * n_head)) for h in range(0, B * n_head, G)]
        self.rows = [slice(t, min(t + R, T)) for t in range(0, T, R)]
        self.later = torch.full((R, R), -math.inf).triu(1)
        # Of bf16, scores and softmax are float32 until a product takes the weights.
        self.wide = torch.float32 if qkv.itemsize < 4 else qkv.dtype
        # One set of buffers for all blocks: they stay in the caches.
        self.scores, self.p, self.d = qkv.new_empty(3, G * R * T, dtype=self.wide)
        if self.wide != qkv.dtype:
            self.narrow = qkv.new_empty(G * R * T)
        if dropout:
            assert seed is not None
            self.row_keys, self.pair_keys = _keys(seed, B * n_head, T)
            self.bits, self.spare = torch.empty(2, G * R * (T + 1) // 2, dtype=torch.int32)

    def weights(self, heads: slice, rows: slice) -> Tensor:
        """Softmax of these rows' scores: [G, R, K], K the columns up to the last row."""
        s, p = self.block(self.scores, heads, rows), self.block(self.p, heads, rows)
        keys = self.k[heads, : rows.stop].transpose(1, 2)
        _product(self.q[heads, rows], keys, s, self.scale)
        if self.mask is None:
            R = rows.stop - rows.start
            s[:, :, rows].add_(self.later[:R, :R])
        else:
            may = self.mask[self.window[heads], 0, rows, : rows.stop]
            s.masked_fill_(~may, -math.inf)
        return torch.softmax(s, -1, out=p)

    def drawn(self, heads: slice, rows: slice) -> Tensor:
        """What decides of each weight of a block: int16 [G, R, K]."""
        pairs = -(-rows.stop // 2)
        out, spare = (self.block(x, heads, rows, columns=pairs) for x in (self.bits, self.spare))
        row_keys = self.row_keys[heads, rows].unsqueeze(2)
        pair_keys = self.pair_keys[heads, :pairs].unsqueeze(1)
        return _hash(row_keys, pair_keys, out, spare)[:, :, : rows.stop]

    def drop(self, x: Tensor, bits: Tensor) -> None:
        """Set to 0 what is not kept: in one vectorised pass over floats taken as integers, where
        masked_fill, or comparing and multiplying, takes several times as long."""
        x = x.view(_INTEGER[x.itemsize])
        torch.ops.aten.threshold_backward.grad_input(
            x, bits.to(x.dtype), _threshold(self.dropout), grad_input=x
        )

    def rounded(self, x: Tensor) -> Tensor:
        """A block as the products take it; the next one's takes its place."""
        if x.dtype == self.q.dtype:
            return x
        return self.narrow[: x.numel()].view_as(x).copy_(x)

    @staticmethod
    def block(buffer: Tensor, heads: slice, rows: slice, columns: int | None = None) -> Tensor:
        """The buffer's beginning as [G, R, K]."""
        G, R = heads.stop - heads.start, rows.stop - rows.start
        K = rows.stop if columns is None else columns
        return buffer[: G * R * K].view(G, R, K)


def _product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """out = scale · a b, a head at a time. bf16 into a float32 `out` is not rounded on the way:
    within `_bf16_products`, float32 numbers that bf16 can hold are multiplied as such."""
    a, b = a.to(out.dtype), b.to(out.dtype)
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


@contextmanager
def _bf16_products(on: bool) -> Iterator[None]:
    """Float32 products round their factors to bf16, which is twice as fast; torch has no bf16
    product with a float32 result on a CPU."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if on:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


# Opaque operators: compiled and eager code then run the same kernels, and give the same bits.
@torch.library.custom_op("gpt::attend", mutates_args=(), device_types="cpu")
def attend(
    qkv: Tensor,
    n_head: int,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention on a CPU: qkv [B, T, 3C] → [B, T, C].

    dropout(softmax(QKᵀ/√D))V (Vaswani et al. 2017, eq. 1): `keep_mask(seed, …)` of the weights is
    kept, and scaled by 1 / (1 − dropout). `mask`: bool [B, 1, T, T], True where a row may look,
    which is never later than itself. Of bf16, scores and softmax are in float32.
    """
    blocks = _Blocks(qkv, n_head, dropout, seed, mask)
    B, T, C3 = qkv.shape
    out = torch.empty_like(blocks.q)
    with _bf16_products(qkv.dtype == torch.bfloat16):
        for heads in blocks.groups:
            for rows in blocks.rows:
                kept = blocks.rounded(blocks.weights(heads, rows))
                if dropout:
                    blocks.drop(kept, blocks.drawn(heads, rows))
                out[heads, rows] = torch.bmm(kept, blocks.v[heads, : rows.stop])
    if dropout:
        out.mul_(1 / (1 - dropout))
    return out.view(B, n_head, T, -1).transpose(1, 2).reshape(B, T, C3 // 3)


@torch.library.custom_op("gpt::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: Tensor,
    qkv: Tensor,
    n_head: int,
    dropout: float,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """From the gradient of `attend`'s output [B, T, C] that of qkv [B, T, 3C]."""
    blocks = _Blocks(qkv, n_head, dropout, seed, mask)
    B, T, C3 = qkv.shape
    q, k, v = blocks.q, blocks.k, blocks.v
    d_out = grad.reshape(B, T, n_head, -1).transpose(1, 2).reshape(q.shape)
    if dropout:
        d_out = d_out * (1 / (1 - dropout))
    d_qkv = qkv.new_empty(3, *q.shape)
    with _bf16_products(qkv.dtype == torch.bfloat16):
        for heads in blocks.groups:
            dk, dv = torch.zeros(2, *k[heads].shape, dtype=blocks.wide)  # rounded once, at the end
            for rows in blocks.rows:
                seen = slice(0, rows.stop)
                p, dp = blocks.weights(heads, rows), blocks.block(blocks.d, heads, rows)
                _product(d_out[heads, rows], v[heads, seen].transpose(1, 2), dp)
                if dropout:
                    bits = blocks.drawn(heads, rows)
                    blocks.drop(dp, bits)
                # A softmax's gradient: P ∘ (dP − the row's sum of dP ∘ P).
                torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)
                ds = blocks.rounded(dp)
                d_qkv[0, heads, rows] = torch.bmm(ds, k[heads, seen])
                dk[:, seen] += torch.bmm(ds.transpose(1, 2), q[heads, rows])
                kept = blocks.rounded(p)
                if dropout:
                    blocks.drop(kept, bits)
                dv[:, seen] += torch.bmm(kept.transpose(1, 2), d_out[heads, rows])
            d_qkv[1, heads], d_qkv[2, heads] = dk, dv
    d_qkv[:2].mul_(blocks.scale)
    return d_qkv.view(3, B, n_head, T, -1).permute(1, 3, 0, 2, 4).reshape(B, T, C3)


@attend.register_fake
def _(
    qkv: Tensor,
    n_head: int,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    B, T, C3 = qkv.shape
    return qkv.new_empty(B, T, C3 // 3)


@_attend_backward.register_fake
def _(
    grad: Tensor,
    qkv: Tensor,
    n_head: int,
    dropout: float,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, ctx.n_head, ctx.dropout, seed, mask = inputs
    ctx.save_for_backward(qkv, seed, mask)


def _backward(ctx: Any, grad: Tensor) -> Any:
    qkv, seed, mask = ctx.saved_tensors
    d_qkv = _attend_backward(grad, qkv, ctx.n_head, ctx.dropout, seed, mask)
    return d_qkv, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
