"""A mixture of prepared shards: which source a window comes from is a function of its position."""

from dataclasses import replace
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

from data.build import Job
from data.say import counted
from data.shards import FORMAT, Manifest, Shard, load_manifest
from data.sources import MixConfig

_LONGEST_PERIOD = 10_000


def identity(config: MixConfig, root: Path) -> dict[str, Any]:
    """Where each source lies, what it holds and what it weighs."""
    sources = {}
    for name, weight in zip(config.sources, config.weights, strict=True):
        folder = _folder(name, root)
        sources[name] = [str(folder.absolute()), load_manifest(folder).fingerprint, weight]
    return {"kind": "mix", "sources": sources}


def manifest(job: Job) -> Manifest:
    """The manifest of a mixture, whose shards stay where they are.

    Raises ValueError where the sources' tokenizers differ, or one is a mixture itself.
    """
    config = job.config
    assert isinstance(config, MixConfig)
    shards: list[Shard] = []
    parts = []
    for stream, name in enumerate(config.sources):
        folder = Path(job.request["source"]["sources"][name][0])
        part = load_manifest(folder)
        if part.tokenizer_sha256 != job.tokenizer.sha256:
            raise ValueError(
                f"the shards of {name} were made with tokenizer {part.tokenizer_name}, the mixture "
                f"asks for {job.tokenizer.name}; their ids mean different tokens; prepare {name} "
                f"with data.tokenizer={config.tokenizer}"
            )
        if len(part.weights) > 1:
            raise ValueError(
                f"{name} is a mixture itself; its windows have an order of their own; name its "
                "sources here"
            )
        for shard in part.shards:
            shards.append(
                replace(
                    shard,
                    file=str((folder / shard.file).absolute()),
                    stream=stream,
                    dtype=shard.dtype or part.dtype,
                )
            )
        parts.append(part)
    weights = in_period(config.weights)
    for name, weight in zip(config.sources, weights, strict=True):
        job.log(f"data: {name}: {weight} of every {counted(sum(weights), 'window')}")
    return Manifest(
        format=FORMAT,
        dataset=job.name,
        request=job.request,
        tokenizer_name=job.tokenizer.name,
        tokenizer_sha256=job.tokenizer.sha256,
        n_vocab=job.tokenizer.n_vocab,
        eot=job.tokenizer.eot,
        dtype=parts[0].dtype,
        split={"method": "mix"},
        train_documents=sum(part.train_documents for part in parts),
        val_documents=sum(part.val_documents for part in parts),
        train_bytes=sum(part.train_bytes for part in parts),
        val_bytes=sum(part.val_bytes for part in parts),
        train_tokens=sum(part.train_tokens for part in parts),
        val_tokens=sum(part.val_tokens for part in parts),
        skipped={},
        repaired={},
        lengths=[],
        weights=weights,
        shards=shards,
    )


def in_period(weights: list[float]) -> list[int]:
    """How many windows of a period each source has: the weights as exact whole numbers.

    Where that takes a period beyond 10,000 they are rounded to one of that length.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    counts = [max(1, int(share * _LONGEST_PERIOD)) for share in shares]
    rests = [share * _LONGEST_PERIOD - count for share, count in zip(shares, counts, strict=True)]
    for i in sorted(range(len(rests)), key=rests.__getitem__, reverse=True):
        if sum(counts) < _LONGEST_PERIOD:
            counts[i] += 1
    return counts


def _folder(name: str, root: Path) -> Path:
    for folder in (root / "shards" / name, Path(name).expanduser()):
        if (folder / "manifest.json").is_file():
            return folder
    raise ValueError(
        f"data.sources names {name}, and there are no shards in {root / 'shards' / name} or in "
        f"{name}; it cannot be mixed in; prepare it first: python -m data.prepare data=…"
    )
