"""The micro-batches of a step, the next one always being read on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpt.evaluation import EvalData
from gpt.ranks import Ranks

Batch = tuple[Tensor, Tensor]


class Data(EvalData, Protocol):
    """What the loop asks of data: windows of the training order, by position."""

    def __len__(self) -> int: ...
    def starts(self, first: int, count: int) -> np.ndarray: ...
    def batch(self, starts: np.ndarray) -> Batch: ...
    def describe(self, starts: np.ndarray) -> list[str]: ...
    def show_with(self, starts: np.ndarray) -> str: ...


class Reader:
    """This rank's share of each step: micro-batch j = i·world_size + rank, rows [j·B, (j+1)·B).

    `left_out`: [from step, windows] pairs, the windows that a rollback passed over.
    """

    def __init__(
        self,
        data: Data,
        windows_per_step: int,
        micro_batch_size: int,
        ranks: Ranks,
        device: torch.device,
        left_out: list[list[int]],
    ) -> None:
        self.data, self.ranks, self.device, self.left_out = data, ranks, device, left_out
        self.windows_per_step, self.micro_batch_size = windows_per_step, micro_batch_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windows")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def position(self, step: int) -> int:
        """How many windows of the training order come before a step's."""
        passed = sum(windows for since, windows in self.left_out if step >= since)
        return step * self.windows_per_step + passed

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, those of all ranks."""
        return self.data.starts(self.position(step), self.windows_per_step)

    def epochs(self, step: int) -> float:
        """How often the training text was read before a step."""
        return self.position(step) / len(self.data)

    def batches(self, step: int) -> Iterator[Batch]:
        """x, y [B, T] in turn, on the device; one is read ahead, also over the border of steps."""
        count = self.windows_per_step // (self.micro_batch_size * self.ranks.world_size)
        known = self._ahead is not None and self._ahead[0] == step
        waiting = self._ahead[1] if self._ahead and known else self._begin(step, 0)
        for i in range(count):
            x, y = waiting.result()
            last = i + 1 == count
            waiting = self._begin(step + 1, 0) if last else self._begin(step, i + 1)
            if last:
                self._ahead = (step + 1, waiting)
            # Only from pinned memory: MPS would read what is already freed.
            ahead = self.device.type == "cuda"
            yield x.to(self.device, non_blocking=ahead), y.to(self.device, non_blocking=ahead)

    def pass_over(self, left_out: list[list[int]]) -> None:
        """From now on without these windows."""
        self.left_out, self._ahead = left_out, None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int, i: int) -> Future[Batch]:
        j, size = i * self.ranks.world_size + self.ranks.rank, self.micro_batch_size
        return self._pool.submit(self._read, self.starts(step)[j * size : (j + 1) * size])

    def _read(self, starts: np.ndarray) -> Batch:
        x, y = self.data.batch(starts)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)
