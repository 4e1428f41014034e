"""Text to token shards: python -m data.prepare data=… [key=value]"""

import contextlib
import errno
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data import mix, parts, token_files
from data.build import Job, build
from data.shards import FORMAT, Manifest, load_manifest, open_shards, save_manifest, verify_shards
from data.sources import DataConfig, MixConfig, TokensConfig, dataset_name, open_source
from data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from conf.schema import Config

Log = Callable[[str], None]


def prepare(config: DataConfig, root: Path, log: Log) -> Path:
    """The folder of shards for `config`, made now or found as it was.

    Shards appear whole or not at all: they are written to a folder beside and renamed. A killed
    preparation goes on where it was. Raises ValueError for a source without documents, an unknown
    tokenizer, text that `strict` refuses, and a full disk.
    """
    name = dataset_name(config)
    folder = root / "shards" / name
    tokenizer = load_tokenizer(config.tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        if config.part == "merge":
            return _made(config, folder, parts.request(folder), tokenizer, log)
        if config.part is not None:
            i, n = config.part.split("/")
            folder = parts.folder_of(folder, int(i), int(n))
            folder.parent.mkdir(exist_ok=True)
        return _made(config, folder, _request(config, root, tokenizer, log), tokenizer, log)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(
            f"the disk of {folder.parent} is full; the shards are not whole; make room and run "
            "this again: it goes on where it was"
        ) from e


def _request(config: DataConfig, root: Path, tokenizer: Tokenizer, log: Log) -> dict[str, Any]:
    """What was asked for: shards of an equal request are the same shards."""
    if isinstance(config, TokensConfig):
        source = token_files.identity(config)
    elif isinstance(config, MixConfig):
        source = mix.identity(config, root)
    else:
        source = open_source(config, log).identity
    request = {
        "format": FORMAT,
        "source": source,
        "tokenizer": tokenizer.sha256,
        "val_fraction": config.val_fraction,
        "split_seed": config.split_seed,
        "shard_tokens": config.shard_tokens,
    }
    if config.part is not None:
        request["part"] = config.part
    return request


def _make(job: Job) -> Manifest:
    if job.config.part == "merge":
        return parts.merge(job)
    if isinstance(job.config, TokensConfig):
        return token_files.manifest(job)
    if isinstance(job.config, MixConfig):
        return mix.manifest(job)
    return build(job)


def _made(
    config: DataConfig, folder: Path, request: dict[str, Any], tokenizer: Tokenizer, log: Log
) -> Path:
    """`folder` as it is where it answers the request, else made beside and renamed."""
    with _lock(folder):
        changed = _changed(folder, request, config)
        if changed is None:
            manifest = load_manifest(folder)
            log(
                f"data: {folder.name} is ready: {manifest.train_tokens:,} training and "
                f"{manifest.val_tokens:,} validation tokens in {folder}, "
                f"fingerprint {manifest.fingerprint[:12]}"
            )
            return folder
        if changed:
            log(f"data: {folder.name} is prepared again, since {changed}")
        building = folder.with_name(f".{folder.name}.building")
        progress = folder.with_name(f".{folder.name}.progress")
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if not progress.exists():
            shutil.rmtree(building, ignore_errors=True)
        building.mkdir(exist_ok=True)
        job = Job(config, folder.name, building, progress, request, tokenizer, log)
        manifest = _make(job)
        tokenizer.save(building / "tokenizer")
        np.save(building / "token_bytes.npy", tokenizer.token_bytes(), allow_pickle=False)
        save_manifest(manifest, building)
        log(f"data: validation is {_say_split(manifest)}")
        log(
            f"data: done: {manifest.kept:,} documents, {manifest.train_tokens:,} training and "
            f"{manifest.val_tokens:,} validation tokens, {len(manifest.shards)} shards in {folder}"
        )
        if folder.exists():
            folder.rename(old)
        building.rename(folder)
        progress.unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _changed(folder: Path, request: dict[str, Any], config: DataConfig) -> str | None:
    """What keeps the shards in `folder` from being used; "" where there are none; None: nothing."""
    if not folder.exists():
        return ""
    try:
        manifest = load_manifest(folder)
        for split in ("train", "val"):
            open_shards(folder, manifest, split)
        if config.verify:
            verify_shards(folder, manifest)
    except ValueError as e:
        return str(e)
    changes = list(_differences("", manifest.request, request))
    if config.strict and manifest.repaired:
        changes.append(f"data.strict forbids its repairs ({manifest.repaired})")
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


def _say_split(manifest: Manifest) -> str:
    if not manifest.val_tokens:
        return "off (no validation text)"
    share = manifest.val_tokens / (manifest.val_tokens + manifest.train_tokens)
    how = {
        "documents": f"{manifest.val_documents:,} whole documents chosen by hash",
        "tail": f"the corpus's end, cut at {manifest.split.get('cut_at')}",
        "files": "in files of its own",
        "mix": "that of every source",
    }[manifest.split["method"]]
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


def main(argv: list[str]) -> int:
    """The command: train.py's configuration, of which `data` and `paths` count."""
    from conf.cli import compose_and_run

    def run(config: "Config", overrides: list[str]) -> int:
        prepare(config.data, Path(config.paths.root), lambda line: print(line, flush=True))
        return 0

    try:
        return compose_and_run(run, argv)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        where = e.filename or "a file"
        print(
            f"error: {where}: {e.strerror or e}; the shards are not whole; mend the path, its "
            "rights or the disk's room, and run this again",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
