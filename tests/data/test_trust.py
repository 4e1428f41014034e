"""Data that someone else made cannot run code, nor reach files outside its folder."""

import contextlib
import json
import pickle
import struct

import datasets
import numpy as np
import pytest

from conf.run import _token_bytes
from data.prepare import prepare
from data.progress import load_progress
from data.shards import load_manifest, open_shards
from data.sources import HFConfig, MixConfig, TokensConfig
from data.tokenizer import load_tokenizer
from data.windows import Windows
from tests.data.conftest import COMMON, ramp, text_config, write_shards


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


@pytest.fixture
def bomb(tmp_path):
    """A pickle that is armed, and is found untouched at the end."""
    raw = pickle.dumps(Bomb(tmp_path / "canary"))
    pickle.loads(raw).close()
    assert (tmp_path / "canary").exists()
    (tmp_path / "canary").unlink()
    yield raw
    assert not (tmp_path / "canary").exists()


def plant(path, raw, how):
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = np.array([Bomb(path.parent / "../canary")] * 3, object)
    if how == "object array":
        np.save(path, objects, allow_pickle=True)
    elif how == "zip":
        with path.open("wb") as file:
            np.savez(file, objects)
    else:
        path.write_bytes(raw)


HOWS = ["pickle", "object array", "zip"]


@pytest.mark.parametrize("how", HOWS)
def test_a_pickle_among_the_shards_is_not_loaded(tmp_path, bomb, how):
    folder = write_shards(tmp_path / "shards", ramp(100), ramp(100))
    plant(folder / "train_00000.npy", bomb, how)
    with pytest.raises(ValueError, match=r"train_00000.npy cannot be read .*; delete its folder"):
        Windows(folder, "train", 10)


@pytest.mark.parametrize("how", HOWS)
def test_a_pickle_in_place_of_token_bytes_is_not_loaded(tmp_path, bomb, how):
    plant(tmp_path / "shards" / "token_bytes.npy", bomb, how)
    with pytest.raises((ValueError, AttributeError)):
        _token_bytes(tmp_path / "shards")


@pytest.mark.parametrize("how", HOWS)
def test_a_pickle_among_token_files_is_not_loaded(tmp_path, log, bomb, how):
    plant(tmp_path / "in" / "a.npy", bomb, how)
    with pytest.raises(ValueError, match=r"a\.npy .*its ids cannot be read"):
        prepare(TokensConfig(**COMMON | {"path": str(tmp_path / "in")}), tmp_path, log)


def test_a_pickle_as_megatron_s_index_is_not_loaded(tmp_path, log, bomb):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(ramp(100).astype("<u2").tobytes())
    for start in (b"", b"MMIDIDX\0\0", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 5, 6)):
        (tmp_path / "in" / "a.idx").write_bytes(start + bomb)
        with pytest.raises(ValueError, match=r"its ids cannot be read"):
            prepare(TokensConfig(**COMMON | {"path": str(tmp_path / "in")}), tmp_path, log)


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_pickle_among_a_tokenizer_s_files_is_not_loaded(tmp_path, bomb, name, protocol):
    folder = tmp_path / "tokenizer"
    load_tokenizer("gpt2").save(folder)
    for other in ("tokenizer.pkl", "added_tokens.json", "special_tokens_map.json", "tokenizer.bin"):
        (folder / other).write_bytes(bomb)
    assert load_tokenizer(folder).encode("a b") == [64, 275]
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "canary"), protocol))
    with pytest.raises(ValueError, match="tokenizer .*; .*; "):
        load_tokenizer(folder)
    for file in ("vocab.json", "merges.txt"):
        (folder / file).unlink()
    (folder / "tokenizer.json").write_bytes(bomb)
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(folder)


