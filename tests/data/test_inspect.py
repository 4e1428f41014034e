import os
import re
import subprocess
import sys

import numpy as np
import pytest

from data.inspect import longest_run, main, similar_pairs, split_documents
from data.prepare import prepare
from data.shards import load_manifest
from data.tokenizer import load_tokenizer
from tests.data.conftest import ramp, text_config, write_shards


def test_documents_are_split_at_separators_across_shards():
    ids = np.array([1, 2, 9, 9, 3, 9, 4, 5, 6, 9, 7])
    documents = split_documents([ids[:2], ids[2:8], ids[8:]], 9)
    assert [d.tolist() for d in documents] == [[1, 2], [], [3], [4, 5, 6], [7]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], (0, 0)),
        ([5], (1, 5)),
        ([1, 1, 2, 2, 2, 1], (3, 2)),
        ([0] * 7, (7, 0)),
        ([1, 2], (1, 1)),
    ],
)
def test_longest_run(ids, expected):
    assert longest_run(np.array(ids, np.int64)) == expected


def test_near_duplicates_are_found_with_their_exact_similarity():
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 50257, 400).astype(np.uint16) for _ in range(30)]
    near = documents[3].copy()
    near[200] = 7  # 5 of 396 shingles differ: 391 / 401
    pairs = similar_pairs([*documents, near, documents[5], np.array([1, 2])], 0.7)
    assert [(round(s, 4), i, j) for s, i, j in pairs] == [
        (1.0, 5, 31),
        (round(391 / 401, 4), 3, 30),
    ]


def test_the_report_names_what_is_wrong(tmp_path, capsys, log):
    folder = tmp_path / "in"
    folder.mkdir()
    words = " ".join(str(i * 7919 % 1000) for i in range(400))
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"{i} {words[i * 10 :]}" if i % 3 else words)
    (folder / "60.txt").write_text("a " + "=" * 3000)
    shards = prepare(text_config(folder, val_fraction=0.4), tmp_path, log)
    assert main([str(shards), "--windows", "2"]) == 0
    out = capsys.readouterr().out
    assert "train: " in out and "out of range: 0" in out
    assert re.search(r"validation: \d+ whole documents chosen by hash: [\d,]+ tokens, ", out)
    assert "exact duplicates: 19 documents; in both splits: 1" in out
    assert "20 x " in out
    assert "a run of" in out
    assert "random windows of train" in out
    assert " of them between train and val" in out and "near duplicates" in out


def test_ids_out_of_range_are_counted(tmp_path, capsys):
    write_shards(tmp_path, ramp(5000), ramp(0), n_vocab=4990)
    load_tokenizer("gpt2").save(tmp_path / "tokenizer")
    # the windows refuse such shards, the report has said why by then
    with pytest.raises(ValueError, match="token id 4999, beyond the vocabulary of 4990"):
        main([str(tmp_path)])
    assert "out of range: 10" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no prepared shards"):
        main([str(tmp_path / "nowhere")])


def test_a_window_is_shown_with_its_place_and_nothing_in_it_acts_on_the_terminal(
    tmp_path, capsys, log
):
    (tmp_path / "in").mkdir()
    evil = "red \x1b[31m bell \a\r over\u202e C1 \x9b2J tab\tend"
    (tmp_path / "in" / "a\x1b[2J.txt").write_text("first\n" + evil)
    (tmp_path / "in" / "b.txt").write_text("second " * 400)
    config = text_config(tmp_path / "in", val_fraction=0.0, shard_tokens=20)
    shards = prepare(config, tmp_path, log)
    total = load_manifest(shards).train_tokens
    command = [str(shards), "--window", "0", "--window", str(total - 3), "--length", "45"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in out)
    visible = "red \\x1b[31m bell \\x07\\r over\\u202e C1 \\x9b2J tab\\tend"
    assert f"first\n{visible}\n[end of document]\nsecond second" in out
    assert (
        "train window at 0, 45 tokens: train_00000.npy tokens 0-19, train_00001.npy tokens 0-19, "
        "train_00002.npy tokens 0-4; documents 1 (a\\x1b[2J.txt) to 2 (b.txt)\n"
    ) in out
    # round the end: the second document's last words, then the first
    assert f" second \n[end of document]\nfirst\n{visible}" in out
    assert "; document 2 (b.txt) then documents 1 (a\\x1b[2J.txt) to 2 (b.txt)\n" in out


@pytest.mark.parametrize(
    "wrong", [["--window", "-1"], ["--window", "5000"], ["--window", "0", "--length", "5001"],
              ["--window", "0", "--length", "1"], ["--window", "100", "--split", "val"]],
)  # fmt: skip
def test_a_window_that_is_not_there_is_one_line(tmp_path, capsys, wrong):
    write_shards(tmp_path, ramp(5000), ramp(100))
    load_tokenizer("gpt2").save(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"^--.* out of range; .*; ") as e:
        main([str(tmp_path), *wrong])
    assert "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "5000"], "--window 5000 is out of range"),
        (
            ["--window", "x"],
            "argument --window: invalid int value: 'x'; see python -m data.inspect",
        ),
        (["another"], "unrecognized arguments: another"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, arguments, message):
    write_shards(tmp_path, ramp(5000), ramp(100))
    load_tokenizer("gpt2").save(tmp_path / "tokenizer")
    with pytest.raises(ValueError) as e:
        main([str(tmp_path), *arguments])
    assert str(e.value).startswith(message) and "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


def test_a_mistake_ends_the_command_with_2(tmp_path):
    command = [sys.executable, "-m", "data.inspect", str(tmp_path), "another"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unrecognized arguments: another")
    assert done.stderr.count("\n") == 1


def test_a_window_of_validation_is_shown_as_text_where_output_is_ascii(tmp_path):
    write_shards(tmp_path, ramp(100), np.array(load_tokenizer("gpt2").encode("漢字 é!" * 20)))
    load_tokenizer("gpt2").save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "data.inspect", str(tmp_path), "--split", "val"]
    command += ["--window", "0", "--length", "9"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=True, env=environment)
    assert b"\n\\u6f22\\u5b57 \\xe9!" in done.stdout
