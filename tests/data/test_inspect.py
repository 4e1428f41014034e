import numpy as np
import pytest

from data.inspect import longest_run, main, similar_pairs, split_documents
from data.prepare import prepare
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
    assert "exact duplicates: 19 documents; 1 texts are in both splits" in out
    assert "20 x " in out
    assert "a run of" in out
    assert "random windows of train" in out
    assert " of them between train and val" in out and "near duplicates" in out


def test_ids_out_of_range_are_counted(tmp_path, capsys):
    from data.tokenizer import load_tokenizer

    write_shards(tmp_path, ramp(5000), ramp(0), n_vocab=4990)
    load_tokenizer("gpt2").save(tmp_path / "tokenizer")
    # the windows refuse such shards, the report has said why by then
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "out of range: 10" in captured.out
    assert captured.err.startswith("error: ")
    assert main([str(tmp_path / "nowhere")]) == 2
