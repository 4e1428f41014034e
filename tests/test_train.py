"""The whole walk on a real text: what a run leaves, that it resumes to the bit, what it refuses."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sample
import train
from conf.cli import stored_overrides
from conf.door import RunError
from gpt import checkpoint, distributed, folders, trainer
from gpt.tracker import read_metrics
from tests.processes import Run, script
from tests.test_ranks import keep_gradients

ROOT = Path(train.__file__).parent
TrainRun = Callable[..., tuple[int, Path]]
Trained = Callable[..., Path]
DROPOUT = [f"model.{name}_dropout=0.1" for name in ("embd", "attn", "resid")]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a run's newest checkpoint."""
    folder = run / "checkpoints" / "latest"
    return load_file(folder / folders.WEIGHTS) | load_file(folder / folders.MOMENTS)


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


def kill_before(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The process dies when about to do update `step` (from 0), once for each."""
    update = trainer.Trainer.update
    left = list(steps)

    def dying(self: trainer.Trainer) -> Any:
        if left and self.progress.step == left[0]:
            left.pop(0)
            raise Killed
        return update(self)

    monkeypatch.setattr(trainer.Trainer, "update", dying)


# --- what a run leaves


def test_the_walk_leaves_what_the_contract_names(train_run: TrainRun) -> None:
    code, run = train_run("trainer.save_every=10", "trainer.log_every=5")
    assert code == 0
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert all(row["tokens_seen"] == 256 * row["step"] for row in rows)
    assert [("val/loss" in row) for row in rows] == [False, True, False, True]
    expected = {"train/loss", "lr", "grad_norm", "perf/tokens_per_sec", "step", "tokens_seen"}
    assert expected <= rows[0].keys()
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] < 6  # ln 257 = 5.55 at the start
    assert (run / "config.yaml").exists() and (run / "train.log").exists()
    links = {name: os.readlink(run / "checkpoints" / name) for name in ("latest", "best")}
    assert links["latest"] == "step_00000020"
    best = min((r for r in rows if "val/loss" in r), key=lambda r: r["val/loss"])
    assert links["best"] == folders.step_name(best["step"])
    folder = run / "checkpoints" / "latest"
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 20 and state["tokens_seen"] == 5120
    assert {"model.safetensors", "config.json", "vocab.json"} <= set(state["files"])


def test_a_finished_run_opens_in_transformers(finished: Path) -> None:
    """The folder as it is: same logits, same ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from data.tokenizer import load_tokenizer

    folder = finished / "checkpoints" / "latest"
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = checkpoint.load_model(folder)
    text = "Fellow-citizens of the Senate — 1815"
    ids = load_tokenizer(folder).encode(text)[:32]
    assert AutoTokenizer.from_pretrained(folder).encode(text)[:32] == ids
    idx = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=1e-5, rtol=0)


def test_how_a_step_is_cut_changes_nothing(train_run: TrainRun, tmp_path: Path) -> None:
    """8 windows at once, 4 × 2 and 8 × 1: the same loss and gradient norm every step, and the
    first step's gradients."""
    base = ["trainer.log_every=1", "trainer.max_steps=4", "trainer.eval_every=null"]
    rows, gradients = [], []
    for size in (8, 2, 1):
        keep_gradients(str(tmp_path / f"gradients{size}"))
        code, run = train_run(*base, f"trainer.micro_batch_size={size}", name=f"micro{size}")
        assert code == 0
        rows.append(read_metrics(run))
        gradients.append(load_file(tmp_path / f"gradients{size}.0"))
    assert max(float(g.abs().max()) for g in gradients[0].values()) > 1e-2
    for others in gradients[1:]:
        assert others.keys() == gradients[0].keys()
        for name, g in gradients[0].items():
            torch.testing.assert_close(others[name], g, atol=1e-6, rtol=0)
    for other in rows[1:]:
        for a, b in zip(rows[0], other, strict=True):
            assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-6)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


