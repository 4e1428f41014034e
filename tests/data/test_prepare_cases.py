"""Cases from the field that concern preparing as a whole."""

import json
import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pytest

from data import build, encode
from data.prepare import main, prepare, standing
from data.shards import load_manifest
from data.sources import HFConfig
from data.tokenizer import load_tokenizer
from data.windows import Windows
from tests.data.conftest import COMMON, text_config
from tests.data.reading import contents, stream, texts_of, training_texts


def hf_config(name, **changes):
    options = {"config": None, "split": "train", "revision": None, "streaming": False}
    return HFConfig(**COMMON | options | {"name": str(name), "text_field": None} | changes)


def test_many_short_documents_fill_windows_without_padding_or_loss(tmp_path, log):
    texts = [" ".join(["word"] * (5 + i * 7 % 45)) for i in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    folder = prepare(text_config(tmp_path / "a.jsonl", val_fraction=0.0), tmp_path, log)
    manifest = load_manifest(folder)
    assert manifest.train_tokens == sum(len(text.split()) for text in texts) + 1000
    w = Windows(folder, "train", 1024)
    x, y = w.batch(w.starts(0, len(w)))
    assert x.shape == y.shape == (len(w), 1024)
    assert set(x.flatten().tolist()) == {4775, 1573, 50256}  # "word", " word", separator


def test_the_last_shard_holds_the_rest_and_is_used(tmp_path, log, said):
    (tmp_path / "a.txt").write_text("x" * 2499)
    options = {"tokenizer": "byte", "val_fraction": 0.0, "shard_tokens": 1000}
    folder = prepare(text_config(tmp_path / "a.txt", **options), tmp_path, log)
    sizes = [np.load(folder / f"train_{i:05}.npy", allow_pickle=False).size for i in range(3)]
    assert sizes == [1000, 1000, 500]
    assert not (folder / "train_00003.npy").exists()
    assert "done: 1 document, 2,500 training and 0 validation tokens, 3 shards" in said[-1]
    w = Windows(folder, "train", 100)
    _, y = w.batch(w.starts(0, len(w)))
    assert 256 in y  # the separator, the very last id


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_few_and_many_documents_with_more_threads_than_documents(tmp_path, log, count):
    (tmp_path / "in").mkdir()
    for i in range(count):
        (tmp_path / "in" / f"{i:04}.txt").write_text(f"document {i}")
    config = text_config(tmp_path / "in", tokenizer="byte", val_fraction=0.0, num_proc=16)
    folder = prepare(config, tmp_path, log)
    assert training_texts(folder) == [f"document {i}" for i in range(count)]


THREADED = """
import sys, multiprocessing
from pathlib import Path
import torch
from data.prepare import prepare
from data.tokenizer import load_tokenizer
from tests.data.conftest import text_config
multiprocessing.set_start_method("spawn")
torch.ones(300, 300) @ torch.ones(300, 300)
load_tokenizer("gpt2").encode("one string")
for n in (1, 4):
    prepare(text_config(sys.argv[1], num_proc=n), Path(sys.argv[2]) / str(n), print)
"""


@pytest.mark.timeout(120)
def test_threads_after_torch_and_under_spawn_neither_hang_nor_differ(tmp_path):
    """Top-level code without a guard, torch and the tokenizer used before, spawn as the method."""
    (tmp_path / "in").mkdir()
    for i in range(50):
        (tmp_path / "in" / f"{i}.txt").write_text(f"document {i}\n" * 300)
    command = [sys.executable, "-c", THREADED, str(tmp_path / "in"), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    assert out.count("data: preparing") == 2  # and not again in children
    assert contents(tmp_path / "1" / "shards") == contents(tmp_path / "4" / "shards")
    assert multiprocessing.active_children() == []


def test_each_change_rebuilds_and_no_change_does_no_work(tmp_path, log, said, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one document"}\n' * 500)
    config = text_config(file, tokenizer="byte")
    folder = prepare(config, tmp_path, log)
    with monkeypatch.context() as patch:
        patch.setattr("data.build.encode", None)  # tokenising would now be an error
        prepare(config, tmp_path, log)
    before = load_manifest(folder)
    said.clear()
    with file.open("a") as out:
        out.write('{"text": "another"}\n')
    prepare(config, tmp_path, log)
    assert "a.jsonl changed" in said[0]
    assert load_manifest(folder).kept == before.kept + 1
    other = prepare(text_config(file, tokenizer="gpt2"), tmp_path, log)
    assert other != folder and load_manifest(other).tokenizer_name == "gpt2"


def test_old_shards_of_another_format_or_request_are_never_used(tmp_path, log, said):
    file = tmp_path / "a.txt"
    file.write_text("words " * 3000)
    config = text_config(file, tokenizer="byte")
    folder = prepare(config, tmp_path, log)
    whole = contents(folder)
    raw = json.loads((folder / "manifest.json").read_text())
    for key, value, message in (
        ("format", 1, "format 1"),
        ("request", raw["request"] | {"tokenizer": "x"}, "tokenizer changed"),
    ):
        (folder / "manifest.json").write_text(json.dumps(raw | {key: value}))
        said.clear()
        prepare(config, tmp_path, log)
        assert message in said[0]
        assert contents(folder) == whole


def test_the_manifest_says_what_the_shards_are(tmp_path, log):
    (tmp_path / "a.jsonl").write_text('{"text": "two words"}\n{"text": ""}\n{"text": "é"}\n')
    folder = prepare(text_config(tmp_path / "a.jsonl", val_fraction=0.0), tmp_path, log)
    manifest = load_manifest(folder)
    source = manifest.request["source"]
    assert source["kind"] == "text" and source["files"]["a.jsonl"][0] == 50
    assert manifest.request["split_seed"] == 1
    assert (manifest.tokenizer_name, len(manifest.tokenizer_sha256)) == ("gpt2", 64)
    assert (manifest.train_documents, manifest.train_tokens, manifest.train_bytes) == (2, 5, 11)
    assert manifest.skipped == {"blank": 1}
    assert manifest.lengths[:3] == [0, 2, 0] and sum(manifest.lengths) == 2  # of 3 and 2 ids
    assert manifest.dtype == "uint16"
    assert all(len(shard.sha256) == 64 for shard in manifest.shards)


def test_verify_finds_a_flipped_bit_that_the_cheap_check_does_not(tmp_path, log, said):
    (tmp_path / "a.txt").write_text("words " * 3000)
    config = text_config(tmp_path / "a.txt", tokenizer="byte")
    folder = prepare(config, tmp_path, log)
    shard = folder / "train_00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    said.clear()
    prepare(config, tmp_path, log)
    assert "is ready" in said[0]
    said.clear()
    prepare(text_config(tmp_path / "a.txt", tokenizer="byte", verify=True), tmp_path, log)
    assert "has another sha256" in said[0]
    assert shard.read_bytes() == whole


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl", "dict"])
def test_data_sets_of_the_library_are_read(tmp_path, log, kind, streaming):
    texts = [f"document number {i}" for i in range(30)]
    data = datasets.Dataset.from_dict({"id": list(range(30)), "text": texts})
    folder = tmp_path / "set"
    folder.mkdir()
    if kind == "saved":
        data.save_to_disk(str(folder))
    elif kind == "dict":
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(folder))
    elif kind == "parquet":
        data.to_parquet(folder / "train.parquet")
    else:
        data.to_json(folder / "train.jsonl")
    config = hf_config(folder, streaming=streaming, tokenizer="byte", val_fraction=0.0)
    assert training_texts(prepare(config, tmp_path, log)) == texts


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 11, 12])
def test_a_data_set_is_gone_on_with_where_it_was(tmp_path, log, monkeypatch, streaming, stop):
    """Documents keep the data set's order, streaming or not: nothing shuffled can be lost."""
    texts = [f"item {i}" for i in range(12)]
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / "train.parquet")
    config = hf_config(folder, streaming=streaming, tokenizer="byte", val_fraction=0.0)
    monkeypatch.setattr(build, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(encode, "_BATCH_CHARS", 1)
    real = build.Progress.save
    saves = []

    def save(self, *args):
        real(self, *args)
        saves.append(self.position)
        if len(saves) == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.Progress, "save", save)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path, log)
    assert saves[-1] == (0, stop)
    assert training_texts(prepare(config, tmp_path, log)) == texts


