"""Each format from a file that something else wrote, and what a file can have wrong with it."""

import bz2
import csv
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.files import decode_blocks
from data.prepare import prepare
from data.shards import load_manifest
from tests.data.conftest import text_config
from tests.data.reading import stream, training_texts

TEXTS = [
    "First.\n\nLine two\r\n",
    'with "quotes", commas\nand 漢字 😀',
    "a\u2028b\u2029c\u0085d\x0ce\rf",
]


@pytest.fixture
def read(tmp_path, log):
    def read(path, **changes):
        options = {"val_fraction": 0.0, "tokenizer": "byte"} | changes  # quick to load
        folder = prepare(text_config(path, **options), tmp_path / "out", log)
        return training_texts(folder)

    return read


def compress(raw, suffix):
    if suffix == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(raw)
        return sink.getvalue().to_pybytes()
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix](
        raw
    )


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".json", ".csv"])
def test_text_and_records_are_read_plain_and_compressed(tmp_path, read, kind, suffix):
    if kind in (".txt", ".md"):
        written, expected = "".join(TEXTS).encode(), ["".join(TEXTS)]
    elif kind == ".csv":
        file = tmp_path / "made.csv"
        expected = TEXTS
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([["id", "text"], *enumerate(expected)])
        written = file.read_bytes()
        file.unlink()
    else:
        records = [{"n": 1, "text": text} for text in TEXTS]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        written = (json.dumps(records, indent=1) if kind == ".json" else lines).encode()
        expected = TEXTS
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"file{kind}{suffix}").write_bytes(compress(written, suffix))
    assert read(tmp_path / "in") == expected  # U+2028 and its like end no record


@pytest.mark.parametrize("rows_a_group", [1, 2, 100])
def test_parquet_by_datasets_is_read(tmp_path, read, rows_a_group):
    data = datasets.Dataset.from_dict({"content": TEXTS, "n": [1, 2, 3]})
    data.to_parquet(tmp_path / "a.parquet", batch_size=rows_a_group)
    assert read(tmp_path / "a.parquet") == TEXTS


def test_many_files_are_documents_in_the_order_of_their_names(tmp_path, read):
    for name, text in (("b.txt", "2"), ("a/z.md", "1"), ("c.jsonl", '{"text": "3"}\n')):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    assert read(tmp_path / "in") == ["1", "2", "3"]
    assert read(f"{tmp_path}/in/*.txt") == ["2"]
    assert read(f"{tmp_path}/in/**/*.md") == ["1"]


def test_what_is_no_text_is_passed_over_with_a_notice(tmp_path, read, said):
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "a.txt").write_text("words")
    (inside / ".hidden.txt").write_text("secret")
    (inside / "scan.pdf").write_bytes(b"%PDF")
    (inside / "old").mkdir()
    (inside / "old" / "manifest.json").write_text("{}")
    (inside / "old" / "train_00000.npy").write_bytes(b"")
    (inside / "train.bin").write_bytes(b"\0\0")
    assert read(inside) == ["words"]
    notice = next(line for line in said if "passed over" in line)
    for what in ("1 hidden", "1 .pdf", "1 .bin", "2 in folders of prepared shards"):
        assert what in notice


