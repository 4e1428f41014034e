"""Claim: twice the tokens are four times the work and memory of the attention that is written out,
while the memory of the flash path grows with T.

python benchmarks/attention_scaling.py [--device cuda] [--heads 12] [--head-dim 64]

One layer's attention, forward, one sequence. Every measurement is a process of its own, since a
process's peak memory never falls again.
"""

import argparse
import json
import platform
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from gpt.cpu_attention import attend
from gpt.model import reference_attention

LENGTHS = (512, 1024, 2048, 4096)


@torch.no_grad()
def measure(path: str, length: int, heads: int, head_dim: int, device: str) -> dict[str, float]:
    """Seconds (best of five), megabytes of peak memory above the inputs, counted FLOPs."""
    qkv = torch.randn(1, length, 3 * heads * head_dim, device=device)

    def once(qkv: torch.Tensor) -> None:
        q, k, v = qkv.view(1, -1, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        if path == "reference":
            reference_attention(q, k, v, 0.0)
        elif device == "cpu":
            attend(qkv, heads)
        else:
            scaled_dot_product_attention(q, k, v, is_causal=True)
        if device == "cuda":
            torch.cuda.synchronize()

    once(qkv[:, :64].contiguous())  # libraries take memory of their own once
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once(qkv)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        once(qkv)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        once(qkv)
        seconds.append(time.perf_counter() - started)
    counter = FlopCounterMode(display=False)
    with counter:
        once(qkv)
    return {"seconds": min(seconds), "megabytes": peak, "flops": counter.get_total_flops()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--one", nargs=2, metavar=("PATH", "T"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        path, length = args.one
        print(json.dumps(measure(path, int(length), args.heads, args.head_dim, args.device)))
        return
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    what = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    print(f"machine: {what}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}, {args.heads} heads of {args.head_dim}, float32, forward")
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"{'':10}{'T':>6}{'ms':>10}{'x':>6}{'MB':>10}{'x':>6}{'GFLOP':>10}{'x':>6}")
    for path in ("reference", "flash"):
        last: dict[str, float] = {}
        for length in LENGTHS:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", path, str(length)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            now = json.loads(ran.stdout)
            row = f"{path:10}{length:6}"
            for key, unit in (("seconds", 1e3), ("megabytes", 1.0), ("flops", 1e-9)):
                ratio = f"{now[key] / last[key]:.1f}" if last.get(key) else ""
                number = f"{now[key] * unit:.2f}" if now[key] else "-"  # a kernel torch can't count
                row += f"{number:>10}{ratio:>6}"
            print(row, flush=True)
            last = now


if __name__ == "__main__":
    main()
