"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """What all schedules share: a linear rise over `warmup_steps` updates."""

    warmup_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} is negative; "
                "it counts updates; set it to 0 for none"
            )


@dataclass(kw_only=True, slots=True)
class ConstantConfig(ScheduleConfig):
    """Warm-up, then the peak rate to the end."""


def _check_ratio(min_lr_ratio: float) -> None:
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(
            f"schedule.min_lr_ratio={min_lr_ratio} is outside [0, 1]; "
            "it is the last rate as a share of the peak; 0.1 is usual"
        )


@dataclass(kw_only=True, slots=True)
class CosineConfig(ScheduleConfig):
    """Warm-up, then half a cosine down to `min_lr_ratio` of the peak at step `decay_steps`.

    `decay_steps` null: the whole run. Past it the rate stays at the minimum, which is then better
    above 0.
    """

    min_lr_ratio: float
    decay_steps: int | None

    def __post_init__(self) -> None:
        # slots=True makes a new class, which the zero-argument super() would miss.
        ScheduleConfig.__post_init__(self)
        _check_ratio(self.min_lr_ratio)
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ValueError(
                f"schedule.decay_steps={self.decay_steps} is negative; it counts updates; "
                "set it to null for the whole run"
            )
        if self.decay_steps is not None and 0 < self.decay_steps < self.warmup_steps:
            raise ValueError(
                f"schedule.decay_steps={self.decay_steps} ends before "
                f"schedule.warmup_steps={self.warmup_steps}; the rate would fall before it has "
                "risen; lower warmup_steps or raise decay_steps"
            )


@dataclass(kw_only=True, slots=True)
class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay (Hu et al. 2024): the last `decay_fraction` of the run falls in a
    straight line to `min_lr_ratio` of the peak."""

    min_lr_ratio: float
    decay_fraction: float

    def __post_init__(self) -> None:
        ScheduleConfig.__post_init__(self)
        _check_ratio(self.min_lr_ratio)
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(
                f"schedule.decay_fraction={self.decay_fraction} is outside [0, 1]; "
                "it is the share of the run spent falling; 0.2 is usual"
            )


def lr_scale(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """What update `step` (from 0) multiplies every group's peak rate by.

    The first update's rate is 1/warmup_steps of the peak, not zero; the peak is reached once,
    at update warmup_steps − 1 (or 0); the last update has the minimum, unless that is 0: then the
    fall would end one update later, since one at a rate of 0 is wasted. Loshchilov & Hutter 2017,
    eq. 5, for the cosine.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    peak = max(config.warmup_steps - 1, 0)
    match config:
        case CosineConfig(min_lr_ratio=least):
            end = max_steps if config.decay_steps is None else config.decay_steps
            progress = _progress(step, peak, end - (least > 0))
            fall = 0.5 * (1 + math.cos(math.pi * progress))
        case WSDConfig(min_lr_ratio=least):
            start = max(peak, max_steps - 1 - round(config.decay_fraction * max_steps))
            fall = 1 - _progress(step, start, max_steps - (least > 0))
        case ConstantConfig():
            return 1.0
        case _:
            raise AssertionError(f"no such schedule: {type(config).__name__}")
    return least + (1 - least) * fall


def _progress(step: int, start: int, last: int) -> float:
    """0 up to `start`, 1 from `last` on, a straight line between."""
    if step <= start < last:
        return 0.0
    if step >= last:
        return 1.0 if step > start or last < start else 0.0
    return (step - start) / (last - start)
