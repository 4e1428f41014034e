"""Each claim the ladder makes about attention, on real numbers.

Where a test needs a second opinion it takes one that shares no code with the ladder: loops over
plain Python numbers, the model's fast path, or transformers' GPT-2.
"""

import inspect
import itertools
import math
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt import attention_steps as steps
from gpt.model import GPT, GPTConfig

T, C, D = 7, 24, 8  # tokens, width, size of a head


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def qkv(x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w_q, w_k, w_v = randn(3, x.shape[-1], D, seed=seed, scale=x.shape[-1] ** -0.5)
    q, k, _ = steps.queries_keys(x, w_q, w_k)
    return q, k, steps.values(x, w_v)


def single_head(x: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = qkv(x)
    weigh = steps.causal_weights if causal else steps.scaled_weights
    return steps.context_vectors(weigh(q @ k.mT, D), v)


def head_weights(n_embd: int = C, seed: int = 3) -> dict[str, torch.Tensor]:
    w = randn(4, n_embd, n_embd, seed=seed, scale=n_embd**-0.5)
    b = randn(4, n_embd, seed=seed + 1)
    return {f"{kind}_{m}": t[i] for kind, t in (("w", w), ("b", b)) for i, m in enumerate("qkvo")}


# --- step 1 ---------------------------------------------------------------------------------


def test_input_is_the_token_row_plus_the_position_row() -> None:
    wte, wpe = randn(11, C), randn(9, C, seed=1)
    ids = torch.tensor([4, 0, 4])
    x = steps.embed(ids, wte, wpe)
    for i, token in enumerate([4, 0, 4]):
        for c in range(C):
            assert x[i, c].item() == pytest.approx(wte[token, c].item() + wpe[i, c].item())


def test_a_repeated_token_has_one_row_without_positions_and_two_with_them() -> None:
    """Identical rows in, identical contexts out; positions tell the two places apart."""
    wte, wpe = randn(11, C, scale=0.3), randn(9, C, seed=1, scale=0.3)
    ids = torch.tensor([4, 7, 4, 2])
    without = steps.embed(ids, wte, torch.zeros_like(wpe))
    with_positions = steps.embed(ids, wte, wpe)
    assert torch.equal(without[0], without[2])
    assert torch.equal(steps.self_attention(without)[2][0], steps.self_attention(without)[2][2])
    assert not torch.allclose(with_positions[0], with_positions[2], atol=0.1)
    context = steps.self_attention(with_positions)[2]
    assert not torch.allclose(context[0], context[2], atol=0.1)


# --- steps 2 to 4 ---------------------------------------------------------------------------


def test_self_attention_equals_loops_over_plain_numbers() -> None:
    x = randn(4, 5, scale=0.7)
    rows = x.tolist()
    scores, weights, context = steps.self_attention(x)
    for i in range(4):
        dots = [sum(a * b for a, b in zip(rows[i], other, strict=True)) for other in rows]
        exps = [math.exp(s) for s in dots]
        assert scores[i].tolist() == pytest.approx(dots, rel=1e-5, abs=1e-6)
        assert weights[i].tolist() == pytest.approx([e / sum(exps) for e in exps], rel=1e-5)
        blend = [sum(e * r[c] for e, r in zip(exps, rows, strict=True)) for c in range(5)]
        expected = [b / sum(exps) for b in blend]
        assert context[i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_with_nothing_trainable_the_diagonal_dominates() -> None:
    """Every token finds itself the most alike, so its own weight is the row's largest."""
    _, weights, _ = steps.self_attention(randn(T, 64, scale=0.25))
    assert torch.equal(weights.argmax(dim=-1), torch.arange(T))
    off_diagonal = weights[~torch.eye(T, dtype=torch.bool)]
    assert weights.diagonal().min() > 2 * off_diagonal.max()


def test_symmetry_of_steps_2_and_3_is_lost_in_step_4() -> None:
    x = randn(T, C)
    w_q, w_k = randn(2, C, D, seed=1)
    plain, _, _ = steps.self_attention(x)
    shared = steps.shared_projection(x, w_q)
    _, _, two = steps.queries_keys(x, w_q, w_k)
    torch.testing.assert_close(plain, plain.mT)
    torch.testing.assert_close(shared, shared.mT)
    assert not torch.allclose(shared, plain, atol=1.0), "W changed nothing"
    assert (two - two.mT).abs().max() > 0.5 * two.abs().max()


def test_one_projection_cannot_reject_itself_and_two_can() -> None:
    """(X W)(X W)^T has no negative diagonal, whatever W is; Q K^T has."""
    x = randn(64, C)
    w_q, w_k = randn(2, C, D, seed=1)
    assert (steps.shared_projection(x, w_q).diagonal() >= 0).all()
    assert (steps.queries_keys(x, w_q, w_k)[2].diagonal() < 0).any()


def test_step_4_with_one_matrix_for_both_is_step_3() -> None:
    x, w = randn(T, C), randn(C, D, seed=1)
    q, k, scores = steps.queries_keys(x, w, w)
    assert torch.equal(q, k)
    torch.testing.assert_close(scores, steps.shared_projection(x, w))


def test_biases_are_added_to_queries_keys_and_values() -> None:
    x, b = randn(T, C), randn(3, D, seed=5)
    w_q, w_k, w_v = randn(3, C, D, seed=1)
    q, k, _ = steps.queries_keys(x, w_q, w_k, b[0], b[1])
    v = steps.values(x, w_v, b[2])
    zero = torch.zeros(T, C)
    for got, w, bias in ((q, w_q, b[0]), (k, w_k, b[1]), (v, w_v, b[2])):
        torch.testing.assert_close(got - steps.values(x, w), bias.expand(T, D))
        torch.testing.assert_close(steps.values(zero, w, bias), bias.expand(T, D))


# --- steps 5 and 6 --------------------------------------------------------------------------


def unit_scores(d_k: int) -> torch.Tensor:
    """Scores of many sequences of 16 tokens whose queries and keys have variance 1."""
    return randn(200, 16, d_k, seed=1) @ randn(200, 16, d_k, seed=2).mT


@pytest.mark.parametrize("d_k", [1, 4, 16, 64, 256])
def test_the_spread_of_scores_grows_with_the_root_of_d_k(d_k: int) -> None:
    spread = unit_scores(d_k).std().item()
    assert spread == pytest.approx(d_k**0.5, rel=0.05)


def typical_gradient(scores: torch.Tensor, d_k: int) -> float:
    """Median norm, over rows, of the gradient that the softmax lets through to its input."""
    scores = scores.clone().requires_grad_()
    weights = steps.scaled_weights(scores, d_k)
    (grad,) = torch.autograd.grad((weights * randn(*weights.shape, seed=3)).sum(), scores)
    # the factor 1/sqrt(d_k) of the division itself is undone: it is the softmax that is asked
    return float(grad.norm(dim=-1).median()) * math.sqrt(d_k)


def test_scaling_changes_little_at_small_d_k_and_much_at_64() -> None:
    """Dividing by sqrt(1) is not dividing. At 64 the unscaled softmax saturates, gradients die."""
    for d_k in (1, 2, 4, 8):
        scores = unit_scores(d_k)
        assert typical_gradient(scores, 1) / typical_gradient(scores, d_k) == pytest.approx(
            1.0, abs=0.1
        )
    scores = unit_scores(64)
    assert typical_gradient(scores, 1) < 0.25 * typical_gradient(scores, 64)
    largest_unscaled = steps.scaled_weights(scores, 1).amax(dim=-1)
    largest_scaled = steps.scaled_weights(scores, 64).amax(dim=-1)
    assert largest_unscaled.mean() > 0.8
    assert (largest_unscaled > 0.99).float().mean() > 0.25
    assert largest_scaled.mean() < 0.3
    assert (largest_scaled > 0.99).sum() == 0


@pytest.mark.parametrize("weigh", [steps.scaled_weights, steps.causal_weights])
def test_rows_are_positive_and_sum_to_one(
    weigh: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    weights = weigh(randn(3, T, T, scale=5.0), D)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, T))
    assert (weights >= 0).all()


@pytest.mark.parametrize("weigh", [steps.scaled_weights, steps.causal_weights])
def test_context_stays_in_the_range_of_the_values_dimension_by_dimension(
    weigh: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    q, k, v = qkv(randn(T, C, scale=3.0))
    context = steps.context_vectors(weigh(q @ k.mT, D), v)
    low, high = v.min(dim=0).values, v.max(dim=0).values
    assert (context >= low - 1e-6).all()
    assert (context <= high + 1e-6).all()
    assert context.std() > 0.1


def test_without_mask_and_positions_attention_is_equivariant_under_permutation() -> None:
    """Shuffle the tokens and the contexts are shuffled: order is unknown. The mask ends that."""
    x = randn(T, C)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    torch.testing.assert_close(
        single_head(x[order], causal=False), single_head(x, causal=False)[order]
    )
    torch.testing.assert_close(steps.self_attention(x[order])[2], steps.self_attention(x)[2][order])
    masked = single_head(x, causal=True)
    assert not torch.allclose(single_head(x[order], causal=True), masked[order], atol=0.1)


# --- step 7 ---------------------------------------------------------------------------------


def test_the_mask_leaves_exact_zeros_above_the_diagonal_and_keeps_the_diagonal() -> None:
    weights = steps.causal_weights(randn(2, T, T, scale=30.0), D)
    for i in range(T):
        for j in range(T):
            assert (weights[:, i, j] == 0).all() if j > i else True
    assert (steps.causal_weights(torch.zeros(T, T), D).diagonal() > 0).all()
    assert (weights[:, 0, 0] == 1).all()


def test_masking_before_the_softmax_is_renormalising_what_is_left() -> None:
    scores = randn(T, T)
    kept = steps.scaled_weights(scores, D).tril()
    torch.testing.assert_close(
        steps.causal_weights(scores, D), kept / kept.sum(dim=-1, keepdim=True)
    )


def test_row_i_depends_on_the_next_value_only_without_the_mask() -> None:
    for causal in (False, True):
        x = randn(T, C)
        q, k, v = qkv(x)
        v.requires_grad_()
        weigh = steps.causal_weights if causal else steps.scaled_weights
        context = steps.context_vectors(weigh(q @ k.mT, D), v)
        for i in range(T - 1):
            (grad,) = torch.autograd.grad(context[i].sum(), v, retain_graph=True)
            assert (grad[i + 1].abs().max() == 0) == causal
            assert grad[: i + 1].abs().min() > 0


def test_a_repeated_word_has_different_contexts_under_the_mask() -> None:
    """Even with no positions: the two places have different pasts. Unmasked they are equal."""
    x = randn(T, C)
    x[4] = x[1]
    masked, unmasked = single_head(x, causal=True), single_head(x, causal=False)
    assert not torch.allclose(masked[1], masked[4], atol=0.05)
    torch.testing.assert_close(unmasked[1], unmasked[4])


def train_on_a_chain(causal: bool) -> tuple[float, float]:
    """A one-block model built of the ladder, trained on two interleaved Markov chains.

    A token t is followed, two places on, by 2t or 2t + 1 modulo 8, each with probability 1/2: no
    honest model can have a loss below ln 2, and it has to look one token back for that. Returns
    the final training loss and the share of legal tokens when it generates from short prompts.
    """
    V, T, C = 8, 8, 32
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int) -> torch.Tensor:
        chain = [torch.randint(V, (batch,), generator=generator) for _ in range(2)]
        for _ in range(T - 1):
            coin = torch.randint(2, (batch,), generator=generator)
            chain.append((2 * chain[-2] + coin) % V)
        return torch.stack(chain, dim=1)  # [batch, T + 1]

    shapes = [(V, C), (T, C), (C, C), (C, C), (C, C), (C, C), (C, 4 * C), (4 * C, C), (C, V)]
    params = [randn(*s, seed=i, scale=s[0] ** -0.5).requires_grad_() for i, s in enumerate(shapes)]
    wte, wpe, w_q, w_k, w_v, w_o, w_fc, w_proj, w_head = params
    norm = partial(steps.layer_norm, weight=torch.ones(C), bias=torch.zeros(C))
    mlp = partial(
        steps.feed_forward, w_fc=w_fc, b_fc=torch.zeros(1), w_proj=w_proj, b_proj=torch.zeros(1)
    )

    def attend(x: torch.Tensor) -> torch.Tensor:
        _, _, scores = steps.queries_keys(x, w_q, w_k)
        weights = (steps.causal_weights if causal else steps.scaled_weights)(scores, C)
        return steps.context_vectors(weights, steps.values(x, w_v)) @ w_o

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return norm(steps.block(steps.embed(ids, wte, wpe), norm, attend, norm, mlp)) @ w_head

    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)
    recent = []
    for _ in range(250):
        chain = draw(32)
        # from the second token on: the first cannot know what its follower continues
        predicted, target = logits(chain[:, :-1])[:, 1:], chain[:, 2:]
        loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        recent.append(loss.item())

    legal, total = 0, 0
    with torch.no_grad():
        text = draw(64)[:, :2]
        while text.shape[1] < T:
            following = logits(text)[:, -1].argmax(dim=-1)
            legal += int((following // 2 == text[:, -2] % (V // 2)).sum())
            total += len(following)
            text = torch.cat([text, following[:, None]], dim=1)
    return sum(recent[-20:]) / 20, legal / total


def test_a_model_trained_without_the_mask_cheats_in_training_and_fails_at_generation() -> None:
    honest_loss, honest_legal = train_on_a_chain(causal=True)
    cheating_loss, cheating_legal = train_on_a_chain(causal=False)
    assert math.log(2) - 0.02 < honest_loss < math.log(2) + 0.2  # at the chain's own entropy
    assert honest_legal > 0.98
    assert cheating_loss < 0.5 * math.log(2)  # better than possible: it reads the answer
    assert cheating_legal < 0.6


# --- step 8 ---------------------------------------------------------------------------------


def test_dropout_is_off_in_evaluation() -> None:
    weights = steps.causal_weights(randn(T, T), D)
    keep = steps.keep_mask(T, 0.5, seed=1)
    assert torch.equal(steps.attention_dropout(weights, keep, 0.5, training=False), weights)


def test_dropout_in_training_is_unbiased_in_the_mean() -> None:
    """Each weight is 0 or w / (1 - p), and over many seeds its mean is w."""
    p, seeds = 0.3, 4000
    weights = steps.causal_weights(randn(T, T), D)
    keep = torch.stack([steps.keep_mask(T, p, seed) for seed in range(seeds)])
    dropped = steps.attention_dropout(weights, keep, p, training=True)
    torch.testing.assert_close(dropped[keep], (weights / (1 - p)).expand(seeds, T, T)[keep])
    assert (dropped[~keep] == 0).all()
    error = (4.5 * (p / (1 - p) / seeds) ** 0.5) * weights  # 4.5 standard errors of the mean
    assert ((dropped.mean(dim=0) - weights).abs() <= error).all()
    assert not torch.allclose(dropped[0].sum(dim=-1), torch.ones(T))


def keep_mask_in_plain_python(length: int, p: float, keys: tuple[int, ...]) -> list[list[bool]]:
    def mixed(h: int, key: int) -> int:
        h = ((h ^ key) + 0x9E3779B9) % 2**32
        h = ((h ^ (h >> 16)) * 0x7FEB352D) % 2**32
        h = ((h ^ (h >> 15)) * 0x846CA68B) % 2**32
        return h ^ (h >> 16)

    mask = []
    for i in range(length):
        row = []
        for j in range(length):
            h = 0
            for key in (*keys, i, j):
                h = mixed(h, key)
            row.append(h / 2**32 >= p)
        mask.append(row)
    return mask


@pytest.mark.parametrize("keys", [(0, 0, 0), (7, 3, 11), (2**32 - 1, 11, 0)])
def test_the_keep_mask_equals_unbounded_integer_arithmetic(keys: tuple[int, int, int]) -> None:
    """torch's 64-bit products wrap round; the low 32 bits are right all the same."""
    assert steps.keep_mask(9, 0.25, *keys).tolist() == keep_mask_in_plain_python(9, 0.25, keys)


def test_the_keep_mask_looks_random_in_every_key() -> None:
    p, n = 0.4, 64
    first = steps.keep_mask(n, p, seed=5)
    for other in (
        steps.keep_mask(n, p, seed=6),
        steps.keep_mask(n, p, seed=5, layer=1),
        steps.keep_mask(n, p, seed=5, head=1),
        first.mT,
        first.roll(1, dims=0),
        first.roll(1, dims=1),
    ):
        # independent masks agree at (1-p)^2 + p^2 = 0.52 of the places
        assert (first == other).float().mean().item() == pytest.approx(0.52, abs=0.04)
    assert first.float().mean().item() == pytest.approx(1 - p, abs=0.03)
    assert torch.equal(first[:9, :9], steps.keep_mask(9, p, seed=5)), "the mask depends on T"
    assert steps.keep_mask(n, 0.0, seed=5).all()


# --- step 9 ---------------------------------------------------------------------------------


def test_multi_head_is_single_heads_side_by_side_then_out_proj() -> None:
    """Against steps 4 to 7 run on each head's own columns."""
    x, w, n_head = randn(T, C), head_weights(), C // D
    columns = [slice(h * D, (h + 1) * D) for h in range(n_head)]
    heads = []
    for c in columns:
        _, _, scores = steps.queries_keys(
            x, w["w_q"][:, c], w["w_k"][:, c], w["b_q"][c], w["b_k"][c]
        )
        v = steps.values(x, w["w_v"][:, c], w["b_v"][c])
        heads.append(steps.context_vectors(steps.causal_weights(scores, D), v))
    expected = torch.cat(heads, dim=-1) @ w["w_o"] + w["b_o"]
    torch.testing.assert_close(steps.multi_head(x, n_head, **w), expected, rtol=1e-5, atol=1e-5)


def test_the_number_of_weights_does_not_depend_on_n_head() -> None:
    """One and the same set of matrices serves 1, 2, 3, ... heads, with different results."""
    x, w = randn(T, C), head_weights()
    results = [steps.multi_head(x, n_head, **w) for n_head in (1, 2, 3, 4, 6, 8, 12, 24)]
    assert all(result.shape == (T, C) for result in results)
    for one, other in itertools.pairwise(results):
        assert not torch.allclose(one, other, atol=1e-2)
    counts = set()
    for n_head in (1, 4, 12):
        model = GPT(config(n_head=n_head, n_embd=768, n_layer=1, vocab_size=64))
        attention = dict(model.h[0].attn.named_parameters())  # type: ignore[union-attr]
        counts.add(attention["c_attn.weight"].numel())
    assert counts == {1_769_472}


def test_heads_are_independent_until_they_are_concatenated() -> None:
    """Changing one head's weights changes its columns before out_proj and no others."""
    x, w, n_head = randn(T, C), head_weights(), C // D
    w["w_o"], w["b_o"] = torch.eye(C), torch.zeros(C)  # out_proj that changes nothing
    before = steps.multi_head(x, n_head, **w)
    own = slice(D, 2 * D)  # head 1
    for name in ("w_q", "w_k", "w_v", "b_q", "b_v"):
        changed = {k: v.clone() for k, v in w.items()}
        changed[name][..., own] += 0.5
        after = steps.multi_head(x, n_head, **changed)
        different = (after != before).any(dim=0)
        assert different[own].any()
        assert not different[:D].any()
        assert not different[2 * D :].any()
    w["w_o"] = head_weights()["w_o"]
    mixed_before = steps.multi_head(x, n_head, **w)
    w["w_q"][:, own] += 0.5
    assert (steps.multi_head(x, n_head, **w) != mixed_before).any(dim=0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_a_batch_never_mix(causal: bool) -> None:
    """A batch gives what each sequence gives alone, at every step."""
    x, w = randn(3, T, C), head_weights()
    batched = (*steps.self_attention(x), single_head(x, causal), steps.multi_head(x, 3, **w))
    for b in range(3):
        alone = (
            *steps.self_attention(x[b]),
            single_head(x[b], causal),
            steps.multi_head(x[b], 3, **w),
        )
        for together, single in zip(batched, alone, strict=True):
            torch.testing.assert_close(together[b], single)
    other = x.clone()
    other[1] = randn(T, C, seed=9)
    assert torch.equal(steps.multi_head(other, 3, **w)[0], batched[-1][0])
    assert not torch.allclose(steps.multi_head(other, 3, **w)[1], batched[-1][1])


# --- step 10 and the real thing -------------------------------------------------------------


def test_attention_is_the_only_place_where_tokens_meet() -> None:
    """Take attention out of the block and each row depends on itself alone."""
    x = randn(T, C).requires_grad_()
    norm = partial(steps.layer_norm, weight=randn(C, seed=1), bias=randn(C, seed=2))
    mlp = partial(
        steps.feed_forward,
        w_fc=randn(C, 4 * C, seed=3, scale=0.2),
        b_fc=randn(4 * C, seed=4),
        w_proj=randn(4 * C, C, seed=5, scale=0.1),
        b_proj=randn(C, seed=6),
    )
    attend = partial(steps.multi_head, n_head=3, **head_weights())
    for attention, meets in ((torch.zeros_like, False), (attend, True)):
        out = steps.block(x, norm, attention, norm, mlp)
        (grad,) = torch.autograd.grad(out[3].sum(), x)
        assert grad[3].abs().max() > 0
        assert bool((grad[:3] != 0).any()) == meets
        assert not (grad[4:] != 0).any()


def config(**changes: int) -> GPTConfig:
    shape = {"block_size": 32, "vocab_size": 61, "n_layer": 2, "n_head": 3, "n_embd": 48}
    return GPTConfig(**{**shape, **changes}, embd_dropout=0.1, attn_dropout=0.1, resid_dropout=0.1)


def model_with_large_weights(**changes: int) -> GPT:
    """At the usual small start every row of weights is nearly even, and much would go unseen."""
    model = GPT(config(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def from_linear(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's attention as the ladder's W and b: torch.nn.Linear holds the transpose."""
    w_q, w_k, w_v = state[f"{prefix}.c_attn.weight"].mT.chunk(3, dim=-1)
    b_q, b_k, b_v = state[f"{prefix}.c_attn.bias"].chunk(3)
    w_o, b_o = state[f"{prefix}.c_proj.weight"].mT, state[f"{prefix}.c_proj.bias"]
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    return weights | {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}


@pytest.mark.parametrize("attention", ["flash", "reference"])
def test_the_last_step_equals_the_models_attention(attention: str) -> None:
    model = model_with_large_weights()
    model.h[0].attn.attention = attention  # type: ignore[union-attr]
    x = randn(2, T, 48)
    with torch.no_grad():
        expected = model.h[0].attn(x)  # type: ignore[operator]
        got = steps.multi_head(x, 3, **from_linear("h.0.attn", model.state_dict()))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.std() > 0.1


def test_the_ladder_from_input_to_last_block_is_the_models_trunk() -> None:
    """Steps 1 and 10 as well: ids to hidden states with nothing of the model but its weights."""
    model = model_with_large_weights()
    s = model.state_dict()
    ids = torch.tensor([[5, 60, 5, 0, 17, 33, 2]])
    x = steps.embed(ids, s["wte.weight"], s["wpe.weight"])
    norms = [
        partial(steps.layer_norm, weight=s[f"{name}.weight"], bias=s[f"{name}.bias"])
        for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f")
    ]
    for layer in range(2):
        mlp = partial(
            steps.feed_forward,
            w_fc=s[f"h.{layer}.mlp.c_fc.weight"].mT,
            b_fc=s[f"h.{layer}.mlp.c_fc.bias"],
            w_proj=s[f"h.{layer}.mlp.c_proj.weight"].mT,
            b_proj=s[f"h.{layer}.mlp.c_proj.bias"],
        )
        attend = partial(steps.multi_head, n_head=3, **from_linear(f"h.{layer}.attn", s))
        x = steps.block(x, norms[2 * layer], attend, norms[2 * layer + 1], mlp)
    with torch.no_grad():
        torch.testing.assert_close(norms[4](x), model.trunk(ids), rtol=1e-5, atol=2e-5)


def test_the_last_step_equals_transformers_gpt2_attention() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    hf_config = transformers.GPT2Config(n_embd=C, n_head=3, n_positions=32)
    hf_config._attn_implementation = "eager"
    attention = GPT2Attention(hf_config, layer_idx=0).eval()  # type: ignore[no-untyped-call]
    w = head_weights()
    with torch.no_grad():  # their Conv1D lies as the textbook's W does
        attention.c_attn.weight.copy_(torch.cat([w["w_q"], w["w_k"], w["w_v"]], dim=1))
        attention.c_attn.bias.copy_(torch.cat([w["b_q"], w["b_k"], w["b_v"]]))
        attention.c_proj.weight.copy_(w["w_o"])
        attention.c_proj.bias.copy_(w["b_o"])
        x = randn(2, T, C)
        future = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
        expected = attention(x, attention_mask=future)[0]
    torch.testing.assert_close(steps.multi_head(x, 3, **w), expected, rtol=1e-5, atol=1e-5)


def counted_flops(run: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def test_twice_the_tokens_are_four_times_the_scoring_work() -> None:
    """Counted multiply-adds: scores and context go with T squared, the projections with T."""
    w_q, w_k = randn(2, C, D)
    for n in (64, 128):
        x, double = randn(n, C), randn(2 * n, C)
        q, k, _ = steps.queries_keys(x, w_q, w_k)
        q2, k2, _ = steps.queries_keys(double, w_q, w_k)
        assert counted_flops(lambda q=q, k=k: q @ k.mT) == 2 * n * n * D  # type: ignore[misc]
        assert counted_flops(lambda q=q2, k=k2: q @ k.mT) == 4 * 2 * n * n * D  # type: ignore[misc]
        assert counted_flops(partial(steps.values, double, w_q)) == 2 * counted_flops(
            partial(steps.values, x, w_q)
        )
        weights = torch.softmax(q2 @ k2.mT, dim=-1)
        assert counted_flops(partial(steps.context_vectors, weights, q2)) == 4 * 2 * n * n * D


# --- the code itself ------------------------------------------------------------------------

SAMPLE_CALLS = {
    "embed": "embed(torch.tensor([1, 0, 1]), torch.randn(4, 8), torch.randn(5, 8))",
    "self_attention": "self_attention(torch.randn(3, 8))",
    "shared_projection": "shared_projection(torch.randn(3, 8), torch.randn(8, 4))",
    "queries_keys": "queries_keys(torch.randn(3, 8), torch.randn(8, 4), torch.randn(8, 4))",
    "values": "values(torch.randn(3, 8), torch.randn(8, 4), torch.randn(4))",
    "scaled_weights": "scaled_weights(torch.randn(3, 3), 4)",
    "context_vectors": "context_vectors(torch.randn(3, 3), torch.randn(3, 4))",
    "causal_weights": "causal_weights(torch.randn(3, 3), 4)",
    "keep_mask": "keep_mask(3, 0.5, seed=1)",
    "attention_dropout": "attention_dropout(torch.rand(3, 3), torch.ones(3, 3) > 0, 0.5, True)",
    "multi_head": "multi_head(torch.randn(3, 8), 2,"
    " **{f'w_{m}': torch.randn(8, 8) for m in 'qkvo'})",
    "layer_norm": "layer_norm(torch.randn(3, 8), torch.ones(8), torch.zeros(8))",
    "feed_forward": "feed_forward(torch.randn(3, 8), torch.randn(8, 32), torch.zeros(32),"
    " torch.randn(32, 8), torch.zeros(8))",
    "block": "block(torch.randn(3, 8), *[lambda x: x] * 4)",
}


@pytest.mark.parametrize("function", [f for _, rung in steps.STEPS for f in rung])
def test_every_step_runs_alone_when_copied_out(
    function: Callable[..., object], tmp_path: Path
) -> None:
    """In a file of its own with torch (and Callable, for the block) and nothing else."""
    name = function.__name__
    imports = "import torch\n" + ("from collections.abc import Callable\n" * (name == "block"))
    code = f"{imports}\n{inspect.getsource(function)}\nresult = {SAMPLE_CALLS[name]}\n"
    (tmp_path / "copied.py").write_text(code, encoding="utf-8")
    result = runpy.run_path(str(tmp_path / "copied.py"))["result"]
    tensors = result if isinstance(result, tuple) else (result,)
    assert all(isinstance(t, torch.Tensor) and t.shape[0] == 3 for t in tensors)


def test_every_step_says_what_it_is_for() -> None:
    for number, (_, rung) in enumerate(steps.STEPS, start=1):
        docs = [inspect.getdoc(f) or "" for f in rung]
        assert all(doc.startswith(f"Step {number}") for doc in docs)
        assert all("->" in doc for doc in docs), "shapes"
    public = [n for n, f in vars(steps).items() if inspect.isfunction(f) and n[0] != "_"]
    assert public == [f.__name__ for _, rung in steps.STEPS for f in rung]


def test_the_docs_name_tests_and_pictures_that_exist() -> None:
    docs = Path(steps.__file__).parents[1] / "docs"
    text = (docs / "attention.md").read_text(encoding="utf-8")
    cited = [
        name for group in re.findall(r"\[(`\w+`(?:, `\w+`)*)\]", text) for name in group.split(", ")
    ]
    assert len(cited) > 15
    assert {"test_" + name.strip("`") for name in cited} <= set(globals())
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(pictures) >= 6
    assert all((docs / picture).stat().st_size < 300_000 for picture in pictures)
