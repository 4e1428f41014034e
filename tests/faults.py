"""What goes wrong on purpose inside a run: hooks for tests.processes.Run, small enough to read.

Each takes its place by replacing a method; `step` counts from 0, as Trainer.progress does before
the update.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpt import checkpoint
from gpt.loss import NextTokenLoss
from gpt.trainer import Trainer

_now: dict[str, Any] = {"step": None, "left_out": []}  # of the update under way


def all_of(*hooks: Callable[[], None]) -> None:
    for hook in hooks:
        hook()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def before_update(step: int, do: Callable[[], None], after_rollback: bool = False) -> None:
    """Call `do` before update `step`."""
    inner = Trainer.update

    def update(self: Trainer) -> Any:
        rolled_back = bool(self.progress.left_out)
        if self.progress.step == step and (rolled_back or not after_rollback):
            do()
        return inner(self)

    Trainer.update = update  # type: ignore[method-assign]


def scale_loss(by: float, steps: list[int], on_rank: int | None, once: bool = False) -> None:
    """Multiply the training loss of these updates, on one rank or all. `once`: of the windows that
    the run meets there first, not of those after a rollback."""
    forward, inner = NextTokenLoss.forward, Trainer.update

    def update(self: Trainer) -> Any:
        _now.update(step=self.progress.step, left_out=self.progress.left_out)
        return inner(self)

    def scaled(self: NextTokenLoss, x: Any, y: Any) -> Any:
        loss = forward(self, x, y)
        here = _now["step"] in steps and on_rank in (None, rank())
        return loss * by if self.training and here and not (once and _now["left_out"]) else loss

    Trainer.update = update  # type: ignore[method-assign]
    NextTokenLoss.forward = scaled  # type: ignore[method-assign]


def write_digests(folder: str) -> None:
    """Each rank's sum over its weights at the end of the run."""
    run = Trainer.run

    def told(self: Trainer) -> Any:
        out = run(self)
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        Path(folder, f"rank{rank()}").write_text(digest.hexdigest())
        return out

    Trainer.run = told  # type: ignore[method-assign]


def happen() -> None:
    """Leave the time of a fault, where it is asked for."""
    path = os.environ.get("FAULT_AT")
    if path is not None and not Path(path).exists():
        Path(path).touch()


def fail(on_rank: int) -> None:
    if rank() == on_rank:
        happen()
        raise RuntimeError("broken on purpose")


def fail_in_save() -> None:
    def write(*args: object) -> None:
        happen()
        raise RuntimeError("broken on purpose")

    checkpoint.write = write


def hang(on_rank: int) -> None:
    if rank() == on_rank:
        stand_still()


def stand_still() -> None:
    time.sleep(1000)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fill(disk: str) -> None:
    """Write until there is no room, then leave a page of it: logs can still be written."""
    with open(Path(disk) / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 8 * 4096))


def make_room(disk: str) -> None:
    (Path(disk) / "filler").unlink()


def limit_files(size: int) -> None:
    """No file of this process may grow beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_read_only(mount: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)


def remove(folder: str) -> None:
    shutil.rmtree(folder)


def say_and_sleep(seconds: float) -> None:
    print("reached", flush=True)
    time.sleep(seconds)


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def lose_shards(on_rank: int) -> None:
    """This rank alone can't see the training shards."""
    if rank() != on_rank:
        return

    def without_shards(inner: Any) -> Any:
        def lost(path: Any, *args: Any, **kwargs: Any) -> Any:
            if "train_0" in str(path):
                happen()
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return inner(path, *args, **kwargs)

        return lost

    np.load, np.memmap = without_shards(np.load), without_shards(np.memmap)  # type: ignore[misc]


def turn_the_clock_back() -> None:
    """Every look at the wall clock is an hour before the last one, down to one same second."""
    now = time.time()
    strftime = time.strftime

    def earlier() -> float:
        nonlocal now
        now = max(now - 3600, 1e9)
        return now

    def formatted(form: str, t: Any = None) -> str:
        return strftime(form, t if t is not None else time.gmtime(1e9))

    time.time = earlier
    time.strftime = formatted  # type: ignore[assignment]
