import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pytest

from data.lock import lock
from data.prepare import Standing, prepare, standing
from data.shards import load_manifest
from data.sources import HFConfig, SotuConfig
from data.split import splitter
from data.tokenizer import load_tokenizer
from data.windows import Windows
from tests.data.conftest import COMMON, text_config
from tests.data.reading import stream, texts_of


def test_the_built_in_corpus_is_split_by_whole_documents(tmp_path, log, said):
    folder = prepare(SotuConfig(**COMMON | {"val_fraction": 0.04, "split_seed": 2}), tmp_path, log)
    assert folder == tmp_path / "shards" / "sotu"
    manifest = load_manifest(folder)
    assert manifest.train_documents + manifest.val_documents == 249
    assert manifest.train_tokens + manifest.val_tokens == 2_389_157
    assert manifest.split["method"] == "documents"
    assert 0.03 < manifest.val_tokens / 2_389_157 < 0.05
    tokenizer = load_tokenizer(folder / "tokenizer")
    train = set(texts_of(stream(folder, "train"), tokenizer))
    val = set(texts_of(stream(folder, "val"), tokenizer))
    assert len(train) + len(val) == 249 and not train & val
    lengths = np.load(folder / "token_bytes.npy", allow_pickle=False)
    assert lengths[stream(folder, "val")].sum() == manifest.val_bytes
    assert any("249 documents, 12.2 MB, 2,389,157 tokens" in line for line in said)
    assert any("whole documents chosen by hash" in line for line in said)


def test_every_document_comes_back_with_one_separator_after_it(tmp_path, log):
    texts = {"a.txt": "one", "b.md": "two\r\n<|endoftext|>\r\n", "c.txt": "\ufeffthree 漢 😀"}
    (tmp_path / "in").mkdir()
    for name, text in texts.items():
        (tmp_path / "in" / name).write_bytes(text.encode())
    folder = prepare(text_config(tmp_path / "in", val_fraction=0.0), tmp_path, log)
    tokenizer = load_tokenizer("gpt2")
    ids = stream(folder, "train")
    assert texts_of(ids, tokenizer) == ["one", "two\r\n<|endoftext|>\r\n", "three 漢 😀"]
    assert ids.count(tokenizer.eot) == 3
    assert stream(folder, "val") == []


@pytest.mark.parametrize("tokenizer_name", ["gpt2", "byte"])
def test_a_file_s_text_comes_back_blank_lines_included(tmp_path, log, tokenizer_name):
    text = "a\n\n\nb\n"
    (tmp_path / "verse.txt").write_bytes(text.encode())
    config = text_config(tmp_path / "verse.txt", tokenizer=tokenizer_name)
    folder = prepare(config, tmp_path, log)
    tokenizer = load_tokenizer(folder / "tokenizer")
    ids = stream(folder, "train") + stream(folder, "val")
    assert tokenizer.decode(i for i in ids if i != tokenizer.eot) == text


