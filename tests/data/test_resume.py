"""A killed preparation goes on, and leaves what an undisturbed one leaves, byte for byte."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from data import build, encode, pieces
from data.prepare import prepare
from data.shards import ShardWriter, load_manifest
from tests.data.conftest import text_config
from tests.data.reading import contents, stream

# Prepares with small batches and a save after each, so that there is much to interrupt.
CODE = """
import sys
from pathlib import Path
from data import build, encode, pieces
from data.prepare import prepare
from tests.data.conftest import text_config
pieces.PIECE_CHARS = encode._BATCH_CHARS = 6000
build._SAVE_SECONDS = 0.0
options = {"tokenizer": "byte", "shard_tokens": 20_000, "val_fraction": float(sys.argv[3])}
prepare(text_config(sys.argv[1], **options), Path(sys.argv[2]), print)
"""


def write_corpus(folder, kind, records=2000):
    rng = random.Random(7)
    folder.mkdir()
    words = [f"word{i}" for i in range(500)]

    def text(n):
        return " ".join(rng.choices(words, k=n)) + "\n"

    if kind == "one book":
        (folder / "book.txt").write_text(text(60_000))
    elif kind == "records":
        lines = [json.dumps({"text": text(rng.randrange(200))}) + "\n" for _ in range(records)]
        (folder / "a.jsonl").write_text("".join(lines[: records // 2]))
        (folder / "b.jsonl").write_text("".join(lines[records // 2 :]))
        (folder / "c.txt").write_text(text(5000))


@pytest.mark.timeout(300)
def test_killed_at_random_moments_it_ends_byte_equal(tmp_path):
    """kill -9, with no chance to tidy up; benchmarks/prepare_kills.py does it more often."""
    write_corpus(tmp_path / "in", "records")

    def run(root, seconds=None):
        command = [sys.executable, "-c", CODE, str(tmp_path / "in"), str(root), "0.1"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, check=True)
            return done.stdout.decode()
        except subprocess.TimeoutExpired as e:  # run() has sent SIGKILL
            return (e.stdout or b"").decode() + "killed"

    began = time.monotonic()
    run(tmp_path / "straight")
    whole = time.monotonic() - began
    rng = random.Random(7)
    outputs = [run(tmp_path / "killed", rng.uniform(0.5, 0.95) * whole) for _ in range(3)]
    outputs.append(run(tmp_path / "killed"))
    assert outputs[0].endswith("killed")
    assert "done:" in outputs[-1] or "is ready" in outputs[-1]
    straight = contents(tmp_path / "straight" / "shards")
    killed = contents(tmp_path / "killed" / "shards")
    assert len(straight) > 10
    assert killed == straight


class Stop(BaseException):
    """Stands for a kill: nothing may catch it and tidy up."""


@pytest.mark.parametrize("kind", ["one book", "records"])
@pytest.mark.parametrize("where", ["append", "close", "cut", "rename"])
def test_stopped_at_a_known_place_it_ends_byte_equal(tmp_path, log, said, monkeypatch, kind, where):
    write_corpus(tmp_path / "in", kind, 1000)
    for module, name in ((pieces, "PIECE_CHARS"), (encode, "_BATCH_CHARS")):
        monkeypatch.setattr(module, name, 10_000)
    monkeypatch.setattr(build, "_SAVE_SECONDS", 0.0)
    options = {"tokenizer": "byte", "shard_tokens": 20_000, "val_fraction": 0.1, "num_proc": 1}
    config = text_config(tmp_path / "in", **options)
    straight = prepare(config, tmp_path / "straight", log)

    owner, name = {
        "append": (ShardWriter, "append"),
        "close": (ShardWriter, "_close_shard"),
        "cut": (build, "drop_tail"),
        "rename": (build, "finish"),
    }[where]

    def stopping_at(call):
        real, calls = getattr(owner, name), []

        def stopping(*args, **kwargs):
            calls.append(1)
            result = real(*args, **kwargs)
            if len(calls) == call:
                raise Stop
            return result

        return stopping

    stops = 0
    for call in (1, 2, 5, 9, 30):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping_at(call))
            try:
                folder = prepare(config, tmp_path / "stopped", log)
            except Stop:
                stops += 1
                continue
        break
    else:
        folder = prepare(config, tmp_path / "stopped", log)
    assert stops > 0 or (where == "cut" and kind == "records")
    assert contents(folder) == contents(straight)
    assert where == "append" or stops == 0 or any("going on after" in line for line in said)


def test_what_progress_speaks_of_must_be_there(tmp_path, log, said, monkeypatch):
    write_corpus(tmp_path / "in", "records", 1000)
    monkeypatch.setattr(build, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(encode, "_BATCH_CHARS", 10_000)
    config = text_config(tmp_path / "in", tokenizer="byte", val_fraction=0.1, num_proc=1)
    straight = prepare(config, tmp_path / "straight", log)
    calls = []
    real = ShardWriter.append

    def append(self, ids):
        calls.append(1)
        if len(calls) == 40:
            raise Stop
        real(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", append)
        with pytest.raises(Stop):
            prepare(config, tmp_path / "lost", log)
    building = next((tmp_path / "lost" / "shards").glob(".*.building"))
    os.truncate(building / "train_00000.npy", 500)
    folder = prepare(config, tmp_path / "lost", log)
    assert any("starting over" in line for line in said)
    assert contents(folder) == contents(straight)


def test_progress_of_another_request_is_not_gone_on_from(tmp_path, log, said, monkeypatch):
    write_corpus(tmp_path / "in", "records")
    monkeypatch.setattr(build, "_SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(build, "finish", lambda *_, **__: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            prepare(text_config(tmp_path / "in", tokenizer="byte"), tmp_path, log)
    (tmp_path / "in" / "c.txt").write_text("changed")
    folder = prepare(text_config(tmp_path / "in", tokenizer="byte"), tmp_path, log)
    assert not any("going on after" in line for line in said)
    ids = stream(folder, "train") + stream(folder, "val")
    assert b"changed" in bytes(i for i in ids if i < 256)


def test_a_full_disk_is_one_line_and_goes_on_later(tmp_path, log, monkeypatch):
    write_corpus(tmp_path / "in", "records")
    config = text_config(tmp_path / "in", tokenizer="byte")
    with monkeypatch.context() as patch:

        def full(self, ids):
            raise OSError(28, "No space left on device")

        patch.setattr(ShardWriter, "append", full)
        with pytest.raises(ValueError, match="is full; .*make room and run this again"):
            prepare(config, tmp_path, log)
    assert load_manifest(prepare(config, tmp_path, log)).train_tokens > 0
