"""Losses that are no number, spikes, loss scaling: the same on all ranks, and the same again."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.door import RunError
from data import inspect
from gpt import folders, trainer
from tests import faults
from tests.processes import Run
from tests.test_chaos import SETTINGS, assert_same_run, rows, tensors

TrainRun = Callable[..., tuple[int, Path]]


def arguments(book: Path, root: Path, *more: str) -> list[str]:
    args = [*SETTINGS, f"data.path={book}", f"paths.root={root}", "run=r"]
    return [*args, "trainer.max_steps=60", "trainer.eval_every=20", *more]


def test_one_ranks_bad_number_is_skipped_by_all(
    tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1's loss of step 5 is NaN: no rank updates, step, rank and windows are named, the ranks
    stay equal, and the run is the one that a single process with the same bad windows makes."""
    folder = tmp_path / "two" / "runs" / "r"
    bad = partial(faults.scale_loss, float("nan"), [4], 1)
    hook = partial(faults.all_of, bad, partial(faults.write_digests, str(tmp_path)))
    args = arguments(book, tmp_path / "two", "trainer.max_steps=20")
    run = Run(args, tmp_path / "out", ranks=2, hook=hook)
    assert run.codes() == [0, 0], run.text()
    assert "step 5: loss nan" in run.text() and "on rank 1, which read 4 windows" in run.text()
    assert run.text().count("train window at") == 4
    (command,) = re.findall(r"their text: python -m data\.inspect (.+)", run.text())
    assert inspect.main(shlex.split(command)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line in shown for line in re.findall("train window at.*", run.text()))
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()
    row = rows(folder)[4]
    assert row["step"] == 5 and row["skipped"] == 1 and "train/loss" not in row

    alone = partial(faults.scale_loss, float("nan"), [4], 0)
    run = Run(arguments(book, tmp_path / "one", "trainer.max_steps=20"), tmp_path / "out", 1, alone)
    assert run.codes() == [0], run.text()
    for a, b in zip(rows(tmp_path / "one" / "runs" / "r"), rows(folder), strict=True):
        assert a.keys() == b.keys()
        assert [b[key] for key in a] == pytest.approx([a[key] for key in a], rel=1e-5)


def test_too_many_bad_steps_leave_latest_and_best_alone(tmp_path: Path, book: Path) -> None:
    """From step 23 on every loss is NaN on rank 1: after max_skipped exit 1, one error line."""
    bad = partial(faults.scale_loss, float("nan"), list(range(22, 60)), 1)
    args = arguments(book, tmp_path, "trainer.max_skipped=2")
    run = Run(args, tmp_path / "out", ranks=2, hook=bad)
    assert run.codes(30)[0] == 1, run.text()
    text = run.text()
    assert text.count("all ranks skip this update") == 3, text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "step 25" in errors[0] and "step_00000020" in errors[0], text
    assert "Traceback" not in text
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    assert [os.readlink(checkpoints / name) for name in ("latest", "best")] == ["step_00000020"] * 2
    folders.verify(checkpoints / "step_00000020")
    assert rows(tmp_path / "runs" / "r")[-1]["step"] >= 20


@pytest.mark.parametrize("what", ["log", "skip"])
def test_a_spike_is_logged_or_skipped(what: str, tmp_path: Path, book: Path) -> None:
    """Ten times the loss at step 46; log is the default."""
    more = [] if what == "log" else ["trainer.on_spike=skip"]
    spike = partial(faults.scale_loss, 10.0, [45], None)
    run = Run(arguments(book, tmp_path, *more), tmp_path / "out", hook=spike)
    assert run.codes() == [0], run.text()
    assert run.text().count("is a spike") == 1 and "step 46: loss" in run.text()
    by_step = {row["step"]: row for row in rows(tmp_path / "runs" / "r")}
    assert len(by_step) == 60
    assert ("train/loss" in by_step[46]) == (what == "log")
    assert ("train window at" in run.text()) == (what == "skip")
    assert by_step[60].get("skipped") == (None if what == "log" else 1)


ONE_SPIKE = partial(faults.scale_loss, 10.0, [45], None, True)


