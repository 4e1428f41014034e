"""Batches read on a thread of their own, ahead of the step that uses them."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from data.windows import Windows

Batch = tuple[torch.Tensor, torch.Tensor]


def prefetch(
    windows: Windows, starts: Iterable[np.ndarray], pin: bool = False, depth: int = 2
) -> Iterator[Batch]:
    """windows.batch of each of `starts` in turn, `depth` of them read ahead.

    `pin` puts them in page-locked memory, from where a GPU copies without waiting
    (`x.to(device, non_blocking=True)`). `starts` may be endless; errors in reading come out here.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="windows") as reader:
        waiting: deque[Future[Batch]] = deque()
        for wanted in starts:
            waiting.append(reader.submit(_read, windows, wanted, pin))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read(windows: Windows, starts: np.ndarray, pin: bool) -> Batch:
    x, y = windows.batch(starts)
    return (x.pin_memory(), y.pin_memory()) if pin else (x, y)
