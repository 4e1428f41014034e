"""Devices, number formats, compiling, seeds: what is chosen and what is refused."""

import pytest
import torch

from gpt import runtime
from gpt.config import Attention, DType, Parallel, RuntimeConfig
from gpt.runtime import resolve, seed_of

CPU = torch.device("cpu")


def config(**changes: object) -> RuntimeConfig:
    values = {"device": "cpu", "dtype": DType.auto, "compile": False}
    fixed = {"attention": Attention.flash, "deterministic": False, "parallel": Parallel.ddp}
    off = {"activation_checkpointing": False, "hang_minutes": None, "peak_flops": None}
    return RuntimeConfig(**{**values, **fixed, **off, **changes})  # type: ignore[arg-type]


def test_auto_and_cpu_run_where_there_is_no_gpu() -> None:
    for device in ("auto", "cpu"):
        assert resolve(config(device=device)).device.type in ("cpu", "cuda", "mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there(device: str) -> None:
    """One line that names it, not torch's traceback."""
    with pytest.raises(ValueError, match=f"runtime.device={device} is not on this machine"):
        resolve(config(device=device))


@pytest.mark.parametrize("has", [True, False])
def test_auto_takes_bfloat16_only_where_it_is_fast(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has})
    machine = resolve(config())
    assert machine.dtype == (torch.bfloat16 if has else torch.float32)
    assert any("no bfloat16" in note for note in machine.notes) is not has


def test_deterministic_algorithms_are_for_one_run() -> None:
    """Jobs of a sweep share a process."""
    for wanted in (True, False):
        resolve(config(deterministic=wanted))
        assert torch.are_deterministic_algorithms_enabled() == wanted


def fake(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, bf16: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_a_gpu_without_bfloat16_takes_float16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, cuda=True, mps=False)
    machine = resolve(config(device="auto"))
    assert (machine.device.type, machine.dtype) == ("cuda", torch.float16)
    assert any("float16 with loss scaling" in note for note in machine.notes)
    with pytest.raises(ValueError, match="runtime.dtype=bfloat16"):
        resolve(config(device="cuda", dtype=DType.bfloat16))


def test_mps_is_neither_cpu_nor_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, no compiling, no loss scaling, nothing of CUDA's is called."""
    fake(monkeypatch, cuda=False, mps=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("CUDA was called"))
    machine = resolve(config(device="auto", compile="auto"))
    assert (machine.device.type, machine.dtype) == ("mps", torch.float32)
    assert not machine.compile
    assert not torch.amp.GradScaler("mps", enabled=machine.dtype == torch.float16).is_enabled()
    machine.synchronize()
    with pytest.raises(ValueError, match="runtime.dtype=float16"):
        resolve(config(device="mps", dtype=DType.float16))


def test_float16_needs_cuda() -> None:
    with pytest.raises(ValueError, match="runtime.dtype=float16 needs a CUDA device"):
        resolve(config(dtype=DType.float16))


def test_without_a_compiler_it_runs_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.shutil, "which", lambda name: None)
    machine = resolve(config(compile="auto"))
    assert not machine.compile and any("no C++ compiler" in note for note in machine.notes)


def test_seeds_are_functions_of_their_parts() -> None:
    assert seed_of("dropout", 1, 2, 3) == seed_of("dropout", 1, 2, 3)
    seeds = {seed_of("dropout", a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64 and all(0 <= s < 2**63 for s in seeds)


def test_dropout_of_a_micro_batch_depends_on_its_place_alone() -> None:
    runtime.seed_dropout(1, 5, 2)
    first = torch.rand(4)
    torch.rand(100)
    runtime.seed_dropout(1, 5, 3)
    other = torch.rand(4)
    runtime.seed_dropout(1, 5, 2)
    assert torch.equal(torch.rand(4), first) and not torch.equal(first, other)
