"""python -m tools.doctor: what it says, that it changes nothing, and that it finds a mismatch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from conf.cli import compose_and_run
from gpt import folders
from tools import doctor

ROOT = Path(train.__file__).parent
TrainRun = Callable[..., tuple[int, Path]]
SECRET = "0123456789abcdef0123456789abcdef01234567"


def run_doctor(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.doctor", *args],
        cwd=ROOT,
        env={**os.environ, "WANDB_API_KEY": SECRET, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time, hidden ones too."""
    return {
        str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in root.rglob("*")
        if p.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_a_config_that_resumes(
    ranks: list[str], train_run: TrainRun, tmp_path: Path, tiny_args: list[str]
) -> None:
    """On the shards that are there: all well, nothing of ours is changed, and no key is told."""
    train_run("trainer.max_steps=1")
    before = listing(tmp_path)
    done = run_doctor(*ranks, *tiny_args, f"paths.root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    text = done.stdout
    assert text.endswith("\nall well\n")
    assert "is ready and used as it is" in text
    assert "weights and moments equal those of one go, to the bit" in text
    assert f"killed before step 5 by kill -9, on {'2 ranks' if ranks else '1 rank'}" in " ".join(
        text.split()
    )
    for word in ("memory", "disk", "port", "tokenizer", "compiler", "a key is configured"):
        assert word in text
    assert "tokens/s" in text and "MB each" in text
    assert SECRET not in text + done.stderr
    assert listing(tmp_path) == before


def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for args, says in [
        (["trainer.lrr=1"], "did you mean optimizer.lr?"),
        (["--ranks", "none"], "--ranks"),
        (["-m", "trainer.seed=1,2"], "sweep"),
    ]:
        done = run_doctor(*args, f"paths.root={tmp_path / 'root'}")
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_does_not_resume(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_args: list[str],
) -> None:
    """The continued run has learned with another seed, as if something random were not restored:
    exit 1, and the tensors are named with their distance."""

    def run(self: doctor.Trial, name: str, dies: bool) -> None:
        if dies:
            return
        seed = "trainer.seed=2" if "killed" in name else "trainer.seed=1"
        argv = [*self.settings, f"run={name}", seed]
        assert compose_and_run(train.train, argv) == 0
        (self.folder.parent / "report_0.json").write_text('{"process": 1e9, "device": 0}')

    monkeypatch.setattr(doctor.Trial, "_run", run)
    code = doctor.main([*tiny_args, f"paths.root={tmp_path}"])
    out = capsys.readouterr().out
    assert code == 1
    assert "tensors are NOT those of one go" in out and "not all well" in out
    assert "exp_avg.wpe.weight: up to" in out or "transformer." in out


def test_differences_are_named_with_their_distance(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    run = trained("trainer.max_steps=2", "trainer.eval_every=null")
    a = (run / "checkpoints" / "latest").resolve()
    b = tmp_path / "b"
    (b / "training").mkdir(parents=True)
    save_file(load_file(a / folders.WEIGHTS), b / folders.WEIGHTS)
    moments: dict[str, Any] = load_file(a / folders.MOMENTS)
    save_file(moments, b / folders.MOMENTS)
    assert doctor.differences(a, b) == {}
    name = "exp_avg.wpe.weight"
    assert name in moments
    moments[name] = moments[name].clone()
    moments[name][3, 4] += 0.25
    moments["more"] = torch.zeros(1)
    save_file(moments, b / folders.MOMENTS)
    found = doctor.differences(a, b)
    assert found.keys() == {name, "more"}
    assert found[name].startswith("up to 2.5e-01 apart")
