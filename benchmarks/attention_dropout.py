"""Claim: dropping attention weights on a CPU takes less than twice the time of not dropping them,
in memory that grows with T; scaled_dot_product_attention's grows with T² when it drops.

python benchmarks/attention_dropout.py [--heads 12] [--head-dim 64] [--windows 1] [--rounds 3]

One layer's attention, forward and backward, float32, dropout 0.1. Every measurement is a process of
its own, since a process's peak memory never falls again; the three ways take turns, and the median
over the rounds is shown.
"""

import argparse
import json
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpt.cpu_attention import attend

LENGTHS = (512, 1024, 2048, 4096)
WAYS = ("sdpa, no dropout", "ours, dropout", "sdpa, dropout")


def measure(way: str, B: int, T: int, H: int, D: int) -> dict[str, float]:
    """Seconds (best of three after a first) and megabytes of peak memory above the inputs."""
    qkv = torch.randn(B, T, 3 * H * D, requires_grad=True)
    grad = torch.randn(B, T, H * D)

    def once(T: int) -> None:
        part = qkv[:, :T]
        if way.startswith("ours"):
            out = attend(part.contiguous(), H, 0.1, torch.tensor(1))
        else:
            q, k, v = part.reshape(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
            p = 0.0 if way.endswith("no dropout") else 0.1
            out = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            out = out.transpose(1, 2).reshape(B, T, H * D)
        torch.autograd.grad(out, qkv, grad[:, :T])

    once(32)  # libraries take memory of their own once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        once(T)
        seconds.append(time.perf_counter() - begun)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    return {"seconds": min(seconds[1:]), "megabytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "T"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        way, length = args.one
        print(json.dumps(measure(way, args.windows, int(length), args.heads, args.head_dim)))
        return
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    print(f"machine: {cpu}, {torch.get_num_threads()} threads; torch {torch.__version__}")
    print(f"{args.windows} windows, {args.heads} heads of {args.head_dim}, forward and backward")
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"{'T':>6}" + "".join(f"{way + ': ms':>24}{'x':>6}{'MB':>8}{'x':>6}" for way in WAYS))
    last: dict[str, tuple[float, float]] = {}
    for length in LENGTHS:
        got: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", way, str(length)]
                ran = subprocess.run(command, capture_output=True, text=True, check=True)
                got[way].append(json.loads(ran.stdout))
        row, ms_of = f"{length:6}", {}
        for way in WAYS:
            ms = 1e3 * statistics.median(one["seconds"] for one in got[way])
            mb = statistics.median(one["megabytes"] for one in got[way])
            growth = [f"{now / then:.1f}" for now, then in zip((ms, mb), last.get(way, ()))]
            growth = growth or ["", ""]
            row += f"{ms:24.1f}{growth[0]:>6}{mb:8.0f}{growth[1]:>6}"
            last[way], ms_of[way] = (ms, mb), ms
        print(row, flush=True)
        base = ms_of[WAYS[0]]
        print(f"       with dropout / without: {ms_of[WAYS[1]] / base:.2f} ours, "
              f"{ms_of[WAYS[2]] / base:.2f} sdpa", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
