"""Where windows of tokens come from: shard files, and the documents that they touch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.files import WHOLE, kind_of
from data.say import counted, visible
from data.shards import Manifest, Shard
from data.split import splitter

_CHUNK = 1 << 22


def describe(
    arrays: Sequence[np.ndarray],
    manifest: Manifest,
    split: str,
    starts: Iterable[int],
    count: int,
) -> list[str]:
    """A line for each window of `count` tokens at `starts`: shard files, and documents touched.

    `arrays` are the split's shards, opened. A token's place in a file counts from 0, in bytes
    where the file is another maker's. Documents are numbered from 1 through the split (through
    each source of a mixture); their ids are told where the manifest gives them away. Reads every
    id before the last window once, 4 million at a time.
    """
    shards = manifest.of(split)
    ends = list(accumulate(map(len, arrays)))
    streams: dict[int, tuple[int, int]] = {}  # first token and end of each
    for shard, end in zip(shards, ends, strict=True):
        first, _ = streams.get(shard.stream, (end - shard.tokens, 0))
        streams[shard.stream] = first, end
    windows = [(start, list(_stretches(start, count, streams.values()))) for start in starts]
    stretches = [stretch for _, parts in windows for stretch in parts]
    wanted = {place for base, first, end in stretches for place in (base, first, end - 1)}
    before = _separators_before(arrays, manifest.eot, sorted(wanted))
    numbers = {
        (base, first, end): (
            1 + before[first] - before[base],
            1 + before[end - 1] - before[base],
        )
        for base, first, end in stretches
    }
    names = _names(manifest, split, {n for pair in numbers.values() for n in pair})
    lines = []
    for start, parts in windows:
        files = [place for _, first, end in parts for place in _files(shards, ends, first, end)]
        touched = " then ".join(_documents(*numbers[part], names) for part in parts)
        lines.append(
            f"{split} window at {start}, {counted(count, 'token')}: {', '.join(files)}; {touched}"
        )
    return lines


def _stretches(
    start: int, count: int, streams: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """(first token of the stream, first token, end) of a window, which wraps round its stream."""
    base, end = next(stream for stream in streams if start < stream[1])
    while count > 0:
        stop = min(start + count, end)
        yield base, start, stop
        count -= stop - start
        start = base


def _separators_before(
    arrays: Sequence[np.ndarray], eot: int, places: Sequence[int]
) -> dict[int, int]:
    """How many separators lie before each of `places`, which ascend."""
    counts: dict[int, int] = {}
    seen = at = 0
    for array in arrays:
        for first in range(0, len(array), _CHUNK):
            chunk = array[first : first + _CHUNK]
            found = at + np.flatnonzero(chunk == eot)
            at += len(chunk)
            while len(counts) < len(places) and places[len(counts)] < at:
                place = places[len(counts)]
                counts[place] = seen + int(np.searchsorted(found, place))
            if len(counts) == len(places):
                return counts
            seen += len(found)
    return counts


def _files(shards: list[Shard], ends: list[int], first: int, end: int) -> Iterator[str]:
    """Each file that tokens first … end-1 lie in, and where."""
    for shard, shard_end in zip(shards, ends, strict=True):
        base = shard_end - shard.tokens
        low, high = max(first, base) - base, min(end, shard_end) - base
        if low < high:
            unit = "tokens"
            if shard.offset is not None:
                size = np.dtype(shard.dtype).itemsize
                unit, low, high = "bytes", shard.offset + low * size, shard.offset + high * size
            yield f"{visible(shard.file)} {unit} {low}-{high - 1}"


def _documents(first: int, last: int, names: dict[int, str]) -> str:
    told = [f"{n:,} ({visible(names[n])})" if n in names else f"{n:,}" for n in (first, last)]
    return f"document {told[0]}" if first == last else f"documents {told[0]} to {told[1]}"


def _names(manifest: Manifest, split: str, numbers: set[int]) -> dict[int, str]:
    """The ids of some documents of a split, as far as they follow from what was asked for."""
    source, how = manifest.request.get("source", {}), manifest.split
    if manifest.skipped or "part" in manifest.request:
        return {}  # it is not known which ones were left out
    documents, skip = manifest.kept, 0
    if how["method"] == "tail":
        in_two = how["cut_at"] != "a document's end"
        documents -= in_two
        skip = manifest.train_documents - in_two if split == "val" else 0
    ids: Iterable[str]
    if source.get("kind") == "text":
        ids = source["files"]
        if len(source["files"]) != documents or any(
            kind_of(Path(name)) not in WHOLE for name in source["files"]
        ):
            return {}
    elif source.get("kind") == "hf":
        ids = (f"{source['split']}:{row}" for row in range(documents))
    else:
        return {}
    if how["method"] == "documents":
        split_of = splitter(manifest.request["val_fraction"], how["seed"])
        ids = (name for name in ids if split_of(name) == split)
    return {n: name for n, name in enumerate(ids, 1 - skip) if n in numbers}
