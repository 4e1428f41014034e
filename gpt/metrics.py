"""How much work a token is, and how fast it goes. docs/meters.md tells what each number means."""

from __future__ import annotations

import functools
import math
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from gpt import distributed, peaks
from gpt.model import GPT
from gpt.ranks import Ranks


def flops_per_token(model: GPT) -> float:
    """Forward and backward, a token: 6·N + 12·L·C·T (Chowdhery et al. 2022, appendix B).

    N counts all parameters but the position table; the tied embedding counts as the head's
    matrix. Attention is counted in full, though the causal mask needs half. Work done again
    (activation checkpointing) is not counted: the share of peak is of useful work.
    """
    config = model.config
    n = model.n_params() - config.block_size * config.n_embd
    return 6 * n + 12 * config.n_layer * config.n_embd * config.block_size


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss that doesn't depend on the tokenizer: nats a token → bits a byte of text."""
    return nats_per_token / math.log(2) / bytes_per_token


class Meter:
    """Tokens a second of a run, all ranks together, with and without what is not training.

    flops_per_token: work of a token; peak: FLOP/s of all ranks together (`total_peak`), None where
    it is unknown: there is no perf/mfu then.
    """

    def __init__(
        self,
        batch_tokens: int,
        flops_per_token: float,
        peak: float | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.mfu_per_rate = flops_per_token / peak if peak else None
        self.now = now
        self.steps, self.seconds, self.since = 0, 0.0, now()  # of the present row
        self.durations: list[float] = []  # of up to twenty steps, the first of the process left out
        self.steady: tuple[float, int, float] | None = None  # since then: when, steps, seconds

    def add(self, seconds: float) -> None:
        """An optimizer step took so long; evaluation, saving and sampling are not in it."""
        self.steps += 1
        self.seconds += seconds
        if self.steady is None:  # the first step of a process compiles: it foretells nothing
            self.steady = (self.now(), 0, 0.0)
            return
        self.durations = [*self.durations[-19:], seconds]
        when, steps, total = self.steady
        self.steady = (when, steps + 1, total + seconds)

    def row(self) -> dict[str, float]:
        """The rates since the previous row, under their names in metrics.jsonl; starts anew.

        To be called once a row, after its evaluation, which then counts in the row's wall clock.
        """
        now = self.now()
        tokens = self.steps * self.batch_tokens
        rate = tokens / self.seconds
        row = {
            "perf/tokens_per_sec": rate,
            "perf/wall_tokens_per_sec": tokens / max(now - self.since, self.seconds),
        }
        if self.mfu_per_rate is not None:
            row["perf/mfu"] = rate * self.mfu_per_rate
        self.steps, self.seconds, self.since = 0, 0.0, now
        return row

    def rate(self) -> float | None:
        """Tokens a second of the last twenty steps; None before the second."""
        return self.batch_tokens / statistics.median(self.durations) if self.durations else None

    def left(self, steps: int) -> float | None:
        """Seconds for so many steps more; None before the second step.

        The median of the last twenty, and what evaluation, saving and sampling have taken a step.
        """
        if self.steady is None or not self.durations:
            return None
        when, done, seconds = self.steady
        beside = max(self.now() - when - seconds, 0.0) / done
        return (statistics.median(self.durations) + beside) * steps


def total_peak(
    device: torch.device, dtype: torch.dtype, override: float | None, ranks: Ranks
) -> float | None:
    """FLOP/s of all ranks' devices together, or None where one of them is unknown.

    Every rank has to call it. They measure a CPU at the same time, so that cores which they share
    are not counted twice.
    """
    distributed.barrier(ranks)
    peak = peak_flops(device, dtype, override)
    total = torch.tensor([math.nan if peak is None else peak], dtype=torch.float64)
    distributed.all_sum(total, ranks)
    return None if math.isnan(float(total)) else float(total)


def peak_flops(
    device: torch.device, dtype: torch.dtype, override: float | None = None
) -> float | None:
    """FLOP/s of one device in products of `dtype`: the user's figure, else the maker's (gpt/peaks).

    A CPU's is measured. None where it isn't known: a guess would be worse than none.
    """
    if override is not None:
        return override
    if device.type == "cpu":
        return measure_cpu_peak(dtype)
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    lookup = functools.partial(
        peaks.lookup,
        torch.cuda.get_device_name(device),
        dtype,
        memory_gb=card.total_memory / 2**30,
        units=card.multi_processor_count,
    )
    found = lookup()
    return found if found is not None else lookup(power_watts=_power_limit(card))


def measure_cpu_peak(dtype: torch.dtype) -> float:
    """Attainable FLOP/s of square matrix products in `dtype`, on this process's threads.

    Measured once a process, in 0.2 s. What the processor could do by its data sheet is more,
    but depends on clocks under load that no system call tells.
    """
    return _product_rate(dtype, torch.get_num_threads())


@functools.cache
def _product_rate(dtype: torch.dtype, threads: int) -> float:
    """The best product of a fifth of a second: one that another process held up says nothing.

    No generator is used, so that no run can depend on it.
    """
    begun, n, best = time.perf_counter(), 128, 0.0
    while time.perf_counter() - begun < 0.2:
        a = torch.full((n, n), 0.5, dtype=dtype)
        started = time.perf_counter()
        torch.mm(a, a)
        best = max(best, 2 * n**3 / (time.perf_counter() - started))
        if n < 4096 and 2 * (2 * n) ** 3 / best < 0.03:
            n *= 2
    return best


def _power_limit(card: object) -> float | None:
    """The card's own power limit in watts, by the driver's tool; None where there is no answer."""
    ask = ["nvidia-smi", "--query-gpu=power.default_limit", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*ask, f"--id=GPU-{getattr(card, 'uuid')}"],  # noqa: B009  # not in every build of torch
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return float(answer.stdout)
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
        return None
