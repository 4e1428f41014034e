"""Token files that others made, used in place: what is in them, and where in the file it lies.

Formats: headerless uint16 `.bin`; `.bin` with a header of 256 int32 (magic 20240520: version 1,
then the count of uint16 ids after it); Megatron's `.bin` with its `.idx`; `.npy`.
"""

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.build import Job
from data.files import below, expand
from data.say import counted
from data.shards import FORMAT, Manifest, Shard, open_shard, sha256_of_ids
from data.sources import TokensConfig
from data.split import find_cut
from data.tokenizer import Tokenizer

_HEADER_MAGIC = 20240520
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 22


@dataclass(slots=True)
class TokenFile:
    """Where a file's ids lie, and what they are."""

    path: Path
    offset: int
    dtype: str
    tokens: int


def identity(config: TokensConfig) -> dict[str, Any]:
    files = _find(config.path)
    stats = {str(file.absolute()): file.stat() for file in files}
    return {
        "kind": "tokens",
        "files": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
    }


def manifest(job: Job) -> Manifest:
    """The manifest of token files, each hashed and looked through once.

    Files with `val` or `valid` in their name are validation; where there are none, the last
    `val_fraction` of the ids is. Raises ValueError for ids beyond the tokenizer's vocabulary.
    """
    config, tokenizer = job.config, job.tokenizer
    assert isinstance(config, TokensConfig)
    shards = [_shard(inspect_file(path)) for path in _find(config.path)]
    shards = [shard for shard in shards if shard.tokens]
    how: dict[str, Any] = {"method": "files"}
    if config.val_fraction and all(shard.split == "train" for shard in shards):
        at, kind = find_cut(job.building, shards, "<u4", tokenizer, config.val_fraction)
        shards, how = _cut(shards, at), {"method": "tail", "cut_at": kind}
    lengths = tokenizer.token_bytes()
    documents, size = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    for shard in shards:
        ids = open_shard("", shard, "")
        shard.sha256 = sha256_of_ids(ids)
        separators, text = _look_through(ids, shard.file, tokenizer, lengths)
        documents[shard.split] += separators
        size[shard.split] += text
        job.log(
            f"data: {Path(shard.file).name}: {counted(shard.tokens, 'id')} of {shard.dtype} for "
            f"{shard.split}, {counted(separators, 'separator')}"
        )
    return Manifest(
        format=FORMAT,
        dataset=job.name,
        request=job.request,
        tokenizer_name=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        n_vocab=tokenizer.n_vocab,
        eot=tokenizer.eot,
        dtype=shards[0].dtype or "",
        split=how,
        train_documents=documents["train"],
        val_documents=documents["val"],
        train_bytes=size["train"],
        val_bytes=size["val"],
        train_tokens=sum(shard.tokens for shard in shards if shard.split == "train"),
        val_tokens=sum(shard.tokens for shard in shards if shard.split == "val"),
        skipped={},
        repaired={},
        lengths=[],
        weights=[1],
        shards=shards,
    )


