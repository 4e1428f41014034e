"""Runs in processes of their own, which can really be killed, without torch's import for each.

A fork server imports this module once; every run is forked from it and goes through the same door
as `python train.py`. What a run is at stands in shared memory, so that a kill can be aimed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of every run would import it: 2 s

import conf.run
import train
from conf.door import door
from gpt import checkpoint
from gpt.trainer import Trainer

ROOT = Path(__file__).parent.parent
STARTING, PREPARING, TRAINING, EVALUATING, SAVING = range(5)
NAMES = ("starting", "preparing", "training", "evaluating", "saving")
Hook = Callable[[], None]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.processes"])


class Run:
    """A run on `ranks` processes, started at once. `hook` changes things inside each first."""

    def __init__(self, args: list[str], out: Path, ranks: int = 1, hook: Hook | None = None):
        self.out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
        self._at = context.Array("i", [0] * 5 * ranks, lock=False)
        port = free_port()
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            env = {"OMP_NUM_THREADS": "1"}
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            at = (self._at, 5 * rank)
            process = context.Process(target=_work, args=(args, str(out), env, at, hook))
            process.start()
            self.processes.append(process)

    @property
    def steps(self) -> int:
        """Updates begun by the main rank since its start."""
        return int(self._at[TRAINING])

    def phases(self, rank: int = 0) -> set[int]:
        """What a rank is at: saving may go beside something else."""
        now = self._at[5 * rank : 5 * rank + 5]
        return {now[0], SAVING} if now[SAVING] else {now[0]}

    def wait_until(self, reached: Callable[[Run], bool], seconds: float = 60) -> bool:
        """Whether it came to that before it ended."""
        until = time.monotonic() + seconds
        while not reached(self):
            if not all(p.is_alive() for p in self.processes):
                return False
            assert time.monotonic() < until, f"not reached:\n{self.text()}"
            time.sleep(0.0005)
        return True

    def send(self, number: int, *ranks: int) -> None:
        """A signal to these ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def codes(self, seconds: float = 60) -> list[int | None]:
        """Exit codes (−9 for a kill), once all have ended; whoever has not by then is killed, and
        its code is None."""
        until = time.monotonic() + seconds
        codes: list[int | None] = []
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes

    def text(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _work(
    args: list[str], out: str, env: dict[str, str], at: tuple[Any, int], hook: Hook | None
) -> None:
    os.environ.update(env)
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if hook is not None:
        hook()
    _tell(*at)
    sys.argv = ["train.py", *args]
    door(train.main, "the run can't go on without it")


def _tell(at: Any, first: int) -> None:
    """Keep in shared memory what this process is at."""

    def wrap(owner: Any, name: str, phase: int) -> None:
        inner = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            before, at[first] = at[first], phase
            at[first + phase] += 1
            try:
                return inner(*args, **kwargs)
            finally:
                at[first] = before

        setattr(owner, name, told)

    def wrap_save(inner: Any) -> Any:  # on a thread of its own, beside the others
        def told(*args: Any, **kwargs: Any) -> Any:
            at[first + SAVING] = 1
            try:
                return inner(*args, **kwargs)
            finally:
                at[first + SAVING] = 0

        return told

    wrap(conf.run, "prepare", PREPARING)
    wrap(Trainer, "update", TRAINING)
    wrap(Trainer, "evaluate", EVALUATING)
    checkpoint.write = wrap_save(checkpoint.write)


def script(fault: str) -> str:
    """train.py, after something in it was broken."""
    return f"""
import functools, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from conf.door import door
from tests import faults
{fault}
door(train.main, "the run can't go on without it")
"""