def test_a_local_data_set_runs_neither_pickles_nor_scripts(tmp_path, log, bomb):
    folder = tmp_path / "set"
    folder.mkdir()
    options = {"config": None, "split": "train", "revision": None, "streaming": False}
    options |= {"name": str(folder), "text_field": None, "val_fraction": 0.0}
    config = HFConfig(**COMMON | options)
    (folder / "train.pkl").write_bytes(bomb)
    (folder / "set.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    with pytest.raises(ValueError, match="cannot be opened"):
        prepare(config, tmp_path, log)
    datasets.Dataset.from_dict({"text": ["a"]}).to_json(folder / "train.jsonl")
    with contextlib.suppress(ValueError):  # the library may refuse a folder with a script
        prepare(config, tmp_path, log)


OUTSIDE = ["../secret.npy", "{outside}/secret.npy", "sub/train_00000.npy", "train_00000.npy/..",
           "", ".", "train_00000.npy\n", "trajn_00000.npy"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("offset", [None, 0])
def test_a_manifest_reaches_no_file_outside_its_folder(tmp_path, name, offset):
    np.save(tmp_path / "secret.npy", ramp(100).astype("<u2"))
    folder = write_shards(tmp_path / "shards", ramp(100), ramp(100))
    raw = json.loads((folder / "manifest.json").read_text())
    raw["shards"][0] |= {"file": name.format(outside=tmp_path), "offset": offset, "dtype": "<u2"}
    for source in ({}, {"kind": "text", "files": {str(tmp_path / "secret.npy"): [1, 1]}}):
        raw["request"] = {"source": source}
        (folder / "manifest.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=r"names the file .*; it could be any file"):
            load_manifest(folder)


def test_a_mixture_reaches_only_what_its_sources_hold(tmp_path, log):
    sha256 = load_tokenizer("gpt2").sha256
    np.save(tmp_path / "secret.npy", ramp(100).astype("<u2"))
    for name in "ab":
        write_shards(tmp_path / "shards" / name, ramp(100), ramp(100), tokenizer_sha256=sha256)
    mix = {"sources": ["a", "b"], "weights": [1.0, 1.0]}
    folder = prepare(MixConfig(**COMMON | mix), tmp_path, log)
    assert len(open_shards(folder, load_manifest(folder), "train")) == 2
    whole = (folder / "manifest.json").read_text()
    raw = json.loads(whole)
    for wrong in (str(tmp_path / "secret.npy"), str(tmp_path / "shards" / "a" / "manifest.json")):
        raw["shards"][0]["file"] = wrong
        (folder / "manifest.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match="names the file"):
            load_manifest(folder)
    raw = json.loads(whole)  # a mixture that is its own source
    raw["request"]["source"]["sources"] = {"self": [str(folder), "", 1]}
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="names the file"):
        load_manifest(folder)


@pytest.mark.parametrize("source", [[], "text", {"kind": "tokens"}, {"kind": "mix", "sources": 1}])
def test_a_manifest_with_a_senseless_source_is_damaged(tmp_path, source):
    folder = write_shards(tmp_path, ramp(100), ramp(100), request={"source": source})
    with pytest.raises(ValueError, match="is damaged"):
        load_manifest(folder)


def test_progress_that_names_files_elsewhere_is_not_gone_on_from(tmp_path, log, monkeypatch):
    (tmp_path / "a.txt").write_text("words " * 5000)
    config = text_config(tmp_path / "a.txt", tokenizer="byte", num_proc=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "data.build.finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path, log)
    (progress,) = (tmp_path / "shards").glob(".*.progress")
    raw = json.loads(progress.read_text())
    assert load_progress(progress, raw["request"]) is not None
    victim = tmp_path / "victim.npy"
    victim.write_bytes(
        (next((tmp_path / "shards").glob(".*.building")) / "train_00000.npy").read_bytes()
    )
    before = victim.read_bytes()
    raw["shards"]["train"][0]["file"] = "../../victim.npy"
    progress.write_text(json.dumps(raw))
    assert load_progress(progress, raw["request"]) is None
    prepare(config, tmp_path, log)
    assert victim.read_bytes() == before