def test_the_commit_read_of_the_hub_is_kept_and_never_taken_for_a_change(
    tmp_path, log, said, monkeypatch
):
    hub, read = iter(["a" * 40, "b" * 40]), []

    def dataset_info(api, name, revision, timeout):
        assert (name, revision) == ("org/set", "main")
        return SimpleNamespace(sha=next(hub))

    def load_dataset(name, config, split, revision, streaming):
        read.append(revision)
        return datasets.Dataset.from_dict({"text": ["a document"]})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = hf_config("org/set", revision="main", tokenizer="byte", val_fraction=0.0)
    folder = prepare(config, tmp_path, log)
    source = load_manifest(folder).request["source"]
    assert (source["commit"], source["revision"], read) == ("a" * 40, "main", ["a" * 40])
    assert any(f"data.revision={'a' * 40} reads it again" in line for line in said)

    def offline(*_, **__):
        raise ConnectionError

    for answer in (dataset_info, offline):  # the hub has moved on; nobody can ask it
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
        assert standing(config, tmp_path).changed == ""
        assert prepare(config, tmp_path, log) == folder and "is ready" in said[-1]
    assert read == ["a" * 40]

    other = prepare(config, tmp_path / "other", log)  # offline, from the library's cache
    assert "commit" not in load_manifest(other).request["source"]
    assert read[1:] == ["main"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_killed_preparation_goes_on_with_the_commit_it_began_with(
    tmp_path, log, monkeypatch, streaming
):
    """The ref moves on in between, to the same documents in another order."""
    commits = {"a" * 40: [f"document {i}" for i in range(100)]}
    commits["b" * 40] = commits["a" * 40][::-1]
    hub, read = iter(commits), []

    def load_dataset(name, config, split, revision, streaming):
        read.append(revision)
        data = datasets.Dataset.from_dict({"text": commits[revision]})
        return data.to_iterable_dataset() if streaming else data

    answer = lambda *_, **__: SimpleNamespace(sha=next(hub))  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(encode, "_BATCH_CHARS", 100)
    monkeypatch.setattr(build, "_SAVE_SECONDS", 0.0)
    settings = {"streaming": streaming, "tokenizer": "byte", "val_fraction": 0.0, "num_proc": 1}
    config = hf_config("org/set", **settings)
    real = build.Progress.save

    def save(self, *args):
        real(self, *args)
        if self.documents["train"] > 50:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.Progress, "save", save)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path, log)
    folder = prepare(config, tmp_path, log)
    assert training_texts(folder) == commits["a" * 40]
    assert load_manifest(folder).request["source"]["commit"] == "a" * 40
    assert read == ["a" * 40] * 2


