"""Files of text: finding them, and reading each format as pieces of documents."""

import codecs
import csv
import errno
import glob
import json
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from data.compressed import COMPRESSED, open_binary
from data.pieces import Piece, cut_text

Log = Callable[[str], None]
WHOLE = (".txt", ".md")  # one document a file
RECORDS = (".jsonl", ".json", ".csv", ".parquet")  # one document a record
_BLOCK = 1 << 20
_LARGEST_RECORD = 1 << 29  # of a .json file, in characters
_BETWEEN = re.compile(r"[\s,]*\]?\s*")
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, ValueError)


def kind_of(file: Path) -> str:
    """The suffix that says how to read a file, "" for none of ours."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        kind = suffixes[0] if len(suffixes) == 2 else ""
        return kind if kind != ".parquet" else ""  # compressed inside, and needs seeking
    return suffixes[-1] if suffixes and suffixes[-1] in WHOLE + RECORDS else ""


def find_files(path: str, log: Log) -> tuple[Path, list[Path]]:
    """The folder that ids are relative to, and the text files of a file, folder or glob, sorted.

    Hidden files, folders of prepared shards, linked folders (a link may lead back) and files of
    other kinds are passed over with a notice. Raises ValueError where nothing is left, and for a
    file or folder that cannot be read.
    """
    asked = Path(path).expanduser()
    kinds = " ".join("*" + suffix for suffix in WHOLE + RECORDS)
    looked_for = f"{kinds}, each also with {' '.join(COMPRESSED)}"
    if asked.is_file():
        root, found = asked.parent, [asked]
    elif asked.is_dir():
        root, found = asked, list(below(asked))
    elif glob.has_magic(path):
        magic = next(i for i, part in enumerate(asked.parts) if glob.has_magic(part))
        root = Path(*asked.parts[:magic])
        found = [path for path in expand(asked) if not path.is_dir()]
    else:
        raise ValueError(f"data.path={path} does not exist; there is no text; correct it")
    kept: list[Path] = []
    passed: Counter[str] = Counter()
    shards: dict[Path, bool] = {}
    for file in sorted(found):
        inside = file.relative_to(root)
        if any(part.startswith(".") for part in inside.parts):
            passed["hidden"] += 1
        elif any(_holds_shards(root / folder, shards) for folder in inside.parents):
            passed["in folders of prepared shards"] += 1
        elif file.is_symlink() and file.is_dir():
            passed["linked folders"] += 1
        elif not kind_of(file):
            passed[file.suffix or "without a suffix"] += 1
        else:
            kept.append(file)
    if passed:
        told = ", ".join(f"{count} {what}" for what, count in passed.most_common(5))
        log(f"data: passed over in {path}: {told}")
    if not kept:
        raise ValueError(
            f"no documents found in data.path={path} (looked for {looked_for}); there is "
            "nothing to train on; give a file or a folder that holds text"
        )
    for file in kept:
        if not os.access(file, os.R_OK):
            why = (
                "a link to nothing" if file.is_symlink() and not file.exists() else "no permission"
            )
            raise ValueError(
                f"{file} cannot be read ({why}); its text would be missing; mend or remove it"
            )
    return root, kept


def expand(pattern: Path) -> Iterator[Path]:
    """The paths of a glob. ValueError for a folder on the way that `glob` would pass over, since it
    cannot be read."""
    for depth, part in enumerate(pattern.parts):
        inside = Path(*pattern.parts[: depth + (part == "**")])
        for folder in glob.iglob(str(inside), recursive=True):
            try:
                if glob.has_magic(part):
                    os.scandir(folder).close()
                else:
                    os.lstat(Path(folder, part))
            except OSError as e:
                if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise _unreadable(Path(folder), e) from e
    yield from (Path(path) for path in glob.iglob(str(pattern), recursive=True))


def _unreadable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{folder} cannot be read ({error.strerror}); its text would be missing; mend or remove it"
    )


def below(folder: Path) -> Iterator[Path]:
    """Every file below, and every linked folder, which is not entered. ValueError for a folder that
    cannot be read, unless it is hidden."""

    def refuse(error: OSError) -> None:
        at = Path(error.filename)
        if not any(part.startswith(".") for part in at.relative_to(folder).parts):
            raise _unreadable(at, error) from error

    for at, folders, names in os.walk(folder, onerror=refuse):
        yield from (Path(at, name) for name in names)
        yield from (path for name in folders if (path := Path(at, name)).is_symlink())


def _holds_shards(folder: Path, known: dict[Path, bool]) -> bool:
    if folder not in known:
        known[folder] = (folder / "manifest.json").is_file() and any(folder.glob("*_00000.npy"))
    return known[folder]


def read_file(
    file: Path, name: str, unit: int, skip: int, text_field: str | None, strict: bool
) -> Iterator[Piece]:
    """The pieces of one file after the first `skip`. Raises ValueError for a broken file."""
    kind = kind_of(file)
    try:
        if kind in WHOLE:
            yield from _whole(file, name, unit, skip, strict)
            return
        readers: dict[str, Callable[[Path, str, int, str | None, bool], Iterator[_Record]]] = {
            ".jsonl": _jsonl,
            ".json": _json,
            ".csv": _csv,
            ".parquet": _parquet,
        }
        for number, text, repaired in readers[kind](file, name, skip, text_field, strict):
            yield Piece(f"{name}:{number}", text, True, True, unit, number, repaired)
    except RefusedError:
        raise
    except _BROKEN as e:
        raise ValueError(
            f"{file} cannot be read to its end ({type(e).__name__}: {' '.join(str(e).split())}); "
            "it is broken or cut short, and its text would be missing; mend or remove it"
        ) from e


_Record = tuple[int, str, str]  # number from 1, text, why it was repaired


class RefusedError(ValueError):
    """What was read is whole, but will not do: a message for the user as it stands."""


def decode_blocks(blocks: Iterable[bytes], name: str, strict: bool) -> Iterator[tuple[str, str]]:
    """(text, repair) of UTF-8 that arrives in blocks; a byte order mark at the start is dropped.

    Line ends are kept as they are. Bad bytes become U+FFFD, or an error where `strict` says so.
    """
    pending, offset = b"", 0
    for block, final in _with_last(blocks):
        data = pending + block
        if offset == 0 and data.startswith(codecs.BOM_UTF8):
            data, offset = data[3:], 3
        repaired = ""
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as e:
            if strict:
                raise RefusedError(_not_utf8(name, offset + e.start)) from e
            repaired = f"not UTF-8 at byte {offset + e.start}"
            text, used = codecs.utf_8_decode(data, "replace", final)
        yield text, repaired
        pending = data[used:]
        offset += used


def _not_utf8(name: str, at: int) -> str:
    return (
        f"{name} is not UTF-8 at byte {at}; data.strict=true forbids the repair; convert the file, "
        "or set data.strict=false"
    )


def _with_last(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    held = b""
    for block in blocks:
        yield held, False
        held = block
    yield held, True


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(_BLOCK):
        yield block


def _whole(file: Path, name: str, unit: int, skip: int, strict: bool) -> Iterator[Piece]:
    repairs: list[str] = []

    def texts(stream: BinaryIO) -> Iterator[str]:
        for text, repaired in decode_blocks(_blocks(stream), name, strict):
            if repaired and not repairs:
                repairs.append(repaired)
            yield text

    with open_binary(file) as stream:
        for index, (text, last) in enumerate(cut_text(texts(stream)), 1):
            if index > skip:
                yield Piece(
                    name, text, index == 1, last, unit, index, repairs[0] if repairs else ""
                )


def _jsonl(file: Path, name: str, skip: int, field: str | None, strict: bool) -> Iterator[_Record]:
    parse = json.JSONDecoder().raw_decode  # json.loads looks for whitespace twice more
    with open_binary(file) as stream:
        for number, line in enumerate(stream, 1):  # bytes: only \n ends one, not Unicode's ends
            if number <= skip or line.isspace():
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            text, repaired = _repair(line, f"{name}:{number}", strict)
            text = text.strip()
            try:
                record, end = parse(text)
                if end != len(text):
                    raise json.JSONDecodeError("Extra data", text, end)
            except json.JSONDecodeError as e:
                raise RefusedError(
                    f"{name}:{number} is no JSON ({e}); its text cannot be read; mend the line"
                ) from e
            if field is None:
                field = guess_field(_strings(record), f"{name}:{number}")
            yield number, field_text(record, field, name, number), repaired


def _repair(raw: bytes, name: str, strict: bool) -> tuple[str, str]:
    """A record's text, and why it is not exactly these bytes, if it is not."""
    try:
        return raw.decode(), ""
    except UnicodeDecodeError as e:
        if strict:
            raise RefusedError(_not_utf8(name, e.start)) from e
        return raw.decode(errors="replace"), f"not UTF-8 at byte {e.start}"


