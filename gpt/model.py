"""GPT-2: token ids → logits.

The architecture of Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners")
and nothing else: learned token and position embeddings, pre-norm blocks, causal multi-head
attention, tanh GELU, biases everywhere, and a head tied to the token embedding. Modules carry
GPT-2's own names, so a checkpoint reads like the original.

Shape letters: B batch, T time, C channels (n_embd), H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.config import GPTConfig as GPTConfig  # noqa: PLC0414  (people import it from here)
from gpt.cpu_attention import attend, keep_mask

INIT_STD = 0.02
LAYER_NORM_EPS = 1e-5
VOCAB_MULTIPLE = 64

Body = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """Causal attention written out: scores, scale, mask, softmax, dropout, blend.

    q, k, v: [B, H, T, D] → [B, H, T, D]. Softmax(QKᵀ/√D)V of Vaswani et al. 2017, eq. 1, with
    the causal mask of section 3.2.3; `mask` [B, 1, T, T], True where a row may look, replaces it.
    Dropout needs a `seed` (int64, one number) and drops what it says, scaling up what is left.
    Holds T × T numbers a head: to be read and compared with.
    """
    B, H, T, D = q.shape
    scores = q @ k.transpose(-2, -1)  # [B, H, T, T]: row i asks, column j answers
    scores = scores / math.sqrt(D)
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if dropout:
        assert seed is not None
        weights = weights * keep_mask(seed, B, H, T, dropout) / (1 - dropout)
    return weights @ v


def document_layout(idx: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Documents of a window kept apart: ids [B, T] → positions [B, T] and mask [B, 1, T, T].

    Positions restart after each `end` token, which belongs to the document it ends; the mask is
    True where row and column are of one document and the column is not later.
    """
    T = idx.shape[1]
    ends = idx == end
    documents = ends.cumsum(1) - ends.long()  # [B, T]: how many documents ended before
    t = torch.arange(T, device=idx.device)
    begins = torch.zeros_like(idx)
    begins[:, 1:] = torch.where(ends[:, :-1], t[1:], 0)
    positions = t - begins.cummax(1).values
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return positions, same & (t[:, None] >= t)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: str) -> None:
        super().__init__()
        C = config.n_embd
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.n_head = config.n_head
        self.attn_dropout = config.attn_dropout
        self.resid_dropout = nn.Dropout(config.resid_dropout)
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        # SDPA drops whatever the module's mode is, so the mode is looked at here.
        dropout = self.attn_dropout if self.training else 0.0
        out: Tensor = self.resid_dropout(
            self.c_proj(self.heads(self.c_attn(x), dropout, mask, seed))
        )
        return out

    def heads(
        self, qkv: Tensor, dropout: float, mask: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        """q, k, v side by side [B, T, 3C] → what each head found, side by side [B, T, C]."""
        B, T, C3 = qkv.shape
        if self.attention == "flash" and qkv.device.type == "cpu":
            attended: Tensor = attend(qkv, self.n_head, dropout, seed, mask)
            return attended
        q, k, v = qkv.view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        if self.attention == "flash":
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
        else:
            y = reference_attention(q, k, v, dropout, mask, seed)
        return y.transpose(1, 2).reshape(B, T, C3 // 3)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_dropout)

    def forward(self, x: Tensor) -> Tensor:
        # GPT-2 was trained with the tanh form (Hendrycks & Gimpel 2016); the erf form differs.
        out: Tensor = self.resid_dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS)
        self.attn = CausalSelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)
        self.recompute = False
        self.body: Body = self._body  # or that, compiled

    def _body(self, x: Tensor, mask: Tensor | None, seed: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, seed)
        x = x + self.mlp(self.ln_2(x))
        return x

    def forward(self, x: Tensor, mask: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """[B, T, C] → [B, T, C]; `seed` (int64, one number) decides what attention drops.

        With `recompute`, only x is kept for the backward pass, which runs the block again, with the
        same dropout: memory for time (Chen et al. 2016)."""
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self.body, x, mask, seed, use_reentrant=False)
            return out
        return self.body(x, mask, seed)


