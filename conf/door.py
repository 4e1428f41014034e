"""What every command has in common: its exit code, and one line for what went wrong.

Imports nothing heavy, so that a command can be behind this door before it loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from data.say import speak_any_language
from gpt.ranks import Ranks, find_ranks, leave
from gpt.stopping import SIGNALS, Stopped, heeded, raise_stopped, raised

# What asks a command for words alone, whatever else it does.
ASKS = {
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info"),
    *("-sc", "--shell-completion"),
}


class RunError(RuntimeError):
    """The run itself failed, for a reason said in one line: exit code 1."""


class Parser(argparse.ArgumentParser):
    """One whose mistakes are a ValueError of one line, and not the usage in several."""

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            option = message.split()[1].rstrip(":")
            message += f"; a value that starts with a dash is written as {option}=VALUE"
        raise ValueError(f"{message}; see {self.prog} --help")


def door(command: Callable[[list[str]], int], consequence: str, shows: bool = False) -> NoReturn:
    """Run a command on the command line's arguments, and leave with its exit code.

    ValueError and OSError are the user's to mend (2), `consequence` being what an OSError means;
    RunError is 1, as is what nobody foresaw, with its traceback; a signal is 128 and its number.
    `shows`: what it prints is all it does, so it is done when nobody reads on.
    """
    speak_any_language()
    for number in heeded():
        signal.signal(number, raise_stopped)
    leave(find_ranks(), code_of(command, sys.argv[1:], consequence, shows))


@contextlib.contextmanager
def memory_told(say: Callable[[], str]) -> Iterator[None]:
    """Memory that runs out in here is one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        from gpt.runtime import is_out_of_memory

        if not is_out_of_memory(e):
            raise
        raise ValueError(say()) from e


def code_of(
    command: Callable[[list[str]], int], argv: list[str], consequence: str, shows: bool = False
) -> int:
    """The exit code of a command. What ended it is said."""
    shows = shows or any(argument.partition("=")[0] in ASKS for argument in argv)
    try:
        try:
            code = command(argv)
        except SystemExit as e:  # argparse's, after --help
            code = int(e.code or 0)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as e:
        code = _say(e, consequence, shows, find_ranks())
    return code


def _say(e: BaseException, consequence: str, shows: bool, ranks: Ranks) -> int:
    """Say what ended a command. Returns its exit code."""
    if isinstance(e, KeyboardInterrupt) or raised():  # a signal can end in any error
        number = e.number if isinstance(e, Stopped) else raised() or signal.SIGINT
        said = "stopped" if shows else "stopped; what was saved is whole: the same command goes on"
        if ranks.is_main:
            print("\n" * sys.stdout.isatty() + said, file=sys.stderr)  # it may be amid a line
        return 128 + number
    if isinstance(e, ValueError):
        return _fail(str(e), 2, ranks)
    if isinstance(e, RunError):
        return _fail(str(e), 1, ranks)
    if isinstance(e, BrokenPipeError) and _nobody_reads():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if shows:  # `--help | head`
            return 0
        said = "nobody reads standard output any more"
        return _fail(f"{said}; {consequence}; run this again, and let it print", 2, ranks)
    if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):
        what = f"{e.filename or 'a file'}: {e.strerror or e}"
        mend = "mend the path, its rights or the disk's room, and run this again"
        return _fail(f"{what}; {consequence}; {mend}", 2, ranks)
    if ranks.world_size > 1 and (isinstance(e, BrokenPipeError) or "Connection" in str(e)):
        said = f"rank {ranks.rank} has lost another rank; see the error above"
        return _fail(said, 1, ranks, known=True)
    traceback.print_exception(e)
    return 1


def _nobody_reads() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _fail(message: str, code: int, ranks: Ranks, known: bool = False) -> int:
    """One line on stderr, from one rank: torchrun ends all when it sees one fail, and so those
    that others may speak for (`known`: that one has) wait before they repeat it."""
    if known or not ranks.is_main:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(3)
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)  # no escape acts
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
