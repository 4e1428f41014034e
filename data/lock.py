"""One process at a time."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def lock(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; a killed process's lock goes with it.

    Where another process has it, `busy` is called, which may raise; else that one is waited for.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
