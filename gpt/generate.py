"""Sampling: a prompt -> new ids. Each sample's randomness is a function of (seed, sample index)."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from gpt.model import GPT
from gpt.runtime import seed_of

# Below this, logits that differ at all differ by more than the temperature can bridge; exact ties
# (common in bfloat16) must not make a temperature of 1e-8 random where 0 is not.
_GREEDY_BELOW = 1e-6


def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eot: int | None = None,
    n_vocab: int | None = None,
) -> Tensor:
    """idx [B, T] -> [B, T + max_new_tokens], the prompts and what follows them.

    Row b is sample b: it depends on its own prompt, the seed and b, not on B. With `eot`, a row
    that produced it stays ended: the rest of the row is `eot`. With `n_vocab`, no id from there on
    is produced: a model may have more than its tokenizer knows. All rows have one length, since
    GPT-2's positions see padding; prompts of unequal length are generated one by one.

    Raises ValueError for a setting out of range, and for non-finite logits.
    """
    generators = [sample_generator(seed, row) for row in range(len(idx))]
    out = [idx]
    ended = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    rows = _rows(model, idx, max_new_tokens, temperature, top_k, top_p, generators, n_vocab)
    for ids in rows:
        if eot is not None:
            ids = torch.where(ended, eot, ids)
            ended |= ids == eot
        out.append(ids[:, None])
        if ended.all():
            rest = max_new_tokens - (len(out) - 1)
            out.append(ids.new_full((len(idx), rest), eot or 0))
            break
    return torch.cat(out, dim=1)


def stream(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eot: int | None = None,
    sample: int = 0,
    n_vocab: int | None = None,
) -> Iterator[int]:
    """The new ids of one sample, each as soon as it is there; idx [1, T]. Ends before `eot`.

    `sample` numbers the samples of one seed, as the rows of `generate` do; `n_vocab` and what is
    raised are as there.
    """
    assert len(idx) == 1, idx.shape
    generators = [sample_generator(seed, sample)]
    rows = _rows(model, idx, max_new_tokens, temperature, top_k, top_p, generators, n_vocab)
    return _until(eot, rows)


def check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for a setting that no distribution belongs to."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature is {temperature}; probabilities need a finite number, 0 or more; "
            "use 0 for the likeliest token always, 1 for the model's own distribution"
        )
    if top_k is not None and top_k < 0:
        raise ValueError(
            f"top_k is {top_k}; it counts the tokens kept; use 1 or more, or 0 to keep all"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"top_p is {top_p}; it is the probability kept; use more than 0, up to 1 to keep all"
        )


def sample_generator(seed: int, sample: int) -> Generator:
    """A CPU generator of its own for each sample of each seed."""
    return torch.Generator().manual_seed(seed_of("sample", seed, sample))


def filter_logits(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """logits [..., V] -> the same with -inf outside the top_k likeliest and outside the nucleus.

    The nucleus is the smallest set of likeliest tokens whose probability reaches top_p (Holtzman
    et al., 2020), within what top_k left; never empty. None or 0 (top_k), None or 1 (top_p): off.
    """
    V = logits.size(-1)
    k = min(top_k or V, V)
    top_p = 1.0 if top_p is None else top_p
    if k == V and top_p == 1:
        return logits
    values, order = logits.topk(k)  # [..., k], descending
    if top_p < 1:
        probs = values.softmax(-1)
        likelier = probs.cumsum(-1) - probs  # probability of the tokens before; first: exactly 0
        values = values.masked_fill(likelier >= top_p, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, order, values)


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: Sequence[Generator],
) -> Tensor:
    """logits [B, V] on the CPU, a generator a row -> an id for each row, int64 [B].

    Temperature first, then the filters, as most tools have it.
    """
    if not logits.isfinite().all():
        raise ValueError(
            "the model's logits are not finite; its weights are damaged or its training "
            "diverged; use an earlier checkpoint"
        )
    if temperature < _GREEDY_BELOW or top_k == 1:
        return logits.argmax(-1)  # the first of equals, whatever the seed
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # 0 at most: no overflow
    cdf = filter_logits(logits, top_k, top_p).double().softmax(-1).cumsum(-1)  # [B, V]
    u = torch.cat([torch.rand(1, dtype=torch.float64, generator=g) for g in generators])[:, None]
    # The first id whose cumulated probability exceeds u < 1; one of probability 0 never is.
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).squeeze(-1)


class _Context:
    """The tokens the model sees: at most block_size; when full, the last half, and on from there.

    A KV cache belongs here and nowhere else: `append` would feed the new ids alone, and the
    halving, which moves every position, is where the cache is filled anew (once in T/2 tokens).
    """

    def __init__(self, model: GPT, idx: Tensor) -> None:
        self.model = model
        self.block_size = model.config.block_size
        self.idx = idx[:, -self.block_size :]

    def append(self, ids: Tensor) -> None:
        """ids [B]"""
        self.idx = torch.cat([self.idx, ids[:, None]], dim=1)
        if self.idx.size(1) > self.block_size:
            self.idx = self.idx[:, -max(1, self.block_size // 2) :]

    def logits(self) -> Tensor:
        """Of the next token, [B, V], on the CPU. The model's mode is what it was, after each call,
        so that whoever holds a half-read stream may train on."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.model.head(self.model.trunk(self.idx)[:, -1]).cpu()
        finally:
            self.model.train(training)


def _rows(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: Sequence[Generator],
    n_vocab: int | None,
) -> Iterator[Tensor]:
    """Checks at once, then yields [B] ids a step, on idx's device."""
    check_settings(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it is a count; use 0 or more")
    if idx.dim() != 2 or idx.size(1) == 0:
        raise ValueError(
            f"the prompt has shape {list(idx.shape)}; generation needs [B, T] with at least one "
            "token a row; start from the end-of-text token where there is no prompt"
        )
    V = model.vocab_size
    if len(idx) and not 0 <= int(idx.min()) <= int(idx.max()) < V:
        raise ValueError(
            f"the prompt holds id {int(idx.max())} (least {int(idx.min())}) but the model knows "
            f"{V} tokens; they belong to different vocabularies; use the checkpoint's tokenizer"
        )

    def run() -> Iterator[Tensor]:
        context = _Context(model, idx)
        for _ in range(max_new_tokens):
            logits = context.logits()[:, :n_vocab]
            ids = choose(logits, temperature, top_k, top_p, generators).to(idx.device)
            yield ids
            context.append(ids)

    return run()


def _until(eot: int | None, rows: Iterator[Tensor]) -> Iterator[int]:
    for ids in rows:
        if (token := int(ids)) == eot:
            return
        yield token
