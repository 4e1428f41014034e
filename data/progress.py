"""How far a preparation has come: what a killed one goes on from."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.encode import SPLITS, Encoded
from data.shards import SHARD_NAME, Shard, ShardWriter


def _zeros() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclass(kw_only=True, slots=True)
class Progress:
    """Counts of everything up to `position`, and the state of the shards that hold it.

    `request` (a hash of it) and `plan` (documents, or tail) say of which preparation. `commit` is
    what of the hub it was begun with, where the hub told. `cut` is the token where the validation
    tail begins, once it is known, and `val_shards` hold it.
    """

    request: str
    plan: str
    why_tail: str = ""
    commit: str | None = None
    position: tuple[int, int] = (0, 0)
    documents: dict[str, int] = field(default_factory=_zeros)
    bytes: dict[str, int] = field(default_factory=_zeros)
    tokens: dict[str, int] = field(default_factory=_zeros)
    skipped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=lambda: [0] * 40)
    open_document: dict[str, int] = field(default_factory=_zeros)  # tokens since a separator
    shards: dict[str, list[Shard]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    open_tokens: dict[str, int] = field(default_factory=_zeros)
    encoded: bool = False
    cut: tuple[int, str] | None = None
    val_shards: list[Shard] | None = None

    def add(self, encoded: Encoded) -> None:
        batch = encoded.batch
        if batch.position:
            self.position = batch.position
        for split in SPLITS:
            self.documents[split] += batch.documents[split]
            self.bytes[split] += encoded.bytes[split]
            self.tokens[split] += len(encoded.ids[split])
            lengths = encoded.lengths[split]
            carried = self.open_document[split]
            self.open_document[split] += len(encoded.ids[split]) - int(lengths.sum())
            if len(lengths):
                self.open_document[split] -= carried
                lengths[0] += carried
                counts = np.bincount(np.log2(lengths).astype(int), minlength=40)
                self.lengths = [a + int(b) for a, b in zip(self.lengths, counts, strict=True)]
        for reason, count in batch.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        for _, reason in batch.repaired:
            kind = reason.split(" at ")[0]
            self.repaired[kind] = self.repaired.get(kind, 0) + 1

    def writers(
        self, folder: Path, dtype: np.dtype[Any], shard_tokens: int
    ) -> dict[str, ShardWriter]:
        return {
            split: ShardWriter(
                folder, split, dtype, shard_tokens, self.shards[split], self.open_tokens[split]
            )
            for split in SPLITS
        }

    def save(self, path: Path, writers: dict[str, ShardWriter]) -> None:
        """Make this the point to go on from: first the ids reach the disk, then the word of it."""
        for split, writer in writers.items():
            writer.sync()
            self.shards[split] = list(writer.shards)
            self.open_tokens[split] = writer.open_tokens
        new = path.with_name(f"{path.name}.new")
        with new.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def load_progress(path: Path, request: str) -> Progress | None:
    """The progress of an interrupted preparation of this very request, or None."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["request"] != request:
            return None
        for split in SPLITS:
            raw["shards"][split] = [Shard(**shard) for shard in raw["shards"][split]]
        if raw["val_shards"] is not None:
            raw["val_shards"] = [Shard(**shard) for shard in raw["val_shards"]]
        shards = [*raw["shards"]["train"], *raw["shards"]["val"], *(raw["val_shards"] or ())]
        if not all(SHARD_NAME.fullmatch(shard.file) for shard in shards):
            return None  # they are cut and deleted by these names
        raw["position"] = tuple(raw["position"])
        return Progress(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