def inspect_file(path: Path) -> TokenFile:
    """What kind of token file this is. Raises ValueError for none that is known."""
    if path.suffix == ".npy":
        return _npy(path)
    size = path.stat().st_size
    index = path.with_suffix(".idx")
    if index.is_file():
        return _megatron(path, index)
    with path.open("rb") as file:
        head = np.frombuffer(file.read(1024), "<i4" if size >= 1024 else "u1")
    if size >= 1024 and head[0] == _HEADER_MAGIC:
        if head[1] != 1:
            raise _unknown(path, f"has a header of version {head[1]}, not 1")
        if size != 1024 + 2 * int(head[2]):
            raise _unknown(path, f"should hold {head[2]} ids after its header and does not")
        return TokenFile(path, 1024, "<u2", int(head[2]))
    if size % 2:
        raise _unknown(path, f"has {size} bytes, an odd number, and ids have two")
    return TokenFile(path, 0, "<u2", size // 2)


def _npy(path: Path) -> TokenFile:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                version, np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(file)
            offset = file.tell()
    except (ValueError, EOFError) as e:
        raise _unknown(path, f"is no .npy file ({' '.join(str(e).split())})") from e
    if dtype.kind not in "ui" or len(shape) != 1:
        raise _unknown(path, f"holds {dtype} of shape {shape}, not a row of integers")
    return TokenFile(path, offset, dtype.str, shape[0])


def _megatron(path: Path, index: Path) -> TokenFile:
    raw = index.read_bytes()
    fixed = len(_MEGATRON_MAGIC) + 8 + 1 + 8 + 8
    if not raw.startswith(_MEGATRON_MAGIC) or len(raw) < fixed:
        raise _unknown(index, "does not begin as Megatron's index files do")
    version, code, sequences, _ = struct.unpack_from("<QBQQ", raw, len(_MEGATRON_MAGIC))
    if version != 1 or code not in _MEGATRON_DTYPES or len(raw) < fixed + 12 * sequences:
        raise _unknown(index, f"has version {version}, kind {code} or a length that do not fit")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    lengths = np.frombuffer(raw, "<i4", sequences, fixed).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, fixed + 4 * sequences)
    ends = np.cumsum(lengths) * dtype.itemsize
    if not np.array_equal(pointers, ends - lengths * dtype.itemsize):
        raise _unknown(index, "lists sequences that do not lie one after another")
    tokens = int(lengths.sum())
    if path.stat().st_size != tokens * dtype.itemsize:
        raise _unknown(path, f"does not hold the {tokens} ids that its .idx lists")
    return TokenFile(path, 0, dtype.str, tokens)


def _find(path: str) -> list[Path]:
    asked = Path(path).expanduser()
    if asked.is_file():
        files = [asked]
    else:
        found = below(asked) if asked.is_dir() else expand(asked)
        files = sorted(f for f in found if f.suffix in (".bin", ".npy") and f.is_file())
        files = [f for f in files if f.name != "token_bytes.npy" and not f.name.startswith(".")]
    if not files:
        raise ValueError(
            f"no token files found in data.path={path} (looked for *.bin *.npy); there is nothing "
            "to train on; give a file or a folder that holds ids, or data=text for text"
        )
    return files


def _shard(file: TokenFile) -> Shard:
    return Shard(
        file=str(file.path.absolute()),
        split="val" if "val" in file.path.stem.lower() else "train",
        tokens=file.tokens,
        sha256="",
        offset=file.offset,
        dtype=file.dtype,
    )


def _look_through(
    ids: np.ndarray, name: str, tokenizer: Tokenizer, lengths: np.ndarray
) -> tuple[int, int]:
    """(separators, bytes of text) of some ids."""
    documents = size = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= tokenizer.n_vocab:
            raise ValueError(
                f"{name} holds the id {low if low < 0 else high}, and tokenizer {tokenizer.name} "
                f"has {tokenizer.n_vocab}; its ids are another tokenizer's; name that one with "
                "data.tokenizer"
            )
        documents += int((chunk == tokenizer.eot).sum())
        size += int(lengths[chunk].sum(dtype=np.int64))
    return documents, size


def _cut(shards: list[Shard], at: int) -> list[Shard]:
    """The same ids, those from `at` on as validation."""
    train: list[Shard] = []
    val: list[Shard] = []
    start = 0
    for shard in shards:
        kept = min(max(at - start, 0), shard.tokens)
        start += shard.tokens
        assert shard.offset is not None
        later = shard.offset + kept * np.dtype(shard.dtype).itemsize
        if kept:
            train.append(replace(shard, tokens=kept))
        if kept < shard.tokens:
            val.append(replace(shard, split="val", tokens=shard.tokens - kept, offset=later))
    return train + val


def _unknown(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} {what}; its ids cannot be read; give a .npy, a uint16 .bin, one with a header, or "
        "Megatron's .bin beside its .idx"
    )
