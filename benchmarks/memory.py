"""Claim: the formulas of docs/parallel.md give the memory that training takes, and recomputing the
blocks leaves one vector a token and layer of their activations.

python benchmarks/memory.py [--model gpt2_1558m]

Small shapes on the CPU, formula against measured: what autograd keeps between forward and backward
(each storage once, parameters left out), and the sizes of weights, gradients and moments after a
step. Then the formulas at the size asked for, on GPUs, in bfloat16.
"""

import argparse
import os
import platform
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import yaml

from gpt import runtime
from gpt.config import AdamWConfig, GPTConfig
from gpt.loss import NextTokenLoss, chunk_rows
from gpt.model import GPT
from gpt.optimizer import build_optimizer

Shape = GPTConfig


def n_params(c: Shape) -> tuple[int, int]:
    """Parameters in all, padding included, and those of the blocks."""
    assert c.vocab_size is not None
    blocks = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd)
    return blocks + (-(-c.vocab_size // 64) * 64 + c.block_size + 2) * c.n_embd, blocks


def activations(c: Shape, windows: int, bf16: bool, again: bool, mask: float) -> dict[str, float]:
    """Bytes kept for the backward pass. `mask`: bytes of an element of a dropout mask, or 0."""
    C, H, L, tokens = c.n_embd, c.n_head, c.n_layer, windows * c.block_size
    V = (n_params(c)[0] - n_params(c)[1]) // C - c.block_size - 2
    block = ((36 if bf16 else 64) + 2 * mask) * C + 4 * H + 16
    copies = 24 * C * C if bf16 else 0  # autocast's, of a block's matrices
    return {
        "blocks": L * 4 * C * tokens if again else L * (block * tokens + copies),
        "one block again": (block * tokens + copies) if again else 0,
        "rest": (8 * C + mask * C + 16) * tokens + 4 * C * V + 8 * c.block_size,
    }


def measured(c: Shape, windows: int, bf16: bool, again: bool) -> int:
    model = GPT(c)
    runtime.recompute_blocks(model, again)
    loss_of = NextTokenLoss(model)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.zeros(windows, c.block_size, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss = loss_of(x, x)
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    loss.backward()
    optimizer = build_optimizer(
        model, AdamWConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    optimizer.step()
    state = 0
    for p in model.parameters():
        assert p.grad is not None
        moments = sum(t.nbytes for t in optimizer.state[p].values() if t.dim())
        state += p.nbytes + p.grad.nbytes + moments
    assert state == 16 * n_params(c)[0], (state, 16 * n_params(c)[0])
    return size


def shape(name: str) -> Shape:
    """A shipped model's shape, with GPT-2's vocabulary."""
    file = Path(__file__).parents[1] / "conf" / "model" / f"{name}.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    return GPTConfig(**{k: v for k, v in values.items() if k != "defaults"} | {"vocab_size": 50257})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2_1558m")
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors", end=", ")
    print(f"torch {torch.__version__}, python {platform.python_version()}")
    print(f"$ python {shlex.join(sys.argv)}")

    print(
        f"{'layers × width, windows':>26} {'dtype':>8} again {'measured':>11} {'formula':>11} ratio"
    )
    for L, C, T, windows in ((2, 64, 32, 2), (4, 128, 64, 4), (6, 192, 128, 2)):
        for bf16 in (False, True):
            for again in (False, True):
                for p in (0.0, 0.1):
                    c = GPTConfig(
                        block_size=T,
                        vocab_size=500,
                        n_layer=L,
                        n_head=4,
                        n_embd=C,
                        embd_dropout=p,
                        attn_dropout=p,
                        resid_dropout=p,
                    )
                    # on a CPU a mask is of the dtype it is applied to
                    mask = (2 if bf16 else 4) if p else 0
                    parts = activations(c, windows, bf16, again, mask)
                    parts["one block again"] = 0  # it comes and goes later
                    if not again:  # a CPU's attention keeps no sums of exponentials
                        parts["blocks"] -= L * 4 * c.n_head * windows * T
                    if p:  # the seeds of attention's
                        parts["rest"] += 8 * L
                    if p and bf16:  # the embedding's is of float32
                        parts["rest"] += 2 * C * windows * T
                    formula, found = sum(parts.values()), measured(c, windows, bf16, again)
                    what = f"{L} × {C}, {windows} × {T}"
                    dtype = "bfloat16" if bf16 else "float32"
                    print(
                        f"{what:>26} {dtype:>8} {again!s:5} {found:>11,} {formula:>11,.0f} "
                        f"{found / formula:.3f}"
                    )
    print("weights, gradients and moments: 16 bytes a parameter, to the byte")

    c = shape(args.model)
    P, blocks = n_params(c)
    rest = P - blocks
    chunk = chunk_rows(torch.bfloat16) * 2 * (-(-50257 // 64) * 64)  # logits of the head
    print(f"\n{args.model}, {P:,} parameters with padding, bfloat16, dropout in all places, GB")
    print(f"{'':34}{'state':>8}{'gathered':>10}{'kept':>8}{'head':>7}{'sum':>8}")
    for name, n, again, windows in (
        ("1 GPU", 1, False, 4),
        ("1 GPU", 1, False, 8),
        ("1 GPU, recomputed", 1, True, 32),
        ("DDP, recomputed", 1, True, 1),
        ("8 GPUs, FSDP", 8, False, 2),
        ("8 GPUs, FSDP", 8, False, 4),
        ("8 GPUs, FSDP, recomputed", 8, True, 4),
        ("8 GPUs, FSDP, recomputed", 8, True, 8),
    ):
        parts = activations(c, windows, True, again, mask=1)
        if n > 1:  # gathered in bfloat16: no copies by autocast
            copies = 24 * c.n_embd**2
            parts["blocks"] -= 0 if again else c.n_layer * copies
            parts["one block again"] -= copies if again else 0
            state, gathered = 12 * P / n + 4 * P, 2 * 2 * blocks / c.n_layer + 4 * rest
        else:
            state, gathered = 16 * P, 0
            if again:  # autocast keeps its copies to the end of the forward pass
                gathered = 24 * c.n_embd**2 * c.n_layer
        numbers = [state, gathered, sum(parts.values()), chunk]
        cells = "".join(f"{v / 1e9:>{w}.1f}" for v, w in zip(numbers, (8, 10, 8, 7), strict=True))
        print(f"{name + f', {windows} windows':34}{cells}{sum(numbers) / 1e9:>8.1f}")


if __name__ == "__main__":
    main()
