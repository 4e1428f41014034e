"""The documents of a source to shards in a folder, able to go on after a kill."""

import hashlib
import json
import os
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.encode import encode
from data.progress import Progress, load_progress
from data.say import Log, counted
from data.shards import FORMAT, Manifest, Shard, dtype_for
from data.sources import DataConfig, Source, open_source
from data.split import copy_tail, count, drop_tail, find_cut, splitter, unfit, unfit_sizes
from data.tokenizer import Tokenizer

_SAVE_SECONDS = 5.0
_SAY_SECONDS = 5.0
_LIVE_SECONDS = 0.2
_REPAIRS_SAID = 5


@dataclass(slots=True)
class Job:
    """A folder of shards in the making: `name` is the finished folder's, `building` where it is
    written, `progress` the file that tells a later attempt where to go on. `live` shows a line in
    place of its last one, where there is a terminal."""

    config: DataConfig
    name: str
    building: Path
    progress: Path
    request: dict[str, Any]
    tokenizer: Tokenizer
    log: Log
    live: Log | None


def build(job: Job) -> Manifest:
    """Encode every document into shards, choose validation, and say what is there.

    The result is the same byte for byte whatever the threads, and however often it was killed.
    """
    config, log = job.config, job.log
    source = open_source(config, lambda _: None)
    digest = hashlib.sha256(json.dumps(job.request).encode()).hexdigest()
    log(f"data: preparing {job.name} with the tokenizer {job.tokenizer.name}")
    progress = load_progress(job.progress, digest)
    if progress is None:
        sizes = source.sizes()
        why = unfit_sizes(sizes, config.val_fraction, config.split_seed) if sizes else ""
        progress = Progress(request=digest, plan="tail" if why else "documents", why_tail=why)
        _empty(job.building)
    else:
        source.commit = progress.commit  # the ref may have moved: documents of two would mix
        log(f"data: going on after {_say_amount(progress)}")
    progress = _encode_all(job, source, progress)
    if config.part is None and progress.plan == "documents":
        why = unfit(progress.tokens, config.val_fraction)
        if why:  # documents lie apart by split already
            log("data: once more, in one row, since the corpus's end will be the validation text")
            progress = Progress(request=digest, plan="tail", why_tail=why)
            _empty(job.building)
            progress = _encode_all(job, source, progress)
    _say_counts(job, progress)
    if source.commit:  # for the reader: the ref that was asked for moves on
        log(f"data: read commit {source.commit}; data.revision={source.commit} reads it again")
        job.request = {**job.request, "source": {**job.request["source"], "commit": source.commit}}
    return finish(job, progress, cut=config.part is None)


def finish(job: Job, progress: Progress, cut: bool) -> Manifest:
    """The manifest of what was encoded; `cut`: after the validation tail is cut off, if due."""
    tokenizer, folder = job.tokenizer, job.building
    dtype = dtype_for(tokenizer.n_vocab)
    shards = progress.shards["train"] + progress.shards["val"]
    documents, size = dict(progress.documents), dict(progress.bytes)
    split: dict[str, Any] = {"method": progress.plan, "seed": job.config.split_seed}
    if progress.plan == "tail":
        split = {"method": "tail", "because": progress.why_tail}
    if progress.plan == "tail" and cut:
        job.log(f"data: choosing validation by document {progress.why_tail}; the end is cut off")
        train = progress.shards["train"]
        if progress.cut is None:
            place = find_cut(folder, train, dtype.name, tokenizer, job.config.val_fraction)
            progress.val_shards = copy_tail(folder, train, dtype, place[0], job.config.shard_tokens)
            progress.cut = place
            progress.save(job.progress, {})
        assert progress.val_shards is not None
        at, split["cut_at"] = progress.cut
        train = drop_tail(folder, train, dtype, at, tokenizer.eot)
        documents["val"], size["val"] = count(folder, progress.val_shards, dtype.name, tokenizer)
        in_two = tokens_of(train) > at  # a document that is cut gets a second separator
        documents["train"] += in_two - documents["val"]
        size["train"] -= size["val"]
        shards = train + progress.val_shards
    return Manifest(
        format=FORMAT,
        dataset=job.name,
        request=job.request,
        tokenizer_name=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        n_vocab=tokenizer.n_vocab,
        eot=tokenizer.eot,
        dtype=dtype.name,
        split=split,
        train_documents=documents["train"],
        val_documents=documents["val"],
        train_bytes=size["train"],
        val_bytes=size["val"],
        train_tokens=tokens_of([s for s in shards if s.split == "train"]),
        val_tokens=tokens_of([s for s in shards if s.split == "val"]),
        skipped=progress.skipped,
        repaired=progress.repaired,
        lengths=progress.lengths,
        weights=[1],
        shards=shards,
    )


