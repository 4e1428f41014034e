"""Words for people: counts, dates, and text that cannot act on a terminal."""

import time
from typing import Any


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
