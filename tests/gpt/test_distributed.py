"""FSDP on three ranks, of which hardly a tensor is a multiple: what each holds, what comes back,
gradients and their norm; against one process. Curves and checkpoints: tests/test_ranks.py."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gpt import distributed
from gpt.config import AdamWConfig, Attention, DType, GPTConfig, Parallel, RuntimeConfig
from gpt.loss import NextTokenLoss
from gpt.model import GPT
from gpt.optimizer import build_optimizer
from gpt.ranks import Ranks, leave
from gpt.runtime import Runtime
from tests.processes import context

N = 3
ADAMW = AdamWConfig(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def machine(dtype: torch.dtype = torch.float32, parallel: Parallel = Parallel.fsdp) -> Runtime:
    config = RuntimeConfig(
        device="cpu",
        dtype=DType.auto,
        compile=False,
        attention=Attention.flash,
        deterministic=False,
        parallel=parallel,
        activation_checkpointing=False,
        hang_minutes=None,
        peak_flops=None,
    )
    return Runtime(config, torch.device("cpu"), dtype, compile=False)


def make() -> NextTokenLoss:
    """60 tokens, so 64 rows: 22, 22 and 20 on three ranks. Two positions: 1, 1 and none."""
    shape = {"block_size": 2, "vocab_size": 60, "n_layer": 2, "n_head": 2, "n_embd": 16}
    return NextTokenLoss(
        GPT(GPTConfig(**shape, embd_dropout=0.0, attn_dropout=0.0, resid_dropout=0.0))
    )


def ids(rank: int) -> Tensor:
    return torch.arange(6 * rank, 6 * rank + 6).view(3, 2)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=N)
    ranks = Ranks(rank, rank, N)
    loss_of = make()
    model = loss_of.model
    module = distributed.wrap(loss_of, ranks, machine())
    optimizer = build_optimizer(model, ADAMW)
    out: dict[str, Tensor] = {}

    def keep(prefix: str) -> None:
        for name, p in model.named_parameters():
            out[f"{prefix}.{name}"] = distributed.full(p.detach()).clone()

    out["rows.wte"] = torch.tensor(model.wte.weight.to_local().shape)
    out["rows.wpe"] = torch.tensor(model.wpe.weight.to_local().shape)
    keep("begin")
    with torch.no_grad():
        module(ids(rank), ids(rank))  # an evaluation leaves shards
    for sync in (False, True):  # two micro-batches, of which the last is reduced
        distributed.set_gradient_sync(module, sync)
        module(ids(rank), ids(rank)).backward()
    for name, p in model.named_parameters():
        out[f"grad.{name}"] = distributed.full(p.grad)
    out["norm"] = distributed.grad_norm(model.parameters())
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, out["norm"])
    out["norm_after"] = distributed.grad_norm(model.parameters())
    optimizer.step()
    keep("end")
    for name, p in model.named_parameters():
        out[f"exp_avg_sq.{name}"] = distributed.full(optimizer.state[p]["exp_avg_sq"])
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            distributed.put(p, torch.arange(p.numel()).view(p.shape) + float(i))
    keep("put")
    scalar = distributed.like(torch.tensor(3.0), model.wte.weight)
    assert type(scalar) is Tensor and scalar == 3
    save_file({name: t.contiguous() for name, t in out.items()}, f"{folder}/out.{rank}")
    part(rank)


def part(rank: int, size: int = N) -> None:
    """End as the ranks of a run do: one that frees its process group may wait for gloo's threads,
    and they for it."""
    dist.barrier()
    if size > 1:
        leave(Ranks(rank, rank, size), 0)
    dist.destroy_process_group()


def run(target: object, folder: Path) -> None:
    processes = [context.Process(target=target, args=(rank, str(folder))) for rank in range(N)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * N


def test_three_ranks_hold_and_learn_what_one_does(tmp_path: Path) -> None:
    run(work, tmp_path)
    outs = [load_file(tmp_path / f"out.{rank}") for rank in range(N)]
    assert [o.pop("rows.wte").tolist() for o in outs] == [[22, 16], [22, 16], [20, 16]]
    assert [o.pop("rows.wpe").tolist() for o in outs] == [[1, 16], [1, 16], [0, 16]]
    for name, tensor in outs[0].items():  # the same bits everywhere
        assert all(torch.equal(o[name], tensor) for o in outs[1:]), name
    out = outs[0]

    loss_of = make()
    for name, p in loss_of.model.named_parameters():
        assert torch.equal(out[f"begin.{name}"], p)
    optimizer = build_optimizer(loss_of.model, ADAMW)
    union = torch.cat([ids(rank) for rank in range(N)])
    (loss_of(union, union) * 2 / N).backward()
    for name, p in loss_of.model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(out[f"grad.{name}"], p.grad, atol=1e-5, rtol=1e-5)
    norm = nn.utils.clip_grad_norm_(loss_of.parameters(), 0.5)
    assert norm > 1
    torch.testing.assert_close(out["norm"], norm, rtol=1e-6, atol=0)
    assert float(out["norm_after"]) == pytest.approx(0.5, rel=1e-5)
    optimizer.step()
    for i, (name, p) in enumerate(loss_of.model.named_parameters()):
        torch.testing.assert_close(out[f"end.{name}"], p.detach(), atol=1e-5, rtol=0)
        moment = optimizer.state[p]["exp_avg_sq"]
        torch.testing.assert_close(out[f"exp_avg_sq.{name}"], moment, atol=1e-9, rtol=1e-4)
        assert torch.equal(out[f"put.{name}"], torch.arange(p.numel()).view(p.shape) + float(i))
    assert out["end.wte.weight"][60:].abs().max() == 0  # padding


def work_in_bfloat16(rank: int, folder: str, device: str = "cpu") -> None:
    """One pass each as DDP and as FSDP; on a GPU there is one rank, and plain for DDP."""
    torch.set_num_threads(1)
    size = N if device == "cpu" else 1
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=size)
    seen: dict[str, str] = {}
    out: dict[str, Tensor] = {}
    for how in Parallel:
        here = machine(torch.bfloat16, how)
        here.device = torch.device(device)
        loss_of, ranks = make().to(here.device), Ranks(rank, rank, size)
        one_gpu = size == 1 and how == Parallel.fsdp
        module = (distributed._shard if one_gpu else distributed.wrap)(loss_of, ranks, here)
        block = loss_of.model.h[1]

        def look(block: nn.Module, args: tuple[Tensor, ...]) -> None:
            weight = block.get_parameter("mlp.c_fc.weight")
            seen[how.value] = f"{args[0].dtype} {weight.dtype} {loss_of.model.wte.weight.dtype}"  # noqa: B023

        block.register_forward_pre_hook(look)
        x = ids(rank).to(here.device)
        with here.autocast():
            loss = module(x, x)
        loss.backward()
        out[f"{how.value}.loss"] = loss.detach()
        for name, p in loss_of.model.named_parameters():
            assert p.grad is not None and p.grad.dtype == torch.float32
            out[f"{how.value}.{name}"] = distributed.full(p.grad)
    save_file({k: v.contiguous().clone() for k, v in out.items()}, f"{folder}/out.{rank}")
    Path(f"{folder}/seen.{rank}").write_text(f"{seen['ddp']}\n{seen['fsdp']}")
    part(rank, size)


def assert_near(folder: Path, tolerance: float) -> None:
    """Loss and gradients of FSDP near those of DDP."""
    out = load_file(folder / "out.0")
    torch.testing.assert_close(out["fsdp.loss"], out["ddp.loss"], rtol=tolerance, atol=0)
    for name in [k.removeprefix("ddp.") for k in out if k.startswith("ddp.")]:
        ddp, fsdp = out[f"ddp.{name}"], out[f"fsdp.{name}"]
        assert (ddp - fsdp).norm() <= tolerance * ddp.norm(), name


def work_twice(rank: int, folder: str) -> None:
    """Where DDP's gradients lie after each micro-batch of two steps, and how many buckets."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=N)
    loss_of = make()
    module = distributed.wrap(loss_of, Ranks(rank, rank, N), machine(parallel=Parallel.ddp))
    places = []
    for sync in (False, True, False, True):
        distributed.set_gradient_sync(module, sync)
        module(ids(rank), ids(rank)).backward()
        grads = [p.grad for p in loss_of.parameters() if p.grad is not None]
        places.append({grad.untyped_storage().data_ptr() for grad in grads})
        if sync:
            distributed.forget_gradients(module)
            assert not any(grad.any() for grad in grads)
    Path(f"{folder}/seen.{rank}").write_text(f"{len(places[0])} {places.count(places[0])}")
    part(rank)


