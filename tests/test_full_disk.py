"""A disk that is full, read-only or gone, for real: a tmpfs of a few hundred pages."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpt import folders
from tests import faults
from tests.processes import Run
from tests.test_chaos import SETTINGS, assert_same_run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, and nothing on it."""
    place = tmp_path / "disk"
    place.mkdir()
    yield from mounted(place)


def mounted(place: Path) -> Iterator[Path]:
    if shutil.which("mount") is None:
        pytest.skip("no mount here")
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """The run that nothing happens to."""
    root = tmp_path_factory.mktemp("whole")
    run = Run([*arguments(book), f"paths.root={root}"], root / "out")
    assert run.codes() == [0], run.text()
    return root / "runs" / "r"


def arguments(book: Path) -> list[str]:
    args = [*SETTINGS, f"data.path={book}", "run=r", "trainer.max_steps=40"]
    return [*args, "trainer.eval_every=20"]


def assert_one_error(run: Run, path: Path, says: str) -> None:
    """One line for people, which names the path and what to do; no traceback."""
    errors = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in run.text(), run.text()
    assert str(path) in errors[0] and says in errors[0] and errors[0].count(";") >= 2, errors[0]


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(
    mount: Path, tmp_path: Path, book: Path, whole: Path
) -> None:
    """The save of step 20 has no room: exit 2, one line; with room again, the run goes on and ends
    with the same bits."""
    args = [*arguments(book), f"paths.root={mount}", "trainer.on_save_error=stop"]
    full = partial(faults.before_update, 12, partial(faults.fill, str(mount)))
    run = Run(args, tmp_path / "out", hook=full)
    assert run.codes() == [2], run.text()
    checkpoints = mount / "runs" / "r" / "checkpoints"
    assert_one_error(run, checkpoints, "No space left on device")
    assert "os error" not in run.text()
    found, complaints = folders.newest_whole(checkpoints)
    assert found is not None and found.name == "step_00000010" and complaints == []
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_00000010"]
    (mount / "filler").unlink()
    run = Run(args, tmp_path / "out")
    assert run.codes() == [0], run.text()
    assert_same_run(mount / "runs" / "r", whole)


def test_a_full_disk_may_be_lived_with(
    mount: Path, tmp_path: Path, book: Path, whole: Path
) -> None:
    """on_save_error=continue: it is said, and the save of step 30 has room again."""
    args = [*arguments(book), f"paths.root={mount}", "trainer.on_save_error=continue"]
    full = partial(faults.before_update, 12, partial(faults.fill, str(mount)))
    room = partial(faults.before_update, 25, partial(faults.make_room, str(mount)))
    run = Run(args, tmp_path / "out", hook=partial(faults.all_of, full, room))
    assert run.codes() == [0], run.text()
    said = [line for line in run.text().splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and "step_00000010" in said[0], run.text()
    assert_same_run(mount / "runs" / "r", whole)


def test_a_last_save_that_fails_is_an_error_all_the_same(
    mount: Path, tmp_path: Path, book: Path
) -> None:
    args = [*arguments(book), f"paths.root={mount}", "trainer.on_save_error=continue"]
    full = partial(faults.before_update, 12, partial(faults.fill, str(mount)))
    run = Run(args, tmp_path / "out", hook=full)
    assert run.codes() == [2], run.text()
    assert_one_error(run, mount / "runs" / "r" / "checkpoints", "No space left on device")
    assert folders.newest_whole(mount / "runs" / "r" / "checkpoints")[0] is not None


def test_a_disk_full_before_the_start_is_one_line(mount: Path, tmp_path: Path, book: Path) -> None:
    faults.fill(str(mount))
    run = Run([*arguments(book), f"paths.root={mount}"], tmp_path / "out")
    assert run.codes() == [2], run.text()
    assert_one_error(run, mount, "is full")


def test_a_disk_that_turns_read_only(tmp_path: Path, book: Path) -> None:
    """Of the checkpoints only, since files that are open elsewhere forbid it."""
    checkpoints = tmp_path / "root" / "runs" / "r" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for _ in mounted(checkpoints):
        args = [*arguments(book), f"paths.root={tmp_path / 'root'}"]
        hook = partial(faults.make_read_only, str(checkpoints))
        run = Run(args, tmp_path / "out", hook=partial(faults.before_update, 12, hook))
        assert run.codes() == [2], run.text()
        assert_one_error(run, checkpoints, "Read-only file system")
        found, complaints = folders.newest_whole(checkpoints)
        assert found is not None and found.name == "step_00000010" and complaints == []


def test_a_limit_on_file_size_is_one_line(tmp_path: Path, book: Path) -> None:
    """RLIMIT_FSIZE: the weights fit, the moments do not."""
    args = [*arguments(book), f"paths.root={tmp_path}"]
    run = Run(args, tmp_path / "out", hook=partial(faults.limit_files, 200_000))
    assert run.codes() == [2], run.text()
    assert_one_error(run, tmp_path / "runs" / "r" / "checkpoints", "File too large")
    assert list((tmp_path / "runs" / "r" / "checkpoints").iterdir()) == []


def test_the_runs_folder_removed_under_the_run(tmp_path: Path, book: Path) -> None:
    """What is saved after that is whole, and can be continued from."""
    folder = tmp_path / "runs" / "r"
    args = [*arguments(book), f"paths.root={tmp_path}"]
    hook = partial(faults.before_update, 12, partial(faults.remove, str(folder)))
    run = Run(args, tmp_path / "out", hook=hook)
    assert run.codes() == [0], run.text()
    found, complaints = folders.newest_whole(folder / "checkpoints")
    assert found is not None and found.name == "step_00000040" and complaints == []
    more = Run([*args, "trainer.max_steps=42"], tmp_path / "out")
    assert more.codes() == [0] and "continuing after step 40" in more.text(), more.text()
