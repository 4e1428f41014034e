"""The checkpoint folder: whole or not at all, verified, found, pruned."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt import checkpoint, folders
from gpt.config import AdamWConfig
from gpt.model import GPT, GPTConfig
from gpt.optimizer import build_optimizer


def tiny() -> GPT:
    shape = {"block_size": 8, "vocab_size": 60, "n_layer": 2, "n_head": 2, "n_embd": 16}
    return GPT(GPTConfig(**shape, embd_dropout=0.0, attn_dropout=0.0, resid_dropout=0.0))


def trained() -> tuple[GPT, torch.optim.Optimizer]:
    """A model after one update, so that there are moments."""
    model = tiny()
    optimizer = build_optimizer(
        model, AdamWConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    model(torch.arange(8)[None]).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = trained()
    path = folder / folders.step_name(step)
    checkpoint.write(
        path, checkpoint.snapshot(model, optimizer), {"step": step}, eot=59, tokenizer=None
    )
    return path


def test_weights_and_moments_come_back_to_the_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = tmp_path / "step_00000001"
    checkpoint.write(
        path, checkpoint.snapshot(model, optimizer), {"step": 1}, eot=59, tokenizer=None
    )
    loaded = checkpoint.load_model(path)
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not loaded.training and all(p.requires_grad for p in loaded.parameters())
    other = build_optimizer(
        loaded, AdamWConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    checkpoint.load_moments(path, loaded, other)
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert (
            optimizer.state[p].keys() == other.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
        )
        for key in optimizer.state[p]:
            assert torch.equal(optimizer.state[p][key], other.state[q][key])


def test_no_file_tells_of_a_device(tmp_path: Path) -> None:
    """A tensor is numbers, a shape and a format, so it loads wherever it is asked to."""
    path = save(tmp_path)
    for name in (folders.WEIGHTS, folders.MOMENTS):
        content = (path / name).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        told = {key for of, entry in header.items() if of != "__metadata__" for key in entry}
        assert told == {"dtype", "shape", "data_offsets"}
    loaded = checkpoint.load_model(path, "meta")  # a device that it was surely not saved on
    assert {p.device.type for p in loaded.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpu_saved_loads_on_the_cpu_and_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.cuda()
    path = tmp_path / "step_00000001"
    checkpoint.write(
        path, checkpoint.snapshot(model, optimizer), {"step": 1}, eot=59, tokenizer=None
    )
    for device in ("cpu", "cuda"):
        loaded = checkpoint.load_model(path, device)
        for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
            assert b.device.type == device and torch.equal(a.cpu(), b.cpu())


def test_a_save_that_dies_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, 1)

    def dying(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", dying)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    found, complaints = folders.newest_whole(tmp_path)
    assert found == first and complaints == []
    monkeypatch.undo()
    folders.prune(tmp_path, keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_links_are_relative_and_replaced_in_one_move(tmp_path: Path) -> None:
    for step in (1, 2):
        folders.link("latest", save(tmp_path, step))
    assert os.readlink(tmp_path / "latest") == "step_00000002"


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    folders.link("best", tmp_path / folders.step_name(2))
    folders.prune(tmp_path, keep_last=2)
    assert [p.name for p in folders.steps(tmp_path)] == [
        folders.step_name(step) for step in (2, 4, 5)
    ]


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', "[]", '{"format": 2, "files": 3}'])
def test_a_broken_state_is_named(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    (path / "state.json").write_text(text)
    with pytest.raises(ValueError, match="state.json is truncated or altered"):
        folders.verify(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.load_model(path)


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    state = json.loads((path / "state.json").read_text())
    state["files"]["../secret"] = {"sha256": "", "size": 0}
    (path / "state.json").write_text(json.dumps(folders.seal(state)))
    with pytest.raises(ValueError, match="outside its folder"):
        folders.verify(path)


def test_weights_alone_can_not_be_continued(tmp_path: Path) -> None:
    """What to do instead is said."""
    path = save(tmp_path)
    (path / "state.json").unlink()
    with pytest.raises(ValueError, match="init_from="):
        folders.verify(path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    """A planted pickle never runs, neither as weights nor under a safetensors name."""
    import pickle

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "canary"),)

    path = save(tmp_path)
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        (path / name).write_bytes(pickle.dumps(Canary()))
    with pytest.raises(ValueError, match="truncated or altered"):
        checkpoint.load_model(path)
    (path / "state.json").unlink()
    with pytest.raises(ValueError, match="can't be read"):
        checkpoint.load_model(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        checkpoint.load_model(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    (path / "state.json").unlink()
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json is truncated or altered.*; restore it"):
        checkpoint.load_model(path)


@pytest.mark.parametrize(
    ("lost", "named"),
    [("exp_avg.ln_f.bias", "ln_f.bias"), (".ln_f.bias", "ln_f.bias"), ("", "wte.weight")],
)
def test_moments_that_are_missing_are_named(tmp_path: Path, lost: str, named: str) -> None:
    """One of a parameter's, all of a parameter's, all: the optimizer would begin them anew."""
    path = save(tmp_path)
    moments = load_file(path / folders.MOMENTS)
    kept = {name: moments[name] for name in moments if lost not in name}
    assert len(kept) < len(moments)
    save_file(kept, path / folders.MOMENTS)
    model, optimizer = trained()
    with pytest.raises(ValueError, match=f"optimizer.safetensors lacks moments of {named}; the"):
        checkpoint.load_moments(path, model, optimizer)


def test_before_any_update_there_are_no_moments(tmp_path: Path) -> None:
    """Every step so far was skipped."""
    model = tiny()
    optimizer = build_optimizer(
        model, AdamWConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    taken = checkpoint.snapshot(model, optimizer)
    path = tmp_path / "step_00000002"
    checkpoint.write(path, taken, {"step": 2, "skipped": 2}, eot=59, tokenizer=None)
    checkpoint.load_moments(path, model, optimizer)
    assert not any(optimizer.state.values())


def test_resolve(tmp_path: Path) -> None:
    """A path that exists, else a run's name; a run means its latest; nothing: the newest run."""
    with pytest.raises(ValueError, match="no run is under"):
        folders.resolve(None, tmp_path)
    path = save(tmp_path / "runs" / "a" / "checkpoints")
    folders.link("latest", path)
    for name in (None, "a", str(path), str(tmp_path / "runs" / "a")):
        assert folders.resolve(name, tmp_path) == path
    with pytest.raises(ValueError, match="runs under .*: a"):
        folders.resolve("b", tmp_path)
