"""Several machines prepare parts of one corpus (data.part=i/n); data.part=merge joins them."""

import re
from pathlib import Path
from typing import Any

from data.build import Job, finish
from data.progress import Progress
from data.say import counted
from data.shards import Manifest, ShardWriter, dtype_for, load_manifest, open_shard, verify_shards
from data.split import unfit


def folder_of(dataset: Path, i: int, n: int) -> Path:
    return dataset.with_name(f"{dataset.name}.parts") / f"{i}-of-{n}"


def request(dataset: Path) -> dict[str, Any]:
    """The request that all parts of a corpus answer together. ValueError where one is missing."""
    parts = _load(dataset)
    requests = [{k: v for k, v in part.request.items() if k != "part"} for _, part in parts]
    for (folder, _), other in zip(parts, requests, strict=True):
        if other != requests[0]:
            raise ValueError(
                f"part {folder} was prepared from another source or with other settings than "
                f"{parts[0][0]}; they do not belong together; prepare it again"
            )
    return requests[0]


def merge(job: Job) -> Manifest:
    """One folder of shards from all parts, equal to what one machine would have made.

    Raises ValueError for a part that is missing, altered, or of another request.
    """
    config, log = job.config, job.log
    parts = _load(job.building.with_name(job.name))
    first = parts[0][1].split
    progress = Progress(request="", plan=first["method"], why_tail=first.get("because", ""))
    dtype = dtype_for(job.tokenizer.n_vocab)
    writers = {
        split: ShardWriter(job.building, split, dtype, config.shard_tokens)
        for split in ("train", "val")
    }
    with writers["train"], writers["val"]:
        for part_folder, part in parts:
            verify_shards(part_folder, part)
            for shard in part.shards:
                writers[shard.split].append(open_shard(part_folder, shard, part.dtype))
            for split, documents, size, tokens in (
                ("train", part.train_documents, part.train_bytes, part.train_tokens),
                ("val", part.val_documents, part.val_bytes, part.val_tokens),
            ):
                progress.documents[split] += documents
                progress.bytes[split] += size
                progress.tokens[split] += tokens
            progress.lengths = [a + b for a, b in zip(progress.lengths, part.lengths, strict=True)]
            for mine, theirs in (
                (progress.skipped, part.skipped),
                (progress.repaired, part.repaired),
            ):
                for reason, number in theirs.items():
                    mine[reason] = mine.get(reason, 0) + number
            log(f"data: part {part_folder.name} is whole: {counted(part.kept, 'document')}")
        for split, writer in writers.items():
            progress.shards[split] = writer.close()
    why = unfit(progress.tokens, config.val_fraction) if progress.plan == "documents" else ""
    if why:
        raise ValueError(
            f"choosing validation by document {why}; parts cannot be cut at the end afterwards; "
            "prepare without data.part, or choose another data.split_seed or data.val_fraction"
        )
    return finish(job, progress, cut=True)


def _load(dataset: Path) -> list[tuple[Path, Manifest]]:
    """All parts in their order."""
    parent = dataset.with_name(f"{dataset.name}.parts")
    found = {
        (int(match[1]), int(match[2])): path
        for path in (parent.iterdir() if parent.is_dir() else ())
        if (match := re.fullmatch(r"(\d+)-of-(\d+)", path.name))
    }
    totals = {n for _, n in found}
    if len(totals) != 1:
        raise ValueError(
            f"{parent} holds parts of {sorted(totals) or 'nothing'}; there is no one set to merge; "
            "prepare data.part=1/n … n/n first, and remove parts of another n"
        )
    n = totals.pop()
    missing = [i for i in range(1, n + 1) if (i, n) not in found]
    if missing:
        raise ValueError(
            f"part {missing[0]} of {n} is not in {parent}; the corpus would lack text; prepare it "
            f"with data.part={missing[0]}/{n}"
        )
    return [(found[i, n], load_manifest(found[i, n])) for i in range(1, n + 1)]
