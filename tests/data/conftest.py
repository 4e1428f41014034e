"""Small corpora and shards for the data tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.shards import FORMAT, Manifest, ShardWriter, save_manifest
from data.sources import TextConfig

COMMON: dict[str, Any] = {
    "tokenizer": "gpt2",
    "val_fraction": 0.1,
    "split_seed": 1,
    "stride": None,
    "document_mask": False,
    "part": None,
    "verify": False,
    "strict": False,
    "num_proc": 2,
    "shard_tokens": 1_000_000,
}


def text_config(path: Path | str, **changes: Any) -> TextConfig:
    return TextConfig(**COMMON | {"path": str(path), "text_field": None} | changes)


def write_shards(
    folder: Path, train: np.ndarray, val: np.ndarray, shard_tokens: int = 1_000_000, **changes: Any
) -> Path:
    """Shards that hold exactly these ids, with no text behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2")
    shards = []
    for split, ids in (("train", train), ("val", val)):
        writer = ShardWriter(folder, split, dtype, shard_tokens)
        writer.append(ids)
        shards += writer.close()
    values: dict[str, Any] = {
        "format": FORMAT,
        "dataset": "made",
        "request": {},
        "tokenizer_name": "gpt2",
        "tokenizer_sha256": "0" * 64,
        "n_vocab": 50257,
        "eot": 50256,
        "dtype": dtype.name,
        "split": {"method": "documents", "seed": 1},
        "train_documents": 1,
        "val_documents": 1,
        "train_bytes": 0,
        "val_bytes": 0,
        "train_tokens": len(train),
        "val_tokens": len(val),
        "skipped": {},
        "repaired": {},
        "lengths": [],
        "weights": [1],
        "shards": shards,
    }
    save_manifest(Manifest(**values | changes), folder)
    return folder


def ramp(n: int) -> np.ndarray:
    """t[i] = i mod 50257: a window shows its own offset."""
    return np.arange(n, dtype=np.int64) % 50257


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(said: list[str]) -> Callable[[str], None]:
    return said.append
