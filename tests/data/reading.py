"""Reading prepared shards back, for tests."""

from pathlib import Path

import numpy as np

from data.shards import load_manifest
from data.tokenizer import Tokenizer, load_tokenizer


def stream(folder: Path, split: str) -> list[int]:
    manifest = load_manifest(folder)
    parts = [np.load(folder / s.file, allow_pickle=False) for s in manifest.of(split)]
    return np.concatenate(parts).tolist() if parts else []


def texts_of(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """The documents of a stream, split at the separator that ends each."""
    assert ids[-1] == tokenizer.eot
    documents, start = [], 0
    for end in [i for i, token in enumerate(ids) if token == tokenizer.eot]:
        documents.append(tokenizer.decode(ids[start:end]))
        start = end + 1
    return documents


def training_texts(folder: Path) -> list[str]:
    return texts_of(stream(folder, "train"), load_tokenizer(folder / "tokenizer"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, for comparing two byte for byte."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
