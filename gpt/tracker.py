"""What a run tells: lines and a live bar on the terminal, train.log, metrics.jsonl, W&B."""

from __future__ import annotations

import json
import math
import netrc
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlparse

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

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


class Tracker:
    """One a run, on the main rank; on the others every call does nothing.

    `resume_step`: rows of metrics.jsonl past it belong to work that a kill undid; they go, so that
    the file holds each step once.
    """

    def __init__(self, config: TrackerConfig, is_main: bool) -> None:
        self.config = config
        self.is_main = is_main
        self.console = Console(highlight=False, soft_wrap=True)
        self.run_id: str | None = None
        self._log: IO[str] | None = None
        self._metrics: IO[str] | None = None
        self._wandb: Any = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._waiting: list[str] = []

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
        self._log = (folder / "train.log").open("a", encoding="utf-8")
        for line in self._waiting:
            self._write_log(line)
        path = folder / "metrics.jsonl"
        keep_rows(path, resume_step)
        self._metrics = path.open("a", encoding="utf-8")
        self._start_wandb(folder, run_config)

    def say(self, text: str = "") -> None:
        """A line for people."""
        if not self.is_main:
            return
        # markup off: text of a document or a sample must not act on the terminal
        self.console.print(printable(text), markup=False)
        if self._log is None:
            self._waiting.append(text)
        else:
            self._write_log(text)

    def log(self, row: dict[str, float | int]) -> None:
        """A row of metrics.jsonl, and of W&B. Values that are not finite are left out."""
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        if self._metrics is not None:
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(row)

    def rewind(self, step: int) -> None:
        """Forget the rows after a step that the run has gone back to."""
        if self._metrics is not None:
            self._metrics.close()
            path = Path(self._metrics.name)
            keep_rows(path, step)
            self._metrics = path.open("a", encoding="utf-8")

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

    def pause(self) -> None:
        """Take the live line away, for text that should stand alone."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self, exit_code: int = 0) -> None:
        self.pause()
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()
        self._metrics = self._log = None
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)
            self._wandb = None

    def _write_log(self, line: str) -> None:
        assert self._log is not None
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._log.flush()

    def _start_wandb(self, folder: Path, run_config: dict[str, Any]) -> None:
        mode = self.config.wandb
        if mode == WandbMode.disabled:
            return
        try:
            import wandb
        except ImportError:
            self.say("wandb is not installed: metrics go to metrics.jsonl only")
            return
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
        except (wandb.Error, OSError) as e:
            self.say(f"wandb could not start ({e}): metrics go to metrics.jsonl only")
            return
        # Our own step is the axis: W&B's must rise, and a resumed run goes over some steps again.
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")
        self.run_id = self._wandb.id


def wandb_has_key() -> bool:
    """Whether a key is configured, without W&B's own look-up, which may prompt."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", WANDB_SITE)).hostname
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def keep_rows(path: Path, last_step: int) -> None:
    """Drop the rows after `last_step`, and a half-written last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= last_step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def printable(text: str) -> str:
    """The text with control characters made visible, so that no escape acts on a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All rows of a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
