"""Text to token shards: python -m data.prepare data=… [key=value]"""

import errno
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data import mix, parts, token_files
from data.build import Job, build
from data.lock import lock
from data.say import Log, counted, file_state, terminal
from data.shards import (
    FORMAT,
    Manifest,
    load_manifest,
    open_shards,
    save_manifest,
    say_split,
    verify_shards,
)
from data.sources import DataConfig, MixConfig, TokensConfig, dataset_name, open_source
from data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from conf.schema import Config


def prepare(config: DataConfig, root: Path, log: Log, live: Log | None = None) -> Path:
    """The folder of shards for `config`, made now or found as it was.

    `log` gets lines; `live`, where given, those of progress, each to be shown in place of the last.
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
            return _made(config, folder, parts.request(folder), tokenizer, log, live)
        if config.part is not None:
            i, n = config.part.split("/")
            folder = parts.folder_of(folder, int(i), int(n))
            folder.parent.mkdir(exist_ok=True)
        request = _request(config, root, tokenizer, log)
        return _made(config, folder, request, tokenizer, log, live)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(
            f"the disk of {folder.parent} is full; the shards are not whole; make room and run "
            "this again: it goes on where it was"
        ) from e


@dataclass(slots=True)
class Standing:
    """What lies there before anything is prepared.

    `fingerprint` is None where there are no whole shards. `changed` says what keeps them from
    being used as they are, "" if nothing does; `surely` whether ids made anew must be others: not
    where a file of the same size has another time, or shards are only to be verified.
    """

    fingerprint: str | None
    changed: str
    surely: bool


def standing(config: DataConfig, root: Path) -> Standing:
    """How the shards of `config` stand, with no work done but looking at the source's files.

    Raises ValueError for a source without documents and an unknown tokenizer.
    """
    folder = root / "shards" / dataset_name(config)
    try:
        manifest = load_manifest(folder)
    except ValueError as e:
        return Standing(None, str(e), False)
    request = _request(config, root, load_tokenizer(config.tokenizer), lambda _: None)
    changes = list(_differences("", manifest.request, request))
    surely = any(sure for _, sure in changes)
    return Standing(manifest.fingerprint, _listed(said for said, _ in changes), surely)


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
    config: DataConfig,
    folder: Path,
    request: dict[str, Any],
    tokenizer: Tokenizer,
    log: Log,
    live: Log | None,
) -> Path:
    """`folder` as it is where it answers the request, else made beside and renamed."""

    def wait() -> None:
        log(f"data: {folder.name} is being prepared by another process: waiting for it")

    with lock(folder.with_name(f".{folder.name}.lock"), wait):
        changed = _changed(folder, request, config)
        if changed is None:
            manifest = load_manifest(folder)
            log(f"data: {folder.name} is ready: {_say_shards(manifest, folder)}")
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
        job = Job(config, folder.name, building, progress, request, tokenizer, log, live)
        manifest = _make(job)
        tokenizer.save(building / "tokenizer")
        np.save(building / "token_bytes.npy", tokenizer.token_bytes(), allow_pickle=False)
        save_manifest(manifest, building)
        log(f"data: validation is {say_split(manifest)}")
        documents = counted(manifest.kept, "document")
        log(f"data: done: {documents}, {_say_shards(manifest, folder)}")
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
    changes = [said for said, _ in _differences("", manifest.request, request)]
    if config.strict and manifest.repaired:
        changes.append(f"data.strict forbids its repairs ({manifest.repaired})")
    return _listed(changes) or None


def _listed(changes: Iterable[str]) -> str:
    changes = list(changes)
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, bool]]:
    """(what changed, whether other ids must come of it)."""
    name = key.removeprefix("source.").removeprefix("files.")
    if isinstance(old, dict) and isinstance(new, dict):
        for part in [*old, *(part for part in new if part not in old)]:
            if f"{key}.{part}" == "source.commit":  # known only where the hub was read
                continue
            yield from _differences(f"{key}.{part}" if key else part, old.get(part), new.get(part))
    elif new is None and old is not None:
        yield f"{name} is gone", True
    elif old is None and new is not None:
        yield f"{name} is new", True
    elif old != new:
        of_a_file = isinstance(old, list) and isinstance(new, list)
        touched = of_a_file and len(old) == 2 and old[0] == new[0]
        yield f"{name} changed from {file_state(old)} to {file_state(new)}", not touched


def _say_shards(manifest: Manifest, folder: Path) -> str:
    train, val = manifest.train_tokens, manifest.val_tokens
    return (
        f"{train:,} training and {counted(val, 'validation token')}, "
        f"{counted(len(manifest.shards), 'shard')} in {folder}, "
        f"fingerprint {manifest.fingerprint[:12]}"
    )


def main(argv: list[str]) -> int:
    """The command: train.py's configuration, of which `data` and `paths` count."""
    from conf.cli import compose_and_run

    def run(config: "Config", overrides: list[str]) -> int:
        with terminal() as (log, live):
            prepare(config.data, Path(config.paths.root), log, live)
        return 0

    return compose_and_run(run, argv)


if __name__ == "__main__":
    from conf.door import door

    door(main, "the shards are not whole")
