"""Causal multi-head self-attention as GPT-2 runs it, built up in ten small steps.

This file is for reading, and it is the reference: gpt/model.py must give the same numbers.
Every function is pure, works on one sequence X [T, d_in] (a batch is only one more dimension in
front), and needs nothing but torch, so that each runs alone when copied out. `a @ b.mT` is a
product with b's last two dimensions swapped. Weights lie as in the textbook, [d_in, d_out], so
that Q = X W_q; torch.nn.Linear stores the transpose.

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Raschka 2024, "Build a Large Language
Model (From Scratch)", chapter 3; Radford et al. 2019 for GPT-2's own choices.
"""

from collections.abc import Callable

import torch


def embed(ids: torch.Tensor, wte: torch.Tensor, wpe: torch.Tensor) -> torch.Tensor:
    """Step 1, input: x_i = t_i + p_i, the token's vector plus the position's vector.

    ids [..., T] (whole numbers), wte [V, C], wpe [block_size, C] -> X [..., T, C]; T must not
    exceed block_size.
    Fixes: a network can compute with vectors, and the same word at two places is two vectors.
    Still can't: each row knows its own token and place only; no row has seen another.
    Source: Vaswani et al. 3.4 and 3.5 (sinusoids there, a learned table in GPT-2).
    """
    return wte[ids] + wpe[: ids.shape[-1]]


def self_attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step 2, self-attention with nothing trainable: tokens meet by their dot products.

    x [..., T, C] -> scores X X^T [..., T, T], weights [..., T, T], context [..., T, C].
    Row i of the weights is a softmax: positive, sums to 1. It says how much token i takes from
    each token, and row i of the context is that mixture.
    Fixes: every row now holds something of every other row.
    Still can't: learn. Likeness of the inputs decides alone: mostly each token looks at itself,
    and i looks at j as strongly as j at i (the scores are symmetric).
    Source: Raschka 3.3.
    """
    scores = x @ x.mT
    weights = torch.softmax(scores, dim=-1)
    return scores, weights, weights @ x


def shared_projection(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Step 3, one trainable projection: compare X W with itself.

    x [..., T, d_in], w [d_in, d_out] -> scores X W (X W)^T [..., T, T].
    Fixes: training can choose, through W, which features of two tokens count as alike.
    Still can't: point one way. (X W)(X W)^T is symmetric whatever W is, and no score of a token
    with itself can be negative; a verb cannot look for its subject without being looked at.
    """
    projected = x @ w
    return projected @ projected.mT


