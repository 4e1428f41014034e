"""micro_batch_size=auto: what divides the step and fits."""

import pytest
import torch

from gpt import autobatch
from gpt.config import GPTConfig
from gpt.loss import NextTokenLoss
from gpt.model import GPT
from gpt.ranks import Ranks
from gpt.runtime import Runtime, resolve
from tests.gpt.test_runtime import config


def tiny(block_size: int) -> NextTokenLoss:
    shape = {"vocab_size": 60, "n_layer": 1, "n_head": 1, "n_embd": 8}
    off = {"embd_dropout": 0.0, "attn_dropout": 0.0, "resid_dropout": 0.0}
    config = GPTConfig(block_size=block_size, **shape, **off)  # type: ignore[arg-type]
    return NextTokenLoss(GPT(config))


def machine(device: str) -> Runtime:
    return Runtime(None, torch.device(device), torch.float32, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch_tokens", "block_size", "found"),
    [(8192, 1024, 4), (1024, 1024, 1), (12 * 512, 512, 6), (16, 8, 2), (5 * 8192, 8192, 1)],
)
def test_on_a_cpu_a_few_thousand_tokens_at_once(
    batch_tokens: int, block_size: int, found: int
) -> None:
    size = autobatch.find_micro_batch_size(tiny(block_size), batch_tokens, machine("cpu"), Ranks())
    assert size == found


def test_out_of_memory_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 windows a step: 48 at once are tried (64 don't divide), then 24, then 12, which fit 20."""
    tried = []

    def fits(loss_of: NextTokenLoss, windows: int, machine: Runtime) -> bool:
        tried.append(windows)
        return windows <= 20

    monkeypatch.setattr(autobatch, "_fits", fits)
    size = autobatch.find_micro_batch_size(tiny(1024), 96 * 1024, machine("cuda"), Ranks())
    assert (size, tried) == (12, [48, 24, 12])


def test_where_nothing_fits_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autobatch, "_fits", lambda *_: False)
    with pytest.raises(ValueError, match="not even one window of 1024 tokens fits"):
        autobatch.find_micro_batch_size(tiny(1024), 4096, machine("cuda"), Ranks())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_is_found_runs() -> None:
    """Memory capped at 2 GiB: fewer than all windows, and the trial leaves nothing behind."""
    torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.mem_get_info()[1])
    try:
        model = GPT(
            GPTConfig(
                block_size=1024,
                vocab_size=50257,
                n_layer=2,
                n_head=4,
                n_embd=256,
                embd_dropout=0.0,
                attn_dropout=0.0,
                resid_dropout=0.0,
            )
        )
        here = resolve(config(device="cuda:0"))
        size = autobatch.find_micro_batch_size(NextTokenLoss(model), 64 * 1024, here, Ranks())
        assert 1 <= size < 64
        assert all(p.grad is None for p in model.parameters())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
