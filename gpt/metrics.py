"""How much work a token is, and how fast it goes."""

from __future__ import annotations

import math

import torch

from gpt.model import GPT

# Dense peak of matrix products, FLOP/s, by the name the driver reports and the dtype used.
# Source: the makers' data sheets, without sparsity. A device that is not here has no MFU: a
# guess would be worse than none.
PEAK_FLOPS = {
    "H200": {torch.bfloat16: 989e12, torch.float16: 989e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float16: 756e12},
    "H100": {torch.bfloat16: 989e12, torch.float16: 989e12},
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
    "V100": {torch.float16: 125e12, torch.float32: 15.7e12},
    "L40S": {torch.bfloat16: 362e12, torch.float16: 362e12},
    "A10G": {torch.bfloat16: 70e12, torch.float16: 70e12},
    "T4": {torch.float16: 65e12, torch.float32: 8.1e12},
    "RTX 4090": {torch.bfloat16: 165e12, torch.float16: 165e12},
    "RTX 3090": {torch.bfloat16: 71e12, torch.float16: 71e12},
}


def flops_per_token(model: GPT) -> float:
    """Forward and backward, a token: 6·N + 12·L·C·T (Chowdhery et al. 2022, appendix B).

    N counts all parameters but the position table; the tied embedding counts as the head's
    matrix. Attention is counted in full, though the causal mask needs half.
    """
    config = model.config
    n = model.n_params() - config.block_size * config.n_embd
    return 6 * n + 12 * config.n_layer * config.n_embd * config.block_size


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak, or None where it isn't known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, rates in PEAK_FLOPS.items():
        if key in name:
            return rates.get(dtype)
    return None


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss that doesn't depend on the tokenizer: nats a token → bits a byte of text."""
    return nats_per_token / math.log(2) / bytes_per_token
