"""Reading an epoch keeps anonymous memory flat, and would not survive growing it; preparing does
not hold the text."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from data.shards import ShardWriter, load_manifest, save_manifest
from tests.data.conftest import ramp, write_shards

TOKENS = 1 << 27  # 256 MiB of them

# With a third argument, memory of one's own that grows with every batch: what the limit is for.
CODE = """
import resource, sys
from pathlib import Path
from data.windows import Windows

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024  # MiB

w = Windows(sys.argv[1], "train", 1024, seed=1)
steps = -(-len(w) // 64)
for step in range(50):
    w.batch(w.starts(step * 64, 64))
limit = int((status("VmData") + 16) * 2**20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = status("RssAnon")
kept, wrong = [], 0
for step in range(steps):
    starts = w.starts(step * 64, min(64, len(w) - step * 64))
    x, y = w.batch(starts)
    wrong += int((x[:, 0].numpy() != starts % 50257).sum())
    if len(sys.argv) > 2:
        kept.append(x)
print(len(w), wrong, status("RssAnon") - before, status("RssFile"))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = write_shards(tmp_path_factory.mktemp("ramp"), ramp(0), ramp(0))
    with ShardWriter(folder, "train", np.dtype("<u2"), 50_000_000) as writer:
        for start in range(0, TOKENS, 1 << 22):
            writer.append((start + np.arange(1 << 22)) % 50257)
        parts = writer.close()
    manifest = replace(load_manifest(folder), shards=parts, train_tokens=TOKENS)
    save_manifest(manifest, folder)
    return folder


def read_epoch(shards, *options):
    command = [sys.executable, "-c", CODE, str(shards), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_an_epoch_of_256_mib_is_read_in_flat_anonymous_memory(shards):
    done = read_epoch(shards)
    assert done.returncode == 0, done.stderr
    windows, wrong, grown, files = map(float, done.stdout.split())
    assert windows == -(-(TOKENS - 1) // 1024)
    assert wrong == 0
    assert grown < 16
    assert files > 256  # the whole file lies in memory, as pages that the kernel may drop


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_the_limit_would_have_stopped_memory_that_grows(shards):
    done = read_epoch(shards, "keep")
    assert done.returncode != 0
    assert "memory" in done.stderr.lower()


PREPARE = """
import sys
from pathlib import Path
from data.prepare import prepare
from tests.data.conftest import text_config

prepare(text_config(sys.argv[1]), Path(sys.argv[2]), print)
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmHWM:"):  # its own peak: ru_maxrss also holds its parent's
        print(int(line.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize("name", ["book.txt", "records.jsonl", "records.json", "records.csv"])
def test_100_mb_of_text_are_prepared_in_less_than_250_mb(tmp_path, book, name):
    text = book.read_text(encoding="utf-8")
    records = [f"{number} {text[: 100 + number * 7 % 5000]}" for number in range(38_000)]
    with (tmp_path / name).open("w", encoding="utf-8", newline="") as out:
        if name == "records.csv":
            csv.writer(out).writerows([["text"], *([record] for record in records)])
        elif name == "records.json":
            json.dump([{"text": record} for record in records], out)
        else:
            jsonl = name == "records.jsonl"
            out.writelines((json.dumps({"text": r}) if jsonl else r) + "\n" for r in records)
    size = sum(len(r.encode()) + (name == "book.txt") for r in records)
    assert size > 95e6
    command = [sys.executable, "-c", PREPARE, str(tmp_path / name), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    manifest = load_manifest(next((tmp_path / "shards").glob("[!.]*")))
    assert manifest.train_bytes + manifest.val_bytes == size
    peak = int(done.stdout.splitlines()[-1])
    assert peak < 250e6, peak  # some 100 MB were measured; text or ids held would be 100 more each
