"""The model: what each part computes, that nothing looks ahead, and how it starts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.loss import NextTokenLoss
from gpt.model import GPT, MLP, Block, GPTConfig, document_layout, reference_attention

PATHS = ["flash", "reference"]


def config(**changes: object) -> GPTConfig:
    values = {
        **{"block_size": 16, "vocab_size": 101, "n_layer": 2, "n_head": 3, "n_embd": 48},
        **{"embd_dropout": 0.0, "attn_dropout": 0.0, "resid_dropout": 0.0},
    }
    return GPTConfig(**{**values, **changes})  # type: ignore[arg-type]


def ids(B: int, T: int, V: int = 101, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize(("n_embd", "block_size"), [(48, 16), (16, 48)])
def test_logits_depend_on_the_past_alone(attention: str, n_embd: int, block_size: int) -> None:
    """Causality by gradients, where width and length differ: zero from the future, not from the
    past."""
    model = GPT(config(n_embd=n_embd, block_size=block_size, n_head=2), attention).eval()
    for p in model.h.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = model.wte(ids(1, block_size)).detach().requires_grad_()
    hidden = x + model.wpe.weight
    for block in model.h:
        hidden = block(hidden)
    at = block_size // 2
    (grad,) = torch.autograd.grad(hidden[0, at].pow(2).sum(), x)
    reached = grad[0].abs().amax(dim=1)
    assert torch.all(reached[at + 1 :] == 0)
    assert torch.all(reached[: at + 1] > 0)


@pytest.mark.parametrize("attention", PATHS)
def test_a_changed_token_changes_its_own_logits_and_later_ones(attention: str) -> None:
    model = GPT(config(), attention).eval()
    a = ids(1, 16)
    b = a.clone()
    b[0, 7] = (b[0, 7] + 1) % 101
    difference = (model(a) - model(b)).abs().amax(dim=-1)[0]
    assert torch.all(difference[:7] == 0) and torch.all(difference[7:] > 0)


def test_both_paths_agree() -> None:
    """The fast attention against the one written out: logits and gradients."""
    flash, reference = GPT(config(), "flash"), GPT(config(), "reference")
    x, y = ids(2, 16), ids(2, 16, seed=1)
    grads = []
    for model in (flash, reference):
        NextTokenLoss(model)(x, y).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(flash(x), reference(x), atol=1e-6, rtol=0)
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-4, rtol=1e-4)


def test_reference_attention_by_hand() -> None:
    """Two positions, one channel: the first sees itself, the second both, by e^(qk)."""
    q = torch.tensor([[[[1.0], [2.0]]]])
    k = torch.tensor([[[[1.0], [0.5]]]])
    v = torch.tensor([[[[10.0], [20.0]]]])
    w = math.exp(2 * 1) / (math.exp(2 * 1) + math.exp(2 * 0.5))
    out = reference_attention(q, k, v, dropout=0.0)
    assert out.flatten().tolist() == pytest.approx([10.0, 10 * w + 20 * (1 - w)])


@pytest.mark.parametrize("attention", PATHS)
def test_dropout_trains_and_rests(attention: str) -> None:
    """Each kind of dropout acts in training, with gradients everywhere, and not in eval."""
    x, y = ids(2, 16), ids(2, 16, seed=1)
    for kind in ("embd_dropout", "attn_dropout", "resid_dropout"):
        model = GPT(config(**{kind: 0.5}), attention)
        model.train()
        assert not torch.equal(model(x), model(x)), kind
        NextTokenLoss(model)(x, y).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any(), name
        model.eval()
        assert torch.equal(model(x), model(x)), kind


def test_gelu_is_the_tanh_form() -> None:
    """Hendrycks & Gimpel's approximation, which differs visibly from the exact form."""
    mlp = MLP(config(n_embd=3))
    x = torch.linspace(-6, 6, 240).view(-1, 12)
    with torch.no_grad():
        mlp.c_fc.weight.copy_(torch.eye(12, 3))
        mlp.c_fc.bias.zero_()
        mlp.c_proj.weight.copy_(torch.eye(3, 12))
        mlp.c_proj.bias.zero_()
        out = mlp(x[:, :3])
    z = x[:, :3]
    tanh = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    torch.testing.assert_close(out, tanh, atol=1e-6, rtol=0)
    assert (out - F.gelu(z)).abs().max() > 1e-4


def test_a_block_against_an_independent_one() -> None:
    """Norm before the sublayer, biased variance, residual around it; weights random."""
    block = Block(config(), "flash").eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    block.double()

    def norm(z: Tensor, m: torch.nn.LayerNorm) -> Tensor:
        centred = z - z.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * m.weight + m.bias

    a = norm(x, block.ln_1) @ block.attn.c_attn.weight.T + block.attn.c_attn.bias
    heads = []
    for h in range(3):
        q, k, v = (a[..., i * 48 + h * 16 : i * 48 + (h + 1) * 16] for i in range(3))
        s = (q @ k.transpose(1, 2) / 4.0).exp() * torch.ones(5, 5, dtype=torch.float64).tril()
        heads.append(s / s.sum(-1, keepdim=True) @ v)
    y = x + torch.cat(heads, -1) @ block.attn.c_proj.weight.T + block.attn.c_proj.bias
    z = norm(y, block.ln_2) @ block.mlp.c_fc.weight.T + block.mlp.c_fc.bias
    z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    expected = y + z @ block.mlp.c_proj.weight.T + block.mlp.c_proj.bias
    torch.testing.assert_close(block(x), expected, atol=1e-10, rtol=0)


