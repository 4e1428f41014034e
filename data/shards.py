"""Token shards: `.npy` arrays of ids beside a `manifest.json` that says what they are."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

from data.say import counted

FORMAT = 2
MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"(train|val)_[0-9]{5,}\.npy")
HEADER = 128  # bytes before the ids of an .npy file
_CHECKED_AT_START = 1 << 24  # ids of a split that are looked at before training begins


@dataclass(kw_only=True, slots=True)
class Shard:
    """One array of ids. Where `offset` is set the ids lie there in the file, a token file of
    another maker; `sha256` is then the hash of the ids. `dtype`: theirs, if not the manifest's."""

    file: str
    split: str
    tokens: int
    sha256: str
    stream: int = 0
    offset: int | None = None
    dtype: str | None = None


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What a folder of shards holds. `request` is what was asked for, and decides reuse.

    `split` says how validation was chosen; `skipped` and `repaired` count documents by reason;
    `lengths[k]` documents have 2^k to 2^(k+1) - 1 tokens, separator included. `weights` are the
    windows that each stream of a mixture has in a period; [1] where there is one stream.
    """

    format: int
    dataset: str
    request: dict[str, Any]
    tokenizer_name: str
    tokenizer_sha256: str
    n_vocab: int
    eot: int
    dtype: str
    split: dict[str, Any]
    train_documents: int
    val_documents: int
    train_bytes: int
    val_bytes: int
    train_tokens: int
    val_tokens: int
    skipped: dict[str, int]
    repaired: dict[str, int]
    lengths: list[int]
    weights: list[int]
    shards: list[Shard]

    @property
    def fingerprint(self) -> str:
        """Hash of what training sees: every shard's sum, and the tokenizer's."""
        digest = hashlib.sha256(self.tokenizer_sha256.encode())
        for shard in self.shards:
            digest.update(f"\n{shard.split} {shard.tokens} {shard.sha256}".encode())
            if len(self.weights) > 1:
                digest.update(f" {shard.stream}/{self.weights}".encode())
        return digest.hexdigest()

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    @property
    def kept(self) -> int:
        return self.train_documents + self.val_documents


class ShardWriter:
    """Writes one split's ids into shards of `shard_tokens`, the last one shorter.

    `done` and `open_tokens` take up an earlier writer's work: what lies beyond them is dropped.
    Raises ValueError where less than that is there.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        done: Sequence[Shard] = (),
        open_tokens: int = 0,
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards = list(done)
        self.open_tokens = open_tokens
        self._file: BufferedRandom | None = None
        for path in sorted(folder.glob(f"{split}_*.npy"))[len(self.shards) + bool(open_tokens) :]:
            path.unlink()
        if open_tokens:
            self._file = _reopen(self._path(), HEADER + open_tokens * dtype.itemsize)

    def append(self, ids: np.ndarray) -> None:
        """Write `ids`, any integers that fit the dtype: [n]."""
        while len(ids):
            if self._file is None:
                self._file = self._path().open("wb+")
                self._header()
            part = ids[: self.shard_tokens - self.open_tokens]
            self._file.write(part.astype(self.dtype, casting="unsafe").data)
            self.open_tokens += len(part)
            ids = ids[len(part) :]
            if self.open_tokens == self.shard_tokens:
                self._close_shard()

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> list[Shard]:
        """Finish the last shard."""
        if self._file is not None:
            self._close_shard()
        return self.shards

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:  # left by an error: what is there may be gone on from
            self._file.close()

    def _path(self) -> Path:
        return self.folder / f"{self.split}_{len(self.shards):05d}.npy"

    def _header(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        write_header(self._file, self.dtype, self.open_tokens)

    def _close_shard(self) -> None:
        assert self._file is not None
        self._header()
        self.sync()
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._file.close()
        name = self._path().name
        self.shards.append(
            Shard(file=name, split=self.split, tokens=self.open_tokens, sha256=sha256)
        )
        self._file, self.open_tokens = None, 0


def write_header(file: BufferedRandom, dtype: np.dtype[Any], tokens: int) -> None:
    """NumPy's header of an array of so many ids. It leaves room for growth, so its size stays."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == HEADER


def _reopen(path: Path, size: int) -> BufferedRandom:
    if not path.is_file() or path.stat().st_size < size:
        raise ValueError(f"{path} is shorter than the {size} bytes that were written to it")
    file = path.open("rb+")
    file.truncate(size)
    file.seek(size)
    return file


def dtype_for(n_vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def save_manifest(manifest: Manifest, folder: Path) -> None:
    path = folder / MANIFEST
    with path.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def load_manifest(folder: str | Path) -> Manifest:
    """The manifest of a folder of shards.

    ValueError where there is none, it is not whole, or it names a file that is neither a shard
    beside it nor one of the token files or sources that it was asked for.
    """
    manifest = _read_manifest(Path(folder))
    known = set(_files_elsewhere(manifest, Path(folder)))
    for shard in manifest.shards:
        if not SHARD_NAME.fullmatch(shard.file) and shard.file not in known:
            raise ValueError(
                f"{Path(folder) / MANIFEST} names the file {shard.file!r}, which is no shard of "
                "its own; it could be any file of this machine; delete the folder and prepare it "
                "again"
            )
    return manifest


def _files_elsewhere(manifest: Manifest, folder: Path) -> Iterator[str]:
    """The files outside its folder that a manifest may speak of."""
    source = manifest.request.get("source", {})
    try:
        if source.get("kind") == "tokens":
            yield from source["files"]
        elif source.get("kind") == "mix":
            for below, _, _ in source["sources"].values():
                part = _read_manifest(Path(below))
                own = set(part.request.get("source", {}).get("files", ()))
                for shard in part.shards:
                    if SHARD_NAME.fullmatch(shard.file) or shard.file in own:
                        yield str((Path(below) / shard.file).absolute())
    except (KeyError, TypeError, AttributeError) as e:
        raise _no_manifest(folder, e) from e


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {MANIFEST}; these are no prepared shards; run python -m "
            "data.prepare, or correct the path"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {raw['format']}, this version reads {FORMAT}; the shards "
                "cannot be used; prepare them again"
            )
        return Manifest(**raw | {"shards": [Shard(**shard) for shard in raw["shards"]]})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise _no_manifest(folder, e) from e


def _no_manifest(folder: Path, e: Exception) -> ValueError:
    return ValueError(
        f"{folder / MANIFEST} is damaged ({type(e).__name__}: {e}); the shards cannot be trusted; "
        "delete the folder and prepare it again"
    )


def open_shards(folder: str | Path, manifest: Manifest, split: str) -> list[np.ndarray]:
    """The split's shards, memory-mapped: arrays [tokens]. ValueError where one is not as said."""
    return [open_shard(folder, shard, manifest.dtype) for shard in manifest.of(split)]


def open_shard(folder: str | Path, shard: Shard, dtype: str) -> np.ndarray:
    path = Path(folder) / shard.file
    try:
        if shard.offset is not None:
            mapped = np.memmap(path, np.dtype(shard.dtype), "r", shard.offset, (shard.tokens,))
            return np.asarray(mapped)
        mapped = np.lib.format.open_memmap(path, mode="r")  # not np.load, which opens zips too
    except (OSError, ValueError, EOFError) as e:
        raise _damaged(path, f"cannot be read ({' '.join(str(e).split())})") from e
    dtype = shard.dtype or dtype
    if mapped.dtype != np.dtype(dtype) or mapped.shape != (shard.tokens,):
        what = f"holds {mapped.dtype} {mapped.shape}, not {dtype} ({shard.tokens},)"
        raise _damaged(path, what)
    return np.asarray(mapped)  # a plain view: slicing a memmap object is slow


def verify_shards(folder: str | Path, manifest: Manifest) -> None:
    """Hash every shard again. ValueError for the first that is not what it was."""
    for shard in manifest.shards:
        path = Path(folder) / shard.file
        if shard.offset is None:
            sha256 = sha256_of(path)
        else:
            sha256 = sha256_of_ids(open_shard(folder, shard, manifest.dtype))
        if sha256 != shard.sha256:
            raise _damaged(path, "has another sha256 than when it was prepared")


def sha256_of_ids(ids: np.ndarray) -> str:
    """The hash of ids that lie within a file."""
    digest = hashlib.sha256()
    for start in range(0, len(ids), 1 << 22):
        digest.update(ids[start : start + (1 << 22)].data)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise _damaged(path, f"cannot be read ({e})") from e


def check_ids(arrays: list[np.ndarray], n_vocab: int, what: str) -> None:
    """ValueError where an id is no token. Samples a big split."""
    total = sum(len(array) for array in arrays)
    block = 1 << 12
    every = max(1, total // _CHECKED_AT_START) * block
    for array in arrays:
        starts = [*range(0, len(array), every), max(0, len(array) - block)]
        largest = max(int(array[at : at + block].max()) for at in starts)
        if largest >= n_vocab:
            raise ValueError(
                f"the {what} shards hold token id {largest}, beyond the vocabulary of {n_vocab}; "
                "they were made with another tokenizer; prepare them again"
            )


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} {what}; it was altered or cut short; delete its folder and prepare it again"
    )


def say_split(manifest: Manifest) -> str:
    """How validation was chosen and how much it is."""
    if not manifest.val_tokens:
        return "off (no validation text)"
    share = manifest.val_tokens / (manifest.val_tokens + manifest.train_tokens)
    how = {
        "documents": f"{counted(manifest.val_documents, 'whole document')} chosen by hash",
        "tail": f"the corpus's end, cut at {manifest.split.get('cut_at')}",
        "files": "in files of its own",
        "mix": "that of every source",
    }[manifest.split["method"]]
    return f"{how}: {counted(manifest.val_tokens, 'token')}, {share:.1%} of all"