def _escaped(stream: BinaryIO) -> Iterator[str]:
    """Text whose bad bytes are lone surrogates, so that each record can answer for its own."""
    return codecs.iterdecode(_blocks(stream), "utf-8-sig", "surrogateescape")


def _unescape(text: str, name: str, strict: bool) -> tuple[str, str]:
    """A record of `_escaped` text, repaired."""
    return _repair(text.encode("utf-8", "surrogateescape"), name, strict)


def _json(file: Path, name: str, skip: int, field: str | None, strict: bool) -> Iterator[_Record]:
    """One record, or an array of them, parsed as it is read."""
    decoder = json.JSONDecoder()
    buffer, at, number, wanted, more = "", 0, 0, _BLOCK, True
    with open_binary(file) as stream:
        source = _escaped(stream)
        while True:
            if more and len(buffer) - at < wanted:
                parts, size = [buffer[at:]], len(buffer) - at
                while more and size < 2 * wanted:
                    text = next(source, None)
                    more = text is not None
                    parts.append(text or "")
                    size += len(parts[-1])
                buffer, at = "".join(parts), 0
                if number == 0 and wanted == _BLOCK:  # the start: an array's bracket goes
                    at = cast(re.Match[str], re.match(r"\s*\[?", buffer)).end()
            at = cast(re.Match[str], _BETWEEN.match(buffer, at)).end()
            if at == len(buffer):
                return
            start = at
            try:
                record, at = decoder.raw_decode(buffer, start)
            except json.JSONDecodeError as e:
                if more and wanted < _LARGEST_RECORD:
                    wanted = 2 * (len(buffer) - at)
                    continue
                raise RefusedError(
                    f"{name} is no JSON in record {number + 1} ({e.msg}); its text cannot be read; "
                    "mend it, or name it .jsonl if each line is a record"
                ) from e
            number, wanted = number + 1, _BLOCK
            if number > skip:
                raw, repaired = _unescape(buffer[start:at], f"{name}:{number}", strict)
                if repaired:
                    record = decoder.decode(raw)
                field = field or guess_field(_strings(record), f"{name}:{number}")
                yield number, field_text(record, field, name, number), repaired