@pytest.fixture(scope="module")
def rolled_back(
    tmp_path_factory: pytest.TempPathFactory, book: Path
) -> Callable[[int, str], tuple[Path, str]]:
    """rolled_back(ranks, parallel) -> a run with a spike at step 46 that went back to 40 and was
    not disturbed, made once, and what it said."""
    made: dict[tuple[int, str], tuple[Path, str]] = {}

    def make(ranks: int, parallel: str) -> tuple[Path, str]:
        if (ranks, parallel) not in made:
            root = tmp_path_factory.mktemp("rolled_back")
            more = ["trainer.on_spike=rollback", f"runtime.parallel={parallel}"]
            run = Run(arguments(book, root, *more), root / "out", ranks, ONE_SPIKE)
            assert run.codes() == [0] * ranks, run.text()
            made[ranks, parallel] = root / "runs" / "r", run.text()
        return made[ranks, parallel]

    return make


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, "ddp"), *(pytest.param(2, how, marks=pytest.mark.slow) for how in ("ddp", "fsdp"))],
)
def test_a_rollback_leaves_the_windows_out_also_after_a_kill(
    ranks: int,
    parallel: str,
    tmp_path: Path,
    book: Path,
    rolled_back: Callable[[int, str], tuple[Path, str]],
) -> None:
    """A spike at step 46: back to 40, and on with the windows after it. Killed at 44 on the second
    try, and at 53, after a save: the bits of the run that was not killed."""
    whole, said = rolled_back(ranks, parallel)
    assert said.count("back to step 40, leaving out the windows of the 6 steps") == 1
    state = folders.read_state(whole / "checkpoints" / "latest")
    assert state is not None and state["left_out"] == [[40, 48]]  # 6 steps of 8 windows
    assert [row["step"] for row in rows(whole)] == list(range(1, 61))

    more = ["trainer.on_spike=rollback", f"runtime.parallel={parallel}"]
    args = arguments(book, tmp_path / "killed", *more)
    for step in (43, 52):
        dead = partial(faults.before_update, step, faults.die, after_rollback=True)
        run = Run(args, tmp_path / "out", ranks, partial(faults.all_of, ONE_SPIKE, dead))
        assert run.codes() == [-9] * ranks, run.text()
    last = Run(args, tmp_path / "out", ranks, ONE_SPIKE)
    assert last.codes() == [0] * ranks, last.text()
    assert_same_run(tmp_path / "killed" / "runs" / "r", whole)


@pytest.mark.slow
def test_where_a_rollback_goes_is_planned(tmp_path: Path, book: Path) -> None:
    """A signal at step 43, or the clock, saves one more checkpoint; a spike at 46 goes back to 40
    all the same, and the end is that of the run without signal."""
    more = ["trainer.on_spike=rollback", "trainer.keep_last=1"]
    whole = arguments(book, tmp_path / "whole", *more)
    assert Run(whole, tmp_path / "out", hook=ONE_SPIKE).codes() == [0]
    args = arguments(book, tmp_path / "a", *more)
    stop = partial(faults.before_update, 42, faults.interrupt)
    run = Run(args, tmp_path / "out", hook=partial(faults.all_of, ONE_SPIKE, stop))
    assert run.codes() == [130] and "saved at step 43" in run.text(), run.text()
    run = Run(args, tmp_path / "out", hook=ONE_SPIKE)
    assert run.codes() == [0] and "back to step 40" in run.text(), run.text()
    assert_same_run(tmp_path / "a" / "runs" / "r", tmp_path / "whole" / "runs" / "r")


def test_a_rollback_reads_other_windows(
    tmp_path: Path, book: Path, rolled_back: Callable[[int, str], tuple[Path, str]]
) -> None:
    """Steps 41 to 60 of a run that went back by 6 steps are steps 47 to 66 of the data: with the
    rate constant and no dropout, step 41's loss is that of the weights after 40 on step 47's
    windows, which a run without any spike never sees at that place."""
    assert Run(arguments(book, tmp_path), tmp_path / "out").codes() == [0]
    a, b = rows(rolled_back(1, "ddp")[0]), rows(tmp_path / "runs" / "r")
    assert a[:40] == b[:40]
    assert a[40]["train/loss"] != b[40]["train/loss"]


def test_many_spikes_end_the_run(tmp_path: Path, book: Path) -> None:
    """Whatever windows come after the rollback, the loss is ten times itself: no endless return."""
    spike = partial(faults.scale_loss, 10.0, [45], None)
    args = arguments(book, tmp_path, "trainer.on_spike=rollback", "trainer.max_skipped=2")
    run = Run(args, tmp_path / "out", hook=spike)
    assert run.codes() == [1], run.text()
    assert run.text().count("back to step 40") == 2
    assert run.text().splitlines()[-1].startswith("error: step 46: another spike")


