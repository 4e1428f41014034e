"""The loop: windows → loss → gradients → update, with evaluation, checkpoints and samples between.

Step s takes the next batch_tokens / block_size windows of the data's order; micro-batch
j = i·world_size + rank of it holds rows [j·B, (j+1)·B), and its dropout is seeded from
(seed, s, j). Neither depends on the number of ranks, on evaluation, or on what happened before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt import checkpoint, distributed, folders, runtime
from gpt.bad_steps import Judge, Progress, Update, Verdict
from gpt.config import AdamWConfig, OnSaveError, TrainerConfig
from gpt.evaluation import evaluate
from gpt.loss import NextTokenLoss
from gpt.metrics import Meter, flops_per_token, total_peak
from gpt.model import GPT
from gpt.optimizer import build_optimizer, set_lr
from gpt.ranks import Ranks
from gpt.reader import Data, Reader
from gpt.runtime import Runtime
from gpt.saver import Saver
from gpt.schedule import ScheduleConfig, lr_scale
from gpt.spikes import Spikes
from gpt.stopping import Stop, Stopped, Watchdog
from gpt.tracker import Tracker


class Interrupted(Exception):
    """A signal came in the middle of a step that could not be finished."""


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
        self.train, self.val = train, val
        self.token_bytes = token_bytes.to(machine.device)
        self.config, self.schedule, self.peak_lr = config, schedule, optimizer.lr
        self.machine, self.ranks, self.tracker = machine, ranks, tracker
        self.state, self.sample, self.progress = state, sample, progress

        block_size = model.config.block_size
        config.check_batch(block_size, ranks.world_size)
        self.windows_per_step = config.batch_tokens // block_size
        self.grad_accum_steps = self.windows_per_step // (
            config.micro_batch_size * ranks.world_size
        )
        self.eval_windows = -(-config.eval_tokens // block_size)

        peak = total_peak(machine.device, machine.dtype, machine.config.peak_flops, ranks)
        self.meter = Meter(config.batch_tokens, flops_per_token(model), peak)
        self.model: GPT = model.to(machine.device)
        runtime.recompute_blocks(model, machine.config.activation_checkpointing)
        self.loss_of = NextTokenLoss(model, eot if document_mask else None)
        if machine.compile:
            runtime.compile_blocks(model)
            if machine.device.type == "cuda":
                runtime.compile_softmax(self.loss_of)
        self.module = distributed.wrap(self.loss_of, ranks, machine)
        self.optimizer = build_optimizer(model, optimizer)
        self.scaler = torch.amp.GradScaler(
            machine.device.type, enabled=machine.dtype == torch.float16
        )
        self.is_compiling = machine.compile  # until the first micro-batch is through
        self.compile_may_fail = machine.config.compile == "auto" and ranks.world_size == 1
        self.saver = Saver(checkpoints, config.keep_last, eot, tokenizer, progress.step or None)
        self.judge = Judge(config, self.scaler.is_enabled(), progress.past_losses, ranks, tracker)
        self.stop = Stop(ranks)
        self.watchdog = Watchdog(machine.config.hang_minutes, ranks)
        self.reader = Reader(
            train,
            self.windows_per_step,
            config.micro_batch_size,
            ranks,
            machine.device,
            progress.left_out,
        )
        self.stop_signal: int | None = None  # the one all ranks agreed on
        self.last_save = time.monotonic()
        self.first_line = True

    # --- one update

    def update(self) -> Update | None:
        """One optimizer step; None for one that all ranks skipped, or went back from.

        Raises StepError after too many of these, with weights as they were before.
        """
        config, progress = self.config, self.progress
        self.model.train()
        losses = torch.zeros(self.grad_accum_steps, device=self.machine.device)
        for i, (x, y) in enumerate(self.reader.batches(progress.step)):
            j = i * self.ranks.world_size + self.ranks.rank
            losses[i] = self._forward_backward(x, y, j, sync=i == self.grad_accum_steps - 1)
            self.watchdog.beat()
            if self.stop.is_overdue():
                distributed.forget_gradients(self.module)
                raise Interrupted
        total = distributed.all_sum(losses.sum(), self.ranks)
        self.scaler.unscale_(self.optimizer)
        norm = distributed.grad_norm(self.model.parameters())
        # The one place where the step waits for the device.
        loss, grad_norm = torch.stack([total / config.batch_tokens, norm]).tolist()
        lr = self.peak_lr * lr_scale(self.schedule, progress.step, config.max_steps)
        done = Update(loss, grad_norm, lr)
        saved = progress.rollback_step is not None
        verdict, name_windows = self.judge.verdict(done, progress, saved)
        if name_windows:
            self.judge.name_windows(losses, self.reader.starts(progress.step), self.train)
            self.judge.check_patience(done, progress)
        if verdict == Verdict.take:
            # Below the limit every gradient would be multiplied by 1: a pass over all of them less.
            if config.grad_clip and grad_norm > config.grad_clip - 1e-5:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), config.grad_clip, norm)
            set_lr(self.optimizer, lr)
            self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():  # after every unscale_, taken or not
            self.scaler.update()
        distributed.forget_gradients(self.module)
        if verdict == Verdict.go_back and self._roll_back():
            return None
        taken = verdict == Verdict.take
        progress.step += 1
        progress.tokens_seen += config.batch_tokens
        progress.skipped += not taken
        progress.skipped_in_row = 0 if taken else progress.skipped_in_row + 1
        return done if taken else None

    def _roll_back(self) -> bool:
        """To the newest checkpoint that was planned, passing over the windows of all steps since;
        False where it could not be written."""
        self.saver.wait()
        folder = self.saver.checkpoints / folders.step_name(self.progress.rollback_step or 0)
        if not distributed.from_main(self.ranks.is_main and folder.is_dir(), self.ranks):
            return False
        state = folders.verify(folder)
        spent = self.progress.step + 1 - state["step"]
        rollbacks = self.progress.rollbacks_in_row
        left_out = [*self.progress.left_out, [state["step"], spent * self.windows_per_step]]
        self.progress = Progress.of(state)
        self.progress.left_out, self.progress.rollbacks_in_row = left_out, rollbacks + 1
        checkpoint.restore(folder, self.model, self.optimizer)
        if state["loss_scaler"]:
            self.scaler.load_state_dict(state["loss_scaler"])
        self.judge.spikes = Spikes(self.config.spike_z, self.progress.past_losses)
        self.reader.pass_over(left_out)
        self.tracker.rewind(self.progress.step)
        self.tracker.say(
            f"warning: back to step {self.progress.step}, leaving out the windows of the {spent} "
            "steps since"
        )
        return True

    def _forward_backward(self, x: Tensor, y: Tensor, j: int, sync: bool) -> Tensor:
        """Summed loss of micro-batch j; its share of the step's mean gradient is added up."""

        def attempt() -> Tensor:
            runtime.seed_dropout(self.config.seed, self.progress.step, j)
            distributed.set_gradient_sync(self.module, sync)
            with self.machine.autocast():
                loss: Tensor = self.module(x, y)
            # Every token weighs the same, whatever micro-batch or rank it is on. The wrappers take
            # the mean over ranks, hence the factor.
            share = loss * (self.ranks.world_size / self.config.batch_tokens)
            self.scaler.scale(share).backward()
            return loss.detach()

        if not self.is_compiling:
            return attempt()
        try:
            with self.stop.at_once():
                loss = attempt()
            self.is_compiling = False
            return loss
        except (Exception, Stopped) as e:
            if self.stop.asked is not None:  # Ctrl-C reached the compiler too: nothing is wrong
                if self.ranks.world_size > 1:  # which won't agree on a step to save
                    raise Stopped(self.stop.asked) from e
                raise Interrupted from e
            of_compiler = type(e).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if not (of_compiler and self.compile_may_fail):
                raise
            reason = str(e).strip().splitlines()[0]
            self.tracker.say(f"torch.compile failed on this machine ({reason}): running without")
        self.is_compiling = False
        runtime.uncompile(self.loss_of)
        distributed.forget_gradients(self.module)
        return attempt()

    # --- looking, without touching

    def evaluate(self) -> tuple[float, float] | None:
        """Validation loss (nats a token, bits a byte); None where a signal cut it short."""
        assert self.val is not None

        def stopped() -> bool:
            self.watchdog.beat()
            return self.stop.asked is not None

        return evaluate(
            self.loss_of,
            self.val,
            self.eval_windows,
            self.config.micro_batch_size,
            self.token_bytes,
            self.machine,
            self.ranks,
            stopped,
        )

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
        """Take a copy of this step's state and have it written, with `latest` (and `best`) pointing
        at it. Every rank has to come: a sharded model is gathered."""
        taken = checkpoint.snapshot(self.model, self.optimizer, keep=self.ranks.is_main)
        if taken is not None:
            state = {
                **self.progress.state(),
                "loss_scaler": self.scaler.state_dict(),
                "tracker_run_id": self.tracker.run_id,
                "world_size": self.ranks.world_size,
                **self.state,
            }
            self.saver.start(taken, state, best)
        self.last_save = time.monotonic()

    def _check_saves(self, final: bool = False) -> None:
        """Say that a save of the main rank has failed; raise its error where that ends the run."""
        failed = torch.tensor(int(self.saver.error is not None))
        if not int(distributed.all_max(failed, self.ranks)):
            return
        error = self.saver.error or OSError("the main rank could not save")
        self.saver.error = None
        if (
            final  # there is no next time
            or self.config.on_save_error == OnSaveError.stop
            or not isinstance(error, OSError)
        ):
            raise error
        self.tracker.say(
            f"warning: {error.filename} could not be written ({error.strerror}): going on without; "
            f"the newest whole checkpoint is {self.newest()}"
        )

    def newest(self) -> str:
        """The newest whole checkpoint, for people."""
        step = self.saver.saved_step
        return folders.step_name(step) if step else "none yet"

    # --- the run

    def run(self) -> int | None:
        """Train to the end. Returns the signal that stopped it before, or None.

        Raises StepError where the run can't go on, OSError where it can't be saved.
        """
        with self.stop, self.watchdog:
            try:
                self._run()
            finally:
                self.reader.close()
                self.saver.wait()
            self._check_saves(final=True)
        self.tracker.pause()
        return self.stop_signal

    def _run(self) -> None:
        if self.progress.unevaluated is not None:
            row, self.progress.unevaluated = self.progress.unevaluated, None
            self._look(row, evaluate=self.val is not None)
        while self.progress.step < self.config.max_steps and self.stop_signal is None:
            begun = time.perf_counter()
            try:
                step, done = self.progress.step, self.update()
            except Interrupted:
                self.stop_signal = self.stop.asked
                if self.progress.step and self.saver.saved_step != self.progress.step:
                    self.save()
                return
            self.meter.add(time.perf_counter() - begun)
            if self.progress.step > step:
                self._after_step(done)

    def _after_step(self, done: Update | None) -> None:
        config, step = self.config, self.progress.step
        last = step == config.max_steps
        evaluate = self.val is not None and (last or _due(step, config.eval_every))
        due = last or evaluate or done is None or _due(step, config.log_every)
        row: dict[str, float] = {}
        if due:
            epochs = self.reader.epochs(step)
            row = {"step": step, "tokens_seen": self.progress.tokens_seen, "epoch": epochs}
            if done is not None:
                row |= {"train/loss": done.loss, "lr": done.lr, "grad_norm": done.grad_norm}
            if self.progress.skipped:
                row["skipped"] = self.progress.skipped
        text = f"loss {done.loss:.3f}  lr {done.lr:.2e}" if done else "skipped"
        self._look(row, evaluate, text)

    def _look(self, row: dict[str, float], evaluate: bool, text: str = "") -> None:
        """Evaluate, log, save and sample, each where it is due."""
        config, progress, step = self.config, self.progress, self.progress.step
        better = False
        if evaluate:
            measured = self.evaluate()
            if measured is None:
                progress.unevaluated = row
            else:
                val_loss, val_bits = measured
                row |= {"val/loss": val_loss, "val/bits_per_byte": val_bits}
                text += f"  val {val_loss:.3f} ({val_bits:.3f} bits/byte)"
                progress.val_loss = val_loss if math.isfinite(val_loss) else None
                progress.val_step = step
                best = progress.best_val_loss
                if math.isfinite(val_loss) and (best is None or val_loss < best):
                    progress.best_val_loss, progress.best_step = val_loss, step
                    better = True
        if row and self.meter.steps:  # none, where a cut evaluation was made up for
            row |= self.meter.row()  # after the evaluation, which the wall clock counts
        if row and progress.unevaluated is None:
            self.tracker.log(row)
        rate, left = self.meter.rate(), self.meter.left(config.max_steps - step)
        if rate is not None and left is not None:
            text += f"  {rate:,.0f} tokens/s  {_duration(left)} left"
        self.tracker.progress(step, config.max_steps, text, bool(row) or self.first_line)
        # One more line early on, once it is known how long the rest takes.
        self.first_line = left is None
        if self._save_is_due(better):
            self.save(best=better)
        if step < config.max_steps and _due(step, config.sample_every):
            self.show_sample()

    def _save_is_due(self, better: bool) -> bool:
        """Whether to save now. The main rank's clock and every rank's signals count for all."""
        minutes = self.config.save_minutes
        by_time = bool(minutes) and time.monotonic() - self.last_save > 60 * (minutes or 0)
        failed = self.saver.error is not None
        flags = torch.tensor(
            [int(self.ranks.is_main and by_time), self.stop.asked or 0, int(failed)]
        )
        by_time_, signal_, failed_ = distributed.all_max(flags, self.ranks).tolist()
        if failed_:
            self._check_saves()
        self.stop_signal = signal_ or None
        step = self.progress.step
        if _due(step, self.config.save_every) or better:
            self.progress.rollback_step, self.progress.rollbacks_in_row = step, 0
            return True
        return step == self.config.max_steps or bool(by_time_) or self.stop_signal is not None


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
