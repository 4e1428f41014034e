"""Goals: `python train.py --help` and a mistake in the settings take at most 2.5 s; on prepared
data the first step of `mini` ends within 12 s; what is ours adds less than 2 s to torch's import.

python benchmarks/startup.py [--rounds 5] [--only help mistake torch import cold warm]

Wall and processor seconds of whole processes (those they waited for included), in turn; medians.
cold, warm: until step 1 is shown, with an empty compile cache and with that of the run before; the
processor's seconds are of the whole command, which ends there.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW = ("datasets", "wandb", "transformers", "pyarrow", "tiktoken")
TRAIN = [
    *("experiment=none", "model=mini", "data=sotu", "trainer.max_steps=1"),
    *("trainer.eval_every=null", "trainer.save_every=null", "trainer.sample_every=null"),
    *("tracker.wandb=disabled", "runtime.device=cpu"),
]


def measure(command: list[str], env: dict[str, str], until: str = "") -> tuple[float, float]:
    """(wall seconds until a line with `until` is shown, else to the end; processor seconds)."""
    begun = time.perf_counter()
    child = subprocess.Popen(
        command, env=os.environ | env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert child.stdout is not None
    seen, lines = None, []
    for line in child.stdout:
        lines.append(line.decode())
        if until and until in lines[-1] and seen is None:
            seen = time.perf_counter() - begun
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - begun
    if until and (seen is None or child.returncode):
        sys.exit("".join(lines))
    return wall if seen is None else seen, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = ["help", "mistake", "torch", "import", "cold", "warm"]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"machine: {platform.machine()}, {threads} cores; Python {platform.python_version()}")
    print(f"command: python {shlex.join(sys.argv)}")
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [python, "train.py", *TRAIN, f"paths.root={folder}"]
        commands = {
            "help": [python, "train.py", "--help"],
            "mistake": [python, "train.py", "trainer.lrr=1"],
            "torch": [python, "-c", "import torch"],
            "import": [python, "-c", "import train, conf.run"],
            "cold": train,
            "warm": train,
        }
        if {"cold", "warm"} & set(args.only):  # prepares the data
            measure([*train, "runtime.compile=false", "run=before"], {}, "step 1/1")
        taken: dict[str, list[tuple[float, float]]] = {n: [] for n in names if n in args.only}
        for round_ in range(args.rounds):
            for what, results in taken.items():
                env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
                if what == "cold":
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                is_run = what in ("cold", "warm")
                extra = [f"run={what}{round_}"] if is_run else []
                until = "step 1/1" if is_run else ""
                results.append(measure([*commands[what], *extra], env, until))
    for what, rounds in taken.items():
        wall, cpu = (statistics.median(column) for column in zip(*rounds))
        print(f"{what:8} {wall:6.2f} s wall, {cpu:6.2f} s processor   {shlex.join(commands[what])}")
    if {"torch", "import"} <= set(taken):
        ours = [a[0] - b[0] for a, b in zip(taken["import"], taken["torch"])]
        print(f"our imports beyond torch's: {statistics.median(ours):.2f} s wall")
    code = (
        f"import train, conf.run, json, sys; print(json.dumps([*({{*{SLOW}}} & {{*sys.modules}})]))"
    )
    loaded = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    print(f"of {', '.join(SLOW)}, loaded by the import: {json.loads(loaded.stdout) or 'none'}")


if __name__ == "__main__":
    main()
