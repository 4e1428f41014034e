"""Text to token shards: python -m data.prepare data=… [key=value]"""

import contextlib
import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.shards import (
    FORMAT,
    Manifest,
    Shard,
    ShardWriter,
    dtype_for,
    load_manifest,
    open_shards,
    save_manifest,
)
from data.sources import DataConfig, dataset_name, describe, documents
from data.tokenizer import Tokenizer, load_tokenizer

Log = Callable[[str], None]
BATCH_CHARS = 1 << 20
MIN_VAL_TOKENS = 1025  # one window of GPT-2's: a split below that measures little
_LOG_SECONDS = 5.0


@dataclass(slots=True)
class Counts:
    documents: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Batch:
    """Documents that are encoded in one call, apart by split."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"train": [], "val": []})
    chars: int = 0


def prepare(config: DataConfig, root: Path, log: Log) -> Path:
    """The folder of shards for `config`, made now or found as it was.

    Shards appear whole or not at all: they are written to a folder beside and renamed. Raises
    ValueError for a source without documents, an unknown tokenizer, and text that `strict` refuses.
    """
    name = dataset_name(config)
    folder = root / "shards" / name
    tokenizer = load_tokenizer(config.tokenizer)
    request = {
        "source": describe(config),
        "tokenizer": tokenizer.sha256,
        "val_fraction": config.val_fraction,
        "split_seed": config.split_seed,
        "shard_tokens": config.shard_tokens,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        changed = _changed(folder, request)
        if changed is None:
            manifest = load_manifest(folder)
            log(
                f"data: {name} is ready: {manifest.train_tokens:,} training and "
                f"{manifest.val_tokens:,} validation tokens in {folder}"
            )
            return folder
        if changed:
            log(f"data: {name} is prepared again, since {changed}")
        building = folder.with_name(f".{name}.building")
        old = folder.with_name(f".{name}.old")
        for stale in (building, old):
            shutil.rmtree(stale, ignore_errors=True)
        building.mkdir()
        _build(config, name, request, tokenizer, building, log)
        if folder.exists():
            folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _changed(folder: Path, request: dict[str, Any]) -> str | None:
    """What keeps the shards in `folder` from being used; "" where there are none; None: nothing."""
    if not folder.exists():
        return ""
    try:
        manifest = load_manifest(folder)
        for split in ("train", "val"):
            open_shards(folder, manifest, split)
    except ValueError as e:
        return str(e)
    changes = list(_differences("", manifest.request, request))
    if not changes:
        return None
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def _differences(key: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            below = f"{key}.{name}" if key else name
            if name not in new:
                yield f"{below} is gone"
            elif name not in old:
                yield f"{below} is new"
            else:
                yield from _differences(below, old[name], new[name])
    elif old != new:
        yield f"{key} changed from {old} to {new}"


def _build(
    config: DataConfig,
    name: str,
    request: dict[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    log: Log,
) -> None:
    log(f"data: preparing {name} with the tokenizer {tokenizer.name}")
    dtype = dtype_for(tokenizer.n_vocab)
    writers = {s: ShardWriter(folder, s, dtype, config.shard_tokens) for s in ("train", "val")}
    counts = {"train": Counts(), "val": Counts()}
    skipped = {"blank": 0}
    began = said = time.monotonic()
    for split, ids in _encoded(config, tokenizer, counts, skipped, log):
        counts[split].tokens += len(ids)
        writers[split].append(ids)
        if time.monotonic() - said > _LOG_SECONDS:
            said = time.monotonic()
            log(f"data: {_progress(counts, said - began)}")
    if not counts["train"].documents + counts["val"].documents:
        raise ValueError(
            f"the source {name} holds no document with any text ({skipped['blank']} blank ones); "
            "there is nothing to train on; give text"
        )
    shards = writers["train"].close() + writers["val"].close()
    log(f"data: {_progress(counts, time.monotonic() - began)}")
    if skipped["blank"]:
        log(f"data: left out {skipped['blank']:,} documents that are empty or blank")
    split_info: dict[str, Any] = {"method": "documents", "seed": config.split_seed}
    reason = _unfit(counts, config.val_fraction)
    if reason:
        log(f"data: choosing validation documents by hash {reason}; the corpus's end is used")
        shards, split_info = _tail(config, tokenizer, folder, counts, shards)
    manifest = Manifest(
        format=FORMAT,
        dataset=name,
        request=request,
        tokenizer_name=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        n_vocab=tokenizer.n_vocab,
        eot=tokenizer.eot,
        dtype=dtype.name,
        split=split_info,
        train_documents=counts["train"].documents,
        val_documents=counts["val"].documents,
        train_bytes=counts["train"].bytes,
        val_bytes=counts["val"].bytes,
        train_tokens=counts["train"].tokens,
        val_tokens=counts["val"].tokens,
        skipped=skipped,
        shards=shards,
    )
    log(f"data: validation is {_say_split(manifest)}")
    tokenizer.save(folder / "tokenizer")
    np.save(folder / "token_bytes.npy", tokenizer.token_bytes(), allow_pickle=False)
    save_manifest(manifest, folder)


def _encoded(
    config: DataConfig,
    tokenizer: Tokenizer,
    counts: dict[str, Counts],
    skipped: dict[str, int],
    log: Log,
) -> Iterator[tuple[str, np.ndarray]]:
    """(split, ids) in the documents' order, whatever the number of threads."""
    n = config.num_proc or os.cpu_count() or 1
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(n) as pool:  # tiktoken frees the GIL: no fork, no copies
        for batch in _batches(config, counts, skipped, log):
            for split, texts in batch.texts.items():
                if texts:
                    waiting.append((split, pool.submit(tokenizer.encode_documents, texts)))
            while len(waiting) > 2 * n + 2:
                split, future = waiting.popleft()
                yield split, future.result()
        for split, future in waiting:
            yield split, future.result()


