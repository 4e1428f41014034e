"""Cutting a huge document must not change its ids."""

import random

import pytest

from data import pieces
from data.pieces import cut_text
from data.tokenizer import load_tokenizer

ALPHABETS = {
    "english": "ab cd's 've  \n\n\t.,'!?-12 \"",
    "chinese": "漢字交じり文。、！は",
    "mixed": "aé漢 \u3000\u00a0\u2028\u0085\x1c\r\n'😀٣①.,'s",
}


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_ids_of_the_pieces_are_the_whole_s(alphabet, monkeypatch):
    tokenizer = load_tokenizer("gpt2")
    rng = random.Random(alphabet)
    cuts = 0
    for size in (1, 2, 7, 30):
        monkeypatch.setattr(pieces, "PIECE_CHARS", size)
        for _ in range(60):
            text = "".join(rng.choices(ALPHABETS[alphabet], k=200))
            chunks = [text[i : i + 23] for i in range(0, 200, 23)]
            parts = list(cut_text(chunks))
            assert "".join(part for part, _ in parts) == text
            assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
            ids = [i for part, _ in parts for i in tokenizer.encode(part)]
            assert ids == tokenizer.encode(text)
            assert all(part.strip() for part, last in parts if not last)
            cuts += len(parts) - 1
    assert cuts > 100


def test_pieces_are_bounded_where_text_can_be_cut(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 100)
    parts = [part for part, _ in cut_text(["some words and more of them\n" * 1000])]
    assert len(parts) > 250
    assert max(map(len, parts)) <= 100


def test_text_without_a_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 100)
    assert list(cut_text(["a" * 70] * 50)) == [("a" * 3500, True)]
    assert list(cut_text([])) == [("", True)]
