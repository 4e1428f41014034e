"""What a run says about itself: at its start, at a resume, at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from conf.schema import Config
from data.shards import Manifest
from gpt import runtime
from gpt.config import OnSpike
from gpt.model import GPT
from gpt.ranks import Ranks
from gpt.schedule import lr_scale
from gpt.tracker import Tracker
from gpt.trainer import Trainer


def announce(
    tracker: Tracker,
    config: Config,
    model: GPT,
    machine: runtime.Runtime,
    ranks: Ranks,
    manifest: Manifest,
    name: str,
    resumed: bool,
    continue_with: str,
) -> None:
    m, t = model.config, config.trainer
    tokens = t.max_steps * t.batch_tokens
    tracker.say(
        f"model: GPT-2 with {m.n_layer} layers, {m.n_head} heads, {m.n_embd} channels, windows of "
        f"{m.block_size} tokens; {model.n_params() / 1e6:.1f} M parameters"
    )
    accumulated = t.batch_tokens // (m.block_size * t.micro_batch_size * ranks.world_size)
    tracker.say(
        f"training: {t.max_steps} steps of {t.batch_tokens:,} tokens "
        f"({t.micro_batch_size} windows × {accumulated} micro-batches × {ranks.world_size} ranks), "
        f"{tokens / manifest.train_tokens:.2f} epochs, packed without padding"
    )
    if config.schedule.warmup_steps > t.max_steps:
        tracker.say(
            f"note: schedule.warmup_steps={config.schedule.warmup_steps} is more than all "
            f"{t.max_steps} steps: the learning rate never reaches optimizer.lr"
        )
    kind = str(machine.dtype).removeprefix("torch.")
    tracker.say(
        f"machine: {machine.device}, {kind}, "
        f"{'compiled (takes a while at the first step)' if machine.compile else 'not compiled'}"
    )
    if t.on_spike != OnSpike.log:
        when = ", and on when it saves" if t.on_spike == OnSpike.rollback else ""
        tracker.say(
            f"note: trainer.on_spike={t.on_spike.value}: what this run learns depends on where its "
            f"losses jump{when}"
        )
    for note in machine.notes:
        tracker.say(f"note: {note}")
    begun = "continued" if resumed else "new"
    tracker.say(f"run: {name}, {begun} (stop with Ctrl-C, go on with: {continue_with})")


def say_where(tracker: Tracker, config: Config, state: dict[str, Any]) -> None:
    step, old, new = state["step"], state["config"], config.trainer.max_steps
    tracker.say(f"continuing after step {step}")
    if old["trainer"]["max_steps"] != new:
        before = lr_scale(config.schedule, step, old["trainer"]["max_steps"])
        now = lr_scale(config.schedule, step, new)
        tracker.say(
            f"trainer.max_steps was {old['trainer']['max_steps']} and is {new}: the learning rate "
            f"of the next step was {config.optimizer.lr * before:.2e} and is "
            f"{config.optimizer.lr * now:.2e}"
        )


def report(
    tracker: Tracker, trainer: Trainer, folder: Path, continue_with: str, stopped_by: int | None
) -> None:
    progress = trainer.progress
    if stopped_by and trainer.saver.saved_step is None:
        tracker.say("nothing is saved yet: the first step was dropped")
    elif stopped_by:
        tracker.say(f"saved at step {trainer.saver.saved_step}")
    trainer.show_sample()
    if progress.val_loss is not None:
        tracker.say(f"validation loss {progress.val_loss:.3f} nats a token")
    place = os.path.relpath(folder)
    if stopped_by:
        tracker.say(f"stopped after step {progress.step}; go on with: {continue_with}")
        return
    tracker.say(f"done: {progress.step} steps; everything is in {place}")
    tracker.say("what to try next:")
    tracker.say(f'  python sample.py {folder.name} --prompt "My fellow citizens"')
    tracker.say("  python train.py data=text data.path=book.txt      (your own text)")
    tracker.say(f"  {continue_with} trainer.max_steps={2 * progress.step}      (train longer)")
