"""Signals that ask a run to end, and how long it may stand still."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

from gpt.ranks import Ranks

# SIGUSR1: what Slurm sends before a time limit (--signal=USR1@…). SIGHUP: the terminal is gone.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)
ONE_WISH = 3.0  # seconds
PATIENCE = 5.0  # that a step in flight gets to end

_raised: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal that came where nothing is to be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def heeded() -> list[int]:
    """The signals to listen to: all but what is ignored already, as nohup does with SIGHUP."""
    return [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]


def mute_after(number: int) -> None:
    """After SIGHUP there is no terminal to write to: what is said goes to train.log alone."""
    if signal.Signals(number).name == "SIGHUP":
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for handle in (1, 2):
            if os.isatty(handle):
                os.dup2(nowhere, handle)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    mute_after(number)
    _raised.append(number)
    raise Stopped(number)


def raised() -> int | None:
    """The signal that `raise_stopped` was called for: what it raised may have become another error,
    or have been swallowed by whom it met."""
    return _raised[0] if _raised else None


def check() -> None:
    """Raise Stopped anew, where it was swallowed."""
    if _raised:
        raise Stopped(_raised[0])


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals wait for the end of this; a second one doesn't. For imports: one that is cut short
    can leave half a module, without an error."""
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise_stopped(number, frame)
        held.append(number)

    before = {n: signal.signal(n, hold) for n in heeded()}
    try:
        yield
    finally:
        for n, old in before.items():
            signal.signal(n, old)
        if held:  # also where the import failed
            raise_stopped(held[0], None)


class Stop:
    """While it is entered, a signal only asks; a second one ends the process at once.

    Under torchrun Ctrl-C arrives twice, from the terminal and from torchrun: what comes within
    three seconds there is one wish.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.asked = raised()
        self._asked_at = time.monotonic()
        self._raises = False

    def __enter__(self) -> Stop:
        self._before = {n: signal.signal(n, self._ask) for n in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for n, old in self._before.items():
            signal.signal(n, old)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is not None:
            if self.ranks.world_size == 1 or now - self._asked_at > ONE_WISH:
                os.write(2, b"\nstopped at once: this step is not saved\n")
                os._exit(128 + number)
            return
        self.asked, self._asked_at = number, now
        mute_after(number)
        if self._raises:
            raise Stopped(number)
        if self.ranks.is_main:
            # Straight to the terminal: the console may be in the middle of a line, which a print
            # from here would make it write twice.
            os.write(2, b"\nstopping after this step (once more: at once, without saving)\n")

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal raises Stopped in here, on one process: where it takes long and nothing is new
        that could be saved."""
        if self.ranks.world_size > 1:
            yield
            return
        if self.asked is not None:
            raise Stopped(self.asked)
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def is_overdue(self) -> bool:
        """Whether a step has had its time since the signal. One process may drop it, and loses that
        step alone; ranks would have to agree in the middle of it."""
        waited = time.monotonic() - self._asked_at
        return self.asked is not None and self.ranks.world_size == 1 and waited > PATIENCE


class Watchdog:
    """Ends the process when the loop stands still for longer than `minutes`.

    A rank that hangs would keep all others waiting inside a collective, for hours. They wait, so
    they are not the cause: the one whose main thread is elsewhere speaks and ends first.
    """

    def __init__(self, minutes: float | None, ranks: Ranks) -> None:
        self.seconds = 60 * minutes if minutes else None
        self.ranks = ranks
        self._last = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.get_ident()

    def beat(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        if self.seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._done.set()

    def _watch(self) -> None:
        assert self.seconds is not None
        while not self._done.wait(min(1.0, self.seconds / 4)):
            still = time.monotonic() - self._last
            if still < self.seconds:
                continue
            stack = traceback.extract_stack(sys._current_frames()[self._thread])
            if waits_for_others(stack) and still < self.seconds + 10:
                continue
            place = stack[-1]
            os.write(
                2,
                f"error: rank {self.ranks.rank} has stood still for {still:.0f} s in {place.name} "
                f"({place.filename}:{place.lineno}); the run would wait for ever, so it ends; "
                "start it again, and it goes on from its newest checkpoint "
                "(runtime.hang_minutes=null waits without end)\n".encode(),
            )
            os._exit(1)


def waits_for_others(stack: traceback.StackSummary) -> bool:
    """Whether a thread that stands still may be waiting for other ranks: inside a collective, in
    the backward pass, whose hooks reduce gradients, or for a device that does either."""
    last = stack[-4:]
    inside = any("distributed" in f.filename or "autograd" in f.filename for f in last)
    return inside or any(word in (last[-1].line or "") for word in (".tolist()", ".cpu()"))
