import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import ByteLevelBPETokenizer

from data.sources import SotuConfig, documents
from data.tokenizer import PATTERN, load_tokenizer
from data.train_tokenizer import main, train_tokenizer
from tests.data.conftest import COMMON

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "gpt2_tokenizer_golden.json").read_text("utf-8")
)["strings"]


@pytest.fixture(scope="module")
def texts():
    return [t for _, t in zip(range(20), (t for _, t in documents(SotuConfig(**COMMON), print)))]


def test_a_trained_tokenizer_encodes_any_text_and_is_opened_by_others(texts, tmp_path):
    tokenizer = train_tokenizer(texts, 1000, "mine")
    assert (tokenizer.n_vocab, tokenizer.eot) == (1000, 999)
    for text in GOLDEN:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(texts[0])) < 0.5 * len(texts[0].encode())
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.sha256, again.name) == (tokenizer.sha256, "mine")
    # by tiktoken and by `tokenizers`, from what is in the folder
    vocab, merges = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    theirs = ByteLevelBPETokenizer(vocab, merges)
    plain = tiktoken.Encoding(
        "mine", pat_str=PATTERN, mergeable_ranks=again._ranks, special_tokens={}
    )
    for text in [*GOLDEN, texts[1]]:
        if "<|endoftext|>" not in text:
            ids = tokenizer.encode(text)
            assert theirs.encode(text).ids == ids
            assert plain.encode(text) == ids


def test_training_twice_gives_the_same(texts):
    first, second = (train_tokenizer(texts[:5], 400, "a").sha256 for _ in range(2))
    assert first == second


def test_it_learns_the_merges_that_another_library_learns(texts):
    """Byte-pair encoding has ties; nearly all of a small vocabulary is beyond them."""
    theirs = ByteLevelBPETokenizer(add_prefix_space=False)
    theirs.train_from_iterator(texts, vocab_size=599, show_progress=False)
    ours = train_tokenizer(texts, 600, "a")
    mine = {tuple(ours.encode(text)) for text in [" the", " and", "\n"]}
    assert all(len(ids) == 1 for ids in mine)
    count = sum(len(theirs.encode(text).ids) for text in texts)
    assert abs(sum(len(ours.encode(text)) for text in texts) / count - 1) < 0.002


def test_a_small_text_gives_a_smaller_vocabulary():
    tokenizer = train_tokenizer(["aaaa bbbb aaaa \ud83d"], 5000, "a")
    assert 257 < tokenizer.n_vocab < 300
    with pytest.raises(ValueError, match="leaves no room"):
        train_tokenizer(["a"], 257, "a")


def test_the_command_trains_saves_and_says_how_to_use_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words and some more words " * 50)
    argv = ["data=text", f"data.path={tmp_path}/a.txt", f"paths.root={tmp_path}"]
    assert main([*argv, "vocab_size=280", f"out={tmp_path}/mine"]) == 0
    assert f"data.tokenizer={tmp_path}/mine" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "mine").n_vocab <= 280
    for wrong in ([], ["vocab_size=many"], ["vocab_size=100"]):
        with pytest.raises(ValueError, match=r"^vocab_size.*; .*; ") as e:
            main([*argv, *wrong])
        assert "\n" not in str(e.value)
