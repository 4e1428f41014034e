import hashlib
import json

import numpy as np
import pytest

from data.shards import ShardWriter, dtype_for, load_manifest, open_shards
from tests.data.conftest import ramp, write_shards


def test_shards_are_plain_npy_files_the_last_one_shorter(tmp_path):
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"), 100)
    for part in np.split(ramp(250), [1, 99, 130, 249]):
        writer.append(part)
    shards = writer.close()
    assert [shard.tokens for shard in shards] == [100, 100, 50]
    read = [np.load(tmp_path / shard.file, allow_pickle=False) for shard in shards]
    assert np.array_equal(np.concatenate(read), np.arange(250))
    for shard in shards:
        assert hashlib.sha256((tmp_path / shard.file).read_bytes()).hexdigest() == shard.sha256


def test_ids_are_16_bit_where_they_fit():
    assert dtype_for(50257) == np.uint16
    assert dtype_for(65536) == np.uint16
    assert dtype_for(65537) == np.uint32


def test_the_fingerprint_follows_ids_and_tokenizer_not_the_folder(tmp_path):
    a = load_manifest(write_shards(tmp_path / "a", ramp(100), ramp(50)))
    b = load_manifest(write_shards(tmp_path / "b", ramp(100), ramp(50), dataset="other"))
    c = load_manifest(write_shards(tmp_path / "c", ramp(100), ramp(51)))
    d = load_manifest(write_shards(tmp_path / "d", ramp(100), ramp(50), tokenizer_sha256="1"))
    assert a.fingerprint == b.fingerprint
    assert len({a.fingerprint, c.fingerprint, d.fingerprint}) == 3


def test_altered_shards_are_refused_by_name(tmp_path):
    folder = write_shards(tmp_path, ramp(100), ramp(50))
    manifest = load_manifest(folder)
    assert len(open_shards(folder, manifest, "train")[0]) == 100
    file = folder / "train_00000.npy"
    whole = file.read_bytes()
    for damaged in (b"", whole[:40], whole[:-2]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train_00000\.npy .*prepare it again"):
            open_shards(folder, manifest, "train")
    np.save(file, ramp(100).astype(np.int32))
    with pytest.raises(ValueError, match="holds int32"):
        open_shards(folder, manifest, "train")
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        open_shards(folder, manifest, "train")


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickled_shard_is_refused_and_its_code_not_run(tmp_path):
    folder = write_shards(tmp_path, ramp(100), ramp(50))
    canary = tmp_path / "canary"
    np.save(folder / "train_00000.npy", np.array([Canary(canary)], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"train_00000\.npy cannot be read"):
        open_shards(folder, load_manifest(folder), "train")
    assert not canary.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}'])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        load_manifest(tmp_path)


def test_another_format_and_a_missing_manifest_are_named(tmp_path):
    with pytest.raises(ValueError, match="no prepared shards"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_manifest(tmp_path)