def queries_keys(
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    b_q: torch.Tensor | float = 0.0,
    b_k: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step 4a, queries and keys: what a token looks for, and what it can be found by.

    x [..., T, d_in], w_q and w_k [d_in, d_k], biases [d_k] -> Q, K [..., T, d_k] and the scores
    Q K^T [..., T, T].
    Fixes: two matrices make two roles, so the symmetry is gone: score (i, j) is not (j, i).
    Still can't: say what is handed over once a token is found (that is 4b, the values).
    Source: Vaswani et al. 3.2; Raschka 3.4.1 (no biases there, biases in GPT-2).
    """
    q = x @ w_q + b_q
    k = x @ w_k + b_k
    return q, k, q @ k.mT


def values(x: torch.Tensor, w_v: torch.Tensor, b_v: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Step 4b, values: what a token hands over to those that look at it.

    x [..., T, d_in], w_v [d_in, d_v], b_v [d_v] -> V [..., T, d_v].
    Fixes: being found and being useful are learned apart: a key can say "I am a comma" while the
    value carries what the comma has gathered.
    Still can't: keep the scores in a range in which the softmax can learn (step 5).
    Source: Vaswani et al. 3.2; Raschka 3.4.1. In GPT-2 small W_q, W_k and W_v together are
    3 * 768 * 768 = 1,769,472 weights a layer.
    """
    return x @ w_v + b_v


def scaled_weights(scores: torch.Tensor, d_k: int) -> torch.Tensor:
    """Step 5, scaling and softmax: divide by the square root of the key's length, then weigh.

    scores [..., T, T] -> weights [..., T, T], rows positive and summing to 1.
    A dot product of d_k independent terms of variance 1 has variance d_k. Dividing by sqrt(d_k)
    brings it back to 1, whatever the head's size.
    Fixes: without it long keys give large scores, the softmax picks one token with weight ~1,
    and its gradients vanish: at d_k = 64 that is felt, at d_k <= 8 hardly.
    Still can't: stop a token from looking at those that come after it (step 7).
    Source: Vaswani et al. 3.2.1 and its footnote 4.
    """
    return torch.softmax(scores / d_k**0.5, dim=-1)


def context_vectors(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Step 6, context: the weighted mean of the values.

    weights [..., T, T], v [..., T, d_v] -> context [..., T, d_v].
    Fixes: row i is now what token i has gathered. As a mean it stays, dimension by dimension,
    between the smallest and the largest value it was made of.
    Still can't: tell the past from the future, or hold two relations apart: one row of weights
    has to serve all.
    Source: Vaswani et al. 3.2.1, equation 1; Raschka 3.4.1.
    """
    return weights @ v


def causal_weights(scores: torch.Tensor, d_k: int) -> torch.Tensor:
    """Step 7, causal mask: scores of later tokens (j > i) become -inf before the softmax.

    scores [..., T, T] -> weights [..., T, T]; above the diagonal exactly 0, rows still sum to 1.
    Masking after the softmax would leave rows that do not sum to 1, and denominators that have
    seen the future.
    Fixes: position i is computed from 0..i alone, so all T next-token predictions of a sequence
    can be trained at once, and generation sees what training saw. Without it the answer, the
    token at i + 1, lies open.
    Still can't: keep a token from leaning on one other token alone (step 8).
    Source: Vaswani et al. 3.2.3; Raschka 3.5.1.
    """
    T = scores.shape[-1]
    future = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(diagonal=1)
    return torch.softmax((scores / d_k**0.5).masked_fill(future, -torch.inf), dim=-1)


def keep_mask(length: int, p: float, seed: int, layer: int = 0, head: int = 0) -> torch.Tensor:
    """Step 8a, which weights dropout keeps: a hash of (seed, layer, head, i, j), no state.

    length T, 0 <= p < 1, seed 0 .. 2^32 - 1 -> bool [T, T], each True with probability 1 - p.
    Whole-number arithmetic modulo 2^32, so that any language gives the same mask.
    Training has masks of its own (gpt/attention_dropout.py); this one is for looking at twice.
    Source of the mixing constants: C. Wellons' "lowbias32" integer hash.
    """
    i = torch.arange(length)[:, None]
    j = torch.arange(length)[None, :]
    h = torch.zeros(length, length, dtype=torch.int64)
    for key in (seed, layer, head, i, j):
        h = ((h ^ key) + 0x9E3779B9) & 0xFFFFFFFF  # the sum keeps all-zero keys from staying zero
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        h = h ^ (h >> 16)
    return h >= int(p * 2**32)


def attention_dropout(
    weights: torch.Tensor, keep: torch.Tensor, p: float, training: bool
) -> torch.Tensor:
    """Step 8b, attention dropout: in training some weights are set to 0, the rest grow.

    weights [..., T, T], keep bool [..., T, T] (True with probability 1 - p), 0 <= p < 1
    -> weights [..., T, T]. What is kept is divided by 1 - p, so that each weight is right in
    the mean; one row need not sum to 1 any more.
    Fixes: a token cannot lean on a single other token; over-fitting is slowed.
    Still can't: be used outside training, where it would be noise: there the weights pass as
    they are.
    Source: Raschka 3.5.2; GPT-2's `attn_pdrop`. Vaswani et al. 5.4 name only dropout on each
    sub-layer's output and on the embeddings.
    """
    if not training:
        return weights
    return weights * keep / (1.0 - p)


def multi_head(
    x: torch.Tensor,
    n_head: int,
    *,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_o: torch.Tensor,
    b_q: torch.Tensor | float = 0.0,
    b_k: torch.Tensor | float = 0.0,
    b_v: torch.Tensor | float = 0.0,
    b_o: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Step 9, multi-head: steps 4 to 7 in n_head small spaces, side by side, then out_proj.

    x [..., T, d_in]; w_q, w_k, w_v [d_in, d_out]; w_o [d_out, d_out]; biases [d_out]
    -> [..., T, d_out]. n_head must divide d_out. Head h owns columns h*head_dim up to
    (h+1)*head_dim of W_q, W_k and W_v, so more heads are smaller heads: the number of weights
    does not change. Dropout is left out: this is the layer as evaluation runs it.
    Fixes: one row of weights per head, so a token can follow several relations at once; w_o
    (out_proj) mixes what the heads bring home.
    Still can't: compute anything new from it: all it does is mix rows. That is the block's
    feed-forward (step 10).
    Source: Vaswani et al. 3.2.2; Raschka 3.6.
    """
    T = x.shape[-2]
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(diagonal=1)
    q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v
    heads = []
    for q_h, k_h, v_h in zip(*(m.chunk(n_head, dim=-1) for m in (q, k, v)), strict=True):
        scores = q_h @ k_h.mT / q_h.shape[-1] ** 0.5  # [..., T, T]
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        heads.append(weights @ v_h)  # [..., T, head_dim]
    return torch.cat(heads, dim=-1) @ w_o + b_o


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Step 10a, the norm: each row on its own gets mean 0 and variance 1, then scale and shift.

    x [..., T, C], weight and bias [C] -> [..., T, C]. The variance divides by C, not C - 1.
    """
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight + bias


def feed_forward(
    x: torch.Tensor,
    w_fc: torch.Tensor,
    b_fc: torch.Tensor,
    w_proj: torch.Tensor,
    b_proj: torch.Tensor,
) -> torch.Tensor:
    """Step 10b, the feed-forward network: each row on its own, widened, bent, narrowed.

    x [..., T, C], w_fc [C, 4C], b_fc [4C], w_proj [4C, C], b_proj [C] -> [..., T, C].
    GPT-2 bends with the tanh form of GELU.
    Source: Vaswani et al. 3.3 (ReLU there).
    """
    return torch.nn.functional.gelu(x @ w_fc + b_fc, approximate="tanh") @ w_proj + b_proj


def block(
    x: torch.Tensor,
    ln_1: Callable[[torch.Tensor], torch.Tensor],
    attend: Callable[[torch.Tensor], torch.Tensor],
    ln_2: Callable[[torch.Tensor], torch.Tensor],
    feed_forward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Step 10c, in a block: gather from other tokens, then think alone, each added to the stream.

    x [..., T, C] -> [..., T, C]. `attend` is multi_head with its weights filled in; the others
    work row by row, so attention is the only place where tokens meet.
    Fixes: feed-forward computes from what attention gathered; the residual sums let every layer
    pass unchanged what it has nothing to say about; the norms keep its inputs in one range.
    Still can't: be deep by itself: GPT-2 small stacks 12 of these.
    Source: Radford et al. 2019, 2.3: the norm stands before each part (Vaswani et al. 3.1 put
    it after the sum).
    """
    x = x + attend(ln_1(x))
    return x + feed_forward(ln_2(x))


# The ladder's rungs in reading order; the page of tools/explore.py and the tests follow it.
STEPS: tuple[tuple[str, tuple[Callable[..., object], ...]], ...] = (
    ("input", (embed,)),
    ("self-attention with nothing trainable", (self_attention,)),
    ("one trainable projection", (shared_projection,)),
    ("queries, keys and values", (queries_keys, values)),
    ("scaling and softmax", (scaled_weights,)),
    ("context", (context_vectors,)),
    ("causal mask", (causal_weights,)),
    ("attention dropout", (keep_mask, attention_dropout)),
    ("multi-head", (multi_head,)),
    ("in a block", (layer_norm, feed_forward, block)),
)