def _csv(file: Path, name: str, skip: int, field: str | None, strict: bool) -> Iterator[_Record]:
    csv.field_size_limit(sys.maxsize)
    with open_binary(file) as stream:

        def lines() -> Iterator[str]:
            rest = ""
            for text in _escaped(stream):
                *whole, rest = (rest + text).split("\n")
                yield from (line + "\n" for line in whole)
            yield rest

        rows = csv.reader(lines())
        header = [_unescape(cell, name, strict)[0] for cell in next(rows, [])]
        field = field or guess_field(header, name)
        if field not in header:
            raise RefusedError(_no_field(name, field, header))
        column = header.index(field)
        for number, row in enumerate((row for row in rows if row), 1):
            if number > skip:
                text = row[column] if column < len(row) else ""
                yield number, *_unescape(text, f"{name}:{number}", strict)


def _parquet(
    file: Path, name: str, skip: int, field: str | None, strict: bool
) -> Iterator[_Record]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    schema = table.schema_arrow
    strings = [
        f.name
        for f in schema
        if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)
    ]
    field = field or guess_field(strings, name)
    if field not in strings:
        raise RefusedError(_no_field(name, field, schema.names))
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= skip:
            number += rows
            continue
        for batch in table.iter_batches(256, row_groups=[group], columns=[field]):
            for raw in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                number += 1
                if number > skip:
                    yield number, *_repair(raw or b"", f"{name}:{number}", strict)


def _strings(record: Any) -> list[str]:
    if not isinstance(record, dict):
        return []
    return [key for key, value in record.items() if isinstance(value, str)]


def guess_field(columns: list[str], name: str) -> str:
    """The one column of text: `text` by name, or the only one there is."""
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        raise RefusedError(
            f"{name} has {len(columns)} fields of text ({', '.join(columns) or 'none'}); which to "
            "train on is unclear; name it with data.text_field"
        )
    return columns[0]


def field_text(record: Any, field: str, name: str, number: int) -> str:
    """The text of a record; none at all counts as blank."""
    if isinstance(record, dict):
        text = record.get(field, 0)
        if isinstance(text, str):
            return text
        if text is None:
            return ""
    fields = list(record) if isinstance(record, dict) else []
    raise RefusedError(_no_field(f"{name}:{number}", field, fields))


def _no_field(name: str, field: str, fields: list[str]) -> str:
    return (
        f"{name} has no text in {field!r} (fields: {', '.join(map(str, fields)) or 'none'}); its "
        "text cannot be read; name the field with data.text_field"
    )
