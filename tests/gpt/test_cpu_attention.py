"""Attention on a CPU: what is dropped, that it is the same on every path, and gradients."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpt import cpu_attention
from gpt.cpu_attention import attend, keep_mask
from gpt.loss import NextTokenLoss
from gpt.model import GPT, GPTConfig, document_layout, reference_attention
from gpt.runtime import compile_blocks, seed_dropout

B, H, D = 2, 3, 8
SEED = torch.tensor(20260101)


def inputs(T: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """qkv [B, T, 3·H·D] and the gradient of an output."""
    generator = torch.Generator().manual_seed(T)
    qkv = torch.randn(B, T, 3 * H * D, generator=generator, dtype=torch.float64)
    grad = torch.randn(B, T, H * D, generator=generator, dtype=torch.float64)
    return qkv.to(dtype).requires_grad_(), grad.to(dtype)


def written_out(qkv: Tensor, p: float, keep: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same from whole matrices, by torch's own softmax and nothing of ours."""
    T = qkv.shape[1]
    q, k, v = (x.reshape(B, T, H, D).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    may = torch.ones(T, T).tril().bool() if mask is None else mask
    weights = F.softmax((q @ k.mT / math.sqrt(D)).masked_fill(~may, -math.inf), dim=-1)
    out: Tensor = (weights * keep / (1 - p)) @ v
    return out.transpose(1, 2).reshape(B, T, H * D)


def test_the_mask_by_hand() -> None:
    """The hash in Python's own integers. Another function would change every run with dropout: a
    run that is resumed would no longer be the one that was not."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def signed(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    T, p = 5, 0.3
    keep = keep_mask(SEED, B, H, T, p)
    for b in range(B):
        for h in range(H):
            places = [((b * H + h) << 32) + t for t in range(T)]
            keys = [mix(mix(SEED.item()) + i * 0x9E3779B97F4A7C15 & 2**64 - 1) for i in places]
            for i in range(T):
                for j in range(T):
                    x = signed((keys[i] >> 32 | 1) * (keys[j // 2] | 1))
                    x = (x ^ x >> 15) * 0x2C1B3C6D
                    half = (x >> 16 * (j % 2)) % 2**16  # signed: the upper half is the lower one
                    assert keep[b, h, i, j].item() == ((half ^ 2**15) >= round(p * 2**16))


def test_extreme_rates() -> None:
    """A hash has 16 bits: what is rarer than one in 65,536 happens as often as that."""
    for p, kept in ((1e-9, 1.0), (1 - 1e-9, 0.0)):
        share = keep_mask(SEED, 1, 1, 512, p).double().mean().item()
        assert share == pytest.approx(kept, abs=1e-4)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_what_is_dropped_looks_drawn(p: float) -> None:
    """The rate as a whole, by row, by column and by diagonal; two heads, windows or seeds agree as
    often as chance has it. Bounds: five standard deviations of fair draws."""
    T = 512
    keep = keep_mask(SEED, 2, 2, T, p).double()
    z = (keep - (1 - p)) / math.sqrt(p * (1 - p))  # mean 0 and variance 1, if fair
    other = keep_mask(SEED + 1, 2, 2, T, p).double()
    z_other = (other - (1 - p)) / math.sqrt(p * (1 - p))
    for what in (z, z[0] * z[1], z[:, 0] * z[:, 1], z * z_other, z[..., 1:] * z[..., :-1]):
        assert abs(what.sum().item()) < 5 * math.sqrt(what.numel())
    for dim in (-1, -2):  # each row's and column's share varies as a fair one's does
        sums = z.sum(dim).flatten() / math.sqrt(T)
        assert sums.square().mean().item() == pytest.approx(1, abs=5 * math.sqrt(3 / len(sums)))
    # Rows or columns that go together would show as a large singular value (fair: 2√T and a bit).
    assert torch.linalg.matrix_norm(z[0, 0], 2).item() < 2 * math.sqrt(T) * 1.15


@pytest.fixture(params=[(128, 2**19), (1, 1), (16, 2000), (7, 500)])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several sizes: rows, and scores (which decides how many heads go together)."""
    rows, scores = request.param
    monkeypatch.setattr(cpu_attention, "QUERY_ROWS", rows)
    monkeypatch.setattr(cpu_attention, "SCORES_PER_THREAD", scores)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("T", [1, 16, 45, 150])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_blocks_against_whole_matrices(T: int, documents: bool, p: float) -> None:
    """Output and gradient in float64, for every size of blocks the same function."""
    mask = None
    if documents:
        ids = torch.randint(0, 9, (B, T), generator=torch.Generator().manual_seed(1))
        _, mask = document_layout(ids, end=0)
    qkv, grad = inputs(T)
    ours = attend(qkv, H, p, SEED, mask)
    keep = keep_mask(SEED, B, H, T, p) if p else torch.ones(T, T)
    whole = written_out(qkv, p, keep, mask)
    torch.testing.assert_close(ours, whole, atol=1e-12, rtol=0)
    (a,), (b,) = torch.autograd.grad(ours, qkv, grad), torch.autograd.grad(whole, qkv, grad)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_gradient_by_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "QUERY_ROWS", 4)
    qkv, _ = inputs(7)
    assert torch.autograd.gradcheck(lambda x: attend(x, H, 0.4, SEED), (qkv,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers(dtype: torch.dtype) -> None:
    """Within their rounding of float64, and the same bits again; under autocast too."""
    p, T = 0.1, 150
    qkv, grad = inputs(T, dtype)
    exact, exact_grad = inputs(T)
    exact.data, exact_grad = qkv.detach().double(), grad.double()
    whole = written_out(exact, p, keep_mask(SEED, B, H, T, p))
    (whole_grad,) = torch.autograd.grad(whole, exact, exact_grad)
    out = attend(qkv, H, p, SEED)
    (d,) = torch.autograd.grad(out, qkv, grad)
    assert out.dtype == d.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (out.double() - whole).abs().max() < 8 * eps * whole.abs().max()
    assert (d.double() - whole_grad).abs().max() < 8 * eps * whole_grad.abs().max()
    # Autocast, which is on where eager code calls this and off where compiled code does.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        again = attend(qkv, H, p, SEED)
        (d_again,) = torch.autograd.grad(again, qkv, grad)
    assert torch.equal(again, out) and torch.equal(d_again, d)


def test_nothing_comes_from_the_future() -> None:
    """By gradients: row 70 of an output knows no later row of q, k or v."""
    qkv, _ = inputs(150)
    out = attend(qkv, H, 0.1, SEED)
    (d,) = torch.autograd.grad(out[:, 70].square().sum(), qkv)
    assert not d[:, 71:].any() and d[:, :71].abs().amax(-1).all()


def test_it_is_an_operator_as_torch_wants_them() -> None:
    """Schema, shapes without data, and autograd, judged by torch's own check."""
    qkv, _ = inputs(20, torch.float32)
    torch.library.opcheck(attend, (qkv, H, 0.1, SEED))


# --- in the model


def model(attention: str = "flash", **changes: float) -> GPT:
    shape = {"block_size": 40, "vocab_size": 101, "n_layer": 3, "n_head": 2, "n_embd": 32}
    dropout = {"embd_dropout": 0.1, "attn_dropout": 0.3, "resid_dropout": 0.0}
    out = GPT(GPTConfig(**{**shape, **dropout, **changes}), attention)  # type: ignore[arg-type]
    for p in out.h.parameters():  # weights at which attention matters
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.15, generator=torch.Generator().manual_seed(p.numel()))
    return out.train()


def step(network: GPT, seed: int = 1, end: int | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch, dropout seeded as the trainer does."""
    ids = torch.randint(0, 101, (2, 41), generator=torch.Generator().manual_seed(5))
    network.zero_grad()
    seed_dropout(seed, step=3, micro_batch=0)
    loss = NextTokenLoss(network, end)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("end", [None, 7])
def test_flash_and_reference_drop_the_same(end: int | None) -> None:
    loss, grads = step(model("flash"), end=end)
    reference_loss, reference_grads = step(model("reference"), end=end)
    assert loss == pytest.approx(reference_loss, rel=1e-6)
    assert len(grads) == len(reference_grads) == 4 + 3 * 12
    for name, grad in grads.items():
        torch.testing.assert_close(grad, reference_grads[name], atol=2e-5, rtol=2e-5, msg=name)
    other, _ = step(model("flash"), seed=2, end=end)
    assert abs(other - loss) > 1e-3


def test_a_step_again_is_the_same_to_the_bit_and_recomputed_too() -> None:
    network = model(resid_dropout=0.2)
    loss, grads = step(network)
    torch.rand(11)
    for recompute in (False, True):
        for block in network.h:
            block.recompute = recompute
        again, grads_again = step(network)
        assert again == loss
        assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_layers_drop_different_weights() -> None:
    """A layer's seed is its own: with one for all, equal layers would drop alike."""
    seen: list[int] = []
    network = model()
    for block in network.h:
        block.register_forward_pre_hook(lambda _, args: seen.append(int(args[2])))
    step(network)
    assert len(set(seen)) == 3


def test_reference_attention_keeps_the_mean() -> None:
    """Over seeds, the mean of what is left is what was: 4 standard deviations of 4,000 draws."""
    q = k = torch.zeros(1, 1, 4, 2)
    v = torch.ones(1, 1, 4, 2)
    outs = [
        reference_attention(q, k, v, 0.5, None, torch.tensor(s))[0, 0, 3, 0] for s in range(4000)
    ]
    assert torch.stack(outs).mean().item() == pytest.approx(1, abs=4 * math.sqrt(0.25 / 4000))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_drops_what_eager_drops() -> None:
    """One block is compiled for all layers, whose seeds differ, and drops the same weights."""
    from torch._dynamo.testing import CompileCounterWithBackend

    loss, grads = step(model())
    network = model()
    counter = CompileCounterWithBackend("inductor")
    for block in network.h:
        block.body = torch.compile(block.body, dynamic=False, backend=counter)
    compiled, compiled_grads = step(network)
    assert compiled == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, compiled_grads[name], atol=2e-5, rtol=2e-5, msg=name)
    assert counter.frame_count == 1
    network = model()
    compile_blocks(network)
    first, second = step(network), step(network)
    assert first[0] == second[0] == compiled
    assert all(torch.equal(first[1][name], second[1][name]) for name in grads)