def test_losses_that_stay_high_are_not_skipped_for_ever(tmp_path: Path, book: Path) -> None:
    """From step 46 on every loss is ten times itself: two are skipped, the third ends the run."""
    spike = partial(faults.scale_loss, 10.0, list(range(45, 60)), None)
    args = arguments(book, tmp_path, "trainer.on_spike=skip", "trainer.max_skipped=2")
    run = Run(args, tmp_path / "out", hook=spike)
    assert run.codes() == [1], run.text()
    assert run.text().count("all ranks skip this update") == 2 + 1
    assert "error: step 48: another spike" in run.text() and "2 skipped in a row" in run.text()


# --- loss scaling


def with_scaler(monkeypatch: pytest.MonkeyPatch, overflow_at: list[int]) -> None:
    """Loss scaling as float16 has it, on the CPU: from 256, doubled after every 4 good steps; the
    gradients of some steps overflow."""

    def scaler(device: str, enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)

    forward, update = trainer.NextTokenLoss.forward, trainer.Trainer.update
    step = 0

    def counted(self: trainer.Trainer) -> Any:
        nonlocal step
        step = self.progress.step
        return update(self)

    def overflowing(self: trainer.NextTokenLoss, x: Any, y: Any) -> Any:
        loss = forward(self, x, y)
        if self.training and step in overflow_at:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    class Amp:
        GradScaler = staticmethod(scaler)

    class Torch:
        amp = Amp

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(trainer, "torch", Torch())
    monkeypatch.setattr(trainer.Trainer, "update", counted)
    monkeypatch.setattr(trainer.NextTokenLoss, "forward", overflowing)


def test_the_loss_scale_goes_on_where_it_was(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256, doubled after steps 4 and 8, halved by the overflow of step 10, doubled after 14
    and 18; a run cut after step 10 has the same scale, skipped step, and bits."""
    with_scaler(monkeypatch, overflow_at=[9])
    args = ["trainer.log_every=1", "trainer.eval_every=null", "schedule=constant"]
    _, whole = train_run(*args, name="whole")
    _, cut = train_run(*args, "trainer.max_steps=10", name="cut")
    state = folders.read_state(cut / "checkpoints" / "latest")
    assert state is not None
    assert state["loss_scaler"]["scale"] == 512 and state["loss_scaler"]["_growth_tracker"] == 0
    train_run(*args, "trainer.max_steps=20", name="cut")
    assert rows(whole) == rows(cut)
    assert [row.get("skipped") for row in rows(cut)] == [None] * 9 + [1] * 11
    a, b = tensors(whole), tensors(cut)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    state = folders.read_state(cut / "checkpoints" / "latest")
    assert state is not None and state["loss_scaler"]["scale"] == 2048


def test_a_run_saved_without_a_loss_scale_goes_on_with_one(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continued on a GPU without bfloat16: the scale starts anew, at 256, and has grown twice."""
    args = ["trainer.eval_every=null", "schedule=constant"]
    _, run = train_run(*args, "trainer.max_steps=10")
    with_scaler(monkeypatch, overflow_at=[])
    code, run = train_run(*args, "trainer.max_steps=20")
    assert code == 0
    state = folders.read_state(run / "checkpoints" / "latest")
    assert state is not None and state["loss_scaler"]["scale"] == 1024


def test_scaling_changes_no_bit_where_nothing_overflows(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping comes after unscaling: with powers of two the weights are those without a scaler."""
    args = ["trainer.eval_every=null", "trainer.grad_clip=0.5"]
    _, plain = train_run(*args, name="plain")
    with_scaler(monkeypatch, overflow_at=[])
    _, scaled = train_run(*args, name="scaled")
    a, b = (load_file(run / "checkpoints" / "latest" / folders.WEIGHTS) for run in (plain, scaled))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(("overflows", "ends"), [(50, False), (51, True)])
def test_overflows_without_end_end_the_run(
    overflows: int,
    ends: bool,
    train_run: TrainRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Some in a row are how the loss scale is found; where halving it 50 times hasn't helped, the
    gradients themselves are no numbers, and the run would skip on to its end."""
    with_scaler(monkeypatch, overflow_at=list(range(2, 2 + overflows)))
    args = ["trainer.max_steps=54", "trainer.eval_every=null", "trainer.save_every=2"]
    if not ends:
        assert train_run(*args)[0] == 0
        assert "warning" not in capsys.readouterr().out
        return
    with pytest.raises(RunError, match=r"step 53: loss 5\.\d+, gradient norm nan, 51 in a row"):
        train_run(*args)
    assert "train window at" in capsys.readouterr().out
