"""Words for people: counts, dates, and text that cannot act on a terminal."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Log = Callable[[str], None]


def counted(number: int, thing: str) -> str:
    """ "1 document", "2,000 documents"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """`text` with everything that does not print written as an escape, all but line ends."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def file_state(value: Any) -> str:
    """Of a file's [bytes, time of change in ns]: "24 bytes of 2026-03-01 12:00:00"; else `value`.

    Where a value is no such pair it is said as it is.
    """
    match value:
        case [int(size), int(changed)]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed / 1e9))
            return f"{counted(size, 'byte')} of {when}"
    return str(value)


def speak_any_language() -> None:
    """Let characters that the terminal's encoding lacks come out as escapes, not as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def terminal() -> Iterator[tuple[Log, Log | None]]:
    """(log, live): lines that stay, and on a terminal one that is written over; else None."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda line: print(visible(line), flush=True), None
        return
    status = console.status("")

    def live(line: str) -> None:
        status.update(Text(visible(line), no_wrap=True, overflow="ellipsis"))
        status.start()

    try:
        yield lambda line: console.print(Text(visible(line))), live
    finally:
        status.stop()
