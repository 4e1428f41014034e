"""Claim: a training step is little more than its matrix products and attention, is faster than
transformers' model, and stays so with dropout.

python benchmarks/train_step.py [--contestants ours eager compiled] [--size gpt2_124m] [--windows 4]
    [--accumulate 4] [--rounds 3] [--device cuda] [--dtype bfloat16] [--cold]

Contestants: `ours`, `whole` (ours, compiled as a whole instead of block by block), `eager` and
`compiled` (transformers' GPT2LMHeadModel; eager as it comes, in float32); with `+dropout` 0.1 in
all three places, else none. All but `eager` run under autocast to --dtype, by default what a run
would choose on this device. A step is --accumulate micro-batches of --windows windows, a clip at 1
and one update by fused AdamW. Each is a process of its own, for
its peak memory; they take a step in turn, one at a time, so that whatever disturbs the machine
disturbs all. The first step is reported apart: with --cold, with an empty compile cache and then,
in a new process, with the one that it filled.
"""

import argparse
import json
import os
import platform
import re
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
from gpt.config import AdamWConfig, Attention, DType, Parallel, RuntimeConfig
from gpt.cpu_attention import attend
from gpt.loss import NextTokenLoss, chunk_rows
from gpt.metrics import flops_per_token, peak_flops
from gpt.model import GPT, GPTConfig
from gpt.optimizer import build_optimizer
from gpt.runtime import Runtime

SIZES = {  # layers, heads, channels, default T
    "tiny": (2, 2, 64, 64),
    "mini": (4, 4, 128, 256),
    "gpt2_124m": (12, 12, 768, 1024),
    "gpt2_350m": (24, 16, 1024, 1024),
}
V = 50257


def on_this_machine(device: str, dtype: str) -> Runtime:
    """What a run with these settings would use."""
    return runtime.resolve(
        RuntimeConfig(
            device=device,
            dtype=DType(dtype),
            compile=True,
            attention=Attention.flash,
            deterministic=False,
            parallel=Parallel.ddp,
            activation_checkpointing=False,
            hang_minutes=None,
            peak_flops=None,
        )
    )


def name_of(machine: Runtime) -> str:
    """The machine, for the head of a table."""
    if machine.device.type == "cuda":
        return f"{torch.cuda.get_device_name(machine.device)}, {machine.dtype}"
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{platform.machine()} {capability}, {threads} threads, {machine.dtype}"


def seconds(machine: Runtime, what: Callable[..., object], *arguments: Tensor) -> float:
    taken = []
    for _ in range(3):
        machine.synchronize()
        begun = time.perf_counter()
        what(*arguments)
        machine.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def stepper(
    loss_of: Callable[[], Tensor], model: torch.nn.Module, micro_batches: int
) -> Callable[[], float]:
    config = AdamWConfig(lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = build_optimizer(model, config)

    def step() -> float:
        for _ in range(micro_batches):
            loss = loss_of()
            (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device

    return step


def build(
    name: str, size: str, B: int, T: int, micro_batches: int, machine: Runtime
) -> tuple[Callable[[], float], Callable[[], float], float]:
    """A contestant's step, the time of its products and attention alone, operations a token."""
    L, H, C, _ = SIZES[size]
    kind, _, dropped = name.partition("+")
    p = 0.1 if dropped else 0.0
    ids = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    ids = ids.to(machine.device)
    x, y = ids[:, :-1], ids[:, 1:]
    shape = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}
    config = GPTConfig(**shape, embd_dropout=p, attn_dropout=p, resid_dropout=p)
    with torch.device("meta"):
        work = flops_per_token(GPT(config))
    if kind in ("ours", "whole"):
        model = GPT(config).to(machine.device).train()
        if kind == "whole":
            model.trunk = torch.compile(model.trunk, dynamic=False)
        else:
            runtime.compile_blocks(model)
        loss = NextTokenLoss(model)
        if machine.device.type == "cuda":
            runtime.compile_softmax(loss)

        def ours() -> Tensor:
            with machine.autocast():
                total: Tensor = loss(x, y)
            return total / (B * T)

        def alone() -> float:
            return micro_batches * kernels(B, T, L, H, C, p, machine)

        return stepper(ours, model, micro_batches), alone, work
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_positions=T, n_layer=L, n_head=H, n_embd=C,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )
    ).to(machine.device).train()  # fmt: skip
    called: Any = torch.compile(theirs) if kind == "compiled" else theirs

    def transformers() -> Tensor:
        # They shift the labels themselves: the whole window in, T predictions and one left out.
        if kind == "eager":
            return called(x, labels=x).loss  # type: ignore[no-any-return]
        with machine.autocast():
            return called(x, labels=x).loss  # type: ignore[no-any-return]

    return stepper(transformers, theirs, micro_batches), lambda: 0.0, work