def test_a_run_of_one_step_learns(train_run: TrainRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rate is the peak over the steps of warming up, which isn't 0."""
    before: dict[str, torch.Tensor] = {}
    run = trainer.Trainer.run

    def look(self: trainer.Trainer) -> Any:
        before.update({k: p.detach().clone() for k, p in self.model.named_parameters()})
        return run(self)

    monkeypatch.setattr(trainer.Trainer, "run", look)
    code, folder = train_run("trainer.max_steps=1")
    assert code == 0
    (row,) = read_metrics(folder)
    assert row["step"] == 1 and row["lr"] == pytest.approx(1e-3 / 4)
    after = dict(checkpoint.load_model(folder / "checkpoints" / "latest").named_parameters())
    assert before and not any(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("off", ["null", "0"])
def test_rows_every_so_often_can_be_switched_off(train_run: TrainRun, off: str) -> None:
    """What is left: evaluations, and the last step."""
    _, run = train_run(f"trainer.log_every={off}", "trainer.eval_every=8")
    assert [row["step"] for row in read_metrics(run)] == [8, 16, 20]


def test_a_checkpoint_knows_of_which_step_its_validation_loss_is(train_run: TrainRun) -> None:
    _, run = train_run("trainer.save_every=5", "trainer.keep_last=9")
    states = [folders.read_state(p) or {} for p in folders.steps(run / "checkpoints")]
    assert [(s["step"], s["val_step"]) for s in states] == [(5, None), (10, 10), (15, 10), (20, 20)]


def test_a_vocabulary_beyond_the_tokenizers(
    train_run: TrainRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rounder table for the matrix units: no sample, here or of sample.py, has an id of it that
    is no token. After one step every id is about as likely as any other."""
    code, run = train_run("model.vocab_size=512", "trainer.max_steps=1")
    assert code == 0 and "sample after step 1" in capsys.readouterr().out
    hot = ["--temperature", "2", "--top-k", "0", "--device", "cpu", "--seed", "1"]
    assert sample.main([str(run), *hot]) == 0
    assert len(capsys.readouterr().out) > 20


def test_no_validation_no_best(trained: Trained) -> None:
    run = trained("trainer.eval_every=null")
    assert not (run / "checkpoints" / "best").exists()
    assert all("val/loss" not in row for row in read_metrics(run))


def test_data_for_three_steps_lasts_for_fifty(train_run: TrainRun, tmp_path: Path) -> None:
    """Epochs go on: 1,021 tokens are 32 windows, of which a step takes 8."""
    short = tmp_path / "short.txt"
    short.write_text("0123456789abcdef\n" * 60)
    args = [f"data.path={short}", "data.val_fraction=0", "trainer.eval_every=null"]
    code, run = train_run(*args, "trainer.max_steps=50")
    assert code == 0
    rows = read_metrics(run)
    assert rows[-1]["step"] == 50
    assert [row["epoch"] for row in rows] == [row["step"] / 4 for row in rows]


# --- resuming


@pytest.fixture(scope="module")
def straight(trained_once: Trained) -> dict[str, torch.Tensor]:
    """20 steps in one go with dropout 0.1 everywhere, evaluation and saving off."""
    return weights(trained_once(*DROPOUT, "trainer.eval_every=null") / "runs" / "r")


@pytest.mark.parametrize("kills", [(10,), (5, 10), (7,)])
@pytest.mark.parametrize("looking", [True, False])
def test_resuming_gives_the_same_bits(
    train_run: TrainRun,
    straight: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    kills: tuple[int, ...],
    looking: bool,
) -> None:
    """20 = 10 + 10 = 5 + 5 + 10, with evaluation and sampling on or off, accumulation 2."""
    every = ["trainer.eval_every=3", "trainer.sample_every=4"] if looking else []
    off = ["trainer.eval_every=null", "trainer.sample_every=null"]
    kill_before(monkeypatch, *kills)
    for _ in kills:
        with pytest.raises(Killed):
            train_run(*DROPOUT, "trainer.save_every=5", *(every or off))
    code, run = train_run()  # `run` alone: the stored settings come first
    assert code == 0
    assert_same_bits(weights(run), straight)
    steps = [row["step"] for row in read_metrics(run)]
    assert steps == sorted(set(steps)) and steps[-1] == 20  # each step once


def test_dropout_was_on(straight: dict[str, torch.Tensor], trained: Trained) -> None:
    """Else the comparison above would hold for the wrong reason."""
    run = trained("trainer.eval_every=null")
    name = "transformer.wte.weight"
    assert not torch.equal(weights(run)[name], straight[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own inner workings
def test_resuming_gives_the_same_bits_compiled(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled against compiled to the bit; against eager, without dropout, to 1e-5."""
    args = ["runtime.compile=true", "trainer.save_every=10"]
    _, whole = train_run(*DROPOUT, *args, name="whole")
    kill_before(monkeypatch, 10)
    with pytest.raises(Killed):
        train_run(*DROPOUT, *args)
    code, run = train_run(*DROPOUT, *args)
    assert code == 0
    assert_same_bits(weights(run), weights(whole))

    _, compiled = train_run(*args, name="compiled")
    _, eager = train_run(name="eager")
    a = load_file(compiled / "checkpoints" / "latest" / folders.WEIGHTS)
    b = load_file(eager / "checkpoints" / "latest" / folders.WEIGHTS)
    losses = [read_metrics(r)[-1]["train/loss"] for r in (compiled, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=0)


def test_a_run_resumed_over_epochs_sees_every_window(
    train_run: TrainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 windows in 10 steps of 8: stopped right at the border of an epoch, on to 30; in each epoch
    every window is read once, and tokens are counted right."""
    text = "".join(f"{i:015d}\n" for i in range(160))  # no 32 bytes of it are like any others
    (tmp_path / "t.txt").write_text(text)
    args = [f"data.path={tmp_path / 't.txt'}", "data.val_fraction=0"]
    args += ["schedule=constant", "trainer.eval_every=null"]
    ids = [*text.encode(), 256]
    place = {tuple((ids * 2)[i : i + 32]): i for i in range(len(ids))}
    assert len(place) == len(ids) == 80 * 32 + 1
    read: list[int] = []
    forward = trainer.NextTokenLoss.forward

    def noted(self: trainer.NextTokenLoss, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        read.extend(place[tuple(row)] for row in x.tolist())
        return forward(self, x, y)

    monkeypatch.setattr(trainer.NextTokenLoss, "forward", noted)
    train_run(*args, "trainer.max_steps=10")
    assert len(read) == 80
    code, run = train_run(*args, "trainer.max_steps=30")
    assert code == 0
    assert len(read) == 3 * 80
    orders = [read[i : i + 80] for i in (0, 80, 160)]
    assert sorted(orders[0]) == list(range(0, 80 * 32, 32))
    for order in orders:  # 32 tokens from one to the next, and round the end the one token more
        gaps = np.diff(sorted(order), append=min(order) + len(ids))
        assert sorted(gaps) == [32] * 79 + [33]
    assert orders[0] != orders[1] != orders[2]
    _, straight = train_run(*args, "trainer.max_steps=30", name="straight")
    assert read[240:] == read[:240]
    assert_same_bits(weights(run), weights(straight))
    assert read_metrics(run)[-1]["tokens_seen"] == 30 * 256


def test_a_longer_run_says_how_the_rate_changes(
    train_run: TrainRun, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing left to do, then twice as long: the old and the new rate are printed."""
    assert train_run()[0] == 0
    assert "nothing left to do" in capsys.readouterr().out
    code, run = train_run("trainer.max_steps=40")
    assert code == 0
    out = capsys.readouterr().out
    assert "trainer.max_steps was 20 and is 40" in out
    rates = [row["lr"] for row in read_metrics(run)]
    assert max(rates) <= 1e-3 and rates[-1] == pytest.approx(1e-5)


def test_the_best_stays_the_best_over_a_resume(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation 3.0, 2.0, 2.5, (resumed) 2.2: the best is the second."""
    losses = iter([3.0, 2.0, 2.5, 2.2])
    monkeypatch.setattr(trainer.Trainer, "evaluate", lambda self: (next(losses), 1.0))
    kill_before(monkeypatch, 15)
    every = ["trainer.eval_every=5", "trainer.save_every=5"]
    with pytest.raises(Killed):
        train_run(*every)
    _, run = train_run(*every)
    links = [os.readlink(run / "checkpoints" / name) for name in ("best", "latest")]
    assert links == ["step_00000010", "step_00000020"]
    kept = sorted(p.name for p in (run / "checkpoints").glob("step_*"))
    assert kept == ["step_00000010", "step_00000015", "step_00000020"]  # newest two, and the best


def test_a_loss_that_is_no_number_stops_the_run(
    train_run: TrainRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, one line, the last good checkpoint named and whole."""
    _, run = train_run("trainer.max_steps=10")
    capsys.readouterr()
    forward = trainer.NextTokenLoss.forward
    monkeypatch.setattr(
        trainer.NextTokenLoss, "forward", lambda self, x, y: forward(self, x, y) * float("nan")
    )
    with pytest.raises(RunError, match="step 13: loss nan") as caught:
        train_run("trainer.max_steps=20", "trainer.max_skipped=2")
    assert "step_00000010" in str(caught.value) and "3 in a row" in str(caught.value)
    said = capsys.readouterr().out
    assert said.count("all ranks skip this update") == 3 and "train window at" in said
    assert os.readlink(run / "checkpoints" / "latest") == "step_00000010"
    folders.verify(run / "checkpoints" / "step_00000010")


def test_auto_is_chosen_once_and_kept(train_run: TrainRun) -> None:
    """The micro-batches are part of what a run is: a resume takes those of its start."""
    auto = "trainer.micro_batch_size=auto"
    _, run = train_run(auto, "trainer.max_steps=5")
    state = folders.read_state(run / "checkpoints" / "latest") or {}
    assert state["config"]["trainer"]["micro_batch_size"] == 8  # all windows of a step
    assert train_run(auto, "trainer.max_steps=10")[0] == 0
    with pytest.raises(ValueError, match="micro_batch_size was 8 and is 4"):
        train_run("trainer.micro_batch_size=4", "trainer.max_steps=15")


def test_memory_that_runs_out_is_one_line(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(self: trainer.Trainer) -> Any:
        return torch.empty(2**60)

    monkeypatch.setattr(trainer.Trainer, "update", greedy)
    with pytest.raises(ValueError, match=r"cpu ran out of memory with micro-batches of 4 windows"):
        train_run()


# --- what is refused


@pytest.fixture
def finished(trained: Trained) -> Path:
    return trained()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.n_layer=3", "model.n_layer was 2 and is 3"),
        ("optimizer.lr=0.5", "optimizer.lr was 0.001 and is 0.5"),
        ("trainer.seed=1", "trainer.seed was 1337 and is 1"),
        ("trainer.micro_batch_size=8", "trainer.micro_batch_size was 4 and is 8"),
        ("schedule=constant", "schedule.min_lr_ratio was 0.01 and is None"),
    ],
)
def test_a_resume_with_other_science_is_refused(
    train_run: TrainRun, finished: Path, override: str, says: str
) -> None:
    with pytest.raises(ValueError, match="started with other settings") as caught:
        train_run(override, "trainer.max_steps=40")
    assert says in str(caught.value)


def test_a_resume_on_other_data_is_refused(
    train_run: TrainRun, finished: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 400)
    with pytest.raises(ValueError, match="going on would train on other text"):
        train_run(f"data.path={other}", "trainer.max_steps=40")


def test_text_that_has_changed_is_refused_before_it_is_prepared(
    train_run: TrainRun, tmp_path: Path, book: Path
) -> None:
    """The shards that the run was trained on stay: with the text put back, it goes on."""
    text = tmp_path / "mine.txt"
    text.write_bytes(book.read_bytes())
    train_run(f"data.path={text}")
    with text.open("a") as file:
        file.write("one line more\n")
    with pytest.raises(ValueError, match=r"the data of run r has changed: .*mine.txt"):
        train_run(f"data.path={text}", "trainer.max_steps=21")
    text.write_bytes(book.read_bytes())
    assert train_run(f"data.path={text}", "trainer.max_steps=21")[0] == 0


def test_the_same_data_at_another_path_is_no_other_data(
    train_run: TrainRun, finished: Path, tmp_path: Path, book: Path
) -> None:
    moved = tmp_path / "moved" / "book.txt"
    moved.parent.mkdir()
    shutil.copyfile(book, moved)
    assert train_run(f"data.path={moved}", "trainer.max_steps=21")[0] == 0


@pytest.mark.parametrize("name", ["model.safetensors", "training/optimizer.safetensors"])
@pytest.mark.parametrize("harm", ["empty", "half", "flip", "gone"])
def test_a_damaged_checkpoint_is_named(
    trained: Trained, train_run: TrainRun, name: str, harm: str
) -> None:
    """Truncated to nothing or a half, one byte flipped, or gone: named, nothing loaded."""
    run = trained("trainer.eval_every=null")  # one checkpoint: none to fall back to
    damage((run / "checkpoints" / "latest").resolve() / name, harm)
    with pytest.raises(ValueError, match="truncated or altered") as caught:
        train_run("trainer.max_steps=40")
    assert name in str(caught.value)


def damage(path: Path, harm: str) -> None:
    data = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
        return
    if harm == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: {"empty": 0, "half": len(data) // 2, "flip": len(data)}[harm]])


def test_resume_falls_back_to_a_whole_checkpoint(
    train_run: TrainRun, capsys: pytest.CaptureFixture[str], straight: dict[str, torch.Tensor]
) -> None:
    """The newest is damaged: the one before is taken, it is said, and the run ends the same."""
    _, run = train_run(*DROPOUT, "trainer.save_every=10", "trainer.eval_every=null")
    damage((run / "checkpoints" / "latest").resolve() / "model.safetensors", "flip")
    code, run = train_run()
    assert code == 0
    assert "warning" in (out := capsys.readouterr().out) and "step_00000010" in out
    assert_same_bits(weights(run), straight)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no document"), ("too short\n", "")],
)
def test_too_little_text_is_refused_before_training(
    train_run: TrainRun, tmp_path: Path, text: str, says: str
) -> None:
    """An error at the start, not at the first evaluation."""
    path = tmp_path / "small.txt"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        train_run(f"data.path={path}")
    assert str(caught.value).count(";") >= 2


def test_vocabulary_below_the_tokenizers_is_refused(train_run: TrainRun) -> None:
    with pytest.raises(ValueError, match="model.vocab_size=200 is below the 257 ids"):
        train_run("model.vocab_size=200")


def test_an_empty_path_is_not_the_current_folder(train_run: TrainRun) -> None:
    with pytest.raises(ValueError, match="data.path is empty"):
        train_run("data.path=")


def test_stored_settings_that_are_damaged_or_gone(train_run: TrainRun, finished: Path) -> None:
    """Damaged: named. Gone: taken from the newest checkpoint."""
    (finished / "overrides.yaml").write_text("")
    with pytest.raises(ValueError, match=r"overrides.yaml is damaged"):
        train_run("trainer.max_steps=21")
    (finished / "overrides.yaml").unlink()
    assert "model=tiny" in stored_overrides(finished)


# --- starting from weights


def test_init_from_a_run_keeps_its_weights_and_takes_its_shape(
    train_run: TrainRun, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    run = trainer.Trainer.run

    def look(self: trainer.Trainer) -> Any:
        seen.update(step=self.progress.step, wte=self.model.wte.weight.detach().clone())
        return run(self)

    monkeypatch.setattr(trainer.Trainer, "run", look)
    code, _ = train_run(f"init_from={finished}", name="tuned")
    assert code == 0 and seen["step"] == 0
    before = load_file(finished / "checkpoints" / "latest" / folders.WEIGHTS)
    assert torch.equal(seen["wte"][:257], before["transformer.wte.weight"])


def test_a_run_goes_on_without_what_it_was_started_from(
    train_run: TrainRun, finished: Path, tmp_path: Path
) -> None:
    """Its own checkpoint and its stored settings are all it takes."""
    source = tmp_path / "source"
    shutil.copytree(finished / "checkpoints" / "latest", source)
    assert train_run(f"init_from={source}", "trainer.max_steps=3", name="tuned")[0] == 0
    shutil.rmtree(source)
    code, run = train_run("trainer.max_steps=5", name="tuned")
    assert code == 0 and read_metrics(run)[-1]["step"] == 5


def test_init_from_another_tokenizer_is_refused(train_run: TrainRun, finished: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        train_run(f"init_from={finished}", "data.tokenizer=gpt2", name="tuned")


def test_init_from_nowhere_is_refused(train_run: TrainRun) -> None:
    with pytest.raises(ValueError, match="no folder, no run, and no name that the"):
        train_run("init_from=/nonexistent/model", name="tuned")


def test_init_from_another_shape_is_refused(train_run: TrainRun, finished: Path) -> None:
    with pytest.raises(ValueError, match="n_layer 2 there, 3 here"):
        train_run(f"init_from={finished}", "model.n_layer=3", name="tuned")


def test_a_finished_run_is_not_finished_with_other_data(
    train_run: TrainRun, finished: Path, tmp_path: Path
) -> None:
    assert train_run()[0] == 0  # nothing left to do
    with pytest.raises(ValueError, match="going on would train on other text"):
        train_run("data.tokenizer=gpt2")
    with pytest.raises(ValueError):
        train_run(f"data.path={tmp_path / 'nothing'}")


# --- as a command


def command(*args: str, timeout: float = 120, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "train.py", *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("override", ["trainer.lrr=1", "runtime.device=cuda:99", "data=text"])
def test_a_mistake_exits_2_with_one_line(override: str, tmp_path: Path) -> None:
    run = Run([override, f"paths.root={tmp_path / 'root'}"], tmp_path / "out")
    assert run.codes() == [2]
    assert run.text().startswith("error: ") and run.text().count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},  # paths of lone surrogates
    ],
)
def test_an_encoding_that_lacks_characters_ends_nothing(
    tmp_path: Path, book: Path, tiny_args: list[str], env: dict[str, str]
) -> None:
    """Neither the × of what is said nor a path that isn't ASCII: escapes stand for them."""
    text = tmp_path / "bücher 漢.txt"
    shutil.copy(book, text)
    args = [a for a in tiny_args if not a.startswith(("data.path=", "trainer.max_steps="))]
    args += [f"data.path='{text}'", f"paths.root={tmp_path}", "run=r", "trainer.max_steps=1"]
    done = command(*args, "schedule.warmup_steps=0", **env)
    assert done.returncode == 0, done.stderr
    assert "(4 windows \\xd7 2 micro-batches \\xd7 1 ranks)" in done.stdout
    assert "done: 1 steps" in done.stdout
    log = (tmp_path / "runs" / "r" / "train.log").read_text(encoding="utf-8")
    assert "(4 windows × 2 micro-batches × 1 ranks)" in log


@pytest.mark.parametrize("root", ["/proc/x", "file"])
def test_a_root_that_can_not_be_written_is_one_line(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = ["model=tiny", "trainer.max_steps=1", f"paths.root={tmp_path / root}"]
    run = Run(args, tmp_path / "out")
    assert run.codes() == [2] and run.text().startswith("error: ")
    assert run.text().count("\n") == 1 and str(tmp_path / root) in run.text()


def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, tiny_args: list[str]) -> None:
    """SIGINT: the step in flight ends, state is saved, exit 130; `run` alone goes on."""
    args = [*tiny_args, f"paths.root={tmp_path}", "run=r", "trainer.max_steps=100000"]
    lines = []
    with subprocess.Popen(
        [sys.executable, "train.py", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.split()[:1] == ["step"] and line.split()[1].startswith("20/"):
                process.send_signal(2)
        assert process.wait(60) == 130
    steps = [line.split()[1] for line in lines if line.split()[:1] == ["step"]]
    assert len(steps) == len(set(steps))  # the signal comes while a line is written: once, whole
    text = "".join(lines)
    assert "go on with: python train.py run=r" in text and "sample after step" in text
    state = folders.verify((tmp_path / "runs/r/checkpoints/latest").resolve())
    step = state["step"]
    args = [f"paths.root={tmp_path}", "run=r", f"trainer.max_steps={step + 5}"]
    again = Run(args, tmp_path / "out")
    assert again.codes() == [0], again.text()
    assert f"continuing after step {step}" in again.text()


def test_wandb_offline_writes_one_run_and_asks_nothing(
    tmp_path: Path, tiny_args: list[str]
) -> None:
    """No key, no network, no standard input; metrics.jsonl is there all the same."""
    args = [a for a in tiny_args if not a.startswith("tracker.")]
    done = command(*args, f"paths.root={tmp_path}", "run=r", "tracker.wandb=auto")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "r"
    assert len(list((run / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    assert read_metrics(run)[-1]["step"] == 20
    assert (folders.read_state(run / "checkpoints" / "latest") or {})["tracker_run_id"]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path, tiny_args: list[str]) -> None:
    """`train.py | head`: the pipe is closed under the run, which goes on into train.log."""
    args = [*tiny_args, f"paths.root={tmp_path}", "run=r", "trainer.log_every=1"]
    with subprocess.Popen(
        [sys.executable, "train.py", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert read_metrics(tmp_path / "runs" / "r")[-1]["step"] == 20
    assert "done: 20 steps" in (tmp_path / "runs" / "r" / "train.log").read_text()


@pytest.mark.slow
def test_a_step_of_hours_is_dropped_for_a_signal(tmp_path: Path, tiny_args: list[str]) -> None:
    """The step in flight gets five seconds; then what is saved is the step before."""
    args = [*tiny_args, f"paths.root={tmp_path}", "run=r", "trainer.batch_tokens=12800000"]
    telling = tmp_path / "telling.py"
    telling.write_text(script("faults.before_update(0, functools.partial(print, 'reached'))"))
    with subprocess.Popen(
        [sys.executable, "-u", str(telling), *args, "trainer.eval_every=null"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("reached"):
                time.sleep(1)  # into the first step, of which nothing is heard
                process.send_signal(15)
                break
        said = process.stdout.read()
        assert "nothing is saved yet" in said and "saved at" not in said
        assert "stopped after step 0" in said
        assert process.wait(30) == 143


def test_a_warm_up_longer_than_the_run_is_noted(
    train_run: TrainRun, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "schedule.warmup_steps=3 is more than all 2 steps: the learning rate never reaches"
    for warmup, noted in ((2, False), (3, True)):
        code, _ = train_run(
            f"schedule.warmup_steps={warmup}", "trainer.max_steps=2", name=f"warm{warmup}"
        )
        assert code == 0 and (said in capsys.readouterr().out) == noted


def test_gradients_are_clipped_only_where_that_changes_them(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as clipping at every step, at as many steps as have a greater norm."""
    args = ["trainer.log_every=1", "trainer.eval_every=null"]
    _, free = train_run(*args, "trainer.grad_clip=null", name="free")
    limit = sorted(row["grad_norm"] for row in read_metrics(free))[10]
    args.append(f"trainer.grad_clip={limit}")
    clip, norm = torch.nn.utils.clip_grads_with_norm_, distributed.grad_norm
    calls = []

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", counted)
    _, ours = train_run(*args, name="ours")
    norms = [row["grad_norm"] for row in read_metrics(ours)]
    assert len(calls) == sum(n > limit for n in norms) and 0 < len(calls) < 20

    def always(parameters: Any) -> torch.Tensor:
        parameters = list(parameters)
        found = norm(parameters)
        clip(parameters, limit, found)
        return found

    monkeypatch.setattr(distributed, "grad_norm", always)
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *arguments: None)
    _, theirs = train_run(*args, name="theirs")
    assert_same_bits(weights(ours), weights(theirs))
