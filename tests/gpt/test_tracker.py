"""What a run tells: rows once each, text that can't act, no key that leaks."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt.tracker import (
    Lines,
    Tracker,
    TrackerConfig,
    WandbMode,
    keep_rows,
    printable,
    read_metrics,
    wandb_has_key,
)

ROOT = Path(__file__).parents[2]
OFF = TrackerConfig(wandb=WandbMode.disabled, project="p")
OFFLINE = TrackerConfig(wandb=WandbMode.offline, project="p")


def rows(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_that_a_kill_undid_go(tmp_path: Path) -> None:
    """Saved at 10, killed at 13 in mid-line: 11 to 13 will be written again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 13)) + '{"step": 1')
    keep_rows(path, 10)
    assert rows(path) == list(range(1, 11))
    keep_rows(tmp_path / "absent.jsonl", 10)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_row_without_a_step_is_none(tmp_path: Path) -> None:
    """What can't be placed before or after the step goes, as a half-written line does."""
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"step": 1}', b'{"val/loss": 2.0}', b"7", b"null", b'{"step": "2"}', b"\xff\x00"]
    path.write_bytes(b"\n".join([*whole, b'{"step": 2}', b'{"step": 3}', b'{"ste']))
    keep_rows(path, 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_rows_that_end_a_file_are_cut_off_in_place(tmp_path: Path) -> None:
    """On a full disk there is no room for a copy."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    inode = path.stat().st_ino
    keep_rows(path, 1)
    assert path.read_text() == '{"step": 1}\n' and path.stat().st_ino == inode


def test_what_is_said_before_the_run_has_a_folder_is_in_its_log(tmp_path: Path) -> None:
    with Tracker(OFF, is_main=True) as tracker:
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
    (tmp_path / "elsewhere").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "elsewhere"))
    assert wandb_has_key()
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_has_key()


# --- a disk that is full, or gone


class FullDisk:
    """Stands for a disk with room for so many bytes more; a write that crosses the end is cut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        self.error = errno.ENOSPC
        write = os.write

        def limited(fd: int, data: bytes) -> int:
            if fd <= 2:
                return write(fd, data)
            if not self.room:
                raise OSError(self.error, os.strerror(self.error))
            done = write(fd, data[: self.room])
            self.room -= done
            return done

        monkeypatch.setattr(os, "write", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_a_line_is_written_whole_or_not_at_all_and_none_is_lost(
    tmp_path: Path, disk: FullDisk
) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    lines.append("fir\udc80st")  # a name that is no UTF-8 may be in a message
    disk.room = 3
    lines.append("second")
    assert path.read_text() == "fir\\udc80st\n" and lines.error is not None
    lines.append("third")
    assert path.read_text() == "fir\\udc80st\n" and lines.waiting == ["second", "third"]
    disk.room = 10**9
    lines.append("fourth")
    assert path.read_text() == "fir\\udc80st\nsecond\nthird\nfourth\n"
    assert lines.error is None and lines.waiting == []


def test_half_a_line_that_could_not_be_cut_off_is_cut_off_later(
    tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk goes in mid-line: the descriptor is good for nothing, not for cutting either."""
    lines = Lines(tmp_path / "lines")
    lines.append("first")
    disk.room, disk.error = 3, errno.EIO
    with monkeypatch.context() as patch:

        def fail(fd: int, length: int) -> None:
            raise OSError(errno.EIO, "")

        patch.setattr(os, "ftruncate", fail)
        lines.append("second")
    assert (tmp_path / "lines").read_text() == "first\nsec"
    disk.room = 10**9
    lines.append("third")
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


def test_a_folder_that_is_gone_is_waited_for(tmp_path: Path, disk: FullDisk) -> None:
    (tmp_path / "run").mkdir()
    lines = Lines(tmp_path / "run" / "lines")
    disk.room, disk.error = 0, errno.EIO
    lines.append("first")
    (tmp_path / "run").rename(tmp_path / "away")
    disk.room = 10**9
    lines.append("second")
    assert isinstance(lines.error, FileNotFoundError)
    (tmp_path / "away").rename(tmp_path / "run")
    lines.append("third")
    assert (tmp_path / "run" / "lines").read_text() == "first\nsecond\nthird\n"


def test_a_full_disk_ends_no_step_and_is_said_once(
    tmp_path: Path, disk: FullDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(OFF, is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        tracker.log({"step": 1})
        disk.room = 5
        for step in range(2, 6):
            tracker.log({"step": step})
            tracker.say(f"at {step}")
        assert rows(tmp_path / "metrics.jsonl") == [1]
        disk.room = 10**9
        tracker.log({"step": 6})
        tracker.say("room again")
    assert rows(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    log = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in log] == [f"at {i}" for i in range(2, 6)] + [
        "room again"
    ]
    out = capsys.readouterr().out
    assert out.count("can't be written") == 1 and out.count("is written") == 1
    assert "No space left" in out and "lost" not in out


def test_what_is_still_unwritten_at_the_end_is_counted_in_one_line(
    tmp_path: Path, disk: FullDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(OFF, is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        disk.room = 0
        for step in range(1, 4):
            tracker.log({"step": step})
        tracker.say("last words")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "lost" in line]
    assert f"3 rows of {tmp_path / 'metrics.jsonl'}" in line
    assert f"1 line of {tmp_path / 'train.log'}" in line and "No space left" in line


def test_going_back_forgets_rows_that_wait_as_well(tmp_path: Path, disk: FullDisk) -> None:
    with Tracker(OFF, is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        tracker.log({"step": 1})
        tracker.log({"step": 2})
        disk.room = 0
        for step in (3, 4):
            tracker.log({"step": step})
        tracker.rewind(1)
        assert rows(tmp_path / "metrics.jsonl") == [1]
        disk.room = 10**9
        tracker.log({"step": 2})
    assert rows(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(path: Path) -> None:
    """Use up the last byte of the disk."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


@pytest.mark.parametrize("config", [OFF, OFFLINE])
def test_a_really_full_disk(
    small_disk: Path, config: TrackerConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small_disk / "run"
    run.mkdir()
    with Tracker(config, is_main=True) as tracker:
        tracker.open(run, {}, None, 0)
        fill(small_disk / "full")
        for step in range(1, 2000):  # enough to use up what the file system had left in its blocks
            tracker.log({"step": step})
        assert tracker._metrics is not None and len(tracker._metrics.waiting) > 1000
        assert rows(run / "metrics.jsonl") == list(range(1, 2000 - len(tracker._metrics.waiting)))
        (small_disk / "full").unlink()
        tracker.log({"step": 2000})
    assert rows(run / "metrics.jsonl") == list(range(1, 2001))
    assert capfd.readouterr().err == ""


# --- W&B


def plain(value: Any) -> bool:
    """Whether it is made of JSON's types alone, interpolations resolved."""
    if type(value) is dict:
        return all(type(k) is str and plain(v) for k, v in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return type(value) in (str, int, float, bool, type(None)) and "${" not in str(value)


def test_wandb_gets_a_plain_nested_dict(
    monkeypatch: pytest.MonkeyPatch, train_run: Callable[..., tuple[int, Path]]
) -> None:
    """Neither a config object nor a string with ${…} in it; and rows with their step."""
    given: dict[str, Any] = {}
    logged: list[dict[str, float]] = []

    def init(**kwargs: Any) -> Any:
        given.update(kwargs)
        return SimpleNamespace(
            id="run-id",
            define_metric=lambda *_, **__: None,
            log=logged.append,
            finish=lambda exit_code: given.update(exit_code=exit_code),
        )

    monkeypatch.setattr("wandb.init", init)
    code, run = train_run("tracker.wandb=offline", "trainer.max_steps=2", "trainer.log_every=1")
    assert code == 0 and given["exit_code"] == 0
    assert plain(given["config"])
    assert given["config"]["model"]["n_embd"] == 32
    assert given["config"]["trainer"]["max_steps"] == 2
    assert given["config"]["paths"]["root"] == str(run.parents[1])
    assert logged == read_metrics(run) and [row["step"] for row in logged] == [1, 2]


def stub_wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What wandb.init is asked for, call by call."""
    asked: list[dict[str, Any]] = []

    def init(**kwargs: Any) -> Any:
        asked.append(kwargs)
        nothing = {name: lambda *_, **__: None for name in ("define_metric", "log", "finish")}
        return SimpleNamespace(id=kwargs["id"] or f"run-{len(asked)}", **nothing)

    monkeypatch.setattr("wandb.init", init)
    return asked


def test_a_resume_goes_on_with_the_stored_wandb_run(
    monkeypatch: pytest.MonkeyPatch, train_run: Callable[..., tuple[int, Path]]
) -> None:
    asked = stub_wandb(monkeypatch)
    for steps in (1, 2):
        train_run("tracker.wandb=offline", f"trainer.max_steps={steps}")
    assert [call["id"] for call in asked] == [None, "run-1"]
    assert all(call["resume"] == "allow" for call in asked)


@pytest.mark.parametrize(
    ("setting", "environment", "key", "mode"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "offline", True, "offline"),
        ("auto", "disabled", True, None),
        ("auto", "online", False, "offline"),
        ("online", "disabled", True, "online"),
        ("offline", "online", True, "offline"),
        ("disabled", "online", True, None),
        ("online", None, False, "offline"),
    ],
)
def test_where_wandb_goes(
    setting: str,
    environment: str | None,
    key: bool,
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A setting wins over W&B's own variable; without a key it isn't online, and asks for none."""
    monkeypatch.delenv("WANDB_MODE")
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    monkeypatch.setattr("gpt.tracker.wandb_has_key", lambda: key)
    asked = stub_wandb(monkeypatch)
    with Tracker(TrackerConfig(wandb=WandbMode(setting), project="p"), is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
    assert [call["mode"] for call in asked] == ([mode] if mode else [])
    unmet = not key and "online" in (setting, environment)
    assert ("W&B has no key" in capsys.readouterr().out) == unmet


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_without_a_wandb_that_works_the_run_goes_on(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "absent":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        (tmp_path / "wandb.py").write_text("raise RuntimeError('made for another protobuf')\n")
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
    with Tracker(OFFLINE, is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        tracker.log({"step": 1})
    assert rows(tmp_path / "metrics.jsonl") == [1]
    assert capsys.readouterr().out.count("wandb can't be used (") == 1


@pytest.mark.parametrize("breaks", ["log", "finish"])
def test_a_wandb_that_fails_ends_no_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    breaks: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError("its process is gone")

    parts: dict[str, Any] = {"log": lambda _: None, "finish": lambda exit_code: None}
    run = SimpleNamespace(id="i", define_metric=lambda *_, **__: None, **{**parts, breaks: fail})
    monkeypatch.setattr("wandb.init", lambda **_: run)
    monkeypatch.setattr("wandb.teardown", lambda: None)
    with Tracker(OFFLINE, is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        for step in (1, 2, 3):
            tracker.log({"step": step})
    assert rows(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert capsys.readouterr().out.count("wandb failed") == 1


KILLED = """
import contextlib, os, signal, sys
from pathlib import Path
from gpt.tracker import Tracker, TrackerConfig, WandbMode

folder = Path(sys.argv[1])
with Tracker(TrackerConfig(wandb=WandbMode.offline, project="p"), is_main=True) as tracker:
    tracker.open(folder, {"a": 1}, None, 0)
    tracker.log({"step": 1})
    tasks = Path("/proc/self/task").iterdir()  # any thread may have started it
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    assert children
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # W&B may reap it itself
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)
    for step in range(2, 50):
        tracker.log({"step": step})
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds W&B's process in /proc")
def test_wandbs_own_process_may_be_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=ROOT,
        # Not the process that an earlier test of this one has started.
        env={key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout.count("wandb failed") == 1
    assert rows(tmp_path / "metrics.jsonl") == list(range(1, 50))


def test_a_key_gets_into_no_file(
    monkeypatch: pytest.MonkeyPatch, train_run: Callable[..., tuple[int, Path]]
) -> None:
    """Real W&B, offline, with a key in the environment."""
    key = "5eed0123456789abcdef5eed0123456789abcdef"
    monkeypatch.setenv("WANDB_API_KEY", key)
    code, run = train_run("tracker.wandb=offline", "trainer.max_steps=2", "trainer.log_every=1")
    assert code == 0
    files = [path for path in run.parents[1].rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"train.log", "metrics.jsonl", "config.yaml", "debug.log"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert [path for path in files if key.encode() in path.read_bytes()] == []