def kernels(B: int, T: int, L: int, H: int, C: int, p: float, machine: Runtime) -> float:
    """Seconds that a micro-batch's matrix products and attention take alone, both ways."""
    N, total, dtype = B * T, 0.0, machine.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=machine.device).to(dtype)

    def time_of(what: Callable[..., object], *arguments: Tensor) -> float:
        return seconds(machine, what, *arguments)

    for n_in, n_out in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)):
        x, w, d = normal(N, n_in), normal(n_out, n_in), normal(N, n_out)
        total += L * time_of(F.linear, x, w, normal(n_out))
        total += L * (time_of(torch.mm, d, w) + time_of(torch.mm, d.t(), x))
    rows, padded = min(N, chunk_rows(dtype)), -(-V // 64) * 64
    x, w, d = normal(rows, C), normal(padded, C), normal(rows, padded)  # the head's, chunk by chunk
    out, dw = torch.empty_like(d), torch.zeros_like(w)
    chunk = time_of(lambda: torch.mm(x, w.t(), out=out)) + time_of(torch.mm, d, w)
    total += N / rows * (chunk + time_of(lambda: dw.addmm_(d.t(), x)))
    qkv = normal(B, T, 3 * C).requires_grad_()
    grad = normal(B, T, C)

    def attention() -> None:
        if machine.device.type == "cpu":
            out = attend(qkv, H, p, torch.tensor(1) if p else None)
        else:
            q, k, v = qkv.view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
            out = out.transpose(1, 2).reshape(B, T, C)
        torch.autograd.grad(out, qkv, grad)

    return total + L * time_of(attention)


def peak_gb(machine: Runtime) -> float:
    """The most that this process has held: of the GPU's memory, else of the machine's."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device) / 1e9
    mark = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert mark is not None
    return int(mark[1]) * 1024 / 1e9


def child(name: str, args: argparse.Namespace) -> None:
    """Answers each line on stdin with one of JSON: `step` or `kernels`, and the peak memory."""
    machine = on_this_machine(args.device, args.dtype)
    step, alone, work = build(name, args.size, args.windows, args.length, args.accumulate, machine)
    for line in sys.stdin:
        begun = time.perf_counter()
        value = alone() if line.strip() == "kernels" else step()
        taken = value if line.strip() == "kernels" else time.perf_counter() - begun
        answer = {"seconds": taken, "value": value, "peak_gb": peak_gb(machine), "work": work}
        print(json.dumps(answer), flush=True)


class Contestant:
    def __init__(self, name: str, args: argparse.Namespace, cache: str | None = None) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        command += ["--size", args.size, "--device", args.device, "--dtype", args.dtype]
        command += ["--windows", str(args.windows), "--length", str(args.length)]
        command += ["--accumulate", str(args.accumulate)]
        environment = {**os.environ, **({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.steps: list[float] = []
        self.alone: list[float] = []
        self.peak, self.work = 0.0, 0.0

    def ask(self, what: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended before its answer")
        answer = json.loads(line)
        self.work = answer["work"]
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
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--length", type=int, help="T; default: the size's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=[d.value for d in DType])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.length = args.length or SIZES[args.size][3]
    if args.child:
        child(args.child, args)
        return
    import transformers

    machine = on_this_machine(args.device, args.dtype)
    print(f"machine: {name_of(machine)}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command: python {shlex.join(sys.argv)}")
    tokens = args.accumulate * args.windows * args.length
    print(f"{args.size}, {args.accumulate} x {args.windows} windows of {args.length} tokens a step")
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
            if one.name.startswith(("ours", "whole")):
                one.alone.append(one.ask("kernels"))
    peak = peak_flops(machine.device, machine.dtype)
    rate = f"{peak / 1e12:.4g} TFLOP/s" if peak else "unknown"
    print(f"peak of this device: {rate}; of it: docs/meters.md's operations a token")
    print(f"{'':15}{'ms a step':>10}{'tokens/s':>10}{'of peak':>9}{'peak GB':>9}"
          f"{'products and attention':>24}")  # fmt: skip
    for one in contestants:
        one.end()
        median = statistics.median(one.steps)
        share = f"{statistics.median(one.alone) / median:.2f}" if one.alone else ""
        of_peak = f"{one.work * tokens / median / peak:.2f}" if peak else ""
        print(f"{one.name:15}{1000 * median:10.1f}{tokens / median:10.0f}{of_peak:>9}"
              f"{one.peak:9.2f}{share:>24}")  # fmt: skip
    base = contestants[0]
    for one in contestants[1:]:
        times = statistics.median(one.steps) / statistics.median(base.steps)
        print(f"{one.name} / {base.name}: time {times:.2f}, memory {one.peak / base.peak:.2f}")


if __name__ == "__main__":
    main()