def tokens_of(shards: list[Shard]) -> int:
    return sum(shard.tokens for shard in shards)


def _encode_all(job: Job, source: Source, progress: Progress) -> Progress:
    if progress.encoded:
        return progress
    config, log = job.config, job.log
    dtype = dtype_for(job.tokenizer.n_vocab)
    try:
        writers = progress.writers(job.building, dtype, config.shard_tokens)
    except ValueError as e:  # the word of progress is there, what it speaks of is not
        log(f"data: starting over, since {e}")
        progress = Progress(
            request=progress.request, plan=progress.plan, why_tail=progress.why_tail
        )
        _empty(job.building)
        writers = progress.writers(job.building, dtype, config.shard_tokens)

    split = splitter(config.val_fraction, config.split_seed)
    if progress.plan == "tail":
        split = lambda _: "train"  # noqa: E731
    start, end = _part(config, source)
    pieces = source.pieces(max(progress.position, (start, 0)), end)
    threads = config.num_proc or os.cpu_count() or 1
    began = said = saved = time.monotonic()
    already = sum(progress.bytes.values())
    say, every = (job.live, _LIVE_SECONDS) if job.live else (log, _SAY_SECONDS)
    batches = encode(pieces, job.tokenizer, split, threads, config.strict)
    with writers["train"], writers["val"], closing(batches):
        for encoded in batches:
            _say_repairs(progress, encoded.batch.repaired, log)
            for name, ids in encoded.ids.items():
                writers[name].append(ids)
            progress.add(encoded)
            progress.commit = source.commit
            now = time.monotonic()
            if now - saved > _SAVE_SECONDS:
                progress.save(job.progress, writers)
                saved = now
            if now - said > every:
                say(_say_progress(progress, source, already, now - began))
                said = now
        for writer in writers.values():
            writer.close()
        progress.encoded = True
        progress.save(job.progress, writers)
    size = sum(progress.bytes.values())
    seconds = max(time.monotonic() - began, 1e-9)
    log(
        f"data: {_say_amount(progress)} in {seconds:.1f} s "
        f"({(size - already) / 1e6 / seconds:.1f} MB/s)"
    )
    return progress


def _part(config: DataConfig, source: Source) -> tuple[int, int | None]:
    """The units (first, end) that this configuration is to prepare."""
    if config.part is None:
        return 0, None
    if source.units is None:
        raise ValueError(
            "a streaming data set has no known length; it cannot be prepared in parts; set "
            "data.streaming=false"
        )
    i, n = (int(number) for number in config.part.split("/"))
    if n > source.units:
        raise ValueError(
            f"data.part={config.part}, and the source has {source.units} files or blocks of rows; "
            "some parts would be empty; use fewer parts"
        )
    return source.units * (i - 1) // n, source.units * i // n


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _say_progress(progress: Progress, source: Source, already: int, seconds: float) -> str:
    size = sum(progress.bytes.values())
    rate = (size - already) / seconds
    done = source.done(progress.position, size)
    bar = ""
    if done:
        minutes, left = divmod(round(size * (1 - done) / done / max(rate, 1.0)), 60)
        full = round(20 * done)
        bar = f"[{'#' * full}{'.' * (20 - full)}] {done:.0%}, {minutes} min {left:02} s left, "
    return f"data: {bar}{rate / 1e6:.1f} MB/s, {_say_amount(progress)}"


def _say_amount(progress: Progress) -> str:
    documents, tokens = sum(progress.documents.values()), sum(progress.tokens.values())
    size = sum(progress.bytes.values()) / 1e6
    return f"{counted(documents, 'document')}, {size:,.1f} MB, {counted(tokens, 'token')}"


def _say_repairs(progress: Progress, repaired: list[tuple[str, str]], log: Log) -> None:
    before = sum(progress.repaired.values())
    for document, reason in repaired[: max(0, _REPAIRS_SAID - before)]:
        log(f"data: warning: {document} is repaired with U+FFFD ({reason})")


def _say_counts(job: Job, progress: Progress) -> None:
    if not sum(progress.documents.values()) and job.config.part is None:
        raise ValueError(
            f"the source {job.name} holds no document with any text "
            f"({progress.skipped.get('blank', 0):,} blank); there is nothing to train on; "
            "give text"
        )
    for reason, number in progress.skipped.items():
        job.log(f"data: left out {counted(number, 'document')} without any text ({reason})")
    for reason, number in progress.repaired.items():
        job.log(f"data: warning: repaired {counted(number, 'document')} ({reason})")
