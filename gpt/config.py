"""The settings of model, optimizer, machine and loop, and what values they may have.

Apart from their owners for one reason: nothing here imports torch, so that a mistake in a setting
is told in a second, before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(kw_only=True, slots=True)
class GPTConfig:
    """A GPT-2's shape. `vocab_size` None means the tokenizer's; it is filled in before building."""

    block_size: int
    vocab_size: int | None
    n_layer: int
    n_head: int
    n_embd: int
    embd_dropout: float
    attn_dropout: float
    resid_dropout: float

    def __post_init__(self) -> None:
        for name in ("block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is not positive; "
                    f"there is no such model; set it to 1 or more"
                )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(
                f"model.vocab_size={self.vocab_size} is not positive; "
                "there is nothing to predict; leave it null to take the tokenizer's"
            )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}; "
                "every head needs the same whole number of channels; change one of the two"
            )
        for name in ("embd_dropout", "attn_dropout", "resid_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is not a probability below 1; "
                    "it is the share of values set to zero; choose one from 0 to 0.99"
                )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019). `lr` is the peak; the schedule multiplies it."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(
                f"optimizer.lr={self.lr} is not positive; nothing would be learned; "
                "choose a rate above 0, such as 6e-4"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} is outside [0, 1); "
                    "it is the weight of the past in a running mean; choose one below 1"
                )
        if self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"optimizer.eps={self.eps}, optimizer.weight_decay={self.weight_decay}: the first "
                "must be above 0, the second not below; the update is undefined or grows weights; "
                "use 1e-8 and 0.1"
            )


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(str, Enum):
    flash = "flash"
    reference = "reference"


class Parallel(str, Enum):
    ddp = "ddp"
    fsdp = "fsdp"


@dataclass(kw_only=True, slots=True)
class RuntimeConfig:
    device: str
    dtype: DType
    compile: Any  # auto, or a boolean: OmegaConf 2.3 fails on merging a union
    attention: Attention
    deterministic: bool
    parallel: Parallel
    activation_checkpointing: bool
    hang_minutes: float | None
    peak_flops: float | None

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda", "mps") or (index and not index.isdigit()):
            raise ValueError(
                f"runtime.device={self.device} is no device; training needs one to run on; "
                "use auto, cpu, cuda, cuda:N or mps"
            )
        if not isinstance(self.compile, bool) and self.compile != "auto":  # 1 == True
            raise ValueError(
                f"runtime.compile={self.compile} is none of auto, true, false; "
                "it says whether torch.compile is used; choose one of the three"
            )
        if self.hang_minutes is not None and not self.hang_minutes >= 0:
            raise ValueError(
                f"runtime.hang_minutes={self.hang_minutes} is negative; it is how long a run may "
                "stand still; use a positive number, or null to wait without end"
            )
        if self.peak_flops is not None and not 0 < self.peak_flops < float("inf"):
            raise ValueError(
                f"runtime.peak_flops={self.peak_flops} is no rate; it is what one device could do; "
                "use FLOP/s, such as 989e12, or null to look it up"
            )


class OnSpike(str, Enum):
    log = "log"
    skip = "skip"
    rollback = "rollback"


OnSaveError = Enum("OnSaveError", {"stop": "stop", "continue": "continue"}, type=str)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`batch_tokens` an optimizer step over all ranks; `micro_batch_size` windows at once on one
    (auto: gpt/autobatch.py).

    Periods are in steps (`save_minutes` in minutes); null or 0 switches one off. `max_skipped`: so
    many steps in a row may have a loss or gradient that is no number. `spike_z`: a loss so many
    robust deviations above those before it is a spike (gpt/spikes.py).
    """

    seed: int
    max_steps: int
    batch_tokens: int
    micro_batch_size: Any  # int, or auto until the run is built
    grad_clip: float | None
    eval_every: int | None
    eval_tokens: int
    save_every: int | None
    save_minutes: float | None
    keep_last: int
    log_every: int | None
    sample_every: int | None
    max_skipped: int
    spike_z: float | None
    on_spike: OnSpike
    on_save_error: OnSaveError

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "batch_tokens",
            "micro_batch_size",
            "eval_tokens",
            "keep_last",
        ):
            value = getattr(self, name)
            if name == "micro_batch_size" and value == "auto":
                continue
            if not isinstance(value, int):
                raise ValueError(
                    f"trainer.{name}={value} is no whole number; so many windows go through at "
                    "once; set it to 1 or more, or to auto"
                )
            if value < 1:
                raise ValueError(
                    f"trainer.{name}={getattr(self, name)} is not positive; a run needs at least "
                    "one; set it to 1 or more"
                )
        for name in (
            "eval_every",
            "save_every",
            "save_minutes",
            "log_every",
            "sample_every",
            "grad_clip",
            "spike_z",
            "max_skipped",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(
                    f"trainer.{name}={value} is negative; 0 is the least there is; "
                    "use 0 or a positive number"
                )

        if self.batch_tokens > 2**30:
            raise ValueError(
                f"trainer.batch_tokens={self.batch_tokens} is above {2**30}; a single update would "
                "read a billion tokens, hundreds of times what the largest runs take; lower it"
            )

    def check_batch(self, block_size: int, world_size: int) -> None:
        """Raises ValueError where ranks and micro-batches can't share out a step evenly."""
        size = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        micro = block_size * size * world_size
        if self.batch_tokens % micro:
            below = self.batch_tokens // micro * micro
            near = f"{below} or {below + micro}" if below else f"{micro}"
            raise ValueError(
                f"trainer.batch_tokens={self.batch_tokens} is not a multiple of {micro} "
                f"(block_size {block_size} × micro_batch_size {size} × "
                f"{world_size} ranks); a step can't be dealt out evenly; nearest that can: {near}, "
                "or change trainer.micro_batch_size"
            )