def test_a_book_s_end_is_validation_cut_at_a_line_end(tmp_path, log, said):
    lines = [f"Line {i} of the book, which goes on.\n" for i in range(3000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    folder = prepare(text_config(tmp_path / "book.txt", val_fraction=0.1), tmp_path, log)
    manifest = load_manifest(folder)
    tokenizer = load_tokenizer("gpt2")
    train, val = stream(folder, "train"), stream(folder, "val")
    assert manifest.split["method"] == "tail"
    assert manifest.split["cut_at"] == "a line's end"
    assert train[-1] == val[-1] == tokenizer.eot
    train_text, val_text = tokenizer.decode(train[:-1]), tokenizer.decode(val[:-1])
    assert train_text + val_text == "".join(lines)
    assert train_text.endswith("\n")
    assert 0.09 < len(val) / (len(train) + len(val)) < 0.12
    assert manifest.train_bytes + manifest.val_bytes == len("".join(lines))
    assert any("corpus's end, cut at a line's end" in line for line in said)


def test_few_documents_give_whole_ones_at_the_end_to_validation(tmp_path, log):
    (tmp_path / "in").mkdir()
    for i in range(10):
        (tmp_path / "in" / f"{i}.txt").write_text(f"word {i} " * 600)
    seeds = [
        seed
        for seed in range(50)
        if all(splitter(0.1, seed)(f"{i}.txt") == "train" for i in range(10))
    ]
    config = text_config(tmp_path / "in", val_fraction=0.1, split_seed=seeds[0])
    folder = prepare(config, tmp_path, log)
    manifest = load_manifest(folder)
    assert manifest.split["method"] == "tail"
    assert manifest.split["cut_at"] == "a document's end"
    assert manifest.train_documents + manifest.val_documents == 10
    tokenizer = load_tokenizer("gpt2")
    expected = [(tmp_path / "in" / f"{i}.txt").read_text() for i in range(10)]
    got = texts_of(stream(folder, "train"), tokenizer) + texts_of(stream(folder, "val"), tokenizer)
    assert got == expected


def test_a_tiny_corpus_fails_before_training_with_both_numbers(tmp_path, log):
    (tmp_path / "tiny.txt").write_text("word " * 40)
    folder = prepare(text_config(tmp_path / "tiny.txt"), tmp_path, log)
    with pytest.raises(ValueError, match="val split .* has .* tokens, a window needs 33"):
        Windows(folder, "val", 32)


def test_blank_documents_are_left_out_and_counted(tmp_path, log, said):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["", "a", " \n\t", "b"]))
    folder = prepare(text_config(file, val_fraction=0.0), tmp_path, log)
    tokenizer = load_tokenizer("gpt2")
    assert texts_of(stream(folder, "train"), tokenizer) == ["a", "b"]
    assert load_manifest(folder).skipped == {"blank": 2}
    assert any("left out 2 documents" in line for line in said)


def test_nothing_found_names_path_and_pattern(tmp_path, log):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"no documents .*{tmp_path}/empty.*\*\.txt"):
        prepare(text_config(tmp_path / "empty"), tmp_path, log)
    with pytest.raises(ValueError, match="does not exist"):
        prepare(text_config(tmp_path / "absent.txt"), tmp_path, log)
    with pytest.raises(ValueError, match="no documents found"):
        prepare(text_config(tmp_path / "*.txt"), tmp_path, log)
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(ValueError, match="no document with any text"):
        prepare(text_config(tmp_path / "blank.txt"), tmp_path, log)
    assert list((tmp_path / "shards").glob("[!.]*")) == []


def test_prepared_shards_are_used_again_until_something_changes(tmp_path, log, said):
    file = tmp_path / "book.txt"
    file.write_text("Some words.\n" * 2000)
    config = text_config(file)
    folder = prepare(config, tmp_path, log)
    before = (folder / "manifest.json").stat().st_mtime_ns
    said.clear()
    assert prepare(config, tmp_path, log) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    assert len(said) == 1 and "is ready" in said[0]
    said.clear()
    prepare(text_config(file, val_fraction=0.2), tmp_path, log)
    assert "val_fraction changed from 0.1 to 0.2" in said[0]
    said.clear()
    file.write_text("Other words.\n" * 2000)
    prepare(text_config(file, val_fraction=0.2), tmp_path, log)
    assert "book.txt changed" in said[0]


def test_what_changed_is_known_before_any_work_and_told_with_dates(tmp_path, log, said):
    file = tmp_path / "book.txt"
    file.write_text("Some words.\n" * 2000)
    os.utime(file, (1_700_000_000, 1_700_000_000))
    config = text_config(file)
    assert standing(config, tmp_path).fingerprint is None
    folder = prepare(config, tmp_path, log)
    fingerprint = load_manifest(folder).fingerprint
    assert standing(config, tmp_path) == Standing(fingerprint, "", False)

    os.utime(file, (1_710_000_000, 1_710_000_000))  # perhaps the same text
    touched = standing(config, tmp_path)
    assert (touched.fingerprint, touched.surely) == (fingerprint, False)
    dates = r"book.txt changed from 24,000 bytes of 2023-11-1\d \S+ to 24,000 bytes of 2024-03-\d+ "
    assert re.match(dates, touched.changed)
    file.write_text("Other words.\n" * 2000)
    other = standing(config, tmp_path)
    assert (other.fingerprint, other.surely) == (fingerprint, True)
    assert "to 26,000 bytes of 20" in other.changed
    assert standing(text_config(file, val_fraction=0.2), tmp_path).surely
    assert load_manifest(folder).fingerprint == fingerprint  # nothing was done

    said.clear()
    prepare(config, tmp_path, log)
    assert said[0].startswith("data: book-") and "to 26,000 bytes of 20" in said[0]
    assert standing(config, tmp_path).fingerprint != fingerprint


