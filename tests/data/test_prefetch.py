import threading

import numpy as np
import pytest
import torch

from data.prefetch import prefetch
from data.windows import Windows
from tests.data.conftest import ramp, write_shards


@pytest.fixture
def windows(tmp_path):
    return Windows(write_shards(tmp_path, ramp(5000), ramp(100)), "train", 16)


def test_batches_come_in_order_and_are_those_of_the_windows(windows):
    wanted = [windows.starts(8 * step, 8) for step in range(20)]
    got = list(prefetch(windows, wanted, depth=3))
    assert len(got) == 20
    for starts, (x, y) in zip(wanted, got, strict=True):
        assert torch.equal(x, windows.batch(starts)[0]) and torch.equal(y, windows.batch(starts)[1])


def test_it_reads_ahead_by_depth_on_another_thread_and_ends_with_its_user(windows, monkeypatch):
    threads = set()
    real = windows.batch

    def batch(starts):
        threads.add(threading.current_thread().name.split("_", maxsplit=1)[0])
        return real(starts)

    monkeypatch.setattr(windows, "batch", batch)
    asked = []

    def endless():
        for step in range(10**9):
            asked.append(step)
            yield windows.starts(8 * step, 8)

    batches = prefetch(windows, endless(), depth=2)
    next(batches)
    assert asked == [0, 1, 2]
    next(batches)
    assert asked == [0, 1, 2, 3]
    batches.close()
    assert threads == {"windows"}
    assert not [t for t in threading.enumerate() if t.name.startswith("windows")]


def test_errors_in_reading_reach_the_user(windows):
    batches = prefetch(windows, [np.array([0]), np.array([10**9])])
    with pytest.raises(IndexError):
        list(batches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_batches(windows):
    x, _ = next(prefetch(windows, [windows.starts(0, 4)], pin=True))
    assert x.is_pinned()
