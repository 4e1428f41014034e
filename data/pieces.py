"""Documents in pieces of bounded size, cut only where GPT-2's pre-tokenisation cuts too."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PIECE_CHARS = 1 << 19
# No match of GPT-2's pattern holds a non-space followed by whitespace, and none joins a sentence
# mark to the letter after it ("'" does, in contractions). The letters are named by range, so that
# no difference between two versions of Unicode matters.
_BEFORE_SPACE = re.compile(r"(?<=\S)[ \n\t\r]")
_AFTER_MARK = re.compile(
    "(?<=[,.;:!?\u2026\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
    "[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
)
# \\s of GPT-2's pattern (Unicode's White_Space, which Python's own differs from)
_SPACES = frozenset(
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    + "".join(map(chr, range(0x2000, 0x200B)))
)


@dataclass(slots=True)
class Piece:
    """A document or a part of one. `index` numbers the pieces (or records) of one unit from 1.

    A position in a source is (unit, index): the pieces up to and including this one are done.
    `repaired`: why its text is not exactly the source's, or "".
    """

    id: str
    text: str
    first: bool
    last: bool
    unit: int
    index: int
    repaired: str = ""


def cut_text(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(piece, last) of one document that arrives in `texts`; ids of the pieces are the whole's.

    A piece is longer than PIECE_CHARS only where there is no place to cut; only the last can be
    blank.
    """
    buffer: list[str] = []
    size, limit = 0, PIECE_CHARS
    for text in texts:
        buffer.append(text)
        size += len(text)
        if size < limit:
            continue
        whole = "".join(buffer)
        start = 0
        while len(whole) - start >= PIECE_CHARS:
            cut = _last_cut(whole, start, start + PIECE_CHARS)
            if cut <= start:
                cut = _last_cut(whole, start, len(whole))
            if cut <= start:
                break
            yield whole[start:cut], False
            start = cut
        buffer = [whole[start:]]
        size = len(buffer[0])
        limit = max(PIECE_CHARS, 2 * size)  # so that text without a cut is not searched for ever
    yield "".join(buffer), True


def _last_cut(text: str, start: int, end: int) -> int:
    """The last place to cut in text[start:end], or `start`: looks from the end in growing steps."""
    for pattern in (_BEFORE_SPACE, _AFTER_MARK):
        reach = 256
        while True:
            low = max(start + 1, end - reach)
            found = [match.start() for match in pattern.finditer(text, low, end)]
            if found:
                return found[-1]
            if low == start + 1:
                break
            reach *= 16
    return start


def border_at(text: str, at: int) -> str:
    """What GPT-2's pattern makes of the place before text[at], 0 < at < len(text).

    "between": two matches meet there, so the ids on either side do not depend on each other.
    "within": it lies in one match, and is matched as two when the text is cut there, nothing else
    changing; whether the ids are those of the whole is then for the merges to say. "": neither is
    sure.
    """
    left, right = _kind(text[at - 1]), _kind(text[at])
    if not left or not right:
        return ""
    if left != right:
        # text before a space or after one may be matched with it, an apostrophe with letters
        return "between" if "s" not in left + right and text[at - 1] != "'" else ""
    if text[at] == "'" or (left == "L" and _kind(text[max(0, at - 2)]) != "L"):
        return ""  # at the start or in the middle of 's, 'll and their like
    return "within"


def _kind(char: str) -> str:
    """L, N, s(pace), o(ther) as in the pattern; "" where versions of Unicode could disagree."""
    if char in _SPACES:
        return "s"
    category = unicodedata.category(char)
    if category[0] in "LN":
        return category[0]
    return "o" if category[0] in "PSM" or category in ("Cc", "Cf") else ""
