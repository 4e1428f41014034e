"""What is in a folder of shards: python -m data.inspect SHARDS [--documents N] [--windows N]

Or in single windows, by their first token: python -m data.inspect SHARDS --window OFFSET
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.say import counted, visible
from data.shards import Manifest, load_manifest, open_shards, say_split
from data.tokenizer import Tokenizer, load_tokenizer
from data.windows import Windows

_SHINGLE = 5  # tokens that are compared as one
_PERMUTATIONS, _BANDS = 128, 32
_CHUNK = 1 << 22


@dataclass(slots=True)
class Facts:
    """What one look through the ids of a split gives."""

    tokens: int = 0
    separators: int = 0
    beyond: int = 0  # ids that are no token
    longest_run: tuple[int, int] = (0, 0)  # length, id
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def main(argv: list[str]) -> int:
    from conf.door import Parser

    parser = Parser(prog="python -m data.inspect", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards", help="a folder that holds manifest.json")
    parser.add_argument("--documents", type=int, default=20_000, help="documents to compare")
    parser.add_argument("--windows", type=int, default=3, help="random windows to show")
    parser.add_argument("--similar", type=float, default=0.7, help="share of equal text to report")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--window",
        type=int,
        action="append",
        metavar="OFFSET",
        help="show only the text from this token of the stream on (repeatable)",
    )
    parser.add_argument("--length", type=int, default=256, help="of such a window, in tokens")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="its stream")
    args = parser.parse_args(argv)
    folder = Path(args.shards)
    lines = (
        show_windows(folder, args.split, args.window, args.length)
        if args.window
        else report(folder, args.documents, args.windows, args.similar, args.seed)
    )
    for line in lines:
        print(visible(line), flush=True)
    return 0


def show_windows(folder: Path, split: str, offsets: list[int], length: int) -> Iterator[str]:
    """Where each window of `length` tokens lies, then its text.

    Raises ValueError for an offset that is not in the split, and for a length beyond it.
    """
    manifest = load_manifest(folder)
    tokens = manifest.train_tokens if split == "train" else manifest.val_tokens
    for name, value, low, high in (
        *(("--window", offset, 0, tokens - 1) for offset in offsets),
        ("--length", length, 2, tokens),
    ):
        if not low <= value <= high:
            raise ValueError(
                f"{name} {value} is out of range; the {split} split of {folder} has "
                f"{counted(tokens, 'token')}; give a number from {low} to {high}"
            )
    tokenizer = load_tokenizer(folder / "tokenizer")
    windows = Windows(folder, split, length - 1)
    for offset, line in zip(offsets, windows.describe(np.array(offsets))):
        yield line
        documents = split_documents([windows.read(offset, length)], manifest.eot)
        yield "\n[end of document]\n".join(tokenizer.decode(ids.tolist()) for ids in documents)


def report(folder: Path, documents: int, windows: int, similar: float, seed: int) -> Iterator[str]:
    """The report, line by line. Raises ValueError where the folder holds no whole shards."""
    manifest = load_manifest(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    yield from _of_manifest(manifest)
    for split in ("train", "val"):
        arrays = open_shards(folder, manifest, split)
        if arrays:
            yield from _of_split(split, look_through(arrays, manifest), manifest, tokenizer)
    found = [
        (split, number, ids)
        for split in ("train", "val")
        for number, ids in zip(
            range(1, documents + 1),
            split_documents(open_shards(folder, manifest, split), manifest.eot),
        )
    ]
    yield f"the first {counted(len(found), 'document')}"
    yield from _lengths([len(ids) for _, _, ids in found])
    yield from _common(found, tokenizer)
    yield from _suspicious(found, tokenizer)
    yield from _alike(found, tokenizer, similar)
    yield from _windows(folder, manifest, tokenizer, windows, seed)


def look_through(arrays: list[np.ndarray], manifest: Manifest) -> Facts:
    facts = Facts(counts=np.zeros(manifest.n_vocab, np.int64))
    for array in arrays:
        for start in range(0, len(array), _CHUNK):
            ids = np.asarray(array[start : start + _CHUNK], np.int64)
            beyond = (ids < 0) | (ids >= manifest.n_vocab)
            facts.tokens += len(ids)
            facts.beyond += int(beyond.sum())
            facts.separators += int((ids == manifest.eot).sum())
            facts.counts += np.bincount(ids[~beyond], minlength=manifest.n_vocab)
            facts.longest_run = max(facts.longest_run, longest_run(ids))
    return facts


def longest_run(ids: np.ndarray) -> tuple[int, int]:
    """(length, id) of the longest stretch of one id."""
    if not len(ids):
        return 0, 0
    borders = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1, append=ids[-1] - 1))
    lengths = np.diff(borders)
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(ids[borders[longest]])


def split_documents(arrays: list[np.ndarray], eot: int) -> Iterator[np.ndarray]:
    """The ids of each document, without its separator, across shards."""
    carried: list[np.ndarray] = []
    for array in arrays:
        for start in range(0, len(array), _CHUNK):
            ids = array[start : start + _CHUNK]
            at = 0
            for end in np.flatnonzero(ids == eot).tolist():
                yield np.concatenate([*carried, ids[at:end]]) if carried else ids[at:end]
                carried, at = [], end + 1
            if at < len(ids):
                carried.append(ids[at:])
    if carried:
        yield np.concatenate(carried)


def similar_pairs(documents: list[np.ndarray], threshold: float) -> list[tuple[float, int, int]]:
    """(Jaccard similarity of 5-token shingles, i, j), most alike first.

    MinHash finds the candidates, their shingles are then compared exactly.
    """
    try:
        import rensa  # type: ignore[import-untyped]
    except ImportError as e:
        raise ValueError(
            "the package rensa is not installed; documents are compared with it; pip install rensa"
        ) from e
    index = rensa.RMinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, num_bands=_BANDS)
    shingles = [_shingles(ids) for ids in documents]
    pairs = []
    for j, mine in enumerate(shingles):
        if not len(mine):
            continue
        sketch = rensa.RMinHash(num_perm=_PERMUTATIONS, seed=1)
        sketch.update(list(map(str, mine.tolist())))
        for i in index.query(sketch):
            both = len(np.intersect1d(shingles[i], mine, assume_unique=True))
            jaccard = both / (len(shingles[i]) + len(mine) - both)
            if jaccard >= threshold:
                pairs.append((jaccard, i, j))
        index.insert(j, sketch)
    return sorted(pairs, reverse=True)


def _shingles(ids: np.ndarray) -> np.ndarray:
    """A hash of every stretch of five ids, each once: uint64."""
    if len(ids) < _SHINGLE:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, _SHINGLE)
    hashes = np.zeros(len(windows), np.uint64)
    for column in range(_SHINGLE):
        hashes = (hashes ^ windows[:, column].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


Found = list[tuple[str, int, np.ndarray]]


def _of_manifest(manifest: Manifest) -> Iterator[str]:
    tokens = manifest.train_tokens + manifest.val_tokens
    size = manifest.train_bytes + manifest.val_bytes
    yield f"{manifest.dataset}: fingerprint {manifest.fingerprint[:12]}, {manifest.dtype}"
    yield (
        f"  tokenizer {manifest.tokenizer_name}, {manifest.n_vocab:,} ids; "
        f"{size / max(tokens, 1):.2f} bytes a token"
    )
    yield f"  validation: {say_split(manifest)}"
    for split, documents, count in (
        ("train", manifest.train_documents, manifest.train_tokens),
        ("val", manifest.val_documents, manifest.val_tokens),
    ):
        shards = manifest.of(split)
        sizes = ", ".join(f"{shard.tokens:,}" for shard in shards[-3:])
        yield (
            f"  {split}: {counted(documents, 'document')}, {counted(count, 'token')} in "
            f"{counted(len(shards), 'shard')}" + (f" (the last: {sizes})" if shards else "")
        )
    for what, reasons in (("left out", manifest.skipped), ("repaired", manifest.repaired)):
        for reason, number in reasons.items():
            yield f"  {what}: {number:,} ({reason})"


def _of_split(split: str, facts: Facts, manifest: Manifest, tokenizer: Tokenizer) -> Iterator[str]:
    used = int((facts.counts > 0).sum())
    length, token = facts.longest_run
    shown = repr(tokenizer.decode([token])) if 0 <= token < manifest.n_vocab else "no token"
    yield f"{split}: {counted(facts.tokens, 'id')}"
    yield f"  out of range: {facts.beyond:,}"
    yield (
        f"  separators: {facts.separators:,}, one every "
        f"{facts.tokens / max(facts.separators, 1):,.0f} tokens"
    )
    yield f"  ids in use: {used:,} of {manifest.n_vocab:,}"
    yield f"  longest run of one id: {length:,} x {token} {shown}"
    top = np.argsort(-facts.counts, kind="stable")[:10]
    told = ", ".join(f"{tokenizer.decode([i])!r} {facts.counts[i] / facts.tokens:.1%}" for i in top)
    yield f"  most common ids: {told}"


def _lengths(lengths: list[int]) -> Iterator[str]:
    yield "  tokens a document:"
    bins = np.bincount(np.log2(np.maximum(lengths, 1)).astype(int)) if lengths else np.zeros(1)
    for power, count in enumerate(bins.tolist()):
        bar = "#" * round(40 * count / max(bins.max(), 1))
        yield f"  {2**power:>12,} - {2 ** (power + 1) - 1:>12,} {count:>9,} {bar}"


def _common(found: Found, tokenizer: Tokenizer) -> Iterator[str]:
    seen: Counter[bytes] = Counter()
    splits: dict[bytes, set[str]] = defaultdict(set)
    for split, _, ids in found:
        seen[ids.tobytes()] += 1
        splits[ids.tobytes()].add(split)
    often = [(text, count) for text, count in seen.most_common(10) if count > 1]
    extra = sum(count - 1 for count in seen.values())
    both = sum(1 for where in splits.values() if len(where) == 2)
    yield f"  exact duplicates: {counted(extra, 'document')}; in both splits: {both:,}"
    dtype = found[0][2].dtype if found else np.dtype("u2")
    for text, count in often:
        yield f"    {count:,} x {_snippet(np.frombuffer(text, dtype), tokenizer)}"


def _suspicious(found: Found, tokenizer: Tokenizer) -> Iterator[str]:
    lengths = tokenizer.token_bytes()
    worst = []
    for split, number, ids in found:
        if len(ids) < 20:
            continue
        run = longest_run(ids.astype(np.int64))[0]
        bytes_a_token = float(lengths[ids].mean())
        different = len(np.unique(ids)) / min(len(ids), tokenizer.n_vocab)
        reasons = [
            (run / 20, f"a run of {run}"),
            (1.5 / bytes_a_token if len(tokenizer.token_bytes()) > 300 else 0, "short tokens"),
            (0.02 / different if len(ids) < 5000 else 0, "few different tokens"),
        ]
        score, reason = max(reasons)
        if score > 1:
            worst.append((score, split, number, reason, ids))
    worst.sort(key=lambda row: row[:3], reverse=True)
    yield f"  suspicious documents: {len(worst):,}"
    for _, split, number, reason, ids in worst[:10]:
        yield f"    {split} {number:,} ({reason}): {_snippet(ids, tokenizer)}"


def _alike(found: Found, tokenizer: Tokenizer, similar: float) -> Iterator[str]:
    pairs = similar_pairs([ids for _, _, ids in found], similar)
    across = {(i, j) for _, i, j in pairs if found[i][0] != found[j][0]}
    yield (
        f"  near duplicates (at least {similar:.0%} of 5-token stretches): "
        f"{counted(len(pairs), 'pair')}, {len(across):,} of them between train and val"
    )
    for jaccard, i, j in sorted(pairs, key=lambda pair: pair[1:] not in across)[:10]:
        (a, m, ids), (b, n, _) = found[i], found[j]
        yield f"    {jaccard:.0%} {a} {m:,} = {b} {n:,}: {_snippet(ids, tokenizer)}"


def _windows(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, count: int, seed: int
) -> Iterator[str]:
    block_size = min(64, manifest.train_tokens - 1)
    if count and block_size > 0:
        windows = Windows(folder, "train", block_size, seed=seed)
        starts = windows.starts(len(windows), count)
        yield "random windows of train"
        for start, x in zip(starts.tolist(), windows.batch(starts)[0], strict=True):
            yield f"  at {start:,}: {tokenizer.decode(x.tolist())!r}"


def _snippet(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    return repr(tokenizer.decode(ids[:24].tolist()))


if __name__ == "__main__":
    from conf.door import door

    door(main, "it cannot be inspected", shows=True)