def test_a_linked_folder_is_passed_over_with_a_notice_and_a_cycle_does_no_harm(
    tmp_path, read, said
):
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "a.txt").write_text("words")
    (tmp_path / "elsewhere.txt").mkdir()  # no file, whatever it is called
    (tmp_path / "elsewhere.txt" / "b.txt").write_text("other words")
    (inside / "sub" / "up").symlink_to(inside)
    (inside / "linked.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert read(inside) == ["words"]
    assert f"data: passed over in {inside}: 2 linked folders" in said


def test_an_unreadable_folder_stops_before_any_work(tmp_path, read, monkeypatch):
    inside = tmp_path / "in"
    (inside / ".cache").mkdir(parents=True)
    (inside / "locked").mkdir()
    (inside / "a.txt").write_text("words")
    real, locked = os.scandir, {str(inside / ".cache")}

    def scandir(path):  # root reads whatever the mode says
        if str(path) in locked:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert read(inside) == ["words"]  # what is hidden would have been passed over anyway
    locked.add(str(inside / "locked"))
    with pytest.raises(
        ValueError, match=r"in/locked cannot be read \(Permission denied\); its text"
    ):
        read(inside)


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt", "*/b.txt", "[i]n*/locked/*.txt"])
def test_a_glob_does_not_pass_over_an_unreadable_folder(tmp_path, read, monkeypatch, pattern):
    """`glob` would: what it can't list or look up is not there for it."""
    (tmp_path / "in" / "locked").mkdir(parents=True)
    (tmp_path / "in" / "open").mkdir()
    (tmp_path / "in" / "open" / "b.txt").write_text("words")
    path = tmp_path / (pattern if pattern.startswith("[") else f"in/{pattern}")
    locked = tmp_path / "in" / "locked"
    if not pattern.startswith("["):
        assert read(path) == ["words"]

    def refusing(real, refused):  # root reads whatever the mode says
        def call(at, *args, **kwargs):
            if refused(Path(at)):
                raise PermissionError(13, "Permission denied", str(at))
            return real(at, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "scandir", refusing(os.scandir, lambda at: at == locked))
    monkeypatch.setattr(os, "lstat", refusing(os.lstat, lambda at: at.parent == locked))
    with pytest.raises(ValueError, match=r"in/locked cannot be read \(Permission denied\); its"):
        read(path)


def test_a_link_to_nothing_stops_before_any_work(tmp_path, read):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("words")
    (tmp_path / "in" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"gone\.txt cannot be read \(a link to nothing\)"):
        read(tmp_path / "in")
    assert not list((tmp_path / "out" / "shards").glob("[!.]*"))


def test_an_unreadable_file_stops_before_any_work(tmp_path, read, monkeypatch):
    (tmp_path / "a.txt").write_text("words")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root reads whatever the mode says
    with pytest.raises(ValueError, match=r"a\.txt cannot be read \(no permission\)"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_a_broken_archive_is_named_and_leaves_nothing_behind(tmp_path, read, suffix):
    (tmp_path / "in").mkdir()
    raw = compress(os.urandom(50_000).hex().encode(), suffix)
    for broken in (raw[: len(raw) // 2], raw[:-1], b"no archive at all"):
        (tmp_path / "in" / f"a.txt{suffix}").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"a\.txt{suffix} cannot be read to its end"):
            read(tmp_path / "in")
    assert not list((tmp_path / "out" / "shards").glob("[!.]*"))


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_archives_one_after_another_are_read_as_one(tmp_path, read, suffix):
    parts = [f"part {i}\n" * 100_000 for i in range(3)]
    raw = b"".join(compress(part.encode(), suffix) for part in parts)
    (tmp_path / f"a.txt{suffix}").write_bytes(raw)
    assert read(tmp_path / f"a.txt{suffix}") == ["".join(parts)]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is no JSON"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', r"2 fields of text \(a, b\).*data\.text_field"),
        ("a.jsonl", b'{"n": 1}\n', r"0 fields of text \(none\)"),
        ("a.jsonl", b'{"text": 1}\n', r"0 fields of text"),
        ("a.jsonl", b'{"text": "x"}\n{"n": 1}\n', r"a\.jsonl:2 has no text in 'text'"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1"),
        ("a.json", b'[{"text": "x"}, {"text": "y"', r"a\.json is no JSON in record 2"),
        ("a.json", b'{"text": "x"}\n{"text" "y"}', r"a\.json is no JSON in record 2"),
        ("a.csv", b"a,b\n1,2\n", r"2 fields of text"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet cannot be read"),
    ],
)
def test_broken_records_are_named(tmp_path, read, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_a_parquet_without_text_is_refused(tmp_path, read):
    table = pyarrow.table({"n": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="0 fields of text"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no text in 'n'"):
        read(tmp_path / "a.parquet", text_field="n")


def test_the_field_can_be_named(tmp_path, read):
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": "y"}\n')
    assert read(tmp_path / "a.jsonl", text_field="b") == ["y"]


def test_a_big_json_array_is_read_in_parts(tmp_path, read):
    records = [{"text": f"record {i} " * 500, "more": [i, {"x": "]"}]} for i in range(700)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert read(tmp_path / "a.json") == [record["text"] for record in records]


def test_lone_surrogates_and_bad_bytes_are_repaired_and_named(tmp_path, read, said):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "a\\ud83d"}\n{"text": "b"}\n')
    assert read(tmp_path / "a.jsonl", tokenizer="gpt2") == ["fine", "a\ufffd", "b"]
    assert 4210 in stream(next((tmp_path / "out" / "shards").glob("a-*")), "train")
    assert any("a.jsonl:2 is repaired with U+FFFD (lone surrogate)" in line for line in said)
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has a lone surrogate.*data\.strict=true"):
        read(tmp_path / "a.jsonl", strict=True)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff\xfe"}\n')
    assert read(tmp_path / "b.jsonl") == ["x", "\ufffd\ufffd"]
    assert any("b.jsonl:2 is repaired" in line for line in said)
    folder = next((tmp_path / "out" / "shards").glob("b-*"))
    assert load_manifest(folder).repaired == {"not UTF-8": 1}


@pytest.mark.parametrize("block", [7, 1 << 20])  # bytes that are decoded at once
@pytest.mark.parametrize(
    ("name", "raw"),
    [
        (
            "a.json",
            b'\xef\xbb\xbf[{"text": "one"}, {"text": "b\xff\xc3d"},\n'
            b'{"text": "\xe6\xbc\xa2"}, {"text": "five"}]',
        ),
        ("a.csv", b'\xef\xbb\xbftext,n\none,1\n"b\xff\xc3d",2\n\xe6\xbc\xa2,\xff\nfive,4\n'),
    ],
)
def test_a_bad_byte_is_its_own_record_s_alone(tmp_path, read, said, monkeypatch, name, raw, block):
    monkeypatch.setattr("data.files._BLOCK", block)
    (tmp_path / name).write_bytes(raw)
    assert read(tmp_path / name) == ["one", "b\ufffd\ufffdd", "漢", "five"]
    assert load_manifest(next((tmp_path / "out" / "shards").glob("a-*"))).repaired == {
        "not UTF-8": 1
    }
    named = [line for line in said if "U+FFFD" in line]
    assert len(named) == 1 and f"{name}:2 is repaired" in named[0]
    with pytest.raises(ValueError, match=rf"{name}:2 is not UTF-8 at byte \d+; data\.strict=true"):
        read(tmp_path / name, strict=True)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_utf8_is_decoded_across_blocks(block):
    raw = "\ufeffé漢😀\r\n".encode() + b"\xff" + "é".encode()[:1] + b"a\xe6"
    blocks = [raw[i : i + block] for i in range(0, len(raw), block)]
    text = "".join(part for part, _ in decode_blocks(blocks, "f", False))
    assert text == raw.decode("utf-8-sig", errors="replace")
    repairs = [repair for _, repair in decode_blocks(blocks, "f", False) if repair]
    assert repairs[0] == f"not UTF-8 at byte {raw.index(0xFF)}"


def test_nul_bytes_and_a_million_equal_characters_are_text(tmp_path, read):
    text = "a\0b" + "a" * 1_000_000 + "\n" + " " * 100_000 + "end"
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == [text]


def test_the_locale_does_not_matter_and_crlf_is_kept(tmp_path):
    text = "é — 漢 😀\n"
    (tmp_path / "lf.txt").write_bytes(text.encode())
    (tmp_path / "crlf.txt").write_bytes(text.replace("\n", "\r\n").encode())
    code = """
import sys
from pathlib import Path
from data.prepare import prepare
from tests.data.conftest import text_config
for name in ("lf", "crlf"):
    prepare(text_config(f"{sys.argv[1]}/{name}.txt", val_fraction=0.0), Path(sys.argv[2]), ascii)
"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.defpath}
    ids = []
    for number, env in enumerate((plain, {"PYTHONUTF8": "1", "PATH": os.defpath})):
        out = tmp_path / str(number)
        command = [sys.executable, "-c", code, str(tmp_path), str(out)]
        subprocess.run(command, env=env, check=True, timeout=120)
        ids.append([stream(next((out / "shards").glob(f"{n}-*")), "train") for n in ("lf", "crlf")])
    assert ids[0] == ids[1]
    lf, crlf = ids[0]
    assert lf[-2:] == [198, 50256]
    assert crlf[-3:] == [201, 198, 50256]
