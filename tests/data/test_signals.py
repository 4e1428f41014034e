"""Ctrl-C and SIGTERM while data are prepared: out within seconds, and on from there later."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.reading import contents

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "data.prepare": ["-m", "data.prepare"],
    "train.py": ["train.py", "model=tiny", "tracker.wandb=disabled", "runtime.device=cpu"],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """12 MB in records, some seconds' work, and the shards of an undisturbed preparation."""
    folder = tmp_path_factory.mktemp("signals")
    rng = random.Random(7)
    words = [f"word{i}" for i in range(5000)]
    with (folder / "a.jsonl").open("w") as out:
        for _ in range(3000):
            out.write(f'{{"text": "{" ".join(rng.choices(words, k=450))}"}}\n')
    done = start(COMMANDS["data.prepare"], folder, "straight")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, out
    return folder


def start(command, folder, root):
    """A command in a session of its own, so that what it leaves behind can be found."""
    options = ["data=text", f"data.path={folder}/a.jsonl", "data.num_proc=2"]
    options += ["data.shard_tokens=500_000", f"paths.root={folder / root}"]
    return subprocess.Popen(
        [sys.executable, *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for_shards(process, root):
    """Until half-written shards are there."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if any(p.stat().st_size > 100_000 for p in root.glob("shards/.*.building/train_*.npy")):
            return
        time.sleep(0.01)
    raise AssertionError(f"nothing was prepared: {process.communicate(timeout=10)}")


@pytest.mark.parametrize(
    ("command", "number"), [("data.prepare", signal.SIGINT), ("train.py", signal.SIGTERM)]
)
def test_a_signal_ends_preparing_soon_and_the_next_start_goes_on(corpus, command, number):
    root = corpus / f"{command}-{number}"
    process = start(COMMANDS[command], corpus, root.name)
    wait_for_shards(process, root)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - sent < 5
    assert process.returncode == 128 + number, (out, err)
    assert "Traceback" not in err and err.count("\n") == 1 and "goes on" in err
    with pytest.raises(ProcessLookupError):  # nobody is left of its session
        os.killpg(process.pid, 0)
    assert "done: " not in out
    assert list(root.glob("shards/[!.]*")) == []  # nothing that looks whole

    again = start(COMMANDS["data.prepare"], corpus, root.name)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert contents(root / "shards") == contents(corpus / "straight" / "shards")


def test_a_signal_ends_waiting_for_another_s_preparation(corpus):
    """The lock is held by a first preparation, which the signal to the second does not disturb."""
    root = corpus / "two"
    first = start(COMMANDS["data.prepare"], corpus, root.name)
    wait_for_shards(first, root)
    first.send_signal(signal.SIGSTOP)
    second = start(COMMANDS["data.prepare"], corpus, root.name)
    time.sleep(4)
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=5)
    assert second.returncode == 143
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert contents(root / "shards") == contents(corpus / "straight" / "shards")
