"""What counts as a spike, against z by hand."""

import math

import pytest

from gpt.spikes import FEWEST, WINDOW, Spikes

# 8 times 1, 2, 3, 4: median 2.5, deviations from it 0.5 and 1.5 in halves, so their median is 1.
PAST = [1.0, 2.0, 3.0, 4.0] * 8


def test_z_by_hand() -> None:
    """z = (loss − median) / (1.4826 · MAD) = (loss − 2.5) / 1.4826."""
    spikes = Spikes(8.0, PAST)
    assert len(PAST) == FEWEST == 32
    assert spikes.score(2.5) == 0
    assert spikes.score(2.5 + 1.4826) == pytest.approx(1, rel=1e-12)
    assert spikes.score(1.0) == pytest.approx(-1.5 / 1.4826, rel=1e-12)


def test_only_above_the_threshold_and_never_into_the_window() -> None:
    spikes = Spikes(8.0, PAST)
    assert spikes.is_spike(2.5 + 7.999 * 1.4826) is None
    assert len(spikes.past) == 33
    spikes = Spikes(8.0, PAST)
    assert spikes.is_spike(2.5 + 8.001 * 1.4826) == pytest.approx(8.001, rel=1e-9)
    assert list(spikes.past) == PAST
    assert spikes.is_spike(-100.0) is None  # far below is no spike


def test_what_can_not_be_judged() -> None:
    """Too few steps, no spread, no number, no threshold: no spike, and no NaN in the window."""
    assert Spikes(8.0, PAST[:-1]).score(1e9) is None
    assert Spikes(8.0, [2.0] * 40).score(1e9) is None
    spikes = Spikes(8.0, PAST)
    assert spikes.is_spike(math.nan) is None and spikes.is_spike(math.inf) is None
    assert list(spikes.past) == PAST
    for off in (None, 0.0):
        assert Spikes(off, PAST).is_spike(1e9) is None


def test_the_window_forgets() -> None:
    spikes = Spikes(8.0, PAST)
    for _ in range(WINDOW):
        spikes.is_spike(2.5)
    assert list(spikes.past) == [2.5] * WINDOW
