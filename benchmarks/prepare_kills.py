"""Claim: kill -9 at any moment costs nothing: the shards end byte-equal to undisturbed ones.

python benchmarks/prepare_kills.py [--kills N]

Prepares a corpus of records and whole files with a save after each small batch, kills it at a
random moment, and again, until N kills have hit; compares every file with a straight run's.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.reading import contents
from tests.data.test_resume import CODE, write_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "in", "records")

        def start(root: Path) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-c", CODE, str(folder / "in"), str(root), "0.1"]
            return subprocess.Popen(
                command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
            )

        began = time.monotonic()
        start(folder / "straight").wait()
        whole = time.monotonic() - began
        straight = contents(folder / "straight" / "shards")
        kills = rounds = equal = 0
        while kills < args.kills:
            rounds += 1
            for attempt in range(50):
                process = start(folder / str(rounds))
                try:
                    process.wait(rng.uniform(0.3, 1.0) * whole if attempt < 4 else None)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills += 1
            equal += contents(folder / str(rounds) / "shards") == straight
        print(
            f"{kills} kills in {rounds} preparations of {len(straight)} files: {equal} byte-equal"
        )
        assert equal == rounds


if __name__ == "__main__":
    main()
