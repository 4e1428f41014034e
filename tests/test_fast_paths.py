"""Speed never changes what is learned: every fast path against the plain one, over 50 steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt import loss, optimizer, trainer
from gpt.tracker import read_metrics

TrainRun = Callable[..., tuple[int, Path]]
BASE = ["trainer.max_steps=50", "trainer.log_every=1", "trainer.eval_every=null"]
DROPOUT = [f"model.{name}_dropout=0.1" for name in ("embd", "attn", "resid")]
ATTENTION = ["model.attn_dropout=0.1"]


def losses(train_run: TrainRun, name: str, *overrides: str) -> list[float]:
    code, run = train_run(*BASE, *overrides, name=name)
    assert code == 0
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 51))
    return [row["train/loss"] for row in rows]


@pytest.fixture
def plainly(train_run: TrainRun) -> Callable[..., list[float]]:
    """Attention written out, loss over all logits at once, AdamW tensor by tensor, no compiler."""

    def cross_entropy(
        hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softmax: loss.Softmax
    ) -> Tensor:
        return F.cross_entropy(hidden @ weight[:vocab_size].t(), targets, reduction="sum")

    def adamw(model: torch.nn.Module, config: Any) -> torch.optim.AdamW:
        groups = optimizer.parameter_groups(model, config.weight_decay)
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, foreach=False)

    def run(*overrides: str) -> list[float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "cross_entropy_sum", cross_entropy)
            patch.setattr(trainer, "build_optimizer", adamw)
            return losses(train_run, "plain", "runtime.attention=reference", *overrides)

    return run


@pytest.mark.parametrize("dropout", [[], DROPOUT])
def test_eager(
    train_run: TrainRun, plainly: Callable[..., list[float]], dropout: list[str]
) -> None:
    """Flash or block-wise attention, chunked loss, fused AdamW, blocks recomputed."""
    plain = plainly(*dropout)
    assert plain[-1] < 0.8 * plain[0]  # something was learned
    fast = losses(train_run, "fast", *dropout, "runtime.activation_checkpointing=true")
    assert fast == pytest.approx(plain, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own inner workings
@pytest.mark.parametrize("dropout", [[], ATTENTION])
def test_compiled(
    train_run: TrainRun, plainly: Callable[..., list[float]], dropout: list[str]
) -> None:
    """Compiled as well. Of dropout only attention's: of the others a compiled block draws other
    masks from the same seed."""
    fast = losses(train_run, "fast", *dropout, "runtime.compile=true")
    assert fast == pytest.approx(plainly(*dropout), rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_on_a_gpu(
    train_run: TrainRun, plainly: Callable[..., list[float]], dtype: str
) -> None:
    """Against the plain path in float32 on the CPU; bfloat16 rounds to a 256th."""
    plain = plainly()
    fast = losses(
        train_run, "fast", "runtime.device=cuda", "runtime.compile=true", f"runtime.dtype={dtype}"
    )
    assert fast == pytest.approx(plain, rel=1e-3 if dtype == "float32" else 1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sampling_and_evaluation_do_not_compile_anew(train_run: TrainRun) -> None:
    """As many graphs with samples of 128 tokens on the way as without."""
    from torch._dynamo.utils import counters

    graphs = []
    for every in ("null", "5"):
        torch.compiler.reset()
        counters.clear()
        code, _ = train_run(
            *("runtime.compile=true", "trainer.eval_every=10", f"trainer.sample_every={every}"),
            name=f"sample{every}",
        )
        assert code == 0
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == 2  # in training and in evaluation
