"""Pieces of documents to ids on all cores, in order, with what there is to count."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from data.pieces import Piece
from data.sources import Position
from data.tokenizer import Tokenizer, replace_surrogates

SPLITS = ("train", "val")
_BATCH_CHARS = 1 << 20
_CHARS_UNDER_WAY = 1 << 26  # a bound on memory where documents are huge


@dataclass(slots=True)
class Batch:
    """Pieces that are encoded in one call, each split's together."""

    pieces: dict[str, list[Piece]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    documents: Counter[str] = field(default_factory=Counter)  # by split
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    repaired: list[tuple[str, str]] = field(default_factory=list)  # document, reason
    chars: int = 0
    position: Position | None = None  # everything up to here is in this batch or an earlier one


@dataclass(slots=True)
class Encoded:
    """A batch's ids by split, their bytes of text, and the tokens up to each separator."""

    batch: Batch
    ids: dict[str, np.ndarray]
    bytes: dict[str, int]
    lengths: dict[str, np.ndarray]


def encode(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    split: Callable[[str], str],
    threads: int,
    strict: bool,
) -> Generator[Encoded, None, None]:
    """Batches in the pieces' order, whatever the number of threads.

    Threads and not processes: tiktoken frees the GIL, so nothing is forked, pickled or copied.
    """
    token_bytes = tokenizer.token_bytes()
    waiting: deque[Future[Encoded]] = deque()
    chars: deque[int] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
    try:
        for batch in _batches(pieces, split):
            waiting.append(pool.submit(_encode, batch, tokenizer, token_bytes, strict))
            chars.append(batch.chars)
            while len(waiting) > 2 * threads + 2 or sum(chars) > _CHARS_UNDER_WAY:
                yield waiting.popleft().result()
                chars.popleft()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # one who stops it does not want to wait


def _batches(pieces: Iterable[Piece], split: Callable[[str], str]) -> Iterator[Batch]:
    batch = Batch()
    chars = 0
    for piece in pieces:
        text = piece.text
        if piece.first and piece.last and (not text or text.isspace()):
            batch.skipped["blank"] += 1
        else:
            where = split(piece.id)
            batch.pieces[where].append(piece)
            chars += len(text)
            if piece.last:
                batch.documents[where] += 1
                if piece.repaired:
                    batch.repaired.append((piece.id, piece.repaired))
        batch.position = (piece.unit, piece.index)
        if chars >= _BATCH_CHARS:
            batch.chars = chars
            yield batch
            batch, chars = Batch(), 0
    if batch.position:
        yield batch


def _encode(batch: Batch, tokenizer: Tokenizer, token_bytes: np.ndarray, strict: bool) -> Encoded:
    out = Encoded(batch, {}, {}, {})
    for split, pieces in batch.pieces.items():
        try:
            ids = tokenizer.encode_pieces([(piece.text, piece.last) for piece in pieces])
        except UnicodeEncodeError:
            batch.repaired += _mend_surrogates(pieces, strict)
            ids = tokenizer.encode_pieces([(piece.text, piece.last) for piece in pieces])
        out.ids[split] = ids
        out.bytes[split] = int(token_bytes[ids].sum(dtype=np.int64))
        out.lengths[split] = np.diff(np.flatnonzero(ids == tokenizer.eot), prepend=-1)
    batch.pieces = {}  # the texts are done with
    return out


def _mend_surrogates(pieces: list[Piece], strict: bool) -> list[tuple[str, str]]:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD; the documents that had any."""
    repaired = []
    for piece in pieces:
        try:
            piece.text.encode()
        except UnicodeEncodeError as e:
            if strict:
                raise ValueError(
                    f"{piece.id} has a lone surrogate at character {e.start}; data.strict=true "
                    "forbids the repair; mend the text, or set data.strict=false"
                ) from e
            piece.text = replace_surrogates(piece.text)
            repaired.append((piece.id, "lone surrogate"))
    return repaired
