"""What is said about a window, against documents found by hand."""

import json

import numpy as np

from data.prepare import prepare
from data.shards import load_manifest
from data.sources import MixConfig, TokensConfig
from data.tokenizer import load_tokenizer
from data.windows import Windows
from tests.data.conftest import COMMON, text_config, write_shards
from tests.data.reading import stream

EOT = 50256


def documents_by_hand(ids, start, count):
    """The numbers of the documents that ids start … start+count-1 of a stream belong to."""
    number, numbers = 1, []
    for token in ids:
        numbers.append(number)
        number += token == EOT
    return [numbers[(start + i) % len(ids)] for i in range(count)]


def test_every_window_s_documents_and_files_are_those_counted_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr("data.where._CHUNK", 7)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 5, 100)
    ids[rng.random(100) < 0.2] = EOT
    ids[-1] = EOT
    write_shards(tmp_path, ids, ids[:10], shard_tokens=30)
    w = Windows(tmp_path, "train", 12)
    lines = w.describe(np.arange(100))
    for start, line in enumerate(lines):
        head, files, touched = line.replace(": ", "; ").split("; ")
        assert head == f"train window at {start}, 13 tokens"
        named = [range(*shard_range(part)) for part in files.split(", ")]
        assert [i for part in named for i in part] == [(start + i) % 100 for i in range(13)]
        told = []
        for part in touched.split(" then "):
            first, _, last = (
                part.removeprefix("documents ").removeprefix("document ").partition(" to ")
            )
            told += [int(first), int(last or first)]
        by_hand = documents_by_hand(ids.tolist(), start, 13)
        assert told[0] == by_hand[0] and told[-1] == by_hand[-1]
        assert len(told) == (4 if start > 87 else 2)  # round the end
        if start > 87:
            assert told[1] == max(by_hand) and told[2] == 1


def shard_range(part):
    """ "train_00001.npy tokens 2-5" → (32, 36), for shards of 30."""
    name, unit, places = part.split()
    first, last = map(int, places.split("-"))
    assert unit == "tokens"
    base = 30 * int(name[6:11])
    return base + first, base + last + 1


def test_documents_are_named_where_files_are_documents(tmp_path, log):
    (tmp_path / "in").mkdir()
    texts = {f"{i:02}.txt": f"text of file {i} " * 60 for i in range(40)}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    for fraction, method in ((0.2, "documents"), (0.03, "tail")):
        config = text_config(tmp_path / "in", val_fraction=fraction, tokenizer="gpt2")
        folder = prepare(config, tmp_path, log)
        manifest = load_manifest(folder)
        assert manifest.split["method"] == method
        tokenizer = load_tokenizer("gpt2")
        for split in ("train", "val"):
            ids = np.array(stream(folder, split))
            w = Windows(folder, split, 5)
            ends = np.flatnonzero(ids == EOT)
            for number, end in enumerate(ends.tolist(), 1):
                start = ends[number - 2] + 1 if number > 1 else 0
                text = tokenizer.decode(ids[start:end].tolist())
                name = next(name for name, whole in texts.items() if text.strip() in whole)
                (line,) = w.describe(np.array([start]))
                assert line.endswith(f"; document {number} ({name})")


def test_a_document_cut_in_two_keeps_its_name_on_both_sides(tmp_path, log):
    (tmp_path / "book.txt").write_text("A line of the book.\n" * 3000)
    folder = prepare(text_config(tmp_path / "book.txt"), tmp_path, log)
    for split in ("train", "val"):
        (line,) = Windows(folder, split, 5).describe(np.array([7]))
        assert line.endswith("document 1 (book.txt)")


def test_ids_that_do_not_follow_from_the_manifest_are_left_out(tmp_path, log):
    (tmp_path / "in").mkdir()
    for name, text in {"a.txt": " ", "b.txt": "b " * 3000}.items():
        (tmp_path / "in" / name).write_text(text)
    blank = prepare(text_config(tmp_path / "in", val_fraction=0.0), tmp_path, log)
    (tmp_path / "r.jsonl").write_text(json.dumps({"text": "a " * 3000}) + "\n")
    records = prepare(text_config(tmp_path / "r.jsonl", val_fraction=0.0), tmp_path, log)
    for folder in (blank, records):
        (line,) = Windows(folder, "train", 5).describe(np.array([0]))
        assert line.endswith("train_00000.npy tokens 0-5; document 1")


def test_a_mixture_s_windows_are_placed_in_their_source(tmp_path, log):
    ids = np.array([1, 2, EOT, 3, EOT] * 20)
    sha256 = load_tokenizer("gpt2").sha256
    for name in "ab":
        write_shards(tmp_path / "shards" / name, ids, ids, tokenizer_sha256=sha256)
    mix = {"sources": ["a", "b"], "weights": [1.0, 1.0]}
    folder = prepare(MixConfig(**COMMON | mix), tmp_path, log)
    lines = Windows(folder, "train", 4).describe(np.array([3, 198]))
    a, b = (tmp_path / "shards" / name / "train_00000.npy" for name in "ab")
    assert lines == [
        f"train window at 3, 5 tokens: {a} tokens 3-7; documents 2 to 3",
        f"train window at 198, 5 tokens: {b} tokens 98-99, {b} tokens 0-2; "
        "document 40 then document 1",
    ]


def test_token_files_are_placed_by_the_byte(tmp_path, log):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 300
    ids = np.arange(300, dtype="<u2")
    (tmp_path / "t.bin").write_bytes(header.tobytes() + ids.tobytes())
    config = TokensConfig(**COMMON | {"path": str(tmp_path / "t.bin"), "val_fraction": 0.1})
    folder = prepare(config, tmp_path, log)
    cut = load_manifest(folder).train_tokens
    for split, at in (("train", 10), ("val", 10 + cut)):
        (line,) = Windows(folder, split, 3).describe(np.array([10]))
        place = line.split("t.bin bytes ")[1].split(";")[0]
        first, last = map(int, place.split("-"))
        raw = (tmp_path / "t.bin").read_bytes()[first : last + 1]
        assert np.frombuffer(raw, "<u2").tolist() == list(range(at, at + 4))
