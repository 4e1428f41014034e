"""Sampling: exact distributions, one seed one text, and a context that never runs over."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt.generate import choose, filter_logits, generate, sample_generator, stream
from gpt.model import GPT, GPTConfig

V = 65  # padded to 128 inside
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def tiny(block_size: int = 32, dropout: float = 0.0) -> GPT:
    config = GPTConfig(
        block_size=block_size,
        vocab_size=V,
        n_layer=2,
        n_head=2,
        n_embd=16,
        embd_dropout=dropout,
        attn_dropout=dropout,
        resid_dropout=dropout,
    )
    model = GPT(config).eval()
    with torch.no_grad():  # ten times GPT-2's spread: distributions far from flat
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(10)
    return model


class Successor(nn.Module):
    """Always says the last id plus one, and remembers what it was shown."""

    def __init__(self, block_size: int = 1000) -> None:
        super().__init__()
        self.config = GPTConfig(
            block_size=block_size,
            vocab_size=1000,
            n_layer=1,
            n_head=1,
            n_embd=1,
            embd_dropout=0.0,
            attn_dropout=0.0,
            resid_dropout=0.0,
        )
        self.vocab_size = 1000
        self.seen: list[Tensor] = []
        self.head_shapes: list[tuple[int, ...]] = []

    def trunk(self, idx: Tensor) -> Tensor:
        assert idx.shape[1] <= self.config.block_size
        self.seen.append(idx.clone())
        return idx[:, :, None].double()

    def head(self, x: Tensor) -> Tensor:
        self.head_shapes.append(tuple(x.shape))
        return 50.0 * nn.functional.one_hot(x.long().squeeze(-1) + 1, 1000).float()


def greedy_reference(model: GPT, idx: Tensor, n: int) -> Tensor:
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return idx


@pytest.mark.parametrize("top_k", [None, 0, 5])
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 5e-324])
def test_zero_and_tiny_temperatures_are_greedy(temperature: float, top_k: int | None) -> None:
    model = tiny()
    wanted = greedy_reference(model, PROMPT, 20)
    for seed in (1, 2):
        assert torch.equal(generate(model, PROMPT, 20, temperature, top_k, seed=seed), wanted)


def test_exact_ties_do_not_make_a_tiny_temperature_random() -> None:
    tied = torch.tensor([[0.0, 7.0, 7.0, 7.0]])
    for temperature, seed in itertools.product((0.0, 1e-8), range(5)):
        assert choose(tied, temperature, None, None, [sample_generator(seed, 0)]).item() == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": -1e-9}, "temperature is -1e-09"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -1.0, "top_k": 3}, "temperature is -1.0"),
        ({"top_k": -5}, "top_k is -5"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ],
)
@pytest.mark.parametrize("path", [generate, stream])
def test_settings_out_of_range_are_refused_at_the_call(
    path: Callable[..., object], settings: dict[str, float], named: str
) -> None:
    """A stream says so before its first token is asked for."""
    with pytest.raises(ValueError, match=named):
        path(tiny(), PROMPT, **{"max_new_tokens": 3, **settings})


def test_bounds_of_top_k() -> None:
    model = tiny()

    def run(top_k: int | None) -> list[int]:
        row = generate(model, PROMPT, 20, 1.0, top_k, seed=5)[0, 5:].tolist()
        assert row == list(stream(model, PROMPT, 20, 1.0, top_k, seed=5))  # both paths agree
        return row

    off = run(None)
    assert off == run(0) == run(V) == run(V + 1)
    assert run(1) == greedy_reference(model, PROMPT, 20)[0, 5:].tolist() != off
    ties = torch.zeros(1, 9)
    assert (
        int(filter_logits(ties, top_k=3).isfinite().sum()) == 3
    )  # not all that tie with the third


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [None, 3])
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int | None) -> None:
    """Chi-square over 50,000 draws of 5 ids; the limits are the 99.99 % points for 4 and 2."""
    logits = [0.3, 2.0, -1.0, 1.1, 0.9]
    kept = sorted(range(5), key=lambda i: -logits[i])[: top_k or 5]
    weights = {i: math.exp(logits[i] / temperature) for i in kept}
    n = 50_000
    draws = choose(
        torch.tensor([logits]).expand(n, 5), temperature, top_k, None, [sample_generator(0, 0)] * n
    )
    counts = torch.bincount(draws, minlength=5).tolist()
    assert all(counts[i] == 0 for i in range(5) if i not in kept)
    expected = {i: n * w / sum(weights.values()) for i, w in weights.items()}
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    assert chi_square < (23.51 if top_k is None else 18.42)


def test_logits_reach_the_draw_unchanged() -> None:
    """Through the whole path: a GPT whose logits are fixed, ids counted over 4,000 samples."""
    model = tiny(block_size=1)
    logits = torch.full((V,), -20.0)
    logits[[4, 8, 64]] = torch.tensor([1.0, 0.0, -1.0])
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(torch.eye(16)[0])
        model.wte.weight[:V, 0] = logits
    out = generate(model, torch.zeros(4000, 1, dtype=torch.int64), 1)[:, 1]
    counts = torch.bincount(out, minlength=V)
    weights = torch.tensor([math.e, 1.0, 1 / math.e])
    expected = 4000 * weights / weights.sum()
    assert int(counts.sum() - counts[[4, 8, 64]].sum()) == 0
    assert float(((counts[[4, 8, 64]] - expected) ** 2 / expected).sum()) < 18.42


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    """Likeliest first whatever the order of ids; together with top_k, within what that leaves."""
    probs = torch.tensor([0.05, 0.5, 0.15, 0.3])

    def kept(top_k: int | None, top_p: float) -> set[int]:
        out = filter_logits(probs.log(), top_k, top_p)
        inside = out.isfinite()
        assert torch.equal(out[inside], probs.log()[inside])
        return set(inside.nonzero().flatten().tolist())

    assert kept(None, 1e-9) == kept(None, 0.49) == {1}
    assert kept(None, 0.51) == kept(None, 0.79) == {1, 3}
    assert kept(None, 0.81) == kept(None, 0.94) == {1, 2, 3}
    assert kept(None, 0.96) == kept(None, 1.0) == {0, 1, 2, 3}
    assert kept(None, 0.62) == {1, 3} != kept(2, 0.62) == {1}  # of two, the first has 0.5 / 0.8
    assert kept(2, 0.63) == {1, 3}
    batch = filter_logits(torch.stack([probs, probs.flip(0)]).log(), None, 0.6)
    assert batch.isfinite().tolist() == [[False, True, False, True], [True, False, True, False]]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """At a temperature that makes every id alike, 65 of the 128 rows come up, and all of them."""
    out = generate(tiny(), torch.zeros(64, 1, dtype=torch.int64), 30, temperature=1e6)[:, 1:]
    assert set(out.flatten().tolist()) == set(range(V))


def test_a_row_alone_is_the_row_in_its_batch() -> None:
    model = tiny()
    prompts = torch.tensor([[1, 2, 3], [9, 9, 9], [64, 0, 7]])
    together = generate(model, prompts, 25, temperature=0.0)
    for row in range(3):
        alone = generate(model, prompts[row : row + 1], 25, temperature=0.0)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("shape", [(5,), (1, 0), (1, 2, 3)])
def test_only_whole_batches_are_taken(shape: tuple[int, ...]) -> None:
    """[B, T] ids and nothing else: no place where padding of unequal rows could hide."""
    with pytest.raises(ValueError, match="shape"):
        generate(tiny(), torch.zeros(shape, dtype=torch.int64), 3)


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    """Of 65 ids the tokenizer has 10: drawn, streamed, or the likeliest, it is one of these."""
    model = tiny()
    free = generate(model, PROMPT, 40, 2.0)
    assert (free[:, PROMPT.size(1) :] >= 10).any()
    few = generate(model, PROMPT, 40, 2.0, n_vocab=10)[:, PROMPT.size(1) :]
    assert few.max() < 10 and len(few.unique()) > 5
    alone = stream(model, PROMPT[:1], 40, 2.0, n_vocab=10)
    assert list(alone) == few[0].tolist()
    idx = PROMPT
    for _ in range(10):
        idx = torch.cat([idx, model(idx)[:, -1, :10].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, PROMPT, 10, 0, n_vocab=10), idx)


def test_ids_of_a_larger_vocabulary_are_named() -> None:
    with pytest.raises(ValueError, match="id 271 .* 65 tokens"):
        generate(tiny(), torch.tensor([[3, 271]]), 3)


def test_end_of_text_ends_a_row_and_it_stays_ended() -> None:
    """Three rows: the middle one meets id 500 as its 5th new token, another never."""
    model: Any = Successor()
    idx = torch.tensor([[0], [495], [100]])
    out = generate(model, idx, 8, temperature=0.0, eot=500)
    assert out.tolist() == [
        list(range(9)),
        [495, 496, 497, 498, 499, 500, 500, 500, 500],
        list(range(100, 109)),
    ]
    on = generate(model, idx, 8, temperature=0.0)
    assert on[1].tolist() == list(range(495, 504))  # without eot, on into the next document


def test_work_ends_with_the_last_row() -> None:
    model: Any = Successor()
    out = generate(model, torch.tensor([[498], [496]]), 50, 0.0, eot=500)
    assert out.shape == (2, 51) and out[:, 5:].eq(500).all()
    assert len(model.seen) == 4


def test_a_stream_ends_before_end_of_text() -> None:
    model: Any = Successor()
    ids = stream(model, torch.tensor([[495]]), 50, temperature=0.0, eot=500)
    assert list(ids) == [496, 497, 498, 499]


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    model = tiny()

    def rows(n: int, seed: int) -> list[list[int]]:
        return generate(model, PROMPT.expand(n, -1), 20, seed=seed).tolist()

    three = rows(3, seed=7)
    assert three == rows(3, seed=7)
    assert len({tuple(row) for row in three}) == 3
    assert rows(1, seed=7)[0] == three[0]
    assert rows(1, seed=8)[0] != three[0]
    for sample, row in enumerate(three):
        assert list(stream(model, PROMPT, 20, seed=7, sample=sample)) == row[5:]


def test_seeds_do_not_meet_in_neighbouring_samples() -> None:
    """Sample 1 of seed 0 is not sample 0 of seed 1, as it would be with seed + number."""
    first = {
        (seed, i): torch.rand(1, generator=sample_generator(seed, i)).item()
        for seed in (-3, 0, 1, 2, 11, 2**70)
        for i in (0, 1, 2, 11)
    }
    assert len(set(first.values())) == len(first)


def test_a_full_context_keeps_its_last_half() -> None:
    """Lengths 5 to 8, then 4 to 8 again; what the model sees is always the end of the text."""
    model: Any = Successor(block_size=8)
    out = generate(model, torch.arange(5)[None], 14, temperature=0.0)
    assert out.tolist() == [list(range(19))]
    assert [s.shape[1] for s in model.seen] == [5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8]
    for new, seen in enumerate(model.seen):
        text = out[0, : 5 + new]
        assert torch.equal(seen[0], text[-seen.shape[1] :])


def test_a_prompt_beyond_the_context_is_cut_on_the_left_and_returned_whole() -> None:
    model: Any = Successor(block_size=8)
    out = generate(model, torch.arange(20)[None], 3, temperature=0.0)
    assert out.tolist() == [list(range(23))]
    assert model.seen[0].tolist() == [list(range(12, 20))]
    assert generate(tiny(block_size=1), PROMPT, 5).shape == (1, 10)  # the smallest context


def test_the_head_sees_the_last_position_only() -> None:
    model: Any = Successor()
    generate(model, torch.arange(50).expand(2, -1), 3, temperature=0.0)
    assert model.head_shapes == [(2, 1)] * 3


def test_sampling_disturbs_nothing() -> None:
    """Mode, global generator and gradients are as before; dropout is off meanwhile."""
    model = tiny(dropout=0.5).train()
    state = torch.get_rng_state()
    first = generate(model, PROMPT, 20, seed=1)
    ids = stream(model, PROMPT, 20, seed=1)
    assert next(ids) == first[0, 5]
    assert model.training and model.h[0].training  # while the stream is half read, too
    assert [first[0, 5].item(), *ids] == first[0, 5:].tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generate(model.eval(), PROMPT, 20, seed=1), first)
    assert not model.training
    assert all(p.grad is None for p in model.parameters()) and not first.requires_grad


def test_damaged_weights_are_said_not_sampled() -> None:
    """A NaN would otherwise come out as text made of one id; the mode is restored even then."""
    model = tiny().train()
    with torch.no_grad():
        model.ln_f.bias[0] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            generate(model, PROMPT, 3, temperature)
    assert model.training


def test_no_new_tokens_is_the_prompt() -> None:
    assert torch.equal(generate(tiny(), PROMPT, 0), PROMPT)
    assert list(stream(tiny(), PROMPT, 0)) == []
