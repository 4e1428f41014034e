"""Which text is validation: documents by hash, or the end of the corpus where that will not do."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from data.shards import HEADER, Shard, ShardWriter, open_shard, sha256_of, write_header
from data.tokenizer import Tokenizer

MIN_TOKENS = 1025  # one window of GPT-2's: a split below that measures little
_CHUNK = 1 << 22


def splitter(val_fraction: float, split_seed: int) -> Callable[[str], str]:
    """The split of a document: a hash of (split seed, document id) against val_fraction."""
    seeded = hashlib.blake2b(f"{split_seed}:".encode(), digest_size=8)
    limit = int(val_fraction * 2**64).to_bytes(8)

    def split_of(document: str) -> str:
        digest = seeded.copy()
        digest.update(document.encode("utf-8", "surrogateescape"))
        return "val" if digest.digest() < limit else "train"

    return split_of


def unfit(tokens: Mapping[str, float], val_fraction: float) -> str:
    """Why documents by hash will not do, from the tokens that each split gets; "" if they will."""
    if val_fraction == 0:
        return ""
    total = tokens["train"] + tokens["val"]
    for split in ("train", "val"):
        if tokens[split] < MIN_TOKENS:
            return f"leaves {tokens[split]:,.0f} tokens of {total:,.0f} to {split}"
    share = tokens["val"] / total
    if not val_fraction / 2 <= share <= val_fraction * 2:
        return f"gives {share:.2%} instead of {val_fraction:.2%}"
    return ""


def unfit_sizes(sizes: Mapping[str, int], val_fraction: float, split_seed: int) -> str:
    """The same before any work, from the sizes of documents in bytes, at 4 bytes a token."""
    tokens = {"train": 0.0, "val": 0.0}
    split_of = splitter(val_fraction, split_seed)
    for document, size in sizes.items():
        tokens[split_of(document)] += size / 4
    if len(sizes) == 1 and val_fraction:
        return "cannot be done with one document"
    return unfit(tokens, val_fraction)


def find_cut(
    folder: Path, shards: list[Shard], dtype: str, tokenizer: Tokenizer, val_fraction: float
) -> tuple[int, str]:
    """(token, kind): where the validation tail begins, and what ends there.

    The last end of a document, else of a line, in the stretch before the wanted place.
    """
    total = sum(shard.tokens for shard in shards)
    want = max(round(val_fraction * total), min(MIN_TOKENS, total // 4), 1)
    target = total - want
    low = max(1, target - min(want, _CHUNK))
    near = _read(folder, shards, dtype, low, max(low, target))
    for found, kind in (
        (near == tokenizer.eot, "a document's end"),
        (np.isin(near, np.flatnonzero(tokenizer.ends_line())), "a line's end"),
    ):
        places = np.flatnonzero(found)
        if len(places):
            return low + int(places[-1]) + 1, kind
    return target, "a token"


def copy_tail(
    folder: Path, shards: list[Shard], dtype: np.dtype[np.unsignedinteger], cut: int, size: int
) -> list[Shard]:
    """Write the ids from `cut` on as the validation shards, of `size` tokens each."""
    total = sum(shard.tokens for shard in shards)
    with ShardWriter(folder, "val", dtype, size) as writer:
        for start in range(cut, total, _CHUNK):
            writer.append(_read(folder, shards, dtype.name, start, min(start + _CHUNK, total)))
        return writer.close()


def drop_tail(
    folder: Path, shards: list[Shard], dtype: np.dtype[np.unsignedinteger], cut: int, eot: int
) -> list[Shard]:
    """Shorten the training shards to `cut` ids, a separator after them. Can be done twice over."""
    kept: list[Shard] = []
    start = 0
    for shard in shards:
        path = folder / shard.file
        tokens = min(shard.tokens, cut - start)
        start += shard.tokens
        if tokens <= 0:
            path.unlink(missing_ok=True)
        elif start <= cut and (start < cut or _last(path, dtype, tokens) == eot):
            kept.append(shard)
        else:
            with path.open("rb+") as file:
                file.truncate(HEADER + tokens * dtype.itemsize)
                file.seek(HEADER)
                if _last(path, dtype, tokens) != eot:
                    file.seek(0, os.SEEK_END)
                    file.write(np.array([eot], dtype).tobytes())
                    tokens += 1
                file.seek(0)
                write_header(file, dtype, tokens)
                file.flush()
                os.fsync(file.fileno())
            kept.append(
                Shard(file=shard.file, split="train", tokens=tokens, sha256=sha256_of(path))
            )
    return kept


def _last(path: Path, dtype: np.dtype[np.unsignedinteger], tokens: int) -> int:
    with path.open("rb") as file:
        file.seek(HEADER + (tokens - 1) * dtype.itemsize)
        return int(np.frombuffer(file.read(dtype.itemsize), dtype)[0])


def count(folder: Path, shards: list[Shard], dtype: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """(documents, bytes) of some shards, from their ids."""
    lengths = tokenizer.token_bytes()
    documents = size = 0
    for shard in shards:
        ids = open_shard(folder, shard, dtype)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            documents += int((chunk == tokenizer.eot).sum())
            size += int(lengths[chunk].sum(dtype=np.int64))
    return documents, size


def _read(folder: Path, shards: list[Shard], dtype: str, start: int, end: int) -> np.ndarray:
    parts = [np.empty(0, dtype)]
    at = 0
    for shard in shards:
        if at < end and at + shard.tokens > start:
            ids = open_shard(folder, shard, dtype)
            parts.append(ids[max(0, start - at) : end - at])
        at += shard.tokens
    return np.concatenate(parts)
