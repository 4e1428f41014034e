"""The loop: windows → loss → gradients → update, with evaluation, checkpoints and samples between.

Step s takes the next batch_tokens / block_size windows of the data's order; micro-batch
j = i·world_size + rank of it holds rows [j·B, (j+1)·B), and its dropout is seeded from
(seed, s, j). Neither depends on the number of ranks, on evaluation, or on what happened before.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gpt import checkpoint, distributed, folders, runtime
from gpt.config import AdamWConfig, TrainerConfig
from gpt.distributed import Ranks
from gpt.loss import IGNORE, NextTokenLoss
from gpt.metrics import bits_per_byte, flops_per_token, peak_flops
from gpt.model import GPT
from gpt.optimizer import build_optimizer, set_lr
from gpt.runtime import Runtime
from gpt.schedule import ScheduleConfig, lr_scale
from gpt.tracker import Tracker


class Data(Protocol):
    """What the loop asks of data: windows of the training order, and fixed evaluation windows."""

    n_eval: int

    def __len__(self) -> int: ...
    def starts(self, first: int, count: int) -> np.ndarray: ...
    def batch(self, starts: np.ndarray) -> tuple[Tensor, Tensor]: ...
    def eval_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]: ...


@dataclass(slots=True)
class Progress:
    """All that history knows beside weights and moments."""

    step: int = 0
    tokens_seen: int = 0
    best_val_loss: float | None = None
    best_step: int | None = None
    val_loss: float | None = None  # of the newest evaluation


@dataclass(slots=True)
class Clock:
    """Time spent in training steps, without evaluation, saving and sampling."""

    steps: int = 0
    seconds: float = 0.0
    durations: list[float] = field(default_factory=list)
    warm: bool = False

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        if self.warm:  # the first step of a process compiles: it foretells nothing
            self.durations.append(seconds)
            del self.durations[:-20]
        self.warm = True

    def rate(self, batch_tokens: int) -> float:
        rate = self.steps * batch_tokens / self.seconds
        self.steps, self.seconds = 0, 0.0
        return rate

    def left(self, steps: int) -> float | None:
        """Seconds for so many steps, by the median of the last twenty; None before the second."""
        return float(np.median(self.durations)) * steps if self.durations else None


class NonFiniteError(RuntimeError):
    """A loss or gradient norm that is no number: the weights after it would be lost."""


class Trainer:
    """A run from its present step to its last."""

    def __init__(
        self,
        *,
        model: GPT,
        train: Data,
        val: Data | None,
        token_bytes: Tensor,
        config: TrainerConfig,
        optimizer: AdamWConfig,
        schedule: ScheduleConfig,
        machine: Runtime,
        ranks: Ranks,
        tracker: Tracker,
        checkpoints: Path,
        state: dict[str, Any],
        eot: int,
        document_mask: bool,
        tokenizer: Path,
        sample: Callable[[GPT], str] | None,
        progress: Progress,
    ) -> None:
        self.model = model.to(machine.device)
        self.train, self.val = train, val
        self.token_bytes = token_bytes.to(machine.device)
        self.config, self.schedule, self.peak_lr = config, schedule, optimizer.lr
        self.machine, self.ranks, self.tracker = machine, ranks, tracker
        self.checkpoints, self.state, self.eot, self.tokenizer = checkpoints, state, eot, tokenizer
        self.sample = sample
        self.progress = progress

        block_size = model.config.block_size
        config.check_batch(block_size, ranks.world_size)
        self.windows_per_step = config.batch_tokens // block_size
        self.grad_accum_steps = self.windows_per_step // (
            config.micro_batch_size * ranks.world_size
        )
        self.optimizer = build_optimizer(model, optimizer)
        self.scaler = torch.amp.GradScaler(
            machine.device.type, enabled=machine.dtype == torch.float16
        )
        if machine.compile:
            runtime.compile_blocks(model)
        self.loss_of = NextTokenLoss(model, eot if document_mask else None)
        self.compile_may_fail = machine.compile and not machine.compile_required
        self.module = distributed.wrap(self.loss_of, ranks, machine.device)
        self.clock = Clock()
        self.last_save = time.monotonic()
        self.saved_step = progress.step if progress.step else None
        self.asked: int | None = None  # the signal this rank got
        self.stop_signal: int | None = None  # the one all ranks agreed on, after an update
        self.tokens_per_sec: float | None = None
        self.first_line = True
        peak = peak_flops(machine.device, machine.dtype)
        self.mfu_per_token = flops_per_token(model) / (peak * ranks.world_size) if peak else None

    # --- one update

    def update(self) -> tuple[float, float, float]:
        """One optimizer step. Returns (mean loss in nats a token, gradient norm, learning rate).

        Raises NonFiniteError before anything is changed.
        """
        config, step = self.config, self.progress.step
        starts = self.train.starts(step * self.windows_per_step, self.windows_per_step)
        self.model.train()
        total = torch.zeros((), device=self.machine.device)
        for i in range(self.grad_accum_steps):
            j = i * self.ranks.world_size + self.ranks.rank
            rows = slice(j * config.micro_batch_size, (j + 1) * config.micro_batch_size)
            x, y = (t.to(self.machine.device) for t in self.train.batch(starts[rows]))
            sync = i == self.grad_accum_steps - 1
            total += self._forward_backward(x, y, j, sync)
        distributed.all_sum(total, self.ranks)
        loss = float(total) / config.batch_tokens
        self.scaler.unscale_(self.optimizer)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), config.grad_clip or float("inf")
            )
        )
        scaled = self.scaler.is_enabled()  # with loss scaling, an overflow only skips the update
        if not math.isfinite(loss) or (not math.isfinite(grad_norm) and not scaled):
            raise NonFiniteError(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}")
        lr = self.peak_lr * lr_scale(self.schedule, step, config.max_steps)
        set_lr(self.optimizer, lr)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens_seen += config.batch_tokens
        return loss, grad_norm, lr

    def _forward_backward(self, x: Tensor, y: Tensor, j: int, sync: bool) -> Tensor:
        """Summed loss of micro-batch j; its share of the step's mean gradient is added up."""

        def attempt() -> Tensor:
            runtime.seed_dropout(self.config.seed, self.progress.step, j)
            distributed.set_gradient_sync(self.module, sync)
            with self.machine.autocast():
                loss: Tensor = self.module(x, y)
            # Every token weighs the same, whatever micro-batch or rank it is on. DDP takes the
            # mean over ranks, hence the factor.
            share = loss * (self.ranks.world_size / self.config.batch_tokens)
            self.scaler.scale(share).backward()
            return loss.detach()

        if not self.compile_may_fail:
            return attempt()
        self.compile_may_fail = False
        try:
            return attempt()
        except Exception as e:
            if not type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = str(e).strip().splitlines()[0]
            self.tracker.say(f"torch.compile failed on this machine ({reason}): running without")
        runtime.uncompile_blocks(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        return attempt()

    # --- looking, without touching

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss on the fixed validation windows: (nats a token, bits a byte), shared among ranks."""
        assert self.val is not None
        config, device = self.config, self.machine.device
        count = min(self.val.n_eval, -(-config.eval_tokens // self.model.config.block_size))
        chosen = np.arange(count) * self.val.n_eval // count  # spread over the whole split
        mine = chosen[self.ranks.rank :: self.ranks.world_size]
        # Losses and counts are added up in float64, so the order of ranks can't be seen.
        sums = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        for first in range(0, len(mine), config.micro_batch_size):
            indices = mine[first : first + config.micro_batch_size]
            missing = config.micro_batch_size - len(indices)
            x, y = self.val.eval_batch(np.pad(indices, (0, missing), mode="edge"))
            y[len(indices) :] = IGNORE  # a full batch, so that compiled code sees one shape
            x, y = x.to(device), y.to(device)
            with self.machine.autocast():
                loss = self.loss_of(x, y)
            counted = y != IGNORE
            n_bytes = (self.token_bytes[y.clamp_min(0)] * counted).sum()
            sums += torch.stack([loss.double(), counted.sum(), n_bytes]).cpu()
        self.model.train()
        nats, tokens, n_bytes = distributed.all_sum(sums, self.ranks).tolist()
        return nats / tokens, bits_per_byte(nats / tokens, n_bytes / tokens)

    def show_sample(self) -> None:
        if self.sample is None or not self.ranks.is_main:
            return
        # Every length would be compiled anew, so sampling runs without.
        with torch.compiler.set_stance("force_eager"):
            text = self.sample(self.model)
        self.tracker.pause()
        self.tracker.say(f"\nsample after step {self.progress.step}:\n{text}\n")

    # --- keeping

    def save(self, best: bool = False) -> None:
        """Write a checkpoint of this step, and point `latest` (and `best`) at it."""
        if self.ranks.is_main:
            folder = self.checkpoints / folders.step_name(self.progress.step)
            progress = self.progress
            state = {
                "step": progress.step,
                "tokens_seen": progress.tokens_seen,
                "val_loss": progress.val_loss,
                "best_val_loss": progress.best_val_loss,
                "best_step": progress.best_step,
                "loss_scaler": self.scaler.state_dict(),
                "tracker_run_id": self.tracker.run_id,
                "world_size": self.ranks.world_size,
                **self.state,
            }
            if self.saved_step != progress.step:
                checkpoint.write(
                    folder, self.model, self.optimizer, state, self.eot, self.tokenizer
                )
            folders.link("latest", folder)
            if best:
                folders.link("best", folder)
            folders.prune(self.checkpoints, self.config.keep_last)
        self.saved_step = self.progress.step
        self.last_save = time.monotonic()
        distributed.barrier(self.ranks)

    # --- the run

    def run(self) -> int | None:
        """Train to the end. Returns the signal that stopped it before, or None."""
        with self._signals():
            while self.progress.step < self.config.max_steps:
                begun = time.perf_counter()
                loss, grad_norm, lr = self.update()
                self.clock.add(time.perf_counter() - begun)
                self._after_update(loss, grad_norm, lr)
                if self.stop_signal is not None:
                    break
        self.tracker.pause()
        return self.stop_signal

    def _after_update(self, loss: float, grad_norm: float, lr: float) -> None:
        config, step = self.config, self.progress.step
        last = step == config.max_steps
        due = last or step % config.log_every == 0
        evaluate = self.val is not None and (last or _due(step, config.eval_every))
        text = f"loss {loss:.3f}"
        row: dict[str, float | int] = {}
        if due or evaluate:
            rate = self.clock.rate(config.batch_tokens)
            row = {
                "step": step,
                "tokens_seen": self.progress.tokens_seen,
                "train/loss": loss,
                "lr": lr,
                "grad_norm": grad_norm,
                "perf/tokens_per_sec": rate,
            }
            if self.mfu_per_token is not None:
                row["perf/mfu"] = rate * self.mfu_per_token
            self.tokens_per_sec = rate
        better = False
        if evaluate:
            val_loss, val_bits = self.evaluate()
            row |= {"val/loss": val_loss, "val/bits_per_byte": val_bits}
            self.progress.val_loss = val_loss
            best = self.progress.best_val_loss
            if math.isfinite(val_loss) and (best is None or val_loss < best):
                self.progress.best_val_loss, self.progress.best_step = val_loss, step
                better = True
            text += f"  val {val_loss:.3f} ({val_bits:.3f} bits/byte)"
        if due or evaluate:
            self.tracker.log(row)
        text += f"  lr {lr:.2e}"
        if (left := self.clock.left(config.max_steps - step)) is not None:
            rate = self.tokens_per_sec or config.batch_tokens / self.clock.durations[-1]
            text += f"  {rate:,.0f} tokens/s  {_duration(left)} left"
        self.tracker.progress(step, config.max_steps, text, due or evaluate or self.first_line)
        # One more line early on, once it is known how long the rest takes.
        self.first_line = left is None
        if self._save_is_due(last, better):
            self.save(best=better)
        if not last and _due(step, config.sample_every):
            self.show_sample()

    def _save_is_due(self, last: bool, better: bool) -> bool:
        """Whether to save now. The main rank's clock and every rank's signals count for all."""
        minutes = self.config.save_minutes
        by_time = bool(minutes) and time.monotonic() - self.last_save > 60 * (minutes or 0)
        flags = torch.tensor([int(self.ranks.is_main and by_time), self.asked or 0])
        distributed.all_max(flags, self.ranks)
        self.stop_signal = int(flags[1]) or None
        every = _due(self.progress.step, self.config.save_every)
        return last or better or every or bool(flags[0]) or self.stop_signal is not None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the step in flight end and be saved; a second one ends at once."""

        def ask(number: int, frame: Any) -> None:
            if self.asked is not None:
                for n, old in before.items():
                    signal.signal(n, old)
                raise KeyboardInterrupt
            self.asked = number
            if self.ranks.is_main:
                # Straight to the terminal: the console may be in the middle of a line, which a
                # print from here would make it write twice.
                os.write(2, b"\nstopping after this step (once more: at once, without saving)\n")

        before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for n, old in before.items():
                signal.signal(n, old)


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
