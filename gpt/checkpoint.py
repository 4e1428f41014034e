"""A checkpoint folder: write and load.

A checkpoint is a Hugging Face GPT-2 folder (model.safetensors, config.json, the tokenizer's
files), which other tools open as it is, and beside it what training needs: the optimizer's
moments in training/ and the rest in state.json. The sums of all files stand in state.json, which
is written last; a folder is a checkpoint when state.json is whole and the sums agree.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt import distributed, folders
from gpt.config import GPTConfig
from gpt.folders import FORMAT, MOMENTS, STATE, TEMPORARY, TOKENIZER_FILES, WEIGHTS, sha256, verify
from gpt.huggingface import config_from_hf, from_hf, hf_config, to_hf
from gpt.model import GPT

# --- writing


@dataclass(slots=True)
class Snapshot:
    """A copy of weights (by parameter name) and moments on the CPU, without padding."""

    config: GPTConfig
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def snapshot(model: GPT, optimizer: torch.optim.Optimizer, keep: bool = True) -> Snapshot | None:
    """Copy all that learning changes, so that it may change on; None where `keep` is false.

    Sharded tensors are gathered one by one, to which every rank has to come; one of them keeps.
    """

    def copy(into: dict[str, Tensor], name: str, key: str, tensor: Tensor) -> None:
        tensor = distributed.full(tensor.detach())
        if not keep:
            return
        if name == "wte.weight" and tensor.dim() == 2:
            tensor = tensor[: model.vocab_size]
        into[key] = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()

    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        copy(weights, name, name, parameter)
        for key, value in optimizer.state[parameter].items():
            copy(moments, name, f"{key}.{name}", value)
    return Snapshot(model.config, weights, moments) if keep else None


def write(
    folder: Path, taken: Snapshot, state: dict[str, Any], eot: int | None, tokenizer: Path | None
) -> None:
    """Write a checkpoint at `folder`, whole or not at all.

    Everything goes to a folder of another name, is synced to the disk and read back, and takes its
    name last. Raises OSError where the disk won't have it.
    """
    temporary = folder.with_name(TEMPORARY + folder.name)
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "training").mkdir(parents=True)
    _save_tensors(temporary / WEIGHTS, to_hf(taken.weights, taken.config), {"format": "pt"})
    _save_tensors(temporary / MOMENTS, taken.moments)
    _write_json(temporary / "config.json", hf_config(taken.config, eot))
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, temporary / name)
    files = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
    for name in files:
        _sync(temporary / name)
    sums = {
        name: {"sha256": sha256(temporary / name), "size": (temporary / name).stat().st_size}
        for name in files
    }
    _write_json(temporary / STATE, folders.seal({"format": FORMAT, **state, "files": sums}))
    for name in (STATE, "training", "."):
        _sync(temporary / name)
    if folder.exists():  # a run that went back to an earlier step writes this one anew
        os.rename(folder, folder.with_name(folders.REPLACED + folder.name))
    os.rename(temporary, folder)
    _sync(folder.parent)
    folders.put_back(folder.parent)


def _save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write, and read back: the sums that are taken next should be those of these tensors."""
    try:
        save_file(tensors, path, metadata)
        with safe_open(path, "pt") as file:
            same = all(torch.equal(file.get_tensor(name), tensors[name]) for name in tensors)
    except SafetensorError as e:  # it wraps the system's error, of which only the text is left
        number = re.search(r"os error (\d+)", str(e))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(e), str(path)) from e
    if not same:
        raise OSError(errno.EIO, "reads back other than it was written", str(path))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", attention: str = "flash"
) -> GPT:
    """A GPT in eval mode from a checkpoint or any Hugging Face GPT-2 folder, in float32.

    A checkpoint's sums are checked first. Raises ValueError naming the file that is wrong.
    """
    folder = Path(folder)
    if (folder / STATE).exists():
        verify(folder, training=False)
    config = _read_hf_config(folder)
    with torch.device("meta"):
        model = GPT(config, attention)
    state = from_hf(_read_weights(folder), config)
    model.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
    model.requires_grad_()
    return model.to(device).eval()


