import numpy as np
import pytest
import torch

from data.shards import Shard
from data.windows import Windows, _permute, _turns
from tests.data.conftest import ramp, write_shards


@pytest.fixture
def make(tmp_path):
    def make(n, block_size=32, stride=None, seed=1, shard_tokens=1_000_000, split="train"):
        folder = write_shards(tmp_path / f"{n}-{shard_tokens}", ramp(n), ramp(n), shard_tokens)
        return Windows(folder, split, block_size, stride, seed)

    return make


@pytest.mark.parametrize("n", [*range(1, 40), 1000, 4099])
def test_the_permutation_holds_every_place_once_and_depends_on_its_key(n):
    orders = []
    for key in (1, 2):
        order = _permute(np.arange(n), n, np.full(n, key, np.uint64))
        assert np.array_equal(np.sort(order), np.arange(n))
        orders.append(order)
    assert n < 8 or not np.array_equal(*orders)


def test_small_permutations_are_all_about_as_likely():
    seen = {}
    for key in range(2400):
        order = tuple(_permute(np.arange(4), 4, np.full(4, key * 7919, np.uint64)))
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24  # 100 of each, standard deviation 10
    assert min(seen.values()) > 60 and max(seen.values()) < 140


def test_every_epoch_visits_every_window_once_in_an_order_of_its_own(make):
    w = make(10 * 32 + 1)
    assert len(w) == 10
    orders = [w.starts(10 * epoch, 10) for epoch in range(4)]
    for epoch, order in enumerate(orders):
        phase = set((order % 32).tolist()) if epoch == 0 else None
        assert len(set(order.tolist())) == 10
        if epoch == 0:
            assert phase == {0}
            assert set(order.tolist()) == {32 * i for i in range(10)}
    places = [np.argsort(np.argsort(order)).tolist() for order in orders]
    assert len({tuple(p) for p in places}) == 4


def test_later_epochs_start_at_their_own_phase(make):
    """Window i of epoch e is at phase_e + i*stride, so an epoch's starts lie a stride apart."""
    w = make(100_000, block_size=50, stride=50)
    phases = []
    for epoch in range(6):
        order = np.sort(w.starts(len(w) * epoch, len(w)))
        steps = set(np.diff(order).tolist())
        # one more step where the stream's end falls between two windows
        assert 50 in steps and len(steps) <= 3
        phases.append(int(w.starts(len(w) * epoch, len(w)).min()) if epoch else int(order[0]))
    assert phases[0] == 0
    assert len(set(phases)) > 3


def test_a_step_reads_the_same_windows_whoever_asks_and_when(make):
    """Starts depend on the position alone: resuming at 9, at 10 (an epoch's border), or never."""
    w = make(10 * 32 + 1)
    straight = w.starts(0, 30)
    for cut in (9, 10, 11, 20):
        other = make(10 * 32 + 1)
        resumed = np.concatenate([other.starts(0, cut), other.starts(cut, 30 - cut)])
        assert np.array_equal(resumed, straight)
    assert np.array_equal([w.starts(p, 1)[0] for p in range(30)], straight)


def test_the_order_is_the_one_that_runs_depend_on(make):
    """A format: a run that is resumed reads on in this order. Never change these numbers."""
    w = make(331, block_size=16, stride=7, seed=1337)
    assert len(w) == 48
    assert w.starts(0, 96).tolist() == [
        *(217, 224, 231, 329, 21, 49, 105, 56, 140, 287, 84, 161, 70, 189, 133, 98),
        *(63, 182, 196, 119, 28, 203, 210, 168, 322, 252, 308, 154, 112, 273, 14, 175),
        *(42, 147, 126, 301, 245, 238, 77, 91, 294, 315, 259, 0, 35, 280, 7, 266),
        # the second epoch, whose windows begin 2 tokens later
        *(142, 296, 282, 9, 79, 149, 317, 254, 58, 37, 0, 247, 72, 310, 65, 303),
        *(93, 275, 261, 135, 219, 107, 16, 44, 114, 212, 23, 184, 233, 2, 51, 163),
        *(205, 156, 86, 170, 240, 268, 100, 289, 191, 121, 177, 128, 198, 324, 30, 226),
    ]
    assert _turns([5, 3, 2]).tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def test_seed_changes_the_order_and_nothing_else(make):
    a, b = make(3201, seed=1).starts(0, 100), make(3201, seed=2).starts(0, 100)
    assert not np.array_equal(a, b)
    assert set(a.tolist()) == set(b.tolist())


def test_x_and_y_show_their_offsets_across_shards_and_round_the_end(make):
    n = 331
    w = make(n, block_size=16, stride=5, shard_tokens=50)
    starts = w.starts(0, 3 * len(w))
    assert starts.dtype == np.int64 and starts.min() >= 0 and starts.max() < n
    x, y = w.batch(starts)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (len(starts), 16)
    expected = (starts[:, None] + np.arange(17)) % n
    assert np.array_equal(x, expected[:, :-1])
    assert np.array_equal(y, expected[:, 1:])
    assert (starts + 17 > n).any()  # some did wrap


