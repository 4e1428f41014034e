"""Checkpoints written beside the training: a copy is taken at the step, the disk is waited for by a
thread. At most one save is under way; the next one waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from gpt import checkpoint, folders
from gpt.checkpoint import Snapshot


class Saver:
    """Writes checkpoints of one run, on the main rank. `saved_step`: the newest on the disk.

    `error` holds what a save met, until it is taken.
    """

    def __init__(
        self, checkpoints: Path, keep_last: int, eot: int, tokenizer: Path, saved_step: int | None
    ) -> None:
        self.checkpoints, self.keep_last = checkpoints, keep_last
        self.eot, self.tokenizer = eot, tokenizer
        self.saved_step = saved_step
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, snapshot: Snapshot, state: dict[str, Any], best: bool) -> None:
        """Begin to write; `latest` (and `best`) will point at it once it is whole."""
        self.wait()
        # Not a daemon's work: if the loop ends with an exception, what is begun is finished.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, state, best), name="saver"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, state: dict[str, Any], best: bool) -> None:
        folder = self.checkpoints / folders.step_name(state["step"])
        try:
            checkpoint.write(folder, snapshot, state, self.eot, self.tokenizer)
            folders.link("latest", folder)
            if best:
                folders.link("best", folder)
            folders.prune(self.checkpoints, self.keep_last, state.get("rollback_step"))
            self.saved_step = state["step"]
        except Exception as e:  # of a thread: it is raised again by the loop
            if isinstance(e, OSError):
                e.filename = e.filename or str(folder)
            self.error = e
            folders.clean(self.checkpoints)
