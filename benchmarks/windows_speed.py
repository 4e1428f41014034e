"""Claims: one core gathers 20 million tokens/s and more at T = 1024, in flat anonymous memory.

python benchmarks/windows_speed.py [--gigabytes N]

Reads one epoch of a file of ids (RAMP: t[i] = i mod 50257) in permuted order, 16 windows a batch.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from data.shards import Manifest, ShardWriter, save_manifest
from data.windows import Windows


def shards(folder: Path, tokens: int) -> None:
    with ShardWriter(folder, "train", np.dtype("<u2"), 100_000_000) as writer:
        for start in range(0, tokens, 1 << 22):
            writer.append(np.arange(start, min(tokens, start + (1 << 22))) % 50257)
        parts = writer.close()
    manifest = Manifest(
        format=2,
        dataset="ramp",
        request={},
        tokenizer_name="gpt2",
        tokenizer_sha256="",
        n_vocab=50257,
        eot=50256,
        dtype="uint16",
        split={"method": "documents"},
        train_documents=0,
        val_documents=0,
        train_bytes=0,
        val_bytes=0,
        train_tokens=tokens,
        val_tokens=0,
        skipped={},
        repaired={},
        lengths=[],
        weights=[1],
        shards=parts,
    )
    save_manifest(manifest, folder)


def memory() -> tuple[float, float]:
    """(anonymous, file-backed) resident memory in MiB, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kib["RssAnon"] / 1024, kib["RssFile"] / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of ids, in GiB")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"command: python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as folder:
        shards(Path(folder), int(args.gigabytes * 2**29))
        w = Windows(folder, "train", 1024, seed=1)
        for step in range(20):
            w.batch(w.starts(step * 16, 16))
        before = memory()
        highest = before[0]
        wall, cpu = time.perf_counter(), time.process_time()
        steps = len(w) // 16
        for step in range(steps):
            w.batch(w.starts(step * 16, 16))
            if step % 1000 == 0:
                highest = max(highest, memory()[0])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        after = memory()
    tokens = steps * 16 * 1024
    print(
        f"one epoch of {args.gigabytes:g} GiB: {tokens / wall / 1e6:.0f} million tokens/s by the "
        f"clock, {tokens / cpu / 1e6:.0f} by this process's time"
    )
    print(
        f"anonymous memory {before[0]:.0f} MiB, {highest:.0f} at most, {after[0]:.0f} after, "
        f"file pages {before[1]:.0f} to {after[1]:.0f}"
    )


if __name__ == "__main__":
    main()
