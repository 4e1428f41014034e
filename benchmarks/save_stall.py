"""How long a save holds a step up: against a plain copy of the same bytes.

GPT-2 124M with AdamW's moments, 1.5 GB. In turn: a plain copy of every tensor, and what the loop
waits for when it saves (gpt/saver.py): the same copy, and the start of the thread that writes.

    python benchmarks/save_stall.py [--rounds 5] [--root FOLDER]
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gpt import checkpoint  # noqa: E402
from gpt.config import AdamWConfig, GPTConfig  # noqa: E402
from gpt.model import GPT  # noqa: E402
from gpt.optimizer import build_optimizer  # noqa: E402
from gpt.saver import Saver  # noqa: E402

GPT2 = {"block_size": 1024, "vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to write to")
    args = parser.parse_args()
    off = {"embd_dropout": 0.0, "attn_dropout": 0.0, "resid_dropout": 0.0}
    model = GPT(GPTConfig(**GPT2, **off))
    optimizer = build_optimizer(
        model, AdamWConfig(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [p.detach() for p in model.parameters()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    size = sum(t.numel() * t.element_size() for t in tensors)

    plain, stalls, writes = [], [], []
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        saver = Saver(Path(folder), 1, 50256, Path(folder), None)
        for step in range(args.rounds):
            begun = time.perf_counter()
            copies = [t.clone() for t in tensors]
            plain.append(time.perf_counter() - begun)
            del copies
            begun = time.perf_counter()
            saver.start(checkpoint.snapshot(model, optimizer), {"step": step}, best=False)
            stalls.append(time.perf_counter() - begun)
            saver.wait()
            writes.append(time.perf_counter() - begun)
            if saver.error:
                raise saver.error
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"python {' '.join(sys.argv)}; torch {torch.__version__}, {machine}")
    print(f"{size / 1e9:.2f} GB, medians of {args.rounds}")
    print(f"plain copy    {median(plain):.2f} s")
    print(f"stall         {median(stalls):.2f} s   {median(stalls) / median(plain):.2f} x")
    print(f"until on disk {median(writes):.2f} s   beside the training")


if __name__ == "__main__":
    main()
