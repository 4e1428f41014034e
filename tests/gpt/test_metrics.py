"""How much work a token is, how fast it goes, and what share of the machine that is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from gpt import metrics
from gpt.config import GPTConfig
from gpt.metrics import Meter, flops_per_token, measure_cpu_peak, peak_flops, total_peak
from gpt.model import GPT
from gpt.ranks import Ranks

CUDA = torch.device("cuda", 0)


def test_work_of_a_token_is_what_torch_counts() -> None:
    """6·N + 12·L·C·T against the products that torch saw in a forward and a backward."""
    config = GPTConfig(
        block_size=64,
        vocab_size=512,
        n_layer=3,
        n_head=4,
        n_embd=128,
        embd_dropout=0.0,
        attn_dropout=0.0,
        resid_dropout=0.0,
    )
    model = GPT(config, "reference")
    model.init_weights(0)
    x = torch.randint(0, 512, (2, 64))
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    assert flops_per_token(model) * x.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def step(meter: Meter, clock: Clock, seconds: float) -> None:
    clock.time += seconds
    meter.add(seconds)


def test_one_rate_leaves_evaluation_and_saving_out_the_other_does_not() -> None:
    clock = Clock()
    meter = Meter(1000, flops_per_token=6.0, peak=12_000.0, now=clock)
    for _ in range(4):
        step(meter, clock, 2.0)
    clock.time += 12.0  # an evaluation, before the row
    assert meter.row() == {
        "perf/tokens_per_sec": 500.0,
        "perf/wall_tokens_per_sec": 200.0,
        "perf/mfu": 0.25,
    }
    clock.time += 3.0  # a save, after it
    step(meter, clock, 1.0)
    assert meter.row() == {
        "perf/tokens_per_sec": 1000.0,
        "perf/wall_tokens_per_sec": 250.0,
        "perf/mfu": 0.5,
    }


def test_no_share_of_a_peak_that_is_unknown() -> None:
    clock = Clock()
    meter = Meter(1000, flops_per_token=6.0, peak=None, now=clock)
    step(meter, clock, 1.0)
    assert set(meter.row()) == {"perf/tokens_per_sec", "perf/wall_tokens_per_sec"}


def test_a_clock_that_stands_does_not_make_the_wall_faster_than_the_steps() -> None:
    meter = Meter(1000, flops_per_token=6.0, peak=None, now=Clock())
    meter.add(2.0)
    assert meter.row()["perf/wall_tokens_per_sec"] == 500.0


def test_time_left_counts_neither_the_first_step_nor_an_outlier_but_what_is_beside_the_steps() -> (
    None
):
    clock = Clock()
    meter = Meter(1000, flops_per_token=6.0, peak=None, now=clock)
    assert meter.left(10) is None and meter.rate() is None
    step(meter, clock, 60.0)  # compiles
    assert meter.left(10) is None and meter.rate() is None
    for seconds in (1.0, 1.0, 1.0, 9.0):
        step(meter, clock, seconds)
    assert meter.left(10) == pytest.approx(10.0) and meter.rate() == 1000.0
    clock.time += 2.0  # evaluation: half a second a step so far
    assert meter.left(10) == pytest.approx(15.0)


def test_the_share_of_peak_does_not_depend_on_accumulation_or_ranks() -> None:
    """The same tokens a second on twice the devices is half the share, and nothing else is."""
    clock = Clock()
    shares = []
    for batch_tokens, seconds, ranks in ((1000, 1.0, 1), (4000, 4.0, 1), (8000, 4.0, 2)):
        meter = Meter(batch_tokens, flops_per_token=6.0, peak=24_000.0 * ranks, now=clock)
        step(meter, clock, seconds)
        shares.append(meter.row()["perf/mfu"])
    assert shares == [0.25, 0.25, 0.25]


# --- peaks


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """card(name, units, gib): the CUDA device that torch reports."""

    def report(name: str, units: int, gib: float) -> None:
        properties = SimpleNamespace(
            total_memory=int(gib * 2**30), multi_processor_count=units, uuid="u-1"
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    return report


def test_a_card_is_known_by_name_and_number_of_multiprocessors(card: Callable[..., None]) -> None:
    card("NVIDIA H100 PCIe", 114, 79.1)
    assert peak_flops(CUDA, torch.bfloat16) == 756.5e12
    card("NVIDIA H100 80GB HBM3", 132, 79.1)
    assert peak_flops(CUDA, torch.bfloat16) == 989.5e12
    card("NVIDIA H100 80GB HBM3", 16, 9.8)  # a slice of it
    assert peak_flops(CUDA, torch.bfloat16) is None
    assert peak_flops(CUDA, torch.bfloat16, override=1e14) == 1e14


def test_the_drivers_tool_is_asked_where_power_tells(
    card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def answer(watts: str) -> Callable[..., Any]:
        def run(command: list[str], **_: object) -> Any:
            asked.append(command)
            return SimpleNamespace(stdout=watts)

        return run

    card("NVIDIA GeForce RTX 2080", 46, 7.8)
    monkeypatch.setattr(subprocess, "run", answer("215.00\n"))
    assert peak_flops(CUDA, torch.float16) == 40.3e12
    assert asked[0][0] == "nvidia-smi" and "--id=GPU-u-1" in asked[0]
    monkeypatch.setattr(subprocess, "run", answer("[N/A]\n"))
    assert peak_flops(CUDA, torch.float16) is None

    def absent(*_: object, **__: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    assert peak_flops(CUDA, torch.float16) is None


def test_other_devices_are_unknown_and_the_users_figure_goes_first() -> None:
    assert peak_flops(torch.device("mps"), torch.float32) is None
    assert peak_flops(torch.device("mps"), torch.float32, override=3e12) == 3e12
    assert peak_flops(torch.device("cpu"), torch.float32, override=3e12) == 3e12
    assert total_peak(torch.device("mps"), torch.float32, None, Ranks()) is None
    assert total_peak(torch.device("mps"), torch.float32, 3e12, Ranks()) == 3e12


def test_a_cpu_is_measured_once_and_no_generator_moves() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    peak = measure_cpu_peak(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e8 < peak < 1e14  # a processor of today, slow or emulated to large
    assert measure_cpu_peak(torch.float32) == peak
    assert peak_flops(torch.device("cpu"), torch.float32) == peak


TWO_RANKS = """
import os, sys, torch
from gpt import metrics
from gpt.ranks import Ranks
ranks = Ranks(int(sys.argv[1]), int(sys.argv[1]), 2)
torch.distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=ranks.rank, world_size=2)
metrics.peak_flops = lambda device, dtype, override: (1e12, 3e12)[ranks.rank]
both = metrics.total_peak(torch.device("cpu"), torch.float32, None, ranks)
metrics.peak_flops = lambda device, dtype, override: (1e12, None)[ranks.rank]
one = metrics.total_peak(torch.device("cpu"), torch.float32, None, ranks)
print(both, one, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_add_up_and_one_unknown_device_makes_the_sum_unknown(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outs = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert outs == ["4000000000000.0 None\n"] * 2


def test_bits_per_byte() -> None:
    """A uniform guess over 256 bytes, a token each, is 8 bits a byte."""
    assert metrics.bits_per_byte(5.545177444479562, 1.0) == pytest.approx(8.0)