def _embedding(rows: int, columns: int) -> nn.Embedding:
    # Given its weight, Embedding draws none itself, which on the meta device takes two seconds.
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))


class GPT(nn.Module):
    """GPT-2. `model(idx)` maps ids [B, T] to logits [B, T, V].

    `attention`: "flash" (scaled_dot_product_attention, on a CPU gpt/cpu_attention.py) or
    "reference" (written out); the parameters are the same.
    """

    def __init__(self, config: GPTConfig, attention: str = "flash") -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is the tokenizer's by now"
        assert attention in ("flash", "reference"), attention
        self.config = config
        self.vocab_size = config.vocab_size
        # Matrix units want a round number of rows; nobody outside sees the added ones.
        self.padded_vocab_size = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = _embedding(self.padded_vocab_size, config.n_embd)
        self.wpe = _embedding(config.block_size, config.n_embd)
        self.embd_dropout = nn.Dropout(config.embd_dropout)
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS)
        if self.wte.weight.device.type != "meta":  # there, weights are about to be loaded
            self.init_weights(seed=0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """GPT-2's initialisation, a function of the seed alone (drawn on the parameters' device).

        N(0, 0.02) for matrices and both tables, zero biases; the projections that write into the
        residual stream are scaled by 1/√(2·n_layer) (Radford et al. 2019, section 2.3).
        """
        generator = torch.Generator(self.wte.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0)
            else:
                residual = name.endswith("c_proj.weight")
                std = INIT_STD / math.sqrt(2 * self.config.n_layer) if residual else INIT_STD
                parameter.normal_(0.0, std, generator=generator)
        self.wte.weight[self.vocab_size :] = 0.0

    def trunk(self, idx: Tensor, document_end: int | None = None) -> Tensor:
        """Everything below the head: ids [B, T] → [B, T, C], after the final norm.

        GPT-2 attends across the documents packed into a window; with `document_end`, the id that
        ends one, it does not, and each document's positions start at 0.
        Raises ValueError where T is longer than the position table.
        """
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(
                f"the input has {T} tokens and the model {self.config.block_size} positions; "
                "GPT-2 knows no position past its table; cut the input on the left"
            )
        positions, mask = torch.arange(T, device=idx.device), None
        if document_end is not None:
            positions, mask = document_layout(idx, document_end)
        x = self.wte(idx) + self.wpe(positions)  # [B, T, C]
        seeds: list[Tensor | None] = [None] * len(self.h)
        if self.training and self.config.attn_dropout:
            # All layers' at once and first: the same numbers however the rest draws its own, which
            # compiled code does in another way.
            seeds = list(torch.randint(2**63 - 1, (len(self.h),), device=idx.device))
        x = self.embd_dropout(x)
        for block, seed in zip(self.h, seeds):
            x = block(x, mask, seed)
        out: Tensor = self.ln_f(x)
        return out

    def head(self, x: Tensor) -> Tensor:
        """Hidden states [..., C] → logits [..., V], by the token embedding (tied weights)."""
        return F.linear(x, self.wte.weight[: self.vocab_size])

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.trunk(idx))

    @torch.no_grad()
    def crop_block_size(self, block_size: int) -> None:
        """Keep the first `block_size` positions. Raises ValueError on an attempt to grow."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(
                f"block_size={block_size} is not within the model's {self.config.block_size} "
                f"positions; a position table can be cut, not grown; choose at most "
                f"{self.config.block_size}"
            )
        self.config.block_size = block_size
        self.wpe = nn.Embedding.from_pretrained(self.wpe.weight[:block_size].clone(), freeze=False)

    def n_params(self) -> int:
        """Parameters as published: tied ones once, padding not at all."""
        padding = (self.padded_vocab_size - self.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding
