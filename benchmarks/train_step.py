"""Claim: a step on a CPU is little more than its matrix products and attention, is faster than
transformers' model in the same format, and stays so with dropout.

python benchmarks/train_step.py [--contestants ours eager] [--size gpt2_124m] [--rounds 3] [--cold]

Contestants: `ours`, `ours+dropout` (0.1 in all three places), `eager` and `compiled` (transformers'
GPT2LMHeadModel as it comes, without and with torch.compile, no dropout), `eager+dropout`. All train
in float32 with fused AdamW and clipping at 1. Each is a process of its own, for its peak memory;
they take a step in turn, one at a time, so that whatever disturbs the machine disturbs all. The
first step is reported apart: with --cold, with an empty compile cache and then, in a new process,
with the one that it filled.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt import runtime
from gpt.attention_dropout import attend
from gpt.config import AdamWConfig
from gpt.loss import NextTokenLoss
from gpt.model import GPT, GPTConfig
from gpt.optimizer import build_optimizer

SIZES = {  # layers, heads, channels, default T
    "tiny": (2, 2, 64, 64),
    "mini": (4, 4, 128, 256),
    "gpt2_124m": (12, 12, 768, 1024),
    "gpt2_350m": (24, 16, 1024, 1024),
}
V = 50257


def seconds(what: Callable[..., object], *arguments: Tensor) -> float:
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        what(*arguments)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def stepper(loss_of: Callable[[], Tensor], model: torch.nn.Module) -> Callable[[], float]:
    config = AdamWConfig(lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = build_optimizer(model, config)

    def step() -> float:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def build(name: str, size: str, B: int, T: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """A contestant's step, and the time of its products and attention alone."""
    L, H, C, _ = SIZES[size]
    kind, _, dropped = name.partition("+")
    p = 0.1 if dropped else 0.0
    ids = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1], ids[:, 1:]
    if kind == "ours":
        runtime.keep_freed_memory()
        shape = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}
        model = GPT(GPTConfig(**shape, embd_dropout=p, attn_dropout=p, resid_dropout=p)).train()
        runtime.compile_blocks(model)
        loss = NextTokenLoss(model)
        return stepper(lambda: loss(x, y) / (B * T), model), lambda: kernels(B, T, L, H, C, p)
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_positions=T, n_layer=L, n_head=H, n_embd=C,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )
    ).train()  # fmt: skip
    called: Any = torch.compile(theirs) if kind == "compiled" else theirs
    # They shift the labels themselves: the whole window in, T predictions and one left out.
    return stepper(lambda: called(x, labels=x).loss, theirs), lambda: 0.0


def kernels(B: int, T: int, L: int, H: int, C: int, p: float) -> float:
    """Seconds that a step's matrix products and attention take alone, forward and backward."""
    N, total = B * T, 0.0
    for n_in, n_out in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)):
        x, w, d = torch.randn(N, n_in), torch.randn(n_out, n_in), torch.randn(N, n_out)
        total += L * seconds(F.linear, x, w, torch.zeros(n_out))
        total += L * (seconds(torch.mm, d, w) + seconds(torch.mm, d.t(), x))
    rows, padded = 256, -(-V // 64) * 64  # the head's products, chunk by chunk
    x, w, d = torch.randn(rows, C), torch.randn(padded, C), torch.randn(rows, padded)
    out, dw = torch.empty(rows, padded), torch.zeros(padded, C)
    chunk = seconds(lambda: torch.mm(x, w.t(), out=out)) + seconds(torch.mm, d, w)
    total += N / rows * (chunk + seconds(lambda: dw.addmm_(d.t(), x)))
    qkv = torch.randn(B, T, 3 * C, requires_grad=True)
    grad = torch.randn(B, T, C)

    def attention() -> None:
        if p:
            out = attend(qkv, H, p, torch.tensor(1))
        else:
            q, k, v = qkv.view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = out.transpose(1, 2).reshape(B, T, C)
        torch.autograd.grad(out, qkv, grad)

    return total + L * seconds(attention)


def child(name: str, size: str, B: int, T: int) -> None:
    """Answers each line on stdin with one of JSON: `step` or `kernels`, and the peak memory."""
    step, alone = build(name, size, B, T)
    for line in sys.stdin:
        begun = time.perf_counter()
        value = alone() if line.strip() == "kernels" else step()
        taken = value if line.strip() == "kernels" else time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps({"seconds": taken, "value": value, "peak_gb": peak}), flush=True)


class Contestant:
    def __init__(self, name: str, args: argparse.Namespace, cache: str | None = None) -> None:
        self.name = name
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            name,
            "--size",
            args.size,
        ]
        command += ["--windows", str(args.windows), "--length", str(args.length)]
        environment = {**os.environ, **({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.steps: list[float] = []
        self.alone: list[float] = []
        self.peak = 0.0

    def ask(self, what: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if what == "step":
            self.peak = answer["peak_gb"]
        return float(answer["seconds"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--contestants", nargs="+", default=["ours", "eager"])
    parser.add_argument("--size", default="gpt2_124m", choices=SIZES)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, help="T; default: the size's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.length = args.length or SIZES[args.size][3]
    if args.child:
        child(args.child, args.size, args.windows, args.length)
        return
    import transformers

    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    print(f"machine: {cpu}, {torch.get_num_threads()} threads, float32")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command: python {shlex.join(sys.argv)}")
    tokens = args.windows * args.length
    print(f"{args.size}, {args.windows} windows of {args.length} tokens a step")
    if args.cold:
        with tempfile.TemporaryDirectory() as cache:
            for what in ("empty", "filled"):
                one = Contestant(args.contestants[0], args, cache)
                first, second, third = (one.ask("step") for _ in range(3))
                one.end()
                steady = min(second, third)
                print(f"{one.name}, {what} cache: first step {first:.1f} s, {first - steady:.1f} s "
                      f"more than a steady one")  # fmt: skip
        return
    contestants = [Contestant(name, args) for name in args.contestants]
    for one in contestants:
        first = one.ask("step")
        print(f"{one.name}: first step {first:.1f} s", flush=True)
    for _ in range(args.rounds):
        for one in contestants:
            one.steps.append(one.ask("step"))
            if one.name.startswith("ours"):
                one.alone.append(one.ask("kernels"))
    print(f"{'':15}{'s a step':>10}{'tokens/s':>10}{'peak GB':>9}{'products and attention':>24}")
    for one in contestants:
        one.end()
        median = statistics.median(one.steps)
        share = f"{statistics.median(one.alone) / median:.2f}" if one.alone else ""
        print(f"{one.name:15}{median:10.2f}{tokens / median:10.0f}{one.peak:9.2f}{share:>24}")
    base = contestants[0]
    for one in contestants[1:]:
        times = statistics.median(one.steps) / statistics.median(base.steps)
        print(f"{one.name} / {base.name}: time {times:.2f}, memory {one.peak / base.peak:.2f}")


if __name__ == "__main__":
    main()