def test_damaged_shards_are_prepared_again_and_leftovers_cleared(tmp_path, log, said):
    file = tmp_path / "book.txt"
    file.write_text("Some words.\n" * 2000)
    folder = prepare(text_config(file), tmp_path, log)
    shard = folder / "train_00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    (folder.parent / f".{folder.name}.building").mkdir()
    (folder.parent / f".{folder.name}.building" / "train_00000.npy").write_text("half")
    said.clear()
    prepare(text_config(file), tmp_path, log)
    assert any("cut short" in line for line in said)
    assert shard.read_bytes() == whole
    assert [p.name for p in folder.parent.glob("*") if p.is_dir()] == [folder.name]


def test_threads_do_not_change_a_byte(tmp_path, log):
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i}.txt").write_text(f"document {i} " * (i * 997 % 5000))
    sums = []
    for num_proc in (1, 3):
        folder = prepare(text_config(tmp_path / "in", num_proc=num_proc), tmp_path, log)
        sums.append(load_manifest(folder).fingerprint)
        shutil.rmtree(folder)
    assert sums[0] == sums[1]


def test_a_local_hugging_face_data_set_is_read(tmp_path, log):
    texts = [f"document number {i}" for i in range(20)]
    datasets.Dataset.from_dict({"content": texts}).save_to_disk(str(tmp_path / "set"))
    options = {"name": str(tmp_path / "set"), "config": None, "split": "train", "revision": None}
    config = HFConfig(
        **COMMON | options | {"streaming": False, "text_field": None, "val_fraction": 0.0}
    )
    folder = prepare(config, tmp_path, log)
    assert texts_of(stream(folder, "train"), load_tokenizer("gpt2")) == texts


def test_bad_utf8_is_repaired_with_a_notice_or_refused(tmp_path, log, said):
    (tmp_path / "bad.txt").write_bytes(b"good \xff\xfe words")
    folder = prepare(text_config(tmp_path / "bad.txt", val_fraction=0.0), tmp_path, log)
    ids = stream(folder, "train")
    assert load_tokenizer("gpt2").decode(ids[:-1]) == "good \ufffd\ufffd words"
    assert any("bad.txt is repaired with U+FFFD (not UTF-8 at byte 5)" in line for line in said)
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 at byte 5.*data\.strict"):
        prepare(text_config(tmp_path / "bad.txt", strict=True), tmp_path, log)


def test_another_tokenizer_gets_a_folder_of_its_own(tmp_path, log):
    (tmp_path / "a.txt").write_text("words " * 3000)
    names = [
        prepare(text_config(tmp_path / "a.txt", tokenizer=name), tmp_path, log).name
        for name in ("gpt2", "byte")
    ]
    assert names[1] == names[0] + "-byte"
    assert names[0].startswith("a-")


def test_a_second_preparation_says_that_it_waits(tmp_path, log, said):
    """And takes what the first one made."""
    (tmp_path / "a.txt").write_text("We the people of the United States")
    config = text_config(tmp_path / "a.txt")
    made = prepare(config, tmp_path, log)
    said.clear()
    with ThreadPoolExecutor(1) as pool:
        with lock(made.with_name(f".{made.name}.lock"), lambda: pytest.fail("it is free")):
            second = pool.submit(prepare, config, tmp_path, log)
            while not said:
                assert not second.done()
                time.sleep(0.01)
            assert said == [
                f"data: {made.name} is being prepared by another process: waiting for it"
            ]
        assert second.result(60) == made
    assert said[1].startswith(f"data: {made.name} is ready: ")
