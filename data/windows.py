"""Shards to windows of tokens: which windows a step sees is a function of its position alone."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from data.shards import check_ids, load_manifest, open_shards

_ROUNDS = 8
_U64 = np.uint64


class Windows:
    """The windows of one split of a folder of shards; they wrap round the end of the stream.

    An epoch has ceil((N - 1) / stride) windows of block_size + 1 tokens. Global position p stands
    for epoch p // len(self), and there for window `permutation(p % len(self))`, keyed by (seed,
    epoch); window i of epoch e starts at token phase(e) + i * stride. Nothing is drawn twice in an
    epoch and nothing is remembered between calls.

    Raises ValueError where the split is shorter than one window, or a shard is not as it was.
    """

    def __init__(
        self,
        shards: str | Path,
        split: str,
        block_size: int,
        stride: int | None = None,
        seed: int = 0,
    ) -> None:
        manifest = load_manifest(shards)
        self._arrays = open_shards(shards, manifest, split)
        self._ends = np.cumsum([len(array) for array in self._arrays], dtype=np.int64)
        self.n_tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.n_tokens < block_size + 1:
            raise ValueError(
                f"the {split} split of {shards} has {self.n_tokens} tokens, a window needs "
                f"{block_size + 1}; there is nothing to read; give more text, another "
                "data.val_fraction, or a smaller model.block_size"
            )
        check_ids(self._arrays, manifest.n_vocab, split)
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        self.n_eval = -(-(self.n_tokens - 1) // block_size)
        self._len = -(-(self.n_tokens - 1) // self.stride)
        self._key = _key(seed)

    def __len__(self) -> int:
        return self._len

    def starts(self, first: int, count: int) -> np.ndarray:
        """Token offsets of the windows at global positions first … first+count-1: int64 [count]."""
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(positions, self._len)
        keys = _mix(self._key ^ _mix(epochs.astype(_U64)))
        windows = _permute(places, self._len, keys)
        phases = (_mix(keys ^ _U64(0xA5A5A5A5)) % _U64(self.stride)).astype(np.int64)
        phases[epochs == 0] = 0
        starts: np.ndarray = (phases + windows * self.stride) % self.n_tokens
        return starts

    def batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y: int64 [count, block_size] from token offsets; y is x shifted by one."""
        T = self.block_size
        x = np.empty((len(starts), T), np.int64)
        y = np.empty((len(starts), T), np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")
        for row, (start, shard) in enumerate(
            zip(np.asarray(starts).tolist(), shards.tolist(), strict=True)
        ):
            array = self._arrays[shard]
            at = start - int(self._ends[shard]) + len(array)
            window = array[at : at + T + 1]
            if len(window) <= T:
                window = self._read(start, T + 1)
            x[row] = window[:-1]
            y[row] = window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def eval_batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y: int64 [count, block_size] of windows that lie one after another, without wrap.

        Window i of n_eval has the targets i*T+1 … (i+1)*T, so each token but the first is a target
        once. Positions without a target have y = -1 and x = 0.
        """
        T = self.block_size
        x = np.zeros((len(indices), T), np.int64)
        y = np.full((len(indices), T), -1, np.int64)
        for row, index in enumerate(np.asarray(indices).tolist()):
            if not 0 <= index < self.n_eval:
                raise IndexError(f"evaluation window {index} of {self.n_eval}")
            n = min(T, self.n_tokens - 1 - index * T)
            window = self._read(index * T, n + 1)
            x[row, :n] = window[:-1]
            y[row, :n] = window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def _read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on, across shards and round the end."""
        parts = []
        while count > 0:
            shard = int(np.searchsorted(self._ends, start, side="right"))
            array = self._arrays[shard]
            at = start - int(self._ends[shard]) + len(array)
            part = array[at : at + count]
            parts.append(part)
            count -= len(part)
            start = (start + len(part)) % self.n_tokens
        return np.concatenate(parts)


def _key(seed: int) -> np.uint64:
    return _U64(int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest()))


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): uint64 -> uint64, a bijection."""
    z: np.ndarray = np.asarray(x, _U64)
    with np.errstate(over="ignore"):
        z = z + _U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
        z = z ^ (z >> _U64(31))
    return z


def _permute(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """The place of each of 0 … n-1 in a pseudo-random order of n that belongs to its key.

    A Feistel network over pairs (left, right) of an a × b grid that just holds n (Black, Rogaway
    2002); an outcome beyond n goes through it again until it lies within ("cycle walking").
    """
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    out = places.astype(_U64)
    todo = np.arange(len(out))
    while len(todo):
        left, right = np.divmod(out[todo], _U64(b))
        size, other = a, b  # `left` lies in [0, size), `right` in [0, other)
        for round_ in range(_ROUNDS):
            noise = _mix(keys[todo] + _U64(round_) ^ _mix(right))
            left, right = right, (left + noise % _U64(size)) % _U64(size)
            size, other = other, size
        assert _ROUNDS % 2 == 0  # so that left and right are back on their own sides
        out[todo] = left * _U64(b) + right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)
