"""Steps that should not be taken: what isn't finite, and losses far above those before.

All ranks judge by the same numbers, so they decide alike without another word.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt import distributed
from gpt.config import OnSpike, TrainerConfig
from gpt.ranks import Ranks
from gpt.reader import Data
from gpt.spikes import Spikes
from gpt.tracker import Tracker

SHOWN = 8  # windows named of a bad step
# So many overflows in a row may be the loss scale's: each halves it, from 65,536 to 2^-34, at which
# no gradient overflows that isn't itself without end.
MOST_OVERFLOWS = 50


@dataclass(slots=True)
class Progress:
    """All that history knows beside weights and moments: what state.json keeps."""

    step: int = 0
    tokens_seen: int = 0
    val_loss: float | None = None  # of the newest evaluation
    val_step: int | None = None  # after which it was
    best_val_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0  # steps without an update
    skipped_in_row: int = 0
    rollbacks_in_row: int = 0
    rollback_step: int | None = None  # the newest saved by plan: clock and signals move nothing
    left_out: list[list[int]] = field(default_factory=list)  # [from step, windows passed over]
    past_losses: list[float] = field(default_factory=list)  # of gpt/spikes.py
    unevaluated: dict[str, float] | None = None  # a row whose evaluation a signal cut short

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """From a state.json, which may be older than some of the fields."""
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})

    def state(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Update:
    """What a step came to: mean loss in nats a token, gradient norm before clipping, rate."""

    loss: float
    grad_norm: float
    lr: float

    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepError(RuntimeError):
    """Training can't go on, for a reason that lies in the run itself."""


class Verdict(Enum):
    take = "take"
    skip = "skip"
    go_back = "go back"


class Judge:
    """`scaled`: loss scaling is on, whose way it is to overflow now and then."""

    def __init__(
        self, config: TrainerConfig, scaled: bool, past: list[float], ranks: Ranks, tracker: Tracker
    ) -> None:
        self.config, self.scaled, self.ranks, self.tracker = config, scaled, ranks, tracker
        self.spikes = Spikes(config.spike_z, past)

    def verdict(self, done: Update, progress: Progress, saved: bool) -> tuple[Verdict, bool]:
        """What to do with a step, and whether to name its windows; says why.

        Raises StepError where there have been too many.
        """
        config, step = self.config, progress.step + 1
        if not done.is_finite():
            overflow = self.scaled and math.isfinite(done.loss)
            if overflow and progress.skipped_in_row < MOST_OVERFLOWS:
                return Verdict.skip, False
            what = f"step {step}: loss {done.loss}, gradient norm {done.grad_norm}"
            self.tracker.say(f"warning: {what}: all ranks skip this update")
            return Verdict.skip, True
        z = self.spikes.is_spike(done.loss)
        progress.past_losses = list(self.spikes.past)
        if z is None:
            return Verdict.take, False
        self.tracker.say(
            f"note: step {step}: loss {done.loss:.3f} is a spike, {z:.1f} robust deviations above "
            f"the {len(self.spikes.past)} steps before"
        )
        if config.on_spike == OnSpike.log:
            return Verdict.take, False
        if config.on_spike == OnSpike.rollback and saved:
            return Verdict.go_back, True
        self.tracker.say(f"warning: step {step}: all ranks skip this update (trainer.on_spike)")
        return Verdict.skip, True

    def check_patience(self, done: Update, progress: Progress) -> None:
        """Raises StepError after more skips, or returns to one checkpoint, than are allowed."""
        most, step = self.config.max_skipped, progress.step + 1
        if not done.is_finite() and progress.skipped_in_row >= most:
            raise StepError(
                f"step {step}: loss {done.loss}, gradient norm {done.grad_norm}, "
                f"{progress.skipped_in_row + 1} in a row without an update"
            )
        back, skipped = progress.rollbacks_in_row, progress.skipped_in_row
        if done.is_finite() and max(back, skipped) >= max(1, most):
            after = f"{back} returns to a checkpoint" if back else f"{skipped} skipped in a row"
            raise StepError(f"step {step}: another spike (loss {done.loss:.3f}), after {after}")

    def name_windows(self, losses: Tensor, starts: np.ndarray, data: Data) -> None:
        """Say what a bad step read: the windows of micro-batches whose loss is no number, or all
        where every loss is one. `losses`: this rank's, [grad_accum_steps]; every rank has to come.
        """
        world_size = self.ranks.world_size
        bad = torch.zeros(len(losses) * world_size)
        bad[self.ranks.rank :: world_size] = (~torch.isfinite(losses)).float().cpu()
        bad = distributed.all_sum(bad, self.ranks)
        if not self.ranks.is_main:
            return
        chosen = [j for j in range(len(bad)) if bad[j]] or list(range(len(bad)))
        size = len(starts) // len(bad)
        rows = np.concatenate([starts[j * size : (j + 1) * size] for j in chosen])
        who = ", ".join(str(rank) for rank in sorted({j % world_size for j in chosen}))
        self.tracker.say(f"  on rank {who}, which read {len(rows)} windows:")
        for line in data.describe(rows[:SHOWN]):
            self.tracker.say(f"    {line}")
        if len(rows) > SHOWN:
            self.tracker.say(f"    and {len(rows) - SHOWN} more")
        self.tracker.say(f"    their text: {data.show_with(rows[:SHOWN])}")
