import shutil

import pytest

from data.prepare import prepare
from data.shards import load_manifest
from tests.data.conftest import text_config
from tests.data.reading import contents


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(23):
        (folder / f"{i:02}.txt").write_text(f"Document {i} says this.\n" * (50 + i * 37 % 90))
    return folder


@pytest.mark.parametrize("val_fraction", [0.2, 0.0, 0.02])
def test_parts_merge_to_what_one_machine_makes(tmp_path, corpus, log, said, val_fraction):
    options = {"tokenizer": "byte", "val_fraction": val_fraction, "shard_tokens": 7000}
    one = prepare(text_config(corpus, **options), tmp_path / "one", log)
    for part in ("3/3", "1/3", "2/3"):
        prepare(text_config(corpus, **options, part=part), tmp_path / "many", log)
    many = prepare(text_config(corpus, **options, part="merge"), tmp_path / "many", log)
    assert contents(many) == contents(one)
    method = load_manifest(one).split["method"]
    assert method == ("tail" if val_fraction == 0.02 else "documents")
    said.clear()
    assert prepare(text_config(corpus, **options), tmp_path / "many", log) == many
    assert "is ready" in said[0]


def test_a_part_missing_altered_or_of_another_request_is_refused(tmp_path, corpus, log):
    options = {"tokenizer": "byte", "val_fraction": 0.2}
    merge = text_config(corpus, **options, part="merge")
    with pytest.raises(ValueError, match="there is no one set to merge"):
        prepare(merge, tmp_path, log)
    first = prepare(text_config(corpus, **options, part="1/2"), tmp_path, log)
    with pytest.raises(ValueError, match="part 2 of 2 is not in"):
        prepare(merge, tmp_path, log)
    other = text_config(corpus, **options | {"val_fraction": 0.3}, part="2/2")
    prepare(other, tmp_path, log)
    with pytest.raises(ValueError, match="prepared from another source or with other settings"):
        prepare(merge, tmp_path, log)
    second = prepare(text_config(corpus, **options, part="2/2"), tmp_path, log)
    shard = second / "train_00000.npy"
    raw = bytearray(shard.read_bytes())
    raw[200] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train_00000\.npy has another sha256"):
        prepare(merge, tmp_path, log)
    shutil.rmtree(first.parent / "1-of-2")


def test_more_parts_than_files_and_odd_parts_are_refused(tmp_path, corpus, log):
    with pytest.raises(ValueError, match="has 23 files"):
        prepare(text_config(corpus, part="1/24"), tmp_path, log)
    for part in ("0/2", "3/2", "x", "1/0"):
        with pytest.raises(ValueError, match=r"data\.part is"):
            text_config(corpus, part=part)
