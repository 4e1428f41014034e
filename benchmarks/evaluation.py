"""Goal: validation takes at most 1.1 times its trunk and the head's product alone, and holds no
tensor of logits.

python benchmarks/evaluation.py [--model gpt2_124m] [--tokens 32768] [--windows 4] [--no-compile]

Both contestants read the same windows, in turn; the product writes into one buffer, chunk by chunk.
The ratio is the median over the batches. Memory: the peak of a process of its own for each.
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from omegaconf import OmegaConf

from gpt import runtime
from gpt.config import GPTConfig
from gpt.evaluation import evaluate
from gpt.loss import NextTokenLoss
from gpt.model import GPT
from gpt.ranks import Ranks
from gpt.runtime import Runtime

ROOT = Path(__file__).parents[1]
CHUNK = 2048  # rows of the bare product; --chunk


class Noise:
    """Evaluation windows of random tokens, int64 [windows, T + 1]."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.n_eval = len(tokens)

    def eval_batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.tokens[torch.from_numpy(indices)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def contestants(
    model: GPT, data: Noise, machine: Runtime, windows: int, chunk: int
) -> dict[str, Callable[[int], None]]:
    """name -> run it on batch i."""
    loss_of = NextTokenLoss(model)
    token_bytes = torch.ones(model.vocab_size, dtype=torch.int64)
    weight = model.wte.weight

    def ours(i: int) -> None:
        part = Noise(data.tokens[i * windows : (i + 1) * windows])
        evaluate(loss_of, part, windows, windows, token_bytes, machine, Ranks())

    buffer = torch.empty(chunk, len(weight), dtype=machine.dtype)

    @torch.no_grad()
    def alone(i: int) -> None:
        model.eval()
        x, _ = data.eval_batch(np.arange(i * windows, (i + 1) * windows))
        with machine.autocast():
            hidden = model.trunk(x, None).flatten(0, 1).to(machine.dtype)
        head = weight.to(machine.dtype).t()
        for rows in hidden.split(chunk):
            torch.mm(rows, head, out=buffer[: len(rows)])

    return {"evaluate()": ours, "trunk and product": alone}


def build(args: argparse.Namespace) -> tuple[GPT, Noise, Runtime]:
    shape = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{args.model}.yaml"))
    assert isinstance(shape, dict)
    shape.pop("defaults")
    model = GPT(GPTConfig(**{**shape, "vocab_size": 50257}))  # type: ignore[arg-type]
    model.init_weights(0)
    has_bf16 = runtime.has_bfloat16(torch.device("cpu"))
    machine = runtime.resolve(settings())
    machine.dtype = torch.bfloat16 if has_bf16 else torch.float32
    if args.compile:
        runtime.compile_blocks(model)
    T = model.config.block_size
    batches = max(args.tokens // (T * args.windows), 1)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(50257, (batches * args.windows, T + 1), generator=draw)
    return model, Noise(tokens), machine


def settings() -> "runtime.RuntimeConfig":
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "runtime" / "default.yaml"))
    assert isinstance(values, dict)
    values.pop("defaults")
    values |= {"device": "cpu", "compile": False}
    values["dtype"] = runtime.DType(values["dtype"])
    return runtime.RuntimeConfig(**values)  # type: ignore[arg-type]


def peak_mb() -> float:
    """The highest resident memory since the last call: the kernel's mark, which is then reset."""
    status = Path("/proc/self/status").read_text()
    mark = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(mark.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="gpt2_124m")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--windows", type=int, default=4, help="windows a batch")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="rows of the bare product")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, data, machine = build(args)
    runs = contestants(model, data, machine, args.windows, args.chunk)
    if args.one is not None:
        runs[args.one](0)  # compiles
        peak_mb()
        before = peak_mb()
        runs[args.one](0)
        print(json.dumps({"before": before, "peak": peak_mb()}))
        return
    print(
        f"machine: {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads; torch {torch.__version__}"
    )
    T = model.config.block_size
    print(
        f"{args.model}, T={T}, {args.windows} windows a batch, {machine.dtype}, no dropout, "
        f"{'compiled blocks' if args.compile else 'eager'}"
    )
    print(f"command: python {shlex.join(sys.argv)}")
    for run in runs.values():  # compiles
        run(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    batches = data.n_eval // args.windows
    for i in range(batches):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            begun = time.perf_counter()
            runs[name](i)
            seconds[name].append(time.perf_counter() - begun)
    tokens = args.windows * T
    for name, taken in seconds.items():
        print(f"{name:20} {tokens / statistics.median(taken):10,.0f} tokens/s")
    ratios = [a / b for a, b in zip(*seconds.values())]
    print(
        f"ratio: {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f} "
        f"({batches} batches)"
    )
    for name in runs:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:20} peak memory {one['peak']:,.0f} MB, {one['peak'] - one['before']:,.0f} "
            "above what it holds between batches"
        )
    print(f"a tensor of logits would be {tokens * 50304 * 4 / 2**20:,.0f} MB in float32")


if __name__ == "__main__":
    main()
