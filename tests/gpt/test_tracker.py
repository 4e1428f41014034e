"""What a run tells: rows once each, text that can't act, no key that leaks."""

import json
from pathlib import Path

import pytest

from gpt.tracker import Tracker, TrackerConfig, WandbMode, keep_rows, printable, wandb_has_key


def rows(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_that_a_kill_undid_go(tmp_path: Path) -> None:
    """T42: saved at 10, killed at 13 in mid-line: 11 to 13 will be written again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 13)) + '{"step": 1')
    keep_rows(path, 10)
    assert rows(path) == list(range(1, 11))
    keep_rows(tmp_path / "absent.jsonl", 10)
    assert not (tmp_path / "absent.jsonl").exists()


def test_what_is_said_before_the_run_has_a_folder_is_in_its_log(tmp_path: Path) -> None:
    with Tracker(TrackerConfig(wandb=WandbMode.disabled, project="p"), is_main=True) as tracker:
        tracker.say("early")
        tracker.open(tmp_path, {}, None, 0)
        tracker.say("late")
        tracker.log({"step": 1, "train/loss": float("nan"), "lr": 0.5})
    log = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in log] == ["early", "late"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "lr": 0.5}


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(TrackerConfig(wandb=WandbMode.auto, project="p"), is_main=False) as tracker:
        tracker.say("hello")
        tracker.open(tmp_path, {}, None, 0)
        tracker.log({"step": 1})
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_no_escape_of_a_text_acts_on_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r\n\tü漢") == "a\\x1b[31mb\\x07\\r\n\tü漢"


def test_a_key_is_looked_for_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    assert not wandb_has_key()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_has_key()
    (tmp_path / ".netrc").write_text("not a netrc file at all {\n")
    assert not wandb_has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_has_key()
