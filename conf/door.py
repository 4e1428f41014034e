"""What every command has in common: its exit code, and one line for what went wrong.

Imports nothing heavy, so that a command can be behind this door before it loads torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from data.say import speak_any_language
from gpt.ranks import Ranks, find_ranks, leave
from gpt.stopping import SIGNALS, Stopped, heeded, raise_stopped, raised


class RunError(RuntimeError):
    """The run itself failed, for a reason said in one line: exit code 1."""


class Parser(argparse.ArgumentParser):
    """One whose mistakes are a ValueError of one line, and not the usage in several."""

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            option = message.split()[1].rstrip(":")
            message += f"; a value that starts with a dash is written as {option}=VALUE"
        raise ValueError(f"{message}; see {self.prog} --help")


def door(command: Callable[[list[str]], int], consequence: str) -> NoReturn:
    """Run a command on the command line's arguments, and leave with its exit code.

    ValueError and OSError are the user's to mend (2), `consequence` being what an OSError means;
    RunError is 1, as is what nobody foresaw, with its traceback; a signal is 128 and its number.
    """
    speak_any_language()
    ranks = find_ranks()
    for number in heeded():
        signal.signal(number, raise_stopped)
    try:
        code = command(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as e:
        code = _say(e, consequence, ranks)
    leave(ranks, code)


def _say(e: BaseException, consequence: str, ranks: Ranks) -> int:
    """Say what ended a command. Returns its exit code."""
    if isinstance(e, KeyboardInterrupt) or raised():  # a signal can end in any error
        number = e.number if isinstance(e, Stopped) else raised() or signal.SIGINT
        if ranks.is_main:
            print("stopped; what was saved is whole: the same command goes on", file=sys.stderr)
        return 128 + number
    if isinstance(e, ValueError):
        return _fail(str(e), 2, ranks)
    if isinstance(e, RunError):
        return _fail(str(e), 1, ranks)
    if isinstance(e, BrokenPipeError):  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(e, OSError):
        what = f"{e.filename or 'a file'}: {e.strerror or e}"
        mend = "mend the path, its rights or the disk's room, and run this again"
        return _fail(f"{what}; {consequence}; {mend}", 2, ranks)
    if ranks.world_size > 1 and "Connection" in str(e):
        said = f"rank {ranks.rank} has lost another rank; see the error above"
        return _fail(said, 1, ranks, known=True)
    traceback.print_exception(e)
    return 1


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