def test_ddp_adds_micro_batches_up_in_its_buckets(tmp_path: Path) -> None:
    """All gradients of this small model in one piece of memory, the same in every micro-batch."""
    run(work_twice, tmp_path)
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in range(N)] == ["1 4"] * N


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_ranks_can_not_share_one_device(device: str) -> None:
    here = machine()
    here.config.device, here.device = device, torch.device(device)
    with pytest.raises(ValueError, match=f"runtime.device={device} is one device and there are 2"):
        distributed.start(Ranks(0, 0, 2), here)


def test_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    """Under autocast, weights and the residual stream in float32, as with DDP."""
    run(work_in_bfloat16, tmp_path)
    for rank in range(N):
        ddp, fsdp = (tmp_path / f"seen.{rank}").read_text().splitlines()
        assert ddp == fsdp == "torch.float32 torch.float32 torch.float32"
    assert_near(tmp_path, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    """A block's weights are gathered in bfloat16; its input and the embedding are float32."""
    process = context.Process(target=work_in_bfloat16, args=(0, str(tmp_path), "cuda:0"))
    process.start()
    process.join(120)
    ddp, fsdp = (tmp_path / "seen.0").read_text().splitlines()
    assert ddp == "torch.float32 torch.float32 torch.float32"
    assert fsdp == "torch.float32 torch.bfloat16 torch.float32"
    assert_near(tmp_path, 0.02)


def test_float16_is_refused_and_one_process_is_told() -> None:
    with pytest.raises(ValueError, match="can not scale the loss for float16; .*; use"):
        distributed.start(Ranks(), machine(torch.float16))
    alone = machine()
    distributed.start(Ranks(), alone)
    assert alone.notes == ["runtime.parallel=fsdp on one process: there is nothing to shard"]
    loss_of = make()
    assert distributed.wrap(loss_of, Ranks(), alone) is loss_of
    assert type(loss_of.model.wte.weight) is nn.Parameter
    told = machine(parallel=Parallel.ddp)
    distributed.start(Ranks(), told)
    assert told.notes == []