def test_a_data_set_that_is_not_there_is_one_line(tmp_path, log):
    with pytest.raises(ValueError, match=r"cannot be opened .*; there is no text; check") as e:
        prepare(hf_config(tmp_path / "nowhere" / "x"), tmp_path, log)
    assert "\n" not in str(e.value)
    folder = tmp_path / "set"
    datasets.Dataset.from_dict({"a": ["x"], "b": ["y"]}).save_to_disk(str(folder))
    with pytest.raises(ValueError, match=r"2 fields of text \(a, b\)"):
        prepare(hf_config(folder), tmp_path, log)


def test_the_command_prepares_and_has_one_line_for_mistakes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words " * 300)
    argv = ["data=text", f"data.path={tmp_path}/a.txt", f"paths.root={tmp_path}/out"]
    assert main(argv) == 0
    assert "done: " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for wrong in (f"data.path={tmp_path}/empty", "data.val_fraction=1.5", "data.pth=x"):
        with pytest.raises(ValueError, match=r"; .*; ") as e:
            main([*argv, wrong])
        assert "\n" not in str(e.value)
    command = [sys.executable, "-m", "data.prepare", *argv, f"data.path={tmp_path}/empty"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: no documents found in ")


def test_validation_and_training_never_share_a_document(tmp_path, log):
    lines = [json.dumps({"text": f"text {i} " + "x" * 50}) + "\n" for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    folder = prepare(text_config(tmp_path / "a.jsonl", tokenizer="byte"), tmp_path, log)
    assert load_manifest(folder).split["method"] == "documents"
    tokenizer = load_tokenizer("byte")
    train, val = (set(texts_of(stream(folder, split), tokenizer)) for split in ("train", "val"))
    assert len(train) + len(val) == 2000 and not train & val
