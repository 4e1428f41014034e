"""Where things land: relative to where one stands, and a sweep's jobs apart from each other."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train
from conf.cli import compose_and_run
from conf.schema import Config
from gpt import folders
from gpt.tracker import read_metrics
from tests.processes import Run

TrainRun = Callable[..., tuple[int, Path]]
ROOT = Path(train.__file__).parent


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / folders.WEIGHTS)


def test_paths_are_relative_to_where_one_stands(
    tmp_path: Path, tiny_args: list[str], book: Path
) -> None:
    """From another folder, with relative data.path and paths.root, to a resume of the run;
    Hydra's own chdir changes nothing, and nothing is left beside the sources."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.txt").write_bytes(book.read_bytes())
    before = {p.name for p in ROOT.iterdir()}
    args = [a for a in tiny_args if not a.startswith("data.path=")]
    args += ["data.path=text/book.txt", "paths.root=out", "run=r", "hydra.job.chdir=true"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *args, "trainer.max_steps=5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    args += ["trainer.max_steps=10"]
    again = Run(args, tmp_path / "said", hook=partial(os.chdir, tmp_path))
    assert again.codes() == [0], again.text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "said", "text"]
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "runs" / "r")][-1] == 10
    assert {p.name for p in ROOT.iterdir()} - before <= {"__pycache__"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sweep_gives_every_job_a_run_of_its_own(
    root: Path, tiny_args: list[str], train_run: TrainRun
) -> None:
    """Two jobs, two runs; the second has the weights that it has alone."""
    rates = "optimizer.lr=1e-3,1e-4"
    assert train.main(["-m", *tiny_args, f"paths.root={root}", "run=s", rates]) == 0
    assert sorted(p.name for p in (root / "runs").iterdir()) == ["s_0", "s_1"]
    code, alone = train_run("optimizer.lr=1e-4", name="alone")
    assert code == 0
    a, b = weights(alone), weights(root / "runs" / "s_1")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert {p.name for p in root.iterdir()} <= {"runs", "shards", "sweeps", "out"}


def test_a_sweep_takes_the_shape_of_the_weights_it_starts_from(
    root: Path, tiny_args: list[str], train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the default's, nor what a run of the sweep's own name was started with; quoted, as a path
    with a comma has to be."""
    _, made = train_run("trainer.max_steps=1", "model.n_layer=1", name="made")
    source = made.rename(root / "a,b")
    train_run("trainer.max_steps=1", "schedule.warmup_steps=1", name="s")
    shapeless = [a for a in tiny_args if not a.startswith(("model.", "schedule."))]
    more = [f"init_from='{source}'", f"paths.root={root}", "run=s", "optimizer.lr=1e-3,1e-4"]
    found: list[Config] = []

    def job(config: Config, overrides: list[str]) -> int:
        found.append(config)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(train, "train", job)
        assert train.main(["-m", *shapeless, *more]) == 0
    shapes = [(c.model.n_layer, c.model.n_embd, c.model.block_size) for c in found]
    assert shapes == [(1, 32, 32)] * 2
    assert [(c.run, c.optimizer.lr) for c in found] == [("s_0", 1e-3), ("s_1", 1e-4)]
    assert found[0].schedule.warmup_steps > 1


@pytest.mark.parametrize("swept", ["one,two", "choice(one,two)"])
def test_a_sweep_over_weights_is_refused(swept: str) -> None:
    with pytest.raises(ValueError, match=r"^init_from=.*one,two.* names several weights; .*; "):
        train.main(["-m", "run=s", f"init_from={swept}"])


def test_a_job_that_fails_leaves_the_others_alone(
    root: Path, tiny_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first can't be, the second runs; the sweep's exit code is the worst."""
    sizes = "model.vocab_size=10,null"
    code = train.main(["-m", *tiny_args, f"paths.root={root}", "run=s", sizes])
    assert code == 2
    assert "error: s_0: model.vocab_size=10 is below the 257 ids" in capsys.readouterr().err
    assert read_metrics(root / "runs" / "s_1")[-1]["step"] == 20


def test_an_unnamed_sweep_has_new_names_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two begin in one second."""
    monkeypatch.setattr("time.strftime", lambda form: "20261130-190957")
    made = []

    def make(config: Config, overrides: list[str]) -> int:
        assert config.run is not None
        (tmp_path / "runs" / config.run).mkdir(parents=True)
        made.append(config.run)
        return 0

    for _ in range(2):
        root = f"paths.root={tmp_path}"
        assert compose_and_run(make, ["-m", "optimizer.lr=1e-3,1e-4", root]) == 0
    base = "20261130-190957"
    assert made == [f"{base}_0", f"{base}_1", f"{base}-2_0", f"{base}-2_1"]


@pytest.mark.parametrize(("first", "begun", "code"), [(143, 1, 143), (2, 3, 2), (KeyError, 3, 1)])
def test_a_signal_ends_a_sweep_and_a_fault_does_not(
    first: Any, begun: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def job(config: Config, overrides: list[str]) -> int:
        jobs.append(config.run)
        if len(jobs) > 1:
            return 0
        if first is KeyError:
            raise KeyError("unforeseen")
        return int(first)

    sweep = ["-m", "run=s", "optimizer.lr=1e-3,1e-4,1e-5", f"paths.root={tmp_path}"]
    assert compose_and_run(job, sweep) == code
    assert jobs == ["s_0", "s_1", "s_2"][:begun]
    said = capsys.readouterr().err
    assert ("Traceback" in said and "error: s_0: see" in said) == (first is KeyError)


@pytest.mark.slow
def test_a_sweep_leaves_a_wandb_run_for_every_job(root: Path, tiny_args: list[str]) -> None:
    args = [a for a in tiny_args if not a.startswith("tracker.")]
    more = ["tracker.wandb=offline", "trainer.max_steps=1,2", "run=s", f"paths.root={root}"]
    assert train.main(["-m", *args, *more]) == 0
    ids = set()
    for n in (0, 1):
        run = root / "runs" / f"s_{n}"
        (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
        state = folders.read_state(run / "checkpoints" / "latest") or {}
        assert file.name == f"run-{state['tracker_run_id']}.wandb"
        ids.add(file.name)
    assert len(ids) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_resuming_takes_no_more_memory_than_starting(tmp_path: Path, tiny_args: list[str]) -> None:
    """The peak of a process that resumes, against one that starts, 16 M parameters."""
    wide = [a for a in tiny_args if not a.startswith("model.n_embd=")]
    wide += ["model.n_embd=768", "trainer.eval_every=null", "trainer.save_every=2"]
    peaks = []
    for steps in (2, 4):
        script = (
            "import re, sys, train\n"
            "code = train.main(sys.argv[1:])\n"
            # Not ru_maxrss, which a process inherits from the one that started it.
            "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
            "print('peak', peak, code)"
        )
        more = [f"paths.root={tmp_path}", "run=r", f"trainer.max_steps={steps}"]
        done = subprocess.run(
            [sys.executable, "-c", script, *wide, *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        _, peak, code = done.stdout.strip().splitlines()[-1].split()
        assert code == "0"
        peaks.append(int(peak))
    assert peaks[1] < 1.05 * peaks[0], peaks
