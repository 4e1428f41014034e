"""Token shards: `.npy` arrays of ids beside a `manifest.json` that says what they are."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
_CHECKED_AT_START = 1 << 24  # ids of a split that are looked at before training begins


@dataclass(kw_only=True, slots=True)
class Shard:
    file: str
    split: str
    tokens: int
    sha256: str


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What a folder of shards holds. `request` is what was asked for, and decides reuse.

    `split` says how validation was chosen; `skipped` counts documents left out, by reason.
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
    shards: list[Shard]

    @property
    def fingerprint(self) -> str:
        """Hash of what training sees: every shard's sum, and the tokenizer's."""
        digest = hashlib.sha256(self.tokenizer_sha256.encode())
        for shard in self.shards:
            digest.update(f"\n{shard.split} {shard.tokens} {shard.sha256}".encode())
        return digest.hexdigest()

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]


class ShardWriter:
    """Writes one split's ids into shards of `shard_tokens`, the last one shorter."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[Shard] = []
        self._file: BufferedRandom | None = None
        self._tokens = 0  # in the open shard

    def append(self, ids: np.ndarray) -> None:
        """Write `ids`, any integers that fit the dtype: [n]."""
        while len(ids):
            if self._file is None:
                self._file = self._path().open("wb+")
                self._header()
            part = ids[: self.shard_tokens - self._tokens]
            self._file.write(part.astype(self.dtype, casting="unsafe").data)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self.shard_tokens:
                self._close_shard()

    def close(self) -> list[Shard]:
        if self._file is not None:
            self._close_shard()
        return self.shards

    def _path(self) -> Path:
        return self.folder / f"{self.split}_{len(self.shards):05d}.npy"

    def _header(self) -> None:
        # NumPy leaves room in the header for the first axis to grow, so its size stays
        assert self._file is not None
        self._file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self._tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def _close_shard(self) -> None:
        assert self._file is not None
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._file.close()
        name = self._path().name
        self.shards.append(Shard(file=name, split=self.split, tokens=self._tokens, sha256=sha256))
        self._file, self._tokens = None, 0


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
    """The manifest of a folder of shards. ValueError where there is none, or it is not whole."""
    path = Path(folder) / MANIFEST
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
        raise ValueError(
            f"{path} is damaged ({type(e).__name__}: {e}); the shards cannot be trusted; "
            "delete the folder and prepare it again"
        ) from e


def open_shards(folder: str | Path, manifest: Manifest, split: str) -> list[np.ndarray]:
    """The split's shards, memory-mapped: arrays [tokens]. ValueError where one is not as said."""
    arrays = []
    for shard in manifest.of(split):
        path = Path(folder) / shard.file
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise _damaged(path, f"cannot be read ({e})") from e
        if mapped.dtype != np.dtype(manifest.dtype) or mapped.shape != (shard.tokens,):
            raise _damaged(
                path,
                f"holds {mapped.dtype} {mapped.shape}, not {manifest.dtype} ({shard.tokens},)",
            )
        arrays.append(np.asarray(mapped))  # a plain view: slicing a memmap object is slow
    return arrays


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
