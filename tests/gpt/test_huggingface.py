"""Hugging Face's layout: the same function there and here, whatever the file's spelling."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gpt.checkpoint import load_model
from gpt.huggingface import config_from_hf, from_hf, hf_config, to_hf
from gpt.model import GPT, GPTConfig

NO_DROPOUT = {"embd_dropout": 0.0, "attn_dropout": 0.0, "resid_dropout": 0.0}
ODD = GPTConfig(block_size=16, vocab_size=101, n_layer=2, n_head=3, n_embd=48, **NO_DROPOUT)
GPT2_124M = GPTConfig(
    block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, **NO_DROPOUT
)


def random_hf(config: GPTConfig, seed: int = 0) -> GPT2LMHeadModel:
    """transformers' model with every number random; zero biases would hide errors."""
    model = GPT2LMHeadModel(GPT2Config(**hf_config(config, eot=0))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(
                1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.1, generator=generator
            )
    return model


def loaded(tensors: dict[str, Tensor], config: GPTConfig, attention: str = "flash") -> GPT:
    model = GPT(config, attention).eval()
    model.load_state_dict(from_hf(tensors, config), strict=True)
    return model


def numpy_gpt2(tensors: dict[str, Tensor], n_layer: int, n_head: int, idx: list[int]) -> np.ndarray:
    """GPT-2 in float64 straight from the file's layout, token by token in attention: [T, V]."""
    w = {name: t.double().numpy() for name, t in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][idx] + w["wpe.weight"][: len(idx)]
    for i in range(n_layer):
        q, k, v = np.split(dense(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        heads = [np.split(a, n_head, axis=-1) for a in (q, k, v)]
        y = np.zeros_like(x)
        D = x.shape[1] // n_head
        for h, (qh, kh, vh) in enumerate(zip(*heads, strict=True)):
            for t in range(len(idx)):
                scores = np.exp(kh[: t + 1] @ qh[t] / np.sqrt(D))
                y[t, h * D : (h + 1) * D] = (scores / scores.sum()) @ vh[: t + 1]
        x = x + dense(y, f"h.{i}.attn.c_proj")
        z = dense(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        x = x + dense(z, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def bare(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """Names as in OpenAI's files: no prefix, no head."""
    return {
        name.removeprefix("transformer."): t.detach()
        for name, t in model.state_dict().items()
        if name != "lm_head.weight"
    }


def compare(theirs: GPT2LMHeadModel, ours: GPT, idx: Tensor, grad_tol: float) -> None:
    """Logits within 1e-4; the gradient of every parameter within grad_tol of its largest entry."""
    targets = idx.roll(-1, 1)
    logits = {"theirs": theirs(idx).logits, "ours": ours(idx)}
    assert (logits["theirs"] - logits["ours"]).abs().max() < 1e-4
    for out in logits.values():
        F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
    wanted = from_hf({n: p.grad for n, p in theirs.named_parameters()}, ours.config)  # type: ignore[misc]
    got = {n: p.grad for n, p in ours.named_parameters()}
    assert wanted.keys() == got.keys()
    for name, grad in got.items():
        assert grad is not None
        error = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < grad_tol, (name, float(error))


@pytest.mark.parametrize("attention", ["flash", "reference"])
def test_logits_and_gradients_equal_transformers(attention: str) -> None:
    """C != T, an odd number of heads, a padded vocabulary, every position used."""
    theirs = random_hf(ODD)
    ours = loaded(bare(theirs), ODD, attention)
    idx = torch.randint(101, (3, 16), generator=torch.Generator().manual_seed(1))
    compare(theirs, ours, idx, grad_tol=1e-5)


@pytest.mark.timeout(180)
def test_logits_and_gradients_equal_transformers_at_124m() -> None:
    """GPT-2's own shape, at its own initialisation; to_hf is the way there."""
    ours = GPT(GPT2_124M).eval()
    ours.init_weights(seed=2)
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config(**hf_config(GPT2_124M, eot=50256))).eval()
    theirs.load_state_dict(to_hf(ours.state_dict(), GPT2_124M), strict=False, assign=True)
    theirs.tie_weights()
    idx = torch.randint(50257, (1, 48), generator=torch.Generator().manual_seed(3))
    compare(theirs, ours, idx, grad_tol=1e-4)


def test_file_layout_against_a_reference_in_numpy() -> None:
    """OpenAI's spelling with mask buffers: transposed projections are seen, square ones too."""
    tensors = bare(random_hf(ODD))
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    idx = [5, 100, 0, 7, 7, 31, 64, 2, 99]
    wanted = numpy_gpt2(tensors, 2, 3, idx)
    got = loaded(tensors | masks, ODD)(torch.tensor([idx]))[0].detach().double().numpy()
    assert np.abs(got - wanted).max() < 1e-5

    square = "h.1.attn.c_proj.weight"
    wrong = loaded(tensors | {square: tensors[square].t()}, ODD)(torch.tensor([idx]))[0]
    assert np.abs(wrong.detach().numpy() - wanted).max() > 1e-2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"h.1.mlp.c_fc.bias": None}, "h.1.mlp.c_fc.bias is missing"),
        ({"wpe.weight": None, "ln_f.bias": None}, "ln_f.bias, wpe.weight are missing"),
        ({"h.2.ln_1.bias": torch.zeros(48)}, "h.2.ln_1.bias is not part"),
        ({"score.weight": torch.zeros(2, 48)}, "score.weight is not part"),
        ({"wpe.weight": torch.zeros(32, 48)}, r"wpe.weight has shape \[32, 48\].*\[16, 48\]"),
        ({"wte.weight": torch.zeros(128, 48)}, r"wte.weight has shape \[128, 48\].*\[101, 48\]"),
        ({"h.0.attn.c_attn.weight": torch.zeros(144, 48)}, "c_attn.weight .* lies transposed"),
        ({"lm_head.weight": torch.zeros(101, 48)}, "lm_head.weight differs from"),
        ({"lm_head.weight": torch.zeros(128, 48)}, "lm_head.weight differs from"),
        ({"transformer.ln_f.bias": torch.zeros(48)}, "ln_f.bias occurs twice"),
    ],
)
def test_a_tensor_too_many_too_few_or_wrong_is_named(
    change: dict[str, Tensor | None], named: str
) -> None:
    tensors: dict[str, Any] = bare(random_hf(ODD)) | change
    with pytest.raises(ValueError, match=named) as error:
        from_hf({name: t for name, t in tensors.items() if t is not None}, ODD)
    assert "\n" not in str(error.value)


def test_published_vocabulary_in_a_rounded_model() -> None:
    """50257 rows: copied, pad rows zero and outside the logits; a 50304-row config refuses them."""
    small = {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4, **NO_DROPOUT}
    config = GPTConfig(vocab_size=50257, **small)
    tensors = bare(random_hf(config))
    model = loaded(tensors, config)
    assert model.wte.weight.shape == (50304, 4)
    assert torch.equal(model.wte.weight[:50257], tensors["wte.weight"])
    assert not model.wte.weight[50257:].any()
    assert model(torch.tensor([[50256]])).shape == (1, 1, 50257)
    with pytest.raises(ValueError, match=r"wte.weight has shape \[50257, 4\].*\[50304, 4\]"):
        from_hf(tensors, GPTConfig(vocab_size=50304, **small))


def test_wrapper_prefixes_in_any_order() -> None:
    """Foreign files written from wrapped models load as the plain one does."""
    plain = bare(random_hf(ODD))
    wanted = from_hf(plain, ODD)
    wrappers = ["module.", "_orig_mod.", "transformer."]
    orders = [p for n in range(4) for p in itertools.permutations(wrappers, n)]
    assert ("module.", "_orig_mod.", "transformer.") in orders and len(orders) == 16
    for order in orders:
        got = from_hf({"".join(order) + name: t for name, t in plain.items()}, ODD)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), order

    by_block = {n.replace("h.1.", "transformer.h.1._orig_mod."): t for n, t in plain.items()}
    assert from_hf(by_block, ODD).keys() == wanted.keys()


