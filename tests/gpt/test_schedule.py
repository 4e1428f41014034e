"""The learning rate at exact points."""

import itertools
import math

import pytest

from gpt.schedule import ConstantConfig, CosineConfig, WSDConfig, lr_scale


def cosine(warmup: int, decay: int | None = None, ratio: float = 0.1) -> CosineConfig:
    return CosineConfig(warmup_steps=warmup, min_lr_ratio=ratio, decay_steps=decay)


def test_warm_up_starts_above_zero_and_reaches_the_peak_once() -> None:
    scales = [lr_scale(cosine(100), step, 1000) for step in range(1000)]
    assert scales[0] == pytest.approx(0.01)
    rises = [b - a for a, b in itertools.pairwise(scales[:100])]
    assert rises == pytest.approx([0.01] * 99)
    assert max(scales) == scales[99] == 1.0 and scales.count(1.0) == 1
    assert scales[-1] == pytest.approx(0.1, abs=1e-12)


def test_the_shape_is_half_a_cosine() -> None:
    """Exact at the quarters, strictly falling to the end."""
    config = cosine(1, ratio=0.2)
    for p, step in ((0.25, 25), (0.5, 50), (0.75, 75), (1.0, 100)):
        expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * p))
        assert lr_scale(config, step, 101) == pytest.approx(expected, abs=1e-9)
    scales = [lr_scale(config, step, 101) for step in range(101)]
    assert all(a > b for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "expected"),
    [
        (0, 0, 5, [0.1] * 5),
        (5, 5, 5, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 5, 5, [1.0, 0.868198, 0.55, 0.231802, 0.1]),
        (3, 5, 8, [1 / 3, 2 / 3, 1.0, 0.55, 0.1, 0.1, 0.1, 0.1]),
        (10, None, 5, [0.1, 0.2, 0.3, 0.4, 0.5]),  # the run ends during warm-up
        (0, None, 1, [1.0]),
    ],
)
def test_edges(warmup: int, decay: int | None, steps: int, expected: list[float]) -> None:
    """Finite everywhere, the minimum past the end."""
    config = cosine(warmup, decay)
    scales = [lr_scale(config, s, steps) for s in range(steps)]
    assert scales == pytest.approx(expected, abs=1e-6)


def test_a_decay_that_ends_before_the_warm_up_is_refused() -> None:
    """Warm-up 10, decay 5, of 5 steps."""
    with pytest.raises(ValueError, match="decay_steps=5 ends before schedule.warmup_steps=10"):
        cosine(10, 5)


def test_warmup_stable_decay() -> None:
    config = WSDConfig(warmup_steps=2, min_lr_ratio=0.1, decay_fraction=0.5)
    scales = [lr_scale(config, s, 10) for s in range(10)]
    assert scales == pytest.approx([0.5, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1])


def test_constant() -> None:
    scales = [lr_scale(ConstantConfig(warmup_steps=2), s, 5) for s in range(5)]
    assert scales == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (cosine(1, ratio=0.0), [1.0, 0.853553, 0.5, 0.146447]),
        (cosine(0, ratio=0.0), [1.0, 0.853553, 0.5, 0.146447]),
        (WSDConfig(warmup_steps=0, min_lr_ratio=0.0, decay_fraction=1.0), [1.0, 0.75, 0.5, 0.25]),
        (WSDConfig(warmup_steps=0, min_lr_ratio=0.0, decay_fraction=0.25), [1.0, 1.0, 1.0, 0.5]),
    ],
)
def test_a_fall_to_zero_ends_after_the_last_update(
    config: CosineConfig | WSDConfig, expected: list[float]
) -> None:
    """An update at a rate of 0 would change nothing."""
    assert [lr_scale(config, s, 4) for s in range(4)] == pytest.approx(expected, abs=1e-6)
