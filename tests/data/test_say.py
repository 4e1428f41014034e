"""What preparing tells people."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from data.prepare import prepare
from data.say import counted, file_state, visible
from data.shards import load_manifest
from tests.data.conftest import text_config

# Small batches, slowed down so that progress is worth a line.
CODE = """
import sys, time
from pathlib import Path
from data import build, encode, pieces
from data.prepare import prepare
from data.say import terminal
from tests.data.conftest import text_config
encode._BATCH_CHARS = pieces.PIECE_CHARS = 20_000
build._LIVE_SECONDS = 0.0
real = encode._encode
encode._encode = lambda *args: (time.sleep(0.02), real(*args))[1]
config = text_config(sys.argv[1], tokenizer="byte", val_fraction=0.0, num_proc=1)
with terminal() as (log, live):
    prepare(config, Path(sys.argv[2]), log, live)
"""


def test_one_of_a_thing_is_one():
    assert [counted(n, "document") for n in (0, 1, 2000)] == [
        "0 documents",
        "1 document",
        "2,000 documents",
    ]


def test_a_file_s_state_is_said_with_a_date(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert file_state([2400, 1_700_000_000_123_456_789]) == "2,400 bytes of 2023-11-14 22:13:20"
    assert file_state(0.1) == "0.1"
    assert file_state(None) == "None"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("é 漢 😀\n", "é 漢 😀\n"),
        ("\x1b[2J\x07\x9b\x7f", "\\x1b[2J\\x07\\x9b\\x7f"),
        ("a\rb\tc\x00", "a\\rb\\tc\\x00"),
        ("\u202eevil\u2028\ud83d", "\\u202eevil\\u2028\\ud83d"),
    ],
)
def test_nothing_that_could_act_on_a_terminal_is_left(text, expected):
    assert visible(text) == expected


def on_a_terminal(command, term="xterm"):
    """All that a command writes to a terminal of 100 columns."""
    main, side = pty.openpty()
    environment = os.environ | {"TERM": term, "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=side, stderr=side, stdin=side, env=environment)
    os.close(side)
    out = b""
    while True:
        try:
            block = os.read(main, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        out += block
    os.close(main)
    assert process.wait(60) == 0, out
    return out.decode()


def screen(out):
    """The lines that are left on a terminal: erasing a line and going up one are obeyed."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9?]*[A-Za-z]|\n|[^\x1b\n]+", out):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif not part.startswith("\x1b"):
            lines[row] += part.replace("\r", "")
    return lines


@pytest.fixture
def command(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\x1b[31m.txt").write_bytes(b"bad \xff byte")
    (tmp_path / "in" / "b.txt").write_text("words and more words\n" * 50_000)
    return [sys.executable, "-c", CODE, str(tmp_path / "in"), str(tmp_path)]


@pytest.mark.skipif(sys.platform == "win32", reason="no pty there")
def test_a_terminal_shows_one_live_line_and_gets_its_cursor_back(command):
    out = on_a_terminal(command)
    shown = re.findall(r"\[#*\.*\] \d+%, \d+ min \d\d s left, [\d.]+ MB/s", out)
    assert len(set(shown)) > 3
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") > 0  # hidden, shown
    assert "\x1b[31m.txt" not in out and "a\\x1b[31m.txt is repaired" in out
    stay = screen(out)
    assert any(line.startswith("data: done: 2 documents") for line in stay)
    assert not any("s left" in line for line in stay)


@pytest.mark.skipif(sys.platform == "win32", reason="no pty there")
def test_elsewhere_there_are_plain_lines_only(command, tmp_path):
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "\x1b" not in piped and "s left" not in piped
    assert "a\\x1b[31m.txt is repaired" in piped
    other = [*command[:-1], str(tmp_path / "dumb")]
    dumb = on_a_terminal(other, term="dumb")
    assert "\x1b" not in dumb and "done: 2 documents" in dumb


def test_what_was_made_and_what_is_ready_is_said_with_its_fingerprint(tmp_path, log, said):
    (tmp_path / "a.txt").write_text("one line\n")
    config = text_config(tmp_path / "a.txt", val_fraction=0.0, tokenizer="byte")
    folder = prepare(config, tmp_path, log)
    assert any(line.startswith("data: 1 document, 0.0 MB, 10 tokens in ") for line in said)
    shards = (
        f"10 training and 0 validation tokens, 1 shard in {folder}, "
        f"fingerprint {load_manifest(folder).fingerprint[:12]}"
    )
    assert said[-1] == f"data: done: 1 document, {shards}"
    prepare(config, tmp_path, log)
    assert said[-1] == f"data: {folder.name} is ready: {shards}"
