"""Files of a run and a checkpoint are data: nothing in them runs, reaches outside, or acts on a
terminal. (Data files: tests/data/test_trust.py. The page: tests/tools/test_explore.py.)"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import load_tokenizer
from gpt import checkpoint, folders
from gpt.tracker import Tracker, TrackerConfig, WandbMode, read_metrics

ROOT = Path(__file__).parent.parent
TrainRun = Callable[..., tuple[int, Path]]
Trained = Callable[..., Path]
SHORT = ("trainer.max_steps=2", "trainer.eval_every=null")


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.place),)


def opened(act: Callable[[], object]) -> str:
    """What a reader says about a planted file; it may read it, if only nothing runs."""
    try:
        act()
    except ValueError as e:
        return str(e)
    return ""


CHECKPOINT_FILES = [
    *("model.safetensors", "training/optimizer.safetensors", "state.json", "config.json"),
    *("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json", "pytorch_model.bin"),
    *("model.safetensors.index.json", "training_args.bin", "optimizer.pt", "scheduler.pt"),
]


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("trusted", [True, False])
def test_a_pickle_never_runs(
    name: str, trusted: bool, trained: Trained, train_run: TrainRun, tmp_path: Path
) -> None:
    """In the place of any file of a checkpoint; `trusted`: whoever planted it has changed the
    sums in state.json as well, or taken it away."""
    run = trained(*SHORT)
    folder = (run / "checkpoints" / "latest").resolve()
    canary = tmp_path / "canary"
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    state = folder / "state.json"
    if trusted and name != "state.json":
        values = folders.read_state(folder)
        assert values is not None
        path = folder / name
        values["files"][name] = {"sha256": folders.sha256(path), "size": path.stat().st_size}
        state.write_text(json.dumps(folders.seal(values)))
    said = [
        opened(lambda: train_run("trainer.max_steps=4")),
        opened(lambda: train_run(f"init_from={folder}", "trainer.max_steps=1", name="tuned")),
        opened(lambda: checkpoint.load_model(folder)),
        opened(lambda: load_tokenizer(folder)),
    ]
    if name == "pytorch_model.bin":
        for weights in (folder / "model.safetensors", state):
            weights.unlink()
        said.append(opened(lambda: checkpoint.load_model(folder)))
        assert "pickle" in said[-1]
    assert not canary.exists(), said
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # it would have shown


@pytest.mark.parametrize("name", ["overrides.yaml", "config.yaml", "metrics.jsonl", "train.log"])
@pytest.mark.parametrize("kind", ["pickle", "yaml"])
def test_a_runs_own_files_never_run(
    name: str, kind: str, trained: Trained, train_run: TrainRun, tmp_path: Path
) -> None:
    """A pickle, and YAML that asks for a call."""
    run = trained(*SHORT)
    canary = tmp_path / "canary"
    yaml = f"- !!python/object/apply:os.mkdir [{str(canary)!r}]\n".encode()
    (run / name).write_bytes(pickle.dumps(Canary(canary)) if kind == "pickle" else yaml)
    said = opened(lambda: train_run("trainer.max_steps=4"))
    assert not canary.exists()
    if name == "overrides.yaml":
        assert "overrides.yaml is damaged" in said


# --- out of the folder


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_sum_of_a_file_outside_is_refused(name: str, trained: Trained, tmp_path: Path) -> None:
    """state.json: whoever may write it learns nothing about other files."""
    run = trained(*SHORT)
    folder = (run / "checkpoints" / "latest").resolve()
    state = folders.read_state(folder)
    assert state is not None
    state["files"][name] = {"sha256": "0" * 64, "size": 1}
    (folder / "state.json").write_text(json.dumps(folders.seal(state)))
    with pytest.raises(ValueError, match="lies outside its folder"):
        folders.verify(folder)


def test_an_index_reaches_no_file_outside(trained: Trained, tmp_path: Path) -> None:
    """model.safetensors.index.json: a part is looked for in the folder, whatever its path says."""
    run = trained(*SHORT)
    folder = (run / "checkpoints" / "latest").resolve()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "weights.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for name in ("config.json", "vocab.json", "merges.txt"):
        (theirs / name).write_bytes((folder / name).read_bytes())
    for path in ("../weights.safetensors", str(tmp_path / "weights.safetensors")):
        index = {"weight_map": {"transformer.wte.weight": path}}
        (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="can't be read"):
            checkpoint.load_model(theirs)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", ".hidden", ""])
def test_a_runs_name_is_a_name(name: str, tmp_path: Path) -> None:
    """Given, or stored in overrides.yaml: no run's folder lies outside of runs/."""
    done = subprocess.run(
        [
            sys.executable,
            "train.py",
            f"run={name}x/.." if not name else f"run={name}",
            "model=tiny",
        ],
        cwd=ROOT,
        env={**os.environ, "GPT_ROOT": str(tmp_path / "root")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_best_step_that_is_no_number_links_nowhere(
    trained: Trained, train_run: TrainRun, tmp_path: Path
) -> None:
    run = trained(*SHORT)
    checkpoints = run / "checkpoints"
    state = folders.read_state(checkpoints / "latest")
    assert state is not None
    state["best_step"] = "../../../../outside"
    (checkpoints / "latest" / "state.json").write_text(json.dumps(folders.seal(state)))
    assert train_run("trainer.max_steps=2")[0] == 0  # nothing left to do, but links are mended
    assert not (checkpoints / "best").is_symlink()


# --- on a terminal


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x08"


def acting(text: str) -> list[str]:
    """Characters that a terminal may take for more than text."""
    return sorted({c for c in text if not c.isprintable() and c not in "\n\t"})


def test_escapes_in_documents_do_not_act(
    train_run: TrainRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Console and train.log: file names, samples of a model that has learned escapes by heart, and
    the windows of a bad step."""
    text = tmp_path / "evil\x1b[31m.txt"
    text.write_text(EVIL * 400, encoding="utf-8")
    args = [f"data.path='{text}'", "trainer.sample_every=10", "trainer.max_steps=30"]
    code, run = train_run(*args, "trainer.spike_z=0.1", "trainer.on_spike=skip")
    assert code == 0
    out, err = capsys.readouterr()
    assert "sample after step 30" in out and "\\x1b" in out
    assert acting(out + err) == []
    assert acting((run / "train.log").read_text(encoding="utf-8")) == []


def test_a_log_line_is_one_line(tmp_path: Path) -> None:
    """What a document says can't forge a line of its own in train.log."""
    with Tracker(TrackerConfig(wandb=WandbMode.disabled, project="p"), is_main=True) as tracker:
        tracker.open(tmp_path, {}, None, 0)
        tracker.say(f"  in {EVIL}")
    assert acting((tmp_path / "train.log").read_text(encoding="utf-8")) == []


def test_a_prompt_with_escapes_does_not_act(trained: Trained, tmp_path: Path) -> None:
    """sample.py writes its text for people where there is a terminal; to a file, as it is."""
    run = trained(*SHORT)
    done = subprocess.run(
        [
            "script",
            "-qec",
            f"{sys.executable} sample.py {run} --prompt '{EVIL}' --seed 1",
            "/dev/null",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout
    assert "\x1b]0;" not in done.stdout and "\x9b" not in done.stdout


def test_a_settings_error_does_not_act(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "data=text", f"data.path='{EVIL}'", f"paths.root={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert acting(done.stderr) == []


def test_metrics_hold_what_json_allows(train_run: TrainRun) -> None:
    """No NaN or Infinity, which a strict reader refuses."""
    _, run = train_run("trainer.max_steps=2")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert len(read_metrics(run)) == 1
