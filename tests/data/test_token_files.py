"""Token files of other makers, each built by hand from the definition of its format."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare
from data.shards import load_manifest
from data.sources import TokensConfig
from data.windows import Windows
from tests.data.conftest import COMMON, ramp


def tokens_config(path, **changes):
    return TokensConfig(**COMMON | {"path": str(path)} | changes)


def plain(ids):
    return struct.pack(f"<{len(ids)}H", *ids)


def with_header(ids):
    return struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + plain(ids)


def megatron(ids, dtype, code, lengths):
    starts = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    return np.asarray(ids).astype(dtype).tobytes(), index


@pytest.mark.parametrize(
    "kind", ["plain", "header", "megatron", "megatron wide", "npy", "npy int64"]
)
def test_each_format_is_read_where_it_lies(tmp_path, log, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    for split, ids in (("train", ramp(3000)), ("val", ramp(900)[::-1])):
        file = folder / f"corpus_{split}.bin"
        if kind == "plain":
            file.write_bytes(plain(ids))
        elif kind == "header":
            file.write_bytes(with_header(ids))
        elif kind.startswith("megatron"):
            wide = kind.endswith("wide")
            lengths = [7, 0, len(ids) - 107, 100]
            made = megatron(ids, "<i4" if wide else "<u2", 4 if wide else 8, lengths)
            file.write_bytes(made[0])
            file.with_suffix(".idx").write_bytes(made[1])
        else:
            np.save(file.with_suffix(".npy"), ids.astype(np.uint16 if kind == "npy" else np.int64))
    out = prepare(tokens_config(folder), tmp_path, log)
    assert not list(out.glob("*_00000.npy"))  # in place, no copy
    manifest = load_manifest(out)
    assert (manifest.train_tokens, manifest.val_tokens) == (3000, 900)
    assert manifest.split["method"] == "files"
    w = Windows(out, "train", 32, seed=3)
    starts = w.starts(0, len(w))
    x, _ = w.batch(starts)
    assert np.array_equal(x, (starts[:, None] + np.arange(32)) % 3000)
    assert Windows(out, "val", 32).eval_batch([0])[0][0].tolist() == list(range(899, 867, -1))
    assert (out / "token_bytes.npy").is_file() and (out / "tokenizer" / "vocab.json").is_file()


def test_one_file_gives_its_end_to_validation(tmp_path, log):
    ids = ramp(20_000)
    ids[17_400] = 50256
    (tmp_path / "all.bin").write_bytes(plain(ids))
    out = prepare(tokens_config(tmp_path / "all.bin", val_fraction=0.1), tmp_path, log)
    manifest = load_manifest(out)
    assert manifest.split == {"method": "tail", "cut_at": "a document's end"}
    assert (manifest.train_tokens, manifest.val_tokens) == (17_401, 2599)
    assert Windows(out, "val", 32).eval_batch([0])[0][0].tolist() == ids[17_401:17_433].tolist()
    assert manifest.val_documents == 0 and manifest.train_documents == 1


def test_changed_token_files_are_noticed_and_verified(tmp_path, log, said):
    file = tmp_path / "train.bin"
    file.write_bytes(plain(ramp(20_000)))
    config = tokens_config(file)
    before = load_manifest(prepare(config, tmp_path, log)).fingerprint
    said.clear()
    prepare(config, tmp_path, log)
    assert "is ready" in said[0]
    file.write_bytes(plain(ramp(20_001)))
    assert load_manifest(prepare(config, tmp_path, log)).fingerprint != before
    assert any("train.bin changed" in line for line in said)


def test_ids_of_another_tokenizer_are_refused_by_name(tmp_path, log):
    (tmp_path / "a.bin").write_bytes(plain(ramp(2000)))
    with pytest.raises(ValueError, match=r"a\.bin holds the id \d+, and tokenizer byte has 257"):
        prepare(tokens_config(tmp_path / "a.bin", tokenizer="byte"), tmp_path, log)
    np.save(tmp_path / "b.npy", np.array([3, -1] * 100))
    with pytest.raises(ValueError, match=r"b\.npy holds the id -1"):
        prepare(tokens_config(tmp_path / "b.npy"), tmp_path, log)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.bin", b"abc", "an odd number"),
        ("a.bin", with_header(list(range(10)))[:-2], "should hold 10 ids"),
        ("a.bin", struct.pack("<256i", 20240520, 2, *[0] * 254), "version 2"),
        ("a.npy", b"not npy", r"is no \.npy file"),
    ],
)
def test_files_that_are_no_token_files_are_refused(tmp_path, log, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        prepare(tokens_config(tmp_path / name), tmp_path, log)


def test_a_broken_megatron_pair_is_refused(tmp_path, log):
    raw, index = megatron(ramp(100), "<u2", 8, [60, 40])
    for what, made in {
        "do not lie one after another": (raw, index.replace(struct.pack("<q", 120), b"\1" * 8)),
        "does not hold the 100 ids": (raw[:-2], index),
        "does not begin as": (raw, b"x" + index),
        "do not fit": (raw, index[:40]),
    }.items():
        (tmp_path / "a.bin").write_bytes(made[0])
        (tmp_path / "a.idx").write_bytes(made[1])
        with pytest.raises(ValueError, match=what):
            prepare(tokens_config(tmp_path / "a.bin"), tmp_path, log)


def test_a_pickled_array_is_refused_and_its_code_not_run(tmp_path, log):
    canary = tmp_path / "canary"
    np.save(tmp_path / "a.npy", np.array([Canary(canary)], object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a row of integers"):
        prepare(tokens_config(tmp_path / "a.npy"), tmp_path, log)
    assert not canary.exists()


@pytest.mark.parametrize("path", ["in", "in/*/*.bin"])
def test_an_unreadable_folder_is_not_passed_over(tmp_path, log, monkeypatch, path):
    for name in ("locked", "open"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.bin").write_bytes(plain([1, 2, 256] * 100))
    real = os.scandir

    def scandir(at):  # root reads whatever the mode says
        if Path(at) == tmp_path / "in" / "locked":
            raise PermissionError(13, "Permission denied", str(at))
        return real(at)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"in/locked cannot be read \(Permission denied\); its"):
        prepare(tokens_config(tmp_path / path, tokenizer="byte"), tmp_path / "out", log)


def test_an_empty_folder_names_path_and_pattern(tmp_path, log):
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match=r"no token files found in .*/in .*\*\.bin \*\.npy"):
        prepare(tokens_config(tmp_path / "in"), tmp_path, log)
