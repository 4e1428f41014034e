"""Claim: a token's time grows with the model and with T as the count of its products says.

python benchmarks/sizes.py --size gpt2_124m [--lengths 128 512 2048] [--contestants ours eager]

The contestants and how they take turns are benchmarks/train_step.py's; no dropout. A step has
`--tokens` tokens, or one window where that is longer. Predicted: 6·N + 6·L·C·T operations a token
forward and backward (Chowdhery et al. 2022, appendix B, and half of its attention, since that is
causal), at one rate for all lengths. Peak: the device's (docs/meters.md), for a CPU measured once
at the start.
"""

import argparse
import shlex
import statistics
import sys

import torch
from train_step import SIZES, Contestant, V, name_of, on_this_machine

from gpt.metrics import peak_flops


def operations(size: str, T: int) -> float:
    """A token's, forward and backward."""
    L, _, C, _ = SIZES[size]
    return 6 * (12 * L * C**2 + V * C) + 6 * L * C * T


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--size", default="mini", choices=SIZES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--contestants", nargs="+", default=["ours", "eager"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="one after another: less memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    import transformers

    machine = on_this_machine(args.device, args.dtype)
    rate = peak_flops(machine.device, machine.dtype) or float("nan")
    print(f"machine: {name_of(machine)}, {rate / 1e9:.0f} GFLOP/s")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"{'T':>6}{'windows':>9}  {'contestant':13}{'tokens/s':>10}{'of peak':>9}{'GB':>7}"
          f"{'time a token':>14}{'predicted':>11}{'ours is':>9}")  # fmt: skip
    first: dict[str, float] = {}
    for T in args.lengths:
        args.length, args.windows, args.accumulate = T, max(1, args.tokens // T), 1
        contestants = []
        for names in [[name] for name in args.contestants] if args.apart else [args.contestants]:
            together = [Contestant(name, args) for name in names]
            for one in together:
                one.ask("step")
            for _ in range(args.rounds):
                for one in together:
                    one.steps.append(one.ask("step"))
            for one in together:
                one.end()
            contestants += together
        ours = statistics.median(contestants[0].steps)
        for one in contestants:
            median = statistics.median(one.steps)
            token = median / (T * args.windows)
            share = operations(args.size, T) / token / rate
            grown = token / first.setdefault(one.name, token)
            predicted = operations(args.size, T) / operations(args.size, args.lengths[0])
            print(f"{T:6}{args.windows:9}  {one.name:13}{1 / token:10.0f}{share:9.2f}"
                  f"{one.peak:7.2f}"
                  f"{'× ' + format(grown, '.2f'):>14}{'× ' + format(predicted, '.2f'):>11}"
                  f"{'× ' + format(median / ours, '.2f'):>9}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
