import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from data.tokenizer import _parse_merges, load_tokenizer, recover_merges

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "gpt2_tokenizer_golden.json").read_text("utf-8")
)


def test_gpt2_gives_the_golden_ids_and_the_text_back():
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.n_vocab, tokenizer.eot, tokenizer.name) == (50257, 50256, "gpt2")
    for text, ids in zip(GOLDEN["strings"], GOLDEN["ids"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_saved_tokenizer_is_the_same_for_us_and_for_transformers(name, tmp_path):
    tokenizer = load_tokenizer(name)
    tokenizer.save(tmp_path / "ours")
    again = load_tokenizer(tmp_path / "ours")
    assert (again.sha256, again.name, again.eot) == (tokenizer.sha256, name, tokenizer.eot)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert len(theirs) == tokenizer.n_vocab
    assert theirs.eos_token_id == tokenizer.eot
    for text in GOLDEN["strings"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    # transformers writes tokenizer.json alone
    theirs.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "merges.txt").exists()
    assert load_tokenizer(tmp_path / "theirs").sha256 == tokenizer.sha256


def test_byte_ids_are_the_bytes():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 0x0A]
    assert (tokenizer.n_vocab, tokenizer.eot) == (257, 256)


def test_the_separator_s_text_is_ordinary_text_alone_and_among_documents():
    tokenizer = load_tokenizer("gpt2")
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    pieces = [("x", True), ("y ", False), (text, True), ("", True)]
    documents = tokenizer.encode_pieces(pieces)
    y = tokenizer.encode("y ")
    assert documents.tolist() == [*tokenizer.encode("x"), 50256, *y, *ids, 50256, 50256]


def test_documents_encoded_together_are_those_encoded_alone():
    tokenizer = load_tokenizer("gpt2")
    texts = [text for text in GOLDEN["strings"] if "<|endoftext|>" not in text]
    alone = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eot]]
    assert tokenizer.encode_pieces([(text, True) for text in texts]).tolist() == alone


def test_lone_surrogates_become_the_replacement_character():
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("\ud83d") == [4210]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_token_bytes_count_the_text(name):
    tokenizer = load_tokenizer(name)
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (tokenizer.n_vocab,)
    assert lengths[tokenizer.eot] == 0
    text = "Verse one,\n\n  漢字 😀"
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_half_a_character_decodes_to_its_bytes_or_a_replacement():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.decode_bytes([0xC3]) == b"\xc3"
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_merges_found_from_the_ranks_are_those_of_gpt2_s_file(tmp_path):
    tokenizer = load_tokenizer("gpt2")
    assert recover_merges(tokenizer._ranks) == _parse_merges(tokenizer._files[1])


def test_a_tokenizer_with_specials_first_keeps_its_ids(tmp_path):
    """The `tokenizers` library puts special tokens before the bytes."""
    theirs = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    text = "the cat sat on the mat and the other cats sat there " * 20
    theirs.train_from_iterator([text], vocab_size=280, special_tokens=["<|endoftext|>", "<|x|>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.eot == 0
    for sample in (text, "the catalog 漢"):
        assert ours.encode(sample) == theirs.encode(sample).ids
    ours.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").sha256 == ours.sha256


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "use gpt2, byte, or a folder"),
        ({"vocab.json": "{", "merges.txt": ""}, "cannot be read"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "ids do not follow the merges"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json":
            '{"tokenizer_class": "Qwen2Tokenizer"}'}, "Qwen2Tokenizer"),
        ({"tokenizer.json": '{"model": {"type": "Unigram"}}'}, "no GPT-2 byte-level BPE"),
        ({"tokenizer.json": "[]"}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_folder_that_holds_no_gpt2_tokenizer_is_refused_by_name(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as e:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(e.value) or "tokenizer" in str(e.value)


def test_a_vocabulary_in_another_order_than_its_merges_is_refused(tmp_path):
    tokenizer = load_tokenizer("gpt2")
    tokenizer.save(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    vocab["Ġt"], vocab["Ġa"] = vocab["Ġa"], vocab["Ġt"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    with pytest.raises(ValueError, match="ids do not follow the merges"):
        load_tokenizer(tmp_path)


def test_no_pickle_is_opened_as_a_tokenizer(tmp_path):
    """tiktoken's own cache format and pickles are no tokenizer folders."""
    (tmp_path / "tokenizer.pkl").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(ValueError, match="unknown"):
        load_tokenizer(tmp_path)
    assert not np.any([p.name == "canary" for p in Path.cwd().iterdir()])


LONG_TEXTS = {
    "one letter": "a",
    "four letters": "ACGT",
    "digits": "0123456789",
    "marks": "=-'!",
    "spaces": " \n\t\u3000",
    "chinese": "漢字交",
    "kinds in turn": "aж1漢٣'.é",
    "contractions": "'sdmtlverx",
    "anything": "aT7 é漢\u3000\u00a0\u2028\u0085\x1c\r\n'😀٣①.,'s\u0301\u200d\u0378",
}


@pytest.mark.parametrize("alphabet", LONG_TEXTS)
@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_text_encoded_in_chunks_gives_the_ids_of_the_whole(alphabet, name, monkeypatch):
    tokenizer = load_tokenizer(name)
    rng = random.Random(alphabet)
    chunks, real = [], tokenizer._ids_in_chunks
    monkeypatch.setattr("data.tokenizer._LONG", 30)
    monkeypatch.setattr(
        tokenizer, "_ids_in_chunks", lambda *args: chunks.append(real(*args)) or chunks[-1]
    )
    for size in (5, 9, 40):
        monkeypatch.setattr("data.tokenizer._CHUNK", size)
        for _ in range(60):
            characters = rng.choices(LONG_TEXTS[alphabet], k=3)  # few, so that they merge
            text = "".join(rng.choices(characters, k=300))
            for whole in (text, "x" + text, text + "y", text + "'s"):
                expected = tokenizer._encoding.encode(whole, disallowed_special=())
                assert tokenizer.encode(whole) == expected
    assert sum(found is not None for found in chunks) > 500


@pytest.mark.parametrize("unit", ["a", "ACGT", "=", "3.14", "漢"])
def test_a_megabyte_without_a_place_to_cut(unit):
    """The sizes in use, against tiktoken's own encoding in one go."""
    tokenizer = load_tokenizer("gpt2")
    rng = random.Random(unit)
    text = "".join(rng.choices(unit, k=700_000))
    assert tokenizer.encode(text) == tokenizer._encoding.encode(text, disallowed_special=())


def test_millions_of_spaces_are_encoded():
    tokenizer = load_tokenizer("gpt2")
    text = "x" + " " * 2_000_000 + "y"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = [("a", True), (text, True)]
    assert tokenizer.encode_pieces(pieces).tolist() == [64, 50256, *ids, 50256]
    assert tokenizer.encode("\ud83d" + text)[0] == 4210
