"""Shards to windows of tokens: which windows a step sees is a function of its position alone."""

import hashlib
import shlex
from pathlib import Path

import numpy as np
import torch

from data.shards import check_ids, load_manifest, open_shards
from data.where import describe

_ROUNDS = 8
_BLOCK = 4096
_U64 = np.uint64


class Windows:
    """The windows of one split of a folder of shards; they wrap round the end of the stream.

    An epoch has ceil((N - 1) / stride) windows of block_size + 1 tokens. Global position p stands
    for epoch p // len(self), and there for window `permutation(p % len(self))`, keyed by (seed,
    epoch); window i of epoch e starts at token phase(e) + i * stride. Nothing is drawn twice in an
    epoch and nothing is remembered between calls.

    A mixture has several streams, each with epochs of its own; position p belongs to the stream
    that a periodic table names, and is this stream's position `how often it was named before`.
    Of any positions one after another each stream has its share to within one window more or less
    at either end. len(self) is then how many positions it takes to see every stream once.

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
        self._manifest, self._shards, self._split = manifest, shards, split
        self._arrays = open_shards(shards, manifest, split)
        self._lengths = np.array([len(array) for array in self._arrays], np.int64)
        self._ends = np.cumsum(self._lengths)
        self.n_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        sizes = [0] * len(manifest.weights)
        for shard in manifest.of(split):
            sizes[shard.stream] += shard.tokens
        # of each stream: tokens, first token, windows an epoch, evaluation windows
        self._sizes = np.array(sizes, np.int64)
        self._bases = np.cumsum(self._sizes) - self._sizes
        self._epochs = np.maximum(1, -(-(self._sizes - 1) // self.stride))
        self._evals = np.maximum(0, -(-(self._sizes - 1) // block_size))
        self.n_eval = int(self._evals.sum())
        shortest = self.n_tokens if split == "val" else min(sizes)
        if shortest < block_size + 1:
            raise ValueError(
                f"the {split} split of {shards} has {shortest} tokens, a window needs "
                f"{block_size + 1}; there is nothing to read; give more text, another "
                "data.val_fraction, or a smaller model.block_size"
            )
        check_ids(self._arrays, manifest.n_vocab, split)
        self._weights = np.array(manifest.weights, np.int64)
        self._turns = _turns(manifest.weights)
        self._before = np.array(  # of each stream: its turns before each place of the period
            [np.cumsum(self._turns == k) - (self._turns == k) for k in range(len(sizes))]
        )
        self._len = int(max(-(-self._epochs * len(self._turns) // self._weights)))
        self._key = _key(seed)
        # the last positions asked for, with their like: a block costs hardly more than one
        self._worked_out: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self._len

    def starts(self, first: int, count: int) -> np.ndarray:
        """Token offsets of the windows at global positions first … first+count-1: int64 [count]."""
        parts = [np.zeros(0, np.int64)]
        while count > 0:
            block, at = divmod(first, _BLOCK)
            if self._worked_out[0] != block:
                self._worked_out = (block, self._starts(block * _BLOCK, _BLOCK))
            parts.append(self._worked_out[1][at : at + count])
            first += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)

    def _starts(self, first: int, count: int) -> np.ndarray:
        positions = np.arange(first, first + count, dtype=np.int64)
        periods, places = np.divmod(positions, len(self._turns))
        streams = self._turns[places]
        positions = periods * self._weights[streams] + self._before[streams, places]
        epochs, places = np.divmod(positions, self._epochs[streams])
        keys = _mix(self._key ^ _mix(epochs) ^ streams.astype(_U64))
        windows = _permute(places, self._epochs[streams], keys)
        phases = (_mix(keys ^ _U64(0xA5A5A5A5)) % _U64(self.stride)).astype(np.int64)
        phases[epochs == 0] = 0
        starts: np.ndarray = (phases + windows * self.stride) % self._sizes[streams]
        starts += self._bases[streams]
        return starts

    def batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y: int64 [count, block_size] from token offsets; y is x shifted by one."""
        T = self.block_size
        x = np.empty((len(starts), T), np.int64)
        y = np.empty((len(starts), T), np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")
        offsets = np.asarray(starts) - (self._ends - self._lengths)[shards]
        for row, (shard, at) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            window = self._arrays[shard][at : at + T + 1]
            if len(window) <= T:
                window = self.read(int(starts[row]), T + 1)
            x[row] = window[:-1]
            y[row] = window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def eval_batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y: int64 [count, block_size] of windows that lie one after another, without wrap.

        Window i of n_eval has the targets i*T+1 … (i+1)*T of its stream, so each token but a
        stream's first is a target once. Positions without a target have y = -1 and x = 0.
        """
        T = self.block_size
        x = np.zeros((len(indices), T), np.int64)
        y = np.full((len(indices), T), -1, np.int64)
        ends = np.cumsum(self._evals)
        for row, index in enumerate(np.asarray(indices).tolist()):
            if not 0 <= index < self.n_eval:
                raise IndexError(f"evaluation window {index} of {self.n_eval}")
            stream = int(np.searchsorted(ends, index, side="right"))
            at = (index - int(ends[stream] - self._evals[stream])) * T
            n = min(T, int(self._sizes[stream]) - 1 - at)
            window = self.read(int(self._bases[stream]) + at, n + 1)
            x[row, :n] = window[:-1]
            y[row, :n] = window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def describe(self, starts: np.ndarray) -> list[str]:
        """For each window a line: its shard files, the place in them, the documents it touches.

        For finding bad text, not for every step: it reads the ids up to the last window.
        """
        wanted = np.asarray(starts).tolist()
        return describe(self._arrays, self._manifest, self._split, wanted, self.block_size + 1)

    def show_with(self, starts: np.ndarray) -> str:
        """The command that prints the text of these windows."""
        command = ["python", "-m", "data.inspect", str(self._shards), "--split", self._split]
        command += ["--length", str(self.block_size + 1)]
        return shlex.join(command + [f"--window={start}" for start in np.asarray(starts).tolist()])

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on, across shards and round the stream's end."""
        stream = int(np.searchsorted(self._bases + self._sizes, start, side="right"))
        base, size = int(self._bases[stream]), int(self._sizes[stream])
        parts = []
        while count > 0:
            shard = int(np.searchsorted(self._ends, start, side="right"))
            array = self._arrays[shard]
            at = start - int(self._ends[shard]) + len(array)
            part = array[at : at + count]
            parts.append(part)
            count -= len(part)
            start = base + (start - base + len(part)) % size
        return np.concatenate(parts)


def _turns(weights: list[int]) -> np.ndarray:
    """The stream at each place of a period: int64 [sum(weights)].

    Turn j of a stream that has m of M places falls within [j*M/m, (j+1)*M/m), rounded outwards.
    Taking the released turn with the earliest deadline always succeeds for one server that is
    fully used (Liu, Layland 1973), so after p places a stream has had p*m/M turns, give or take
    less than one.
    """
    period = sum(weights)
    had = [0] * len(weights)
    turns = np.empty(period, np.int64)
    for place in range(period):
        _, stream = min(
            (-(-(had[k] + 1) * period // m), k)
            for k, m in enumerate(weights)
            if had[k] < m and had[k] * period // m <= place
        )
        turns[place] = stream
        had[stream] += 1
    return turns


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


def _permute(places: np.ndarray, sizes: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """The place of each of 0 … n-1 in a pseudo-random order of n that belongs to its key.

    `sizes` holds the n of each place. A Feistel network over pairs (left, right) of an a by b grid
    that just holds n (Black, Rogaway 2002); an outcome beyond n goes through it again until it
    lies within ("cycle walking").
    """
    n = np.broadcast_to(np.asarray(sizes, _U64), places.shape)
    a = np.ceil(np.sqrt(n)).astype(_U64)
    b = (n + a - _U64(1)) // a
    out = places.astype(_U64)
    todo = np.arange(len(out))
    while len(todo):
        size, other = a[todo], b[todo]  # `left` lies in [0, size), `right` in [0, other)
        left, right = np.divmod(out[todo], other)
        for round_ in range(_ROUNDS):
            noise = _mix(keys[todo] + _U64(round_) ^ _mix(right))
            left, right = right, (left + noise % size) % size
            size, other = other, size
        assert _ROUNDS % 2 == 0  # so that left and right are back on their own sides
        out[todo] = left * b[todo] + right
        todo = todo[out[todo] >= n[todo]]
    return out.astype(np.int64)