def test_the_initial_loss_is_that_of_a_fair_guess() -> None:
    """ln V + C·0.02²/2: tied logits of a normed hidden state have variance C·0.02²."""
    V, C = 50257, 192
    model = GPT(config(vocab_size=V, n_embd=C, block_size=64)).eval()
    x, y = ids(4, 64, V), ids(4, 64, V, seed=1)
    with torch.no_grad():
        loss = NextTokenLoss(model)(x, y).item() / 256
    assert loss == pytest.approx(math.log(V) + C * 0.02**2 / 2, abs=0.05)


def test_initial_weights() -> None:
    """GPT-2's scaling: tables and matrices N(0, 0.02), residual writers smaller."""
    model = GPT(config(vocab_size=5000, n_embd=96, n_layer=8, block_size=256))
    assert model.wpe.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.wte.weight[:5000].std().item() == pytest.approx(0.02, rel=0.03)
    for block in model.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # √(2·8) = 4
        assert block.mlp.c_fc.bias.abs().max() == 0
        assert torch.all(block.ln_1.weight == 1) and torch.all(block.ln_1.bias == 0)


def test_initial_weights_are_a_function_of_the_seed() -> None:
    a, b = GPT(config()), GPT(config())
    a.init_weights(1)
    torch.rand(7)
    b.init_weights(1)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    b.init_weights(2)
    assert not torch.equal(a.wte.weight, b.wte.weight)


def test_padding_of_the_vocabulary_is_seen_by_nobody() -> None:
    """101 ids: 128 rows inside, the last 27 zero, without gradient; 101 logits outside."""
    model = GPT(config())
    assert model.padded_vocab_size == 128 and model.wte.weight.shape == (128, 48)
    NextTokenLoss(model)(ids(2, 16), ids(2, 16, seed=1)).backward()
    assert model.wte.weight.grad is not None
    assert torch.all(model.wte.weight[101:] == 0)
    assert torch.all(model.wte.weight.grad[101:] == 0)
    assert model(ids(2, 16)).shape == (2, 16, 101)


@pytest.mark.parametrize("attention", PATHS)
def test_crop_block_size(attention: str) -> None:
    """Logits within the new length stay; past it, and growing, is refused."""
    model = GPT(config(block_size=64), attention).eval()
    x = ids(1, 32)
    before = model(x)
    model.crop_block_size(32)
    torch.testing.assert_close(model(x), before, atol=1e-6, rtol=0)
    assert model.wpe.weight.shape == (32, 48) and model.wpe.weight.requires_grad
    with pytest.raises(ValueError, match="33 tokens and the model 32 positions"):
        model(ids(1, 33))
    with pytest.raises(ValueError, match="block_size=64"):
        model.crop_block_size(64)


def test_too_long_an_input_names_both_lengths() -> None:
    with pytest.raises(ValueError, match="17 tokens and the model 16 positions"):
        GPT(config())(ids(1, 17))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd=30 is not divisible by model.n_head=4"),
        ({"n_head": 0}, "n_head=0"),
    ],
)
def test_heads_that_do_not_divide_the_width(changes: dict[str, int], says: str) -> None:
    """Refused with both numbers; 3 heads of 16 in 48 work."""
    with pytest.raises(ValueError, match=says):
        config(**changes)
    assert config(n_head=3, n_embd=48).head_dim == 16


def test_document_layout_by_hand() -> None:
    """Ids a a E b E c with E = 9: three documents; the end token belongs to the one it ends."""
    positions, mask = document_layout(torch.tensor([[1, 2, 9, 3, 9, 4]]), 9)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    expected = [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5]]
    assert [row.nonzero().flatten().tolist() for row in mask[0, 0]] == expected


@pytest.mark.parametrize("attention", PATHS)
def test_with_the_document_mask_neighbours_do_not_matter(attention: str) -> None:
    """A document's hidden states are those it has alone, whatever lies before and behind it."""
    model = GPT(config(), attention).eval()
    end = 100
    document = ids(1, 5, 99, seed=3)
    packed = torch.cat(
        [ids(1, 4, 99), torch.tensor([[end]]), document, torch.tensor([[end, 7]])], 1
    )
    alone = model.trunk(document, end)
    torch.testing.assert_close(model.trunk(packed, end)[:, 5:10], alone, atol=1e-6, rtol=0)
    assert (model.trunk(packed)[:, 5:10] - alone).abs().max() > 1e-3
