"""Checkpoint folders as files: find, verify, link, prune. Nothing here opens a tensor.

A folder is a checkpoint when its state.json is whole and the sums in it agree with the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMAT = 2  # 1 had no sum of state.json itself
STATE = "state.json"
WEIGHTS = "model.safetensors"
MOMENTS = "training/optimizer.safetensors"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json")
_STEP = re.compile(r"step_(\d{8,})")
TEMPORARY = ".writing-"
REPLACED = ".replaced-"


def default_root() -> Path:
    """Where artefacts lie, unless paths.root says otherwise."""
    return Path(os.environ.get("GPT_ROOT") or "artifacts")


def new_name(root: Path, job: str = "") -> str:
    """The time as a name that no run has; in a sweep, that none has with its first `job` behind."""
    base = time.strftime("%Y%m%d-%H%M%S")
    name, n = base, 1
    while (root / "runs" / f"{name}{job}").exists():
        n += 1
        name = f"{base}-{n}"
    return name


# --- finding


def steps(checkpoints: Path) -> list[Path]:
    """The step folders, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: _number(p.name))


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def newest_whole(checkpoints: Path, training: bool = True) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose sums agree, and what is wrong with the newer ones. `training`
    False: the optimizer's moments don't count.

    Raises ValueError where there are checkpoints and none is whole.
    """
    complaints: list[str] = []
    for folder in reversed(steps(checkpoints)):
        try:
            verify(folder, training)
            return folder, complaints
        except ValueError as e:
            complaints.append(str(e))
    if complaints:
        raise ValueError(complaints[0])
    return None, []


def resolve(name_or_path: str | None, root: Path) -> Path:
    """What a command's positional argument means: a folder that exists, else a run's name.

    A run means its newest checkpoint (`latest`), None the newest run that has one. Raises
    ValueError where there is none.
    """
    runs = root / "runs"
    if name_or_path is not None and Path(name_or_path).exists():
        folder = Path(name_or_path)
        if (folder / "checkpoints").is_dir():
            return _latest(folder)
        return folder
    if name_or_path is not None:
        if (runs / name_or_path).is_dir():
            return _latest(runs / name_or_path)
        known = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
        raise ValueError(
            f"{name_or_path} is neither a folder nor a run; there is nothing to open; "
            + (f"runs under {runs}: {', '.join(known)}" if known else f"no runs are under {runs}")
        )
    latest = [p for p in runs.glob("*/checkpoints/latest") if p.exists()] if runs.is_dir() else []
    if not latest:
        begun = [p for p in runs.iterdir() if p.is_dir()] if runs.is_dir() else []
        if begun:
            return _latest(max(begun, key=lambda p: p.stat().st_mtime))
        raise ValueError(
            f"no run is under {runs}; there is nothing to open; train one with python train.py, "
            "or name a checkpoint folder"
        )
    return max(latest, key=lambda p: (p / STATE).stat().st_mtime).resolve()


def _latest(run: Path) -> Path:
    latest = run / "checkpoints" / "latest"
    if not latest.exists():
        raise ValueError(
            f"run {run.name} has no checkpoint yet; there are no weights to open; the first is "
            f"written {_first_save(run)}"
        )
    return latest.resolve()


def _first_save(run: Path) -> str:
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return "once it trains"
    names = ["save_every", "max_steps"]
    if not re.search(r"val_fraction: 0(\.0)?$", text, re.MULTILINE):
        names.append("eval_every")  # the first validation is the best so far, which is saved
    found = [int(n) for n in re.findall(rf"\b(?:{'|'.join(names)}): (\d+)", text) if int(n)]
    return f"at step {min(found)} at the latest" if found else "when it ends or is stopped"


# --- reading


def read_state(folder: str | Path) -> dict[str, Any] | None:
    """state.json, or None for a folder that has none (a Hugging Face one). ValueError if broken."""
    path = Path(folder) / STATE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {state['format']} and this version reads {FORMAT}; it can't "
                "be continued here; use the version that wrote it"
            )
        if not isinstance(state["files"], dict) or not isinstance(state["step"], int):
            raise KeyError("files, step")
        if state.pop("sha256") != _own_sum(state):
            raise KeyError("sha256")
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(
            f"{path} is truncated or altered ({type(e).__name__}); the checkpoint can't be "
            "trusted; use an earlier one"
        ) from e
    out: dict[str, Any] = state
    return out


def seal(state: dict[str, Any]) -> dict[str, Any]:
    """With the sum of its own values, so that a change in state.json itself shows."""
    state = {key: value for key, value in state.items() if key != "sha256"}
    return {**state, "sha256": _own_sum(state)}


def _own_sum(state: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(state))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, training: bool = True) -> dict[str, Any]:
    """Check every file's size and sum against state.json, which is returned.

    `training` False leaves out the optimizer's moments. Raises ValueError naming the file.
    """
    state = read_state(folder)
    if state is None:
        raise ValueError(
            f"{folder} has no {STATE}; it holds weights at most, no training to continue; "
            f"to start from its weights use init_from={folder}"
        )
    names = [n for n in state["files"] if training or not n.startswith("training/")]
    if WEIGHTS not in names or (training and MOMENTS not in names):
        raise ValueError(
            f"{folder / STATE} lists no weights or no moments; the checkpoint can't be trusted; "
            "use an earlier one"
        )
    with ThreadPoolExecutor(2) as pool:  # hashing leaves the GIL alone
        for name, problem in zip(names, pool.map(lambda n: _problem(folder, n, state), names)):
            if problem:
                raise ValueError(
                    f"{folder / name} {problem}; it was truncated or altered, so nothing of this "
                    "checkpoint is used; restore the file, or use an earlier checkpoint"
                )
    return state


def _problem(folder: Path, name: str, state: dict[str, Any]) -> str | None:
    path, entry = folder / name, state["files"][name]
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return "lies outside its folder"
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != entry["size"]:
        return f"has {path.stat().st_size} bytes instead of {entry['size']}"
    if sha256(path) != entry["sha256"]:
        return "has another sha256 than when it was saved"
    return None


def find_weights(name: str, root: Path) -> Path:
    """The folder that `init_from` means: a path, a run, or a model id of the Hugging Face hub.

    Raises ValueError where it is none of these or the hub can't be reached.
    """
    if Path(name).exists() or (root / "runs" / name).is_dir():
        return resolve(name, root)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except HFValidationError as e:
        raise ValueError(
            f"init_from={name} is no folder, no run, and no name that the Hugging Face hub could "
            "have; there are no weights to start from; correct it"
        ) from e
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        raise ValueError(
            f"init_from={name} is no folder, no run, and could not be had from the Hugging Face "
            f"hub ({type(e).__name__}); there are no weights to start from; correct it, or "
            "download the folder and name it"
        ) from e


# --- keeping order


def link(name: str, folder: Path) -> None:
    """Point the sibling link `name` (latest, best) at a checkpoint, in one move."""
    temporary = folder.parent / f"{TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    os.replace(temporary, folder.parent / name)


def prune(checkpoints: Path, keep_last: int, keep_step: int | None = None) -> None:
    """Remove all but the newest `keep_last`, the best and that of `keep_step`, and what interrupted
    saves left.

    Newer than `latest` is only what was found damaged: it isn't counted, and is left to its owner.
    """
    links = [checkpoints / name for name in ("latest", "best")]
    keep = {link.resolve().name for link in links if link.exists()} | {step_name(keep_step or 0)}
    newest = links[0].resolve().name if links[0].exists() else None
    known = [p for p in steps(checkpoints) if newest is None or _number(p.name) <= _number(newest)]
    for folder in known[:-keep_last]:
        if folder.name not in keep:  # in one move: half a checkpoint would look like a damaged one
            os.rename(folder, folder.with_name(TEMPORARY + folder.name))
    clean(checkpoints)


def _number(name: str) -> int:
    return int(name[5:])


def recover(checkpoints: Path) -> None:
    """Finish what a kill in the middle of a save left: renames, and the links to the newest
    checkpoint and to the best that it knows of."""
    put_back(checkpoints)
    clean(checkpoints)
    for newest in steps(checkpoints)[-1:]:
        try:
            state = read_state(newest)
        except ValueError:  # it is passed over, and that is said, when a checkpoint is looked for
            return
        if state is not None:
            link("latest", newest)
            best = state.get("best_step")
            if isinstance(best, int) and (checkpoints / step_name(best)).is_dir():
                link("best", checkpoints / step_name(best))


def put_back(checkpoints: Path) -> None:
    """A checkpoint set aside for a newer one of the same step comes back, unless the newer is
    there."""
    for old in checkpoints.glob(REPLACED + "*"):
        if (target := old.with_name(old.name.removeprefix(REPLACED))).exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)


def clean(checkpoints: Path) -> None:
    """Remove what interrupted saves left."""
    for leftover in checkpoints.glob(TEMPORARY + "*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