def test_saved_names_carry_no_wrapper_prefix() -> None:
    model = GPT(ODD)
    wrapped = {f"module._orig_mod.{name}": t for name, t in model.state_dict().items()}
    saved = to_hf(wrapped, ODD)
    assert saved.keys() == to_hf(model.state_dict(), ODD).keys()
    assert all(name.startswith("transformer.") for name in saved)
    assert all(t.is_contiguous() for t in saved.values())


def test_there_and_back_is_bit_equal() -> None:
    """Weights, and whatever else has their names and shapes, in its own dtype."""
    state = {n: torch.randn_like(t).bfloat16() for n, t in GPT(ODD).state_dict().items()}
    state["wte.weight"][101:] = 0
    back = from_hf(to_hf(state, ODD), ODD)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_transformers_opens_what_was_saved(tmp_path: Path) -> None:
    """By its usual door, with nothing missing or unexpected, and the head tied."""
    ours = loaded(bare(random_hf(ODD, seed=4)), ODD)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ODD, eot=100)))
    save_file(to_hf(ours.state_dict(), ODD), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(theirs, GPT2LMHeadModel)
    assert not any(info.values()), info
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert theirs.config.eos_token_id == 100
    idx = torch.arange(16)[None]
    assert (theirs.eval()(idx).logits - ours(idx)).abs().max() < 1e-6


def test_a_folder_of_transformers_opens_here(tmp_path: Path) -> None:
    """What fine-tuning of somebody else's weights starts from; in half precision, too."""
    theirs = random_hf(ODD, seed=5)
    idx = torch.arange(16)[None]
    theirs.save_pretrained(tmp_path / "whole")
    ours = load_model(tmp_path / "whole")
    assert (theirs(idx).logits - ours(idx)).abs().max() < 1e-5
    theirs.half().save_pretrained(tmp_path / "half")
    half = load_model(tmp_path / "half")
    assert half.wte.weight.dtype == torch.float32
    assert (theirs.float()(idx).logits - half(idx)).abs().max() < 1e-5


def test_a_writer_that_keeps_only_the_heads_name(tmp_path: Path) -> None:
    """safetensors' save_model drops one name of the tied pair: the embedding's."""
    from safetensors.torch import load_file

    theirs = random_hf(ODD)
    save_model(theirs, str(tmp_path / "model.safetensors"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in tensors and "transformer.wte.weight" not in tensors
    idx = torch.arange(16)[None]
    assert (loaded(tensors, ODD)(idx) - theirs(idx).logits).abs().max() < 1e-5


OPENAI = {  # the published small model's config.json, less what belongs to tasks
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}


def test_config_of_the_published_model_and_of_transformers() -> None:
    wanted = GPTConfig(
        block_size=1024,
        vocab_size=50257,
        n_layer=12,
        n_head=12,
        n_embd=768,
        embd_dropout=0.1,
        attn_dropout=0.1,
        resid_dropout=0.1,
    )
    assert config_from_hf(OPENAI) == wanted
    assert config_from_hf(json.loads(GPT2Config().to_json_string(use_diff=False))) == wanted


def test_config_there_and_back() -> None:
    """Each field in its place: all values differ."""
    config = GPTConfig(
        block_size=7,
        vocab_size=11,
        n_layer=3,
        n_head=2,
        n_embd=10,
        embd_dropout=0.1,
        attn_dropout=0.2,
        resid_dropout=0.3,
    )
    assert config_from_hf(json.loads(json.dumps(hf_config(config, eot=5)))) == config
    theirs = GPT2Config(**hf_config(config, eot=5))
    assert (theirs.embd_pdrop, theirs.attn_pdrop, theirs.resid_pdrop) == (0.1, 0.2, 0.3)
    assert (theirs.n_positions, theirs.vocab_size, theirs.n_layer) == (7, 11, 3)
    assert (theirs.n_head, theirs.n_embd, theirs.n_inner) == (2, 10, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("model_type", None),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("quantization_config", {"bits": 4}),
        ("n_inner", 1024),
        ("n_layer", None),
        ("vocab_size", "50257"),
    ],
)
def test_another_architecture_is_refused_by_name(key: str, value: object) -> None:
    assert config_from_hf(OPENAI | {"n_inner": 4 * 768}).n_embd == 768  # spelt out, but GPT-2
    with pytest.raises(ValueError, match=key) as error:
        config_from_hf(OPENAI | {key: value})
    assert "\n" not in str(error.value) and str(error.value).count(";") >= 2