def test_shards_do_not_change_what_is_read(make):
    whole, pieces = make(1000), make(1000, shard_tokens=33)
    starts = whole.starts(0, 80)
    assert np.array_equal(starts, pieces.starts(0, 80))
    for a, b in zip(whole.batch(starts), pieces.batch(starts), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [33, 34, 64, 65, 66, 321, 330])
def test_windows_of_an_epoch_cover_the_stream(make, n):
    """ceil((N-1)/T) windows, every token a target at least once; no tail is skipped."""
    w = make(n)
    assert len(w) == -(-(n - 1) // 32)
    _, y = w.batch(w.starts(0, len(w)))
    assert set(y.flatten().tolist()) >= set(range(1, n))


@pytest.mark.parametrize("shard_tokens", [1_000_000, 50])
@pytest.mark.parametrize("n", [10 * 32 + 1, 10 * 32 + 7])
def test_evaluation_targets_each_token_but_the_first_once(make, n, shard_tokens):
    w = make(n, shard_tokens=shard_tokens, split="val")
    assert w.n_tokens == n
    assert w.n_eval == -(-(n - 1) // 32)
    x, y = w.eval_batch(np.arange(w.n_eval))
    real = y >= 0
    assert int(real.sum()) == n - 1  # the denominator of the mean: 320 for the first
    assert torch.equal(y[real], x[real] + 1)
    assert torch.equal(y[real], torch.arange(1, n))
    assert (x[~real] == 0).all()
    assert torch.equal(w.eval_batch(np.array([3]))[0][0], torch.arange(96, 128))
    with pytest.raises(IndexError):
        w.eval_batch(np.array([w.n_eval]))


def test_positions_go_on_for_ever(make):
    """50 steps on data for 3: windows never run out, and each further epoch holds all of them."""
    w = make(3 * 32 + 1)
    starts = w.starts(0, 50)
    assert len(starts) == 50
    firsts = [sorted((starts[i : i + 3] // 32).tolist()) for i in range(0, 48, 3)]
    assert firsts[0] == [0, 1, 2]
    assert all(len(set(starts[i : i + 3].tolist())) == 3 for i in range(0, 48, 3))


def test_big_positions_do_not_overflow(make):
    w = make(10 * 32 + 1)
    starts = w.starts(10 * 2**55, 10)
    assert len(set(starts.tolist())) == 10
    assert starts.min() >= 0


def test_a_split_shorter_than_a_window_is_refused_with_both_numbers(make):
    for split in ("train", "val"):
        with pytest.raises(ValueError, match=rf"the {split} split .* has 32 tokens.* needs 33"):
            make(32, split=split)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    ids = ramp(1000)
    write_shards(tmp_path, ids, ids, n_vocab=999)
    with pytest.raises(ValueError, match="token id 999, beyond the vocabulary of 999"):
        Windows(tmp_path, "train", 32)


def test_a_split_without_shards_is_refused(tmp_path):
    write_shards(tmp_path, ramp(100), ramp(0))
    with pytest.raises(ValueError, match="val split .* has 0 tokens"):
        Windows(tmp_path, "val", 32)


@pytest.mark.slow
def test_offsets_and_counts_beyond_32_bits_are_exact(tmp_path):
    """Sparse files of 2.2e9 ids with one that is not 0, beyond 2^31; together past 2^32."""
    n, at = 2_200_000_000, 2_190_000_000
    for name in ("a.bin", "b.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * n)
            file.seek(2 * at)
            file.write((777).to_bytes(2, "little"))
    shards = [
        Shard(file=str(tmp_path / name), split="train", tokens=n, sha256="", offset=0, dtype="<u2")
        for name in ("a.bin", "b.bin")
    ]
    request = {"source": {"kind": "tokens", "files": {shard.file: [] for shard in shards}}}
    write_shards(tmp_path, ramp(0), ramp(0), shards=shards, train_tokens=2 * n, request=request)
    w = Windows(tmp_path, "train", 1024)
    assert w.n_tokens == 4_400_000_000 > 2**32
    assert len(w) == -(-(2 * n - 1) // 1024)
    starts = w.starts(0, 5000)
    assert starts.max() > 2**32 and starts.min() >= 0 and (starts % 1024 == 0).all()
    x, y = w.batch(np.array([at - 5, n + at - 5, 2 * n - 3]))
    for row in (0, 1):
        assert x[row].nonzero().flatten().tolist() == [5] and x[row, 5] == 777
        assert y[row].nonzero().flatten().tolist() == [4]
