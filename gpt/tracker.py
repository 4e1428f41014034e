"""What a run tells: lines and a live bar on the terminal, train.log, metrics.jsonl, W&B."""

from __future__ import annotations

import errno
import json
import logging
import math
import netrc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.status import Status
from rich.text import Text

WANDB_SITE = "https://api.wandb.ai"


class WandbMode(str, Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    wandb: WandbMode
    project: str


class Lines:
    """A file to which whole lines are appended. What can't be written now (a full disk, one that is
    gone) waits in memory and goes first at the next call: a training step must not end of it.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file can't be opened: before a run, that can be mended."""
        self.path = path
        self.waiting: list[str] = []
        self.error: OSError | None = None  # why lines are waiting
        self._fd: int | None = None
        self._whole = 0  # bytes of whole lines; what a failed write left after them is cut off
        self._open(cut=False)

    def append(self, line: str) -> None:
        self.waiting.append(line)
        self.write_waiting()

    def write_waiting(self) -> None:
        try:
            if self._fd is None:
                self._open(cut=True)
            assert self._fd is not None
            while self.waiting:
                data = (self.waiting[0] + "\n").encode("utf-8", "backslashreplace")
                if os.write(self._fd, data) < len(data):  # the last bytes that there was room for
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._whole += len(data)
                del self.waiting[0]
            self.error = None
        except OSError as e:
            self.error = e
            with suppress(OSError):
                if self._fd is not None:
                    os.ftruncate(self._fd, self._whole)
            self.release()

    def release(self) -> None:
        """Close the file; the next line opens it again."""
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = None

    def _open(self, cut: bool) -> None:
        # Unbuffered: a buffer that failed would be written a second time on close.
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._fd).st_size
        if cut and size > self._whole:
            os.ftruncate(self._fd, self._whole)
        else:
            self._whole = size


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read along is gone (a closed pipe): the run goes on, and train.log has it all."""
        self.file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Tracker:
    """One a run, on the main rank; on the others every call does nothing.

    `resume_step`: rows of metrics.jsonl past it belong to work that a kill undid; they go, so that
    the file holds each step once.
    """

    def __init__(self, config: TrackerConfig, is_main: bool) -> None:
        self.config = config
        self.is_main = is_main
        self.console = _Console(highlight=False, soft_wrap=True)
        self.run_id: str | None = None
        self._log: Lines | None = None
        self._metrics: Lines | None = None
        self._warned = False  # that lines are waiting
        self._wandb: Any = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._status: Status | None = None
        self._before: list[str] = []  # said before there was a folder

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def open(
        self, folder: Path, run_config: dict[str, Any], run_id: str | None, resume_step: int
    ) -> None:
        """Start writing into the run's folder; what was said before goes into its log too."""
        self.run_id = run_id
        if not self.is_main:
            return
        self._log = Lines(folder / "train.log")
        for line in self._before:
            self._write_log(line)
        path = folder / "metrics.jsonl"
        keep_rows(path, resume_step)
        self._metrics = Lines(path)
        self._start_wandb(folder, run_config)

    def say(self, text: str = "") -> None:
        """A line for people."""
        if not self.is_main:
            return
        self._print(text)
        if self._log is None:
            self._before.append(text)
        else:
            self._write_log(text)

    def log(self, row: dict[str, float | int]) -> None:
        """A row of metrics.jsonl, and of W&B. Values that are not finite are left out."""
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        if self._metrics is not None:
            self._append(self._metrics, json.dumps(row))
        if self._wandb is not None:
            try:
                self._wandb.log(row)
            except Exception as e:  # its own process may be gone, in ways that it does not list
                self._give_up_wandb(e)

    def rewind(self, step: int) -> None:
        """Forget the rows after a step that the run has gone back to."""
        if self._metrics is not None:
            waiting = self._metrics.waiting
            waiting[:] = [line for line in waiting if json.loads(line)["step"] <= step]
            self._metrics.write_waiting()
            self._metrics.release()  # the file may become another one
            try:
                keep_rows(self._metrics.path, step)
            except OSError as e:
                self._print(f"warning: {self._metrics.path} keeps rows that were undone ({e})")

    def progress(self, step: int, max_steps: int, text: str, row_due: bool) -> None:
        """The live line; where there is no terminal, a plain line whenever a row is due."""
        if not self.is_main:
            return
        line = f"step {step:>{len(str(max_steps))}}/{max_steps}  {text}"
        if self.console.is_terminal:
            if self._progress is None:
                self._progress = Progress(
                    BarColumn(20), TextColumn("{task.description}"), console=self.console
                )
                self._progress.start()
                self._task = self._progress.add_task(line, total=max_steps)
            assert self._task is not None
            self._progress.update(self._task, completed=step, description=line)
            if row_due and self._log is not None:
                self._write_log(line)
        elif row_due:
            self.say(line)

    @property
    def has_terminal(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def live(self, text: str) -> None:
        """A line that the next one replaces, until `pause`; of what comes before the first step."""
        if self._status is None:
            self._status = self.console.status("")
            self._status.start()
        self._status.update(Text(printable(text), no_wrap=True, overflow="ellipsis"))

    def pause(self) -> None:
        """Take the live line away, for text that should stand alone."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self, exit_code: int = 0) -> None:
        self.pause()
        lost = []
        for file, what in ((self._metrics, "row"), (self._log, "line")):
            if file is not None:
                if file.waiting:
                    file.write_waiting()
                if file.waiting:
                    plural = "s" if len(file.waiting) > 1 else ""
                    lost.append(f"{len(file.waiting)} {what}{plural} of {file.path} ({file.error})")
                file.release()
        self._metrics = self._log = None
        if lost:
            self._print(f"warning: lost, since they could not be written: {', '.join(lost)}")
        if self._wandb is not None:
            run, self._wandb = self._wandb, None
            try:
                run.finish(exit_code=exit_code)
            except Exception as e:
                self._give_up_wandb(e)

    def _print(self, text: str) -> None:
        # markup off: text of a document or a sample must not act on the terminal
        self.console.print(printable(text), markup=False)

    def _append(self, file: Lines, line: str) -> None:
        file.append(line)
        failed = [f for f in (self._metrics, self._log) if f is not None and f.error is not None]
        if failed and not self._warned:
            self._print(
                f"warning: {failed[0].path} can't be written ({failed[0].error}): the run goes on, "
                "its lines are kept and written when that is possible again"
            )
        elif self._warned and not failed:
            self._print("what was kept in memory of metrics.jsonl and train.log is written")
        self._warned = bool(failed)

    def _write_log(self, line: str) -> None:
        assert self._log is not None
        self._append(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}")

    def _give_up_wandb(self, error: Exception) -> None:
        import wandb

        self._wandb = None
        with suppress(Exception):  # else it fails once more at exit, with a traceback
            wandb.teardown()
        self.say(f"warning: wandb failed ({error!r}): metrics go to metrics.jsonl only")

    def _start_wandb(self, folder: Path, run_config: dict[str, Any]) -> None:
        mode = self.config.wandb
        asked = os.environ.get("WANDB_MODE")  # W&B's own way to say it
        if mode == WandbMode.auto and asked in set(WandbMode):
            mode = WandbMode(asked)
        if mode == WandbMode.disabled:
            return
        try:
            import wandb
        except Exception as e:  # a package that is there may be broken in any way
            self.say(f"wandb can't be used ({e}): metrics go to metrics.jsonl only")
            return
        if mode == WandbMode.online and not wandb_has_key():  # on a terminal it would ask for one
            self.say("W&B has no key (WANDB_API_KEY, or wandb login): it is kept offline")
            mode = WandbMode.offline
        # W&B logs into the run's folder: on a full disk each line would become a traceback.
        logging.raiseExceptions = False
        if mode == WandbMode.auto:
            mode = WandbMode.online if wandb_has_key() else WandbMode.offline
        try:
            self._wandb = wandb.init(
                project=self.config.project,
                name=folder.name,
                id=self.run_id,
                resume="allow",
                dir=folder,
                mode="online" if mode == WandbMode.online else "offline",
                config=run_config,
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
            # Our own step is the axis: W&B's must rise, and a resumed run repeats some steps.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")
        except Exception as e:
            self._wandb = None
            self.say(f"wandb could not start ({e}): metrics go to metrics.jsonl only")
            return
        self.run_id = self._wandb.id


def wandb_has_key() -> bool:
    """Whether a key is configured, without W&B's own look-up, which may prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", WANDB_SITE)).hostname
    try:
        found = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc"))
        return host is not None and found.authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def keep_rows(path: Path, last_step: int) -> None:
    """Drop the rows after `last_step`, and what is no row of a step, as a half-written line is."""
    if not path.exists():
        return
    before = path.read_bytes()
    kept = b"".join(
        line.rstrip(b"\r\n") + b"\n" for line in before.splitlines() if _step(line) <= last_step
    )
    if kept == before:
        return
    if before.startswith(kept):  # nothing but an end goes: that needs no room on the disk
        os.truncate(path, len(kept))
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(kept)
    os.replace(temporary, path)


def _step(line: bytes) -> float:
    """The step of a row; infinite for what is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int | float) else math.inf


def printable(text: str) -> str:
    """The text with control characters made visible, so that no escape acts on a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All rows of a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
