"""Hugging Face's GPT-2 layout <-> ours: pure functions on dicts of tensors and of config values.

The two differ in three places only: Hugging Face keeps projections as Conv1D, `[in, out]`, where
ours are Linear, `[out, in]`; its names start with `transformer.`; its vocabulary has no pad rows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model import INIT_STD, LAYER_NORM_EPS, VOCAB_MULTIPLE

# Segments that wrappers (DDP, torch.compile, FSDP, checkpointing) put into parameter names.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PROJECTION = re.compile(r"h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)\.weight")
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks of old files, not weights
_SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
# What transformers computes when a key is absent; anything else would be another model than ours.
_STRICT: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the tanh form
    "layer_norm_epsilon": (LAYER_NORM_EPS,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}


def to_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The state dict of a GPT -> tensors of GPT2LMHeadModel, contiguous, without the tied head.

    Works on whatever is kept by parameter name and has the parameter's shape (moments too).
    """
    ours = _by_name(state)
    shapes = _shapes(config)
    assert ours.keys() == shapes.keys(), sorted(ours.keys() ^ shapes.keys())
    ours["wte.weight"] = ours["wte.weight"][: config.vocab_size]
    return {f"transformer.{name}": _turn(name, ours[name]).contiguous() for name in shapes}


def from_hf(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Tensors of a GPT-2 in Hugging Face's layout -> a state dict that GPT(config) loads strictly.

    Names may carry `transformer.` or not, and wrapper prefixes in any order. Mask buffers are
    ignored. `lm_head.weight` must equal the embedding, or stand for it where a writer of shared
    tensors dropped the embedding's name. Pad rows come back as zeros; dtypes stay.

    Raises ValueError naming the tensor that is missing, extra, of another shape, or untied.
    """
    theirs = {name: t for name, t in _by_name(tensors).items() if not _MASK.fullmatch(name)}
    head = theirs.pop("lm_head.weight", None)
    if head is not None and not torch.equal(theirs.setdefault("wte.weight", head), head):
        raise ValueError(
            "lm_head.weight differs from transformer.wte.weight; GPT-2's head is tied to its "
            "embedding, so this is another model; use a checkpoint with a tied head"
        )
    shapes = _shapes(config)
    if missing := [name for name in shapes if name not in theirs]:
        raise ValueError(
            f"{_some(missing)} missing from the weights; a partial load would leave random "
            "weights; check that the file is whole and that its config.json belongs to it"
        )
    if extra := [name for name in theirs if name not in shapes]:
        raise ValueError(
            f"{_some(extra)} not part of a GPT-2 of this config; dropping weights would change "
            "the model; check that config.json belongs to the file and that it is a GPT-2"
        )
    state = {}
    for name, shape in shapes.items():
        found = theirs[name]
        if tuple(found.shape) != shape:
            turned = _PROJECTION.fullmatch(name) and tuple(found.shape) == shape[::-1]
            why = "it lies transposed, as no GPT-2 file does" if turned else "they must agree"
            raise ValueError(
                f"{name} has shape {list(found.shape)} where the config gives {list(shape)}; "
                f"{why}; use the config.json and the weights of one and the same model"
            )
        state[name] = _turn(name, found).contiguous()
    wte = state["wte.weight"]
    pad = -len(wte) % VOCAB_MULTIPLE
    state["wte.weight"] = torch.cat([wte, wte.new_zeros(pad, config.n_embd)])
    return state


def hf_config(config: GPTConfig, eot: int | None) -> dict[str, Any]:
    """The content of config.json, with which transformers opens the folder. eot: the id, if any."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": None,
        "embd_pdrop": config.embd_dropout,
        "attn_pdrop": config.attn_dropout,
        "resid_pdrop": config.resid_dropout,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "initializer_range": INIT_STD,
        **{key: allowed[0] for key, allowed in _STRICT.items() if allowed[0] is not None},
    }


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """The content of a config.json -> GPTConfig; dropout that it leaves out is GPT-2's 0.1.

    Raises ValueError naming the first key that makes it another model than a strict GPT-2.
    """
    if not isinstance(values, Mapping):
        raise ValueError("config.json holds no object; the model's shape is unknown; restore it")
    if values.get("model_type") != "gpt2":
        raise ValueError(
            f"config.json has model_type {values.get('model_type')!r}; only 'gpt2' can be "
            "loaded; use a GPT-2 checkpoint"
        )
    for key, allowed in _STRICT.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json has {key} = {values[key]!r}; a strict GPT-2 has {allowed[0]!r}, so "
                "its outputs would differ here; use a checkpoint without this variation"
            )
    if absent := [key for key in _SIZES if not isinstance(values.get(key), int)]:
        raise ValueError(
            f"config.json lacks a whole number for {', '.join(absent)}; the model's size is "
            "unknown; use the config.json that was saved with the weights"
        )
    inner = values.get("n_inner")
    if inner not in (None, 4 * values["n_embd"]):
        raise ValueError(
            f"config.json has n_inner = {inner!r} with n_embd = {values['n_embd']}; a strict "
            "GPT-2 has 4 * n_embd (or null); use a checkpoint without this variation"
        )
    return GPTConfig(
        block_size=values["n_positions"],
        vocab_size=values["vocab_size"],
        n_layer=values["n_layer"],
        n_head=values["n_head"],
        n_embd=values["n_embd"],
        embd_dropout=float(values.get("embd_pdrop", 0.1)),
        attn_dropout=float(values.get("attn_pdrop", 0.1)),
        resid_dropout=float(values.get("resid_pdrop", 0.1)),
    )


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a GPT-2 by our name, with its shape in Hugging Face's layout."""
    assert config.vocab_size is not None, "vocab_size is the tokenizer's by now"
    C = config.n_embd
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.block_size, C),
    }
    for i in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (C,), f"h.{i}.{norm}.bias": (C,)}
        for layer, n_in, n_out in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, 4 * C),
            ("mlp.c_proj", 4 * C, C),
        ):
            shapes |= {f"h.{i}.{layer}.weight": (n_in, n_out), f"h.{i}.{layer}.bias": (n_out,)}
    return shapes | {"ln_f.weight": (C,), "ln_f.bias": (C,)}


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        parts = [part for part in key.split(".") if part not in _WRAPPERS]
        name = ".".join(parts[1:] if parts[0] == "transformer" else parts)
        if name in named:
            raise ValueError(
                f"{name} occurs twice in the weights under different prefixes; which one counts "
                "is unknown; keep one of the two"
            )
        named[name] = tensor
    return named


def _turn(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if _PROJECTION.fullmatch(name) else tensor


def _some(names: Iterable[str], most: int = 3) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more + (" are" if len(names) > 1 else " is")
