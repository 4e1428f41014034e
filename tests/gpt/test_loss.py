"""The chunked loss against torch's own on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from gpt import loss, runtime
from gpt.config import GPTConfig
from gpt.loss import (
    IGNORE,
    NextTokenLoss,
    Softmax,
    cross_entropy_sum,
    softmax_and_gradient,
    softmax_by_rows,
)
from gpt.model import GPT


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, V: int
) -> torch.Tensor:
    logits = hidden @ weight[:V].T
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("softmax", [softmax_by_rows, softmax_and_gradient])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
def test_chunks_change_nothing(
    chunk_rows: int, softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and both gradients, in float64, with ignored targets and pad rows."""
    monkeypatch.setattr(loss, "chunk_rows", lambda dtype: chunk_rows)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 12, generator=generator, requires_grad=True)
    weight = torch.randn(128, 12, generator=generator, requires_grad=True)
    targets = torch.randint(0, 101, (50,), generator=generator)
    targets[::9] = -1
    ours = cross_entropy_sum(hidden, weight, targets, 101, softmax)
    theirs = whole(hidden.double(), weight.double(), targets, 101)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for a, b in zip(
        torch.autograd.grad(3 * ours, (hidden, weight)),
        torch.autograd.grad(3 * theirs, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    """Gradients are scaled in place: a second pass would scale them twice."""
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(64, 4, requires_grad=True)
    out = 2 * cross_entropy_sum(hidden, weight, torch.arange(8), 50)
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own inner workings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_that_a_gpu_compiles(dtype: torch.dtype) -> None:
    """Compiled, here for a CPU, it gives the loss and gradients of the one that isn't: in training,
    in evaluation and, once undone, again. In bfloat16 products sum in other orders."""
    config = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 64, "vocab_size": 1001}
    model = GPT(GPTConfig(**config, embd_dropout=0.0, attn_dropout=0.0, resid_dropout=0.0))
    x, y = torch.randint(0, 1001, (2, 2, 64), generator=torch.Generator().manual_seed(0))
    y[0, ::5] = IGNORE
    loss_of = NextTokenLoss(model)

    def measure() -> tuple[float, float, torch.Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            out = loss_of(x, y)
            out.backward()
            with torch.no_grad():
                again = loss_of(x, y).item()
        grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return out.item(), again, grad

    plain = measure()
    runtime.compile_softmax(loss_of)
    compiled = measure()
    assert compiled[:2] == pytest.approx(plain[:2], rel=1e-6)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert (compiled[2] - plain[2]).norm() <= limit * plain[2].norm()
    runtime.uncompile(loss_of)
    undone = measure()
    assert undone[:2] == plain[:2] and torch.equal(undone[2], plain[2])


def test_nothing_to_predict_is_nothing_to_learn() -> None:
    hidden = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(64, 4, requires_grad=True)
    out = cross_entropy_sum(hidden, weight, torch.full((8,), -1), 50)
    out.backward()
    assert out.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.full((2, 1), 1000.0)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    out = cross_entropy_sum(hidden, weight, torch.tensor([0, 1]), 2)
    assert out.item() == pytest.approx(2000.0)


def test_under_autocast_the_softmax_stays_in_float32() -> None:
    """bf16 products, float32 sums: within bf16's rounding of the exact loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 32, generator=generator)
    weight = torch.randn(512, 32, generator=generator) * 0.1
    targets = torch.randint(0, 512, (256,), generator=generator)
    exact = whole(hidden.double(), weight.double(), targets, 512).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cross_entropy_sum(hidden, weight, targets, 512)
    assert out.dtype == torch.float32
    assert out.item() == pytest.approx(exact, rel=1e-3)


def test_without_gradients_there_is_one_product() -> None:
    """An evaluation takes the head's product, 2·N·C·V operations, not those of its gradient."""
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight = torch.randn(50, 12), torch.nn.Parameter(torch.randn(128, 12))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cross_entropy_sum(hidden, weight, torch.zeros(50, dtype=torch.int64), 101)
    assert counter.get_total_flops() == 2 * 50 * 12 * 128