def _batches(
    config: DataConfig, counts: dict[str, Counts], skipped: dict[str, int], log: Log
) -> Iterator[Batch]:
    batch = Batch()
    for name, text in documents(config, log):
        if not text or text.isspace():
            skipped["blank"] += 1
            continue
        split = split_of(name, config.val_fraction, config.split_seed)
        counts[split].documents += 1
        counts[split].bytes += len(text.encode("utf-8", "replace"))
        batch.texts[split].append(text)
        batch.chars += len(text)
        if batch.chars >= BATCH_CHARS:
            yield batch
            batch = Batch()
    yield batch


def split_of(document: str, val_fraction: float, split_seed: int) -> str:
    """The split of a document: a hash of (split seed, document id) against val_fraction."""
    key = f"{split_seed}:{document}".encode("utf-8", "surrogateescape")
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
    return "val" if draw < val_fraction else "train"


def _unfit(counts: dict[str, Counts], val_fraction: float) -> str:
    """Why the split by documents will not do, or ""."""
    if val_fraction == 0:
        return ""
    total = counts["train"].tokens + counts["val"].tokens
    for split in ("train", "val"):
        if counts[split].tokens < MIN_VAL_TOKENS:
            return f"leaves {counts[split].tokens:,} tokens of {total:,} to {split}"
    share = counts["val"].tokens / total
    if not val_fraction / 2 <= share <= val_fraction * 2:
        return f"gives {share:.2%} instead of {val_fraction:.2%}"
    return ""


def _tail(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    counts: dict[str, Counts],
    shards: list[Shard],
) -> tuple[list[Shard], dict[str, Any]]:
    """Split again: all documents in their order, the last tokens for validation.

    The cut is at the end of a document or a line where one is near. A document that is cut becomes
    two, so that the training part ends with a separator of its own.
    """
    ids = _in_order(config, tokenizer, folder, shards)
    want = max(round(config.val_fraction * len(ids)), min(MIN_VAL_TOKENS, len(ids) // 4), 1)
    target = len(ids) - want
    near = ids[max(1, target - want) : target]
    ends = np.flatnonzero(tokenizer.ends_line()[near])
    documents_end = np.flatnonzero(near == tokenizer.eot)
    cut, at = target, "a token"
    for found, kind in ((ends, "a line's end"), (documents_end, "a document's end")):
        if len(found):
            cut, at = target - len(near) + int(found[-1]) + 1, kind
    lengths = tokenizer.token_bytes()
    shards = []
    for split, part in (("train", ids[:cut]), ("val", ids[cut:])):
        if split == "train" and len(part) and part[-1] != tokenizer.eot:
            part = np.append(part, np.array([tokenizer.eot], part.dtype))
        (folder / f"{split}_00000.npy").unlink(missing_ok=True)
        writer = ShardWriter(folder, split, ids.dtype, config.shard_tokens)
        writer.append(part)
        shards += writer.close()
        counts[split].documents = int((part == tokenizer.eot).sum())
        counts[split].tokens = len(part)
        counts[split].bytes = int(lengths[part].sum())
    return shards, {"method": "tail", "cut_at": at}


def _in_order(
    config: DataConfig, tokenizer: Tokenizer, folder: Path, shards: list[Shard]
) -> np.ndarray:
    parts = [
        ids
        for _, ids in _encoded(
            config, tokenizer, {"train": Counts(), "val": Counts()}, {"blank": 0}, lambda _: None
        )
    ]
    for shard in shards:
        (folder / shard.file).unlink()
    return np.concatenate(parts).astype(dtype_for(tokenizer.n_vocab))


def _progress(counts: dict[str, Counts], seconds: float) -> str:
    train, val = counts["train"], counts["val"]
    size = train.bytes + val.bytes
    return (
        f"{train.documents + val.documents:,} documents, {size / 1e6:,.1f} MB, "
        f"{train.tokens + val.tokens:,} tokens, {size / 1e6 / max(seconds, 1e-9):.1f} MB/s"
    )


def _say_split(manifest: Manifest) -> str:
    if not manifest.val_tokens:
        return "off (data.val_fraction=0)"
    share = manifest.val_tokens / (manifest.val_tokens + manifest.train_tokens)
    how = (
        f"{manifest.val_documents:,} whole documents chosen by hash"
        if manifest.split["method"] == "documents"
        else f"the corpus's end, cut at {manifest.split['cut_at']}"
    )
    return f"{how}: {manifest.val_tokens:,} tokens, {share:.1%} of all"


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One preparation of a folder at a time; a killed one's lock goes with it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Hydra's entry: train.py's configuration, of which `data` and `paths` count."""
    import hydra
    from omegaconf import DictConfig

    from conf.schema import to_config

    @hydra.main(version_base=None, config_path="../conf", config_name="train")
    def run(raw: DictConfig) -> None:
        config = to_config(raw)
        prepare(config.data, Path(config.paths.root), print)

    run()


if __name__ == "__main__":
    main()
