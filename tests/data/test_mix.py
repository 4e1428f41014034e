import numpy as np
import pytest

from data.mix import in_period
from data.prepare import prepare
from data.shards import load_manifest
from data.sources import MixConfig
from data.tokenizer import load_tokenizer
from data.windows import Windows, _turns
from tests.data.conftest import COMMON, ramp, write_shards


def mix_config(mix):
    return MixConfig(**COMMON | {"sources": list(mix), "weights": list(mix.values())})


@pytest.fixture
def mixed(tmp_path, log):
    """Windows of a mixture of ramps: of `a` ids 0…, of `b` ids 10000…, of `c` 20000…"""
    sha256 = load_tokenizer("gpt2").sha256

    def mixed(mix, split="train", seed=1, block_size=10, sizes=(2001, 331, 101)):
        for k, (name, size) in enumerate(zip("abc", sizes, strict=True)):
            ids = ramp(size) + 10_000 * k
            folder = tmp_path / "shards" / name
            write_shards(folder, ids, ids[: size // 2], 150, tokenizer_sha256=sha256)
        return Windows(prepare(mix_config(mix), tmp_path, log), split, block_size, seed=seed)

    return mixed


def sources(w, first, count):
    x, _ = w.batch(w.starts(first, count))
    return (x[:, 0] // 10_000).numpy()


def test_weights_are_exact_in_every_period_and_close_everywhere(mixed):
    w = mixed({"a": 0.5, "b": 0.3, "c": 0.2})
    drawn = sources(w, 0, 500)
    for first in range(0, 490, 10):  # a step of 10 windows, wherever it begins in a period
        counts = np.bincount(drawn[first : first + 10], minlength=3)
        assert counts.tolist() == [5, 3, 2]
    for length in (1, 3, 7, 16, 33):
        for first in range(0, 400):
            counts = np.bincount(drawn[first : first + length], minlength=3)
            assert np.all(np.abs(counts - length * np.array([0.5, 0.3, 0.2])) < 2)


def test_each_source_has_epochs_of_its_own(mixed):
    w = mixed({"a": 1, "b": 1, "c": 2})
    starts = w.starts(0, 4000)
    alone = (w.batch(starts)[0][:, 0] // 10_000).numpy()
    for k, windows in enumerate((200, 33, 10)):
        mine = starts[alone == k]
        for epoch in range(3):
            part = mine[epoch * windows : (epoch + 1) * windows]
            if len(part) == windows:
                assert len(set(part.tolist())) == windows  # nothing twice in an epoch
    assert len(w) == 800  # until `a`, the slowest, was seen whole


def test_windows_never_cross_from_one_source_to_another(mixed):
    w = mixed({"a": 1, "b": 1, "c": 1})
    x, y = w.batch(w.starts(0, 900))
    assert np.array_equal(x[:, 1:], y[:, :-1])
    for row in x.tolist():
        assert len({token // 10_000 for token in row}) == 1


def test_a_position_says_it_all(mixed):
    """Whoever asks, in whatever pieces: the same windows. Another seed: others."""
    w = mixed({"a": 0.7, "b": 0.25, "c": 0.05})
    straight = w.starts(0, 300)
    assert np.array_equal(
        straight, np.concatenate([w.starts(i, 7) for i in range(0, 300, 7)])[:300]
    )
    assert not np.array_equal(
        straight, mixed({"a": 0.7, "b": 0.25, "c": 0.05}, seed=2).starts(0, 300)
    )


def test_evaluation_covers_every_source_s_validation(mixed):
    w = mixed({"a": 1, "b": 1, "c": 1}, split="val")
    x, y = w.eval_batch(np.arange(w.n_eval))
    real = y >= 0
    assert int(real.sum()) == (1000 - 1) + (165 - 1) + (50 - 1)
    assert np.array_equal(y[real], x[real] + 1)
    assert len(set(y[real].tolist())) == int(real.sum())


def test_the_fingerprint_follows_weights_and_contents(mixed, tmp_path, log):
    prints = []
    for mix in ({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 4}):
        mixed(mix)
        prints.append(load_manifest(prepare(mix_config(mix), tmp_path, log)).fingerprint)
    assert len(set(prints)) == 2 and prints[1] == prints[2]


def test_whole_numbers_for_the_weights():
    assert in_period([0.5, 0.3, 0.2]) == [5, 3, 2]
    assert in_period([1, 1, 2]) == [1, 1, 2]
    assert in_period([0.1, 0.2]) == [1, 2]
    odd = in_period([0.123457, 0.654321, 1e-9])
    assert sum(odd) == 10_000 and min(odd) == 1


@pytest.mark.parametrize("weights", [[1], [1, 1], [5, 3, 2], [1, 98, 1], [7, 11, 13, 17, 23, 29]])
def test_turns_keep_within_one_of_their_share(weights):
    turns = _turns(weights)
    shares = np.array(weights) / sum(weights)
    had = np.cumsum(turns[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(turns) + 1)[:, None] * shares
    assert np.abs(had - wanted).max() < 1
    assert had[-1].tolist() == weights


def test_other_tokenizers_mixtures_and_absent_shards_are_refused(mixed, tmp_path, log):
    mixed({"a": 1, "b": 1})
    write_shards(tmp_path / "shards" / "other", ramp(100), ramp(100), tokenizer_name="mine")
    with pytest.raises(ValueError, match="shards of other were made with tokenizer mine"):
        prepare(mix_config({"a": 1, "other": 1}), tmp_path, log)
    with pytest.raises(ValueError, match="mix-a-1-b-1 is a mixture itself"):
        prepare(mix_config({"a": 1, "mix-a-1-b-1": 1}), tmp_path, log)
    with pytest.raises(ValueError, match="names absent, .*prepare it first"):
        prepare(mix_config({"absent": 1}), tmp_path, log)
    with pytest.raises(ValueError, match="one weight above 0"):
        mix_config({"a": 0})
