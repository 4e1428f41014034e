"""sample.Text: ids to text, in pieces that are whole characters and end before a stop."""

import random
from collections.abc import Iterator

import sample


def text_of(chunks: list[bytes], stops: list[str] | None = None) -> list[str]:
    return list(sample.Text(iter(range(len(chunks))), lambda ids: chunks[ids[0]], stops or []))


def test_no_piece_ends_within_a_character() -> None:
    """Each byte its own token: a character comes out with its last byte, and only then."""
    text = "a é漢😀\u200d🏽z"
    seen: list[int] = []

    def ids() -> Iterator[int]:
        for byte in text.encode():
            seen.append(byte)
            yield byte

    for piece in sample.Text(ids(), bytes):
        assert len(piece) == 1
        assert bytes(seen).decode().endswith(piece)  # no later than it could be
    assert "".join(sample.Text(ids(), bytes)) == text


def test_unfinished_character_is_left_out_and_broken_bytes_are_marked() -> None:
    assert "".join(text_of([b"ok ", b"\xf0\x9f", b"\x98"])) == "ok "
    assert "".join(text_of([b"a\xff", b"b", b"\xe6\xbc", b"c"])) == "a\ufffdb\ufffdc"


def test_a_stop_may_come_in_pieces_and_is_held_back() -> None:
    assert text_of([b"one\n", b"\n", b"two"], ["\n\n"]) == ["one"]
    assert text_of([b"one\n", b"two\n"], ["\n\n"]) == ["one", "\ntwo", "\n"]
    stopped = sample.Text(iter([104, 105, 33, 120, 120]), bytes, ["!"])
    assert "".join(stopped) == "hi" and stopped.stopped and stopped.ids == [104, 105, 33]


def test_stops_do_not_depend_on_how_the_text_is_cut_into_tokens() -> None:
    """Against the definition: the shortest beginning of the text that ends with a stop."""
    rng = random.Random(1)
    some_stopped = 0
    for _ in range(2000):
        text = "".join(rng.choices("aab漢", k=12))
        stops = [
            "".join(rng.choices("ab漢", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))
        ]
        ends = [
            n - max(len(stop) for stop in stops if text[:n].endswith(stop))
            for n in range(len(text) + 1)
            if any(text[:n].endswith(stop) for stop in stops)
        ]
        raw, chunks = text.encode(), []
        while raw:
            n = rng.randint(1, 12)
            chunks.append(raw[:n])
            raw = raw[n:]
        some_stopped += bool(ends)
        assert "".join(text_of(chunks, stops)) == text[: ends[0] if ends else None], (chunks, stops)
    assert 500 < some_stopped < 1900