def load_named(
    name: str | None, root: Path, device: str | torch.device, warn: Callable[[str], None]
) -> tuple[Path, GPT]:
    """The folder that a command's argument means (folders.resolve), and its model. Of a run whose
    newest checkpoint is damaged it is the newest whole one, as for a resume."""
    folder = folders.resolve(name, root)
    try:
        return folder, load_model(folder, device)
    except ValueError:
        if name is not None and folder == Path(name):  # this very folder was asked for
            raise
        found, complaints = folders.newest_whole(folder.parent, training=False)
        if found is None or not complaints:  # nothing is damaged, something else is wrong
            raise
    for complaint in complaints:
        warn(f"warning: {complaint}; going back to {found}")
    return found, load_model(found, device)


def shape_overrides(folder: Path) -> list[str]:
    """The shape of a folder's weights, as settings."""
    config = _read_hf_config(folder)
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    return [f"model.{name}={getattr(config, name)}" for name in names]


def _read_hf_config(folder: Path) -> GPTConfig:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(
            f"{folder} holds no config.json; it is no checkpoint and no Hugging Face folder; "
            "name the folder that has model.safetensors and config.json"
        ) from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(
            f"{path} is no JSON; the model's shape is unknown; restore the file"
        ) from e
    return config_from_hf(values)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the parts its index lists."""
    index = folder / (WEIGHTS + ".index.json")
    if (folder / WEIGHTS).exists():
        names = [WEIGHTS]
    elif index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({Path(name).name for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{index} is truncated or altered ({type(e).__name__}); which files hold the "
                "weights is unknown; restore it"
            ) from e
    elif (folder / "pytorch_model.bin").exists():
        raise ValueError(
            f"{folder} holds its weights as a pickle (pytorch_model.bin), which could run code; "
            "it is not opened; save it as safetensors, with save_pretrained of transformers"
        )
    else:
        raise ValueError(
            f"{folder} holds no {WEIGHTS}; there are no weights to open; name a checkpoint or a "
            "Hugging Face folder"
        )
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= load_tensors(folder / name)
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All of a safetensors file. ValueError where it is none."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise ValueError(
            f"{path} can't be read ({e}); it is truncated or no safetensors file; "
            "restore it, or use another checkpoint"
        ) from e


# --- the optimizer's moments, by parameter name


@torch.no_grad()
def restore(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments of a checkpoint of this very model, into model and optimizer."""
    weights = from_hf(_read_weights(folder), model.config)
    for name, parameter in model.named_parameters():
        distributed.put(parameter, weights[name])
    load_moments(folder, model, optimizer)


def load_moments(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the moments saved in a checkpoint. ValueError where they don't fit."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for full_name, value in load_tensors(folder / MOMENTS).items():
        key, _, name = full_name.partition(".")
        if name == "wte.weight" and value.dim() == 2:
            padding = model.padded_vocab_size - model.vocab_size
            value = torch.nn.functional.pad(value, (0, 0, 0, padding))
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise ValueError(
                f"{folder / MOMENTS} holds {key} of {name} with shape {list(value.shape)}, which "
                "fits no parameter of this model; the optimizer can't go on; to start anew from "
                f"these weights use init_from={folder}"
            )
        states[name][key] = distributed.like(value, parameters[name])
    kinds = {frozenset(of_one) for of_one in states.values()}
    if len(kinds) > 1 or (kinds == {frozenset()} and _has_updated(folder)):
        least = min(states, key=lambda name: len(states[name]))
        raise ValueError(
            f"{folder / MOMENTS} lacks moments of {least}; the optimizer can't go on; to start "
            f"anew from these weights use init_from={folder}"
        )
    for name, parameter in parameters.items():
        optimizer.state[parameter] = states[name]


def _has_updated(folder: Path) -> bool:
    """Whether a checkpoint comes after an update: before, there are no moments."""
    state = folders.read_state(folder) or {}
    return bool(state.get("step", 0) > state.get("skipped", 0))
