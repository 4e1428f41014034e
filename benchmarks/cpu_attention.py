"""Claim: on a CPU attention in blocks is faster than scaled_dot_product_attention, which is slow
when it drops weights and then takes memory that grows with T²; the blocks' grows with T.

python benchmarks/cpu_attention.py [--dtype float32] [--heads 12] [--head-dim 64] [--windows 1]
    [--rounds 3]

One layer's attention, forward and backward, without dropout and with 0.1. Every measurement is a
process of its own, since a process's peak memory never falls again; the ways take turns, and the
median over the rounds is shown.
"""

import argparse
import json
import platform
import re
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
from gpt.runtime import keep_freed_memory

LENGTHS = (512, 1024, 2048, 4096)
WAYS = ("sdpa", "ours", "sdpa, dropout", "ours, dropout")


def peak() -> float:
    """The most memory that this process has held, in MB."""
    mark = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert mark is not None
    return int(mark[1]) * 1024 / 1e6


def measure(way: str, B: int, T: int, H: int, D: int, dtype: torch.dtype) -> dict[str, float]:
    """Seconds (best of three after a first) and megabytes of peak memory above the inputs."""
    keep_freed_memory()  # as a run does
    p = 0.1 if way.endswith("dropout") else 0.0
    qkv = torch.randn(B, T, 3 * H * D, dtype=dtype).requires_grad_()
    grad = torch.randn(B, T, H * D, dtype=dtype)

    def once(T: int) -> None:
        part = qkv[:, :T]
        if way.startswith("ours"):
            out = attend(part.contiguous(), H, p, torch.tensor(1) if p else None)
        else:
            q, k, v = part.reshape(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
            out = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            out = out.transpose(1, 2).reshape(B, T, H * D)
        torch.autograd.grad(out, qkv, grad[:, :T])

    once(32)  # libraries take memory of their own once
    before = peak()
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        once(T)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": min(seconds[1:]), "megabytes": peak() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "T"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        way, length = args.one
        shape = (args.windows, int(length), args.heads, args.head_dim)
        print(json.dumps(measure(way, *shape, getattr(torch, args.dtype))))
        return
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    print(f"machine: {cpu}, {torch.get_num_threads()} threads; torch {torch.__version__}")
    print(f"{args.windows} windows, {args.heads} heads of {args.head_dim}, {args.dtype}, both ways")
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
        base = ms_of["sdpa"]
        print(f"       against sdpa without dropout: {ms_of['ours'] / base:.2f} ours, with dropout "
              f"{ms_of['ours, dropout'] / base:.2f}, sdpa {ms_of['sdpa, dropout'] / base:.2f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
