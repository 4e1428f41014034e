"""The machine a run is on: device, number format, compiler, and the seeding of dropout."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpt.config import DType, RuntimeConfig
from gpt.loss import NextTokenLoss, softmax_and_gradient, softmax_by_rows


@dataclass(slots=True)
class Runtime:
    """What RuntimeConfig came to on this machine. `notes` are lines a user should see."""

    config: RuntimeConfig
    device: torch.device
    dtype: torch.dtype
    compile: bool
    notes: list[str] = field(default_factory=list)

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in `dtype`; weights, norms, softmax and the residual in float32."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` → CUDA, else MPS, else CPU. On several ranks `cuda` means this rank's own card.

    Raises ValueError where the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(name.partition(":")[2] or local_rank)
        if index >= count:
            raise ValueError(
                f"runtime.device={name} is not on this machine, which shows {count} CUDA devices; "
                "training can't start there; use runtime.device=auto or cpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError(
            "runtime.device=mps is not on this machine; training can't start there; "
            "use runtime.device=auto or cpu"
        )
    return torch.device(name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether bf16 products run on the device's own instructions.

    Emulated bf16 on a CPU is a hundred times slower than float32, so support alone won't do.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(k) for k in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return False


def resolve_dtype(config: DType, device: torch.device, notes: list[str]) -> torch.dtype:
    """The autocast dtype. Raises ValueError where an explicit one can't run on the device."""
    if config == DType.auto:
        if has_bfloat16(device):
            return torch.bfloat16
        if device.type == "cuda":
            notes.append("this GPU has no bfloat16: float16 with loss scaling is used")
            return torch.float16
        if device.type == "cpu":
            notes.append(
                "this processor has no bfloat16 instructions: float32 is used, "
                "which takes about three times as long; the time left is shown from step 2 on"
            )
        return torch.float32
    if config == DType.bfloat16 and device.type != "cpu" and not has_bfloat16(device):
        raise ValueError(
            f"runtime.dtype=bfloat16 can't run on {device}; its products would fail or be "
            "emulated; use runtime.dtype=auto"
        )
    if config == DType.bfloat16 and not has_bfloat16(device):
        notes.append("this processor has no bfloat16 instructions: they are emulated, very slowly")
    if config == DType.float16 and device.type != "cuda":
        raise ValueError(
            f"runtime.dtype=float16 needs a CUDA device and this is {device.type}; its loss "
            "scaling is for GPUs; use runtime.dtype=auto"
        )
    dtype: torch.dtype = getattr(torch, config.value)
    return dtype


def resolve(config: RuntimeConfig, local_rank: int = 0) -> Runtime:
    """Look at the machine. Raises ValueError for a device or dtype that is not there."""
    notes: list[str] = []
    device = resolve_device(config.device, local_rank)
    dtype = resolve_dtype(config.dtype, device, notes)
    compile_it = config.compile is True
    if config.compile == "auto" and device.type != "mps":
        compiler = os.environ.get("CXX", "g++")
        compile_it = device.type == "cuda" or any(map(shutil.which, (compiler, "clang++")))
        if not compile_it:
            notes.append("no C++ compiler found: running without torch.compile, somewhat slower")
    if config.deterministic:
        # cuBLAS reads this when it starts, so before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        # Only where it changes: it imports torch's compiler, 1.3 s and 70 MB. A sweep's jobs share
        # a process, so it may have to be switched off.
        torch.use_deterministic_algorithms(config.deterministic)
    if device.type == "cpu":
        keep_freed_memory()
    return Runtime(config, device, dtype, compile_it, notes)


def keep_freed_memory() -> None:
    """Let this process keep the memory of its tensors once they are freed, where libc is glibc's.

    glibc gives every large block back to the system and asks for it anew, in pages that are cleared
    at first touch: a step of 124M touched 740,000, which took an eighth of its time. Kept, they are
    the same pages at every step, and the peak stays as it was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # malloc.h
        mallopt(mmap_max, 0)  # no mappings of their own for large blocks
        mallopt(trim_threshold, 2**31 - 1)  # the heap isn't cut


def compile_blocks(model: nn.Module) -> None:
    """Compile the transformer block, once for all layers.

    Not the whole model: a block compiles in seconds where the whole takes half a minute, at
    about the same speed; and the embedding must stay outside, since its compiled backward adds
    in any order and the bits of a run would differ from one process to the next.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as partitioner
    from torch._inductor import config

    # Under DDP a block would be cut where a bucket of gradients fills; buckets are exchanged
    # between blocks all the same, and what crosses a cut is kept for the backward pass.
    dynamo.optimize_ddp = False

    # The backward pass makes layer norms and GELU again where it needs them for a product: a third
    # of a layer's activations less to keep, for a hundredth of its time.
    partitioner.ban_recompute_materialized_backward = False
    if config.cpp.vec_isa_ok is None:
        # Else each instruction set that the processor reports is tried out first, by compiling a
        # program and running it beside another torch: 6 of 20 seconds of a first start.
        config.cpp.vec_isa_ok = True
    for block in _blocks(model):
        block.body = torch.compile(block.body, dynamic=False)


def compile_softmax(loss_of: NextTokenLoss) -> None:
    """Compile what the loss does between its products. For GPUs: gpt/loss.py says why."""
    loss_of.softmax = torch.compile(softmax_and_gradient, dynamic=False)


def uncompile(loss_of: NextTokenLoss) -> None:
    """Back to eager, on a machine where compiling failed."""
    loss_of.softmax = softmax_by_rows
    for block in _blocks(loss_of.model):
        block.body = block._body


def recompute_blocks(model: nn.Module, on: bool) -> None:
    """Keep only each block's input for the backward pass, which runs the block again."""
    for block in _blocks(model):
        block.recompute = on


def _blocks(model: nn.Module) -> Any:
    blocks = model.h
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def is_out_of_memory(e: Exception) -> bool:
    ours = isinstance(e, torch.OutOfMemoryError | MemoryError)
    return ours or "DefaultCPUAllocator" in str(e)


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed as a function of the parts: near parts give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_dropout(seed: int, step: int, micro_batch: int) -> None:
    """Make the dropout of this micro-batch a function of its place in the run.

    `micro_batch` counts over all ranks, so the number of ranks changes nothing. This is why no
    generator state is ever saved: whatever drew numbers before can't reach past this line.
    """
    torch.manual_seed(seed_of("dropout", seed, step, micro_batch))
