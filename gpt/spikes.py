"""Loss spikes: how far a step's loss lies above those of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 128  # steps looked back on
FEWEST = 32  # before so many, nothing is called a spike


class Spikes:
    """A robust z-score over a window of past steps.

    z = (loss − median) / (1.4826 · MAD), with the median absolute deviation of the window, whose
    factor makes it the standard deviation for normal values (Rousseeuw, Croux 1993, section 1).
    A spike and what isn't finite stay out of the window, so that they can't hide the next one.
    """

    def __init__(self, threshold: float | None, past: list[float]) -> None:
        self.threshold = threshold
        self.past: deque[float] = deque(past, WINDOW)

    def score(self, loss: float) -> float | None:
        """z of a loss; None while the window is short or flat, or where loss is not finite."""
        if len(self.past) < FEWEST or not math.isfinite(loss):
            return None
        middle = median(self.past)
        spread = 1.4826 * median(abs(x - middle) for x in self.past)
        return (loss - middle) / spread if spread > 0 else None

    def is_spike(self, loss: float) -> float | None:
        """The score where it is above the threshold. Anything else goes into the window."""
        z = self.score(loss)
        if z is not None and self.threshold and z > self.threshold:
            return z
        if math.isfinite(loss):
            self.past.append(loss)
        return None
