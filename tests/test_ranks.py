"""Many ranks, as processes on one machine: the same curve on any number of them, the same bits on
the same number, DDP or FSDP; and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

import train
from gpt import checkpoint, distributed, folders
from gpt.generate import generate
from gpt.loss import IGNORE, NextTokenLoss
from gpt.tracker import read_metrics
from gpt.trainer import Trainer
from tests.processes import Run

ROOT = Path(train.__file__).parent
STEPS = 50
SETTINGS = [
    *("model=tiny", "model.n_embd=32", "model.block_size=32", "schedule=constant"),
    *("model.embd_dropout=0.1", "model.attn_dropout=0.1", "model.resid_dropout=0.1"),
    *("data.tokenizer=byte", "data.val_fraction=0.1", "schedule.warmup_steps=4"),
    *("trainer.batch_tokens=256", "trainer.micro_batch_size=2", f"trainer.max_steps={STEPS}"),
    *("trainer.eval_every=10", "trainer.eval_tokens=480"),  # 15 windows: odd
    *("trainer.save_every=null", "trainer.log_every=1", "runtime.device=cpu"),
    *("runtime.dtype=float32", "runtime.compile=false", "tracker.wandb=disabled"),
]
FSDP = "runtime.parallel=fsdp"
World = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, book: Path) -> World:
    """world(ranks, name, *settings) -> the run's folder and what was printed, once it has ended
    well on so many ranks. All share one folder of shards."""
    root = tmp_path_factory.mktemp("ranks")

    def run(ranks: int, name: str, *settings: str, hook: Any = None) -> tuple[Path, str]:
        args = [*SETTINGS, "data=text", f"data.path={book}", *settings]
        args += [f"paths.root={root}", f"run={name}"]
        started = Run(args, root / "out" / f"{name}.txt", ranks, hook)
        codes = started.codes(250)
        assert codes == [0] * ranks, started.text()
        return root / "runs" / name, started.text()

    return run


@pytest.fixture(scope="module")
def straight(world: World) -> Callable[[int], Path]:
    """straight(ranks) -> the folder of a run of 50 steps in one go; negative: by FSDP."""
    done: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in done:
            how = [FSDP] if ranks < 0 else []
            done[ranks] = world(abs(ranks), f"straight{ranks}", *how)[0]
        return done[ranks]

    return run


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a run's newest checkpoint."""
    folder = run / "checkpoints" / "latest"
    return load_file(folder / folders.WEIGHTS) | load_file(folder / folders.MOMENTS)


def assert_same_bits(run: Path, other: Path) -> None:
    a, b = tensors(run), tensors(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_same_curve(run: Path, other: Path, steps: int = STEPS) -> None:
    """Every step's loss to 1e-5, validation to 1e-6 where both have it, and the tokens seen."""
    a, b = ({row["step"]: row for row in read_metrics(r)} for r in (run, other))
    assert a.keys() == b.keys() == set(range(1, steps + 1))
    for step in a:
        assert a[step]["train/loss"] == pytest.approx(b[step]["train/loss"], rel=1e-5), step
        assert a[step]["tokens_seen"] == b[step]["tokens_seen"] == 256 * step
        if "val/loss" in a[step] and "val/loss" in b[step]:
            for key in ("val/loss", "val/bits_per_byte"):
                assert a[step][key] == pytest.approx(b[step][key], rel=1e-6), step
    assert any("val/loss" in row for row in a.values())


# --- one curve


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, -2, -3])
def test_any_number_of_ranks_learns_what_one_learns(
    straight: Callable[[int], Path], ranks: int, world: World
) -> None:
    """50 steps with dropout 0.1, DDP on 2 and 4, FSDP on 2 and 3 (of which no table or bias is a
    multiple); an odd number of validation windows, each weighing the same."""
    if ranks == -3:  # a step has to be dealt out to three
        one = world(1, "one384", "trainer.batch_tokens=384", "trainer.max_steps=10")[0]
        three = world(3, "three", "trainer.batch_tokens=384", "trainer.max_steps=10", FSDP)[0]
        a, b = read_metrics(one), read_metrics(three)
        for x, y in zip(a, b, strict=True):
            assert y["train/loss"] == pytest.approx(x["train/loss"], rel=1e-5)
        assert b[-1]["val/loss"] == pytest.approx(a[-1]["val/loss"], rel=1e-6)
        return
    assert_same_curve(straight(ranks), straight(1))


def test_two_ranks_learn_what_one_learns(world: World) -> None:
    """The same, short, DDP and FSDP: for every run of the tests."""
    short = ["trainer.max_steps=12", "trainer.eval_every=6"]
    one = world(1, "short1", *short)[0]
    for name, how in (("ddp", []), ("fsdp", [FSDP])):
        two, text = world(2, name, *short, *how)
        assert_same_curve(two, one, steps=12)
        assert text.count("done: 12 steps") == 1
        steps = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
        assert len(steps) == len(set(steps)) == 12  # one console
        assert text.count("no samples are shown") == (name == "fsdp")
        assert text.count("sample after step") == (name == "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, -2, -4])  # 2: test_chaos.py
def test_an_interrupted_run_ends_with_the_same_bits(
    world: World, straight: Callable[[int], Path], ranks: int, book: Path
) -> None:
    """SIGTERM to every rank somewhere past step 20, on DDP and FSDP; `run` alone goes on."""
    whole = straight(ranks)
    root, n = whole.parent.parent, abs(ranks)
    name = f"interrupted{ranks}"
    args = [*SETTINGS, "data=text", f"data.path={book}", f"paths.root={root}", f"run={name}"]
    args += [FSDP] if ranks < 0 else []
    first = Run(args, root / "out" / f"{name}.first.txt", n)
    assert first.wait_until(lambda run: run.steps >= 20, 120)
    first.send(signal.SIGTERM)
    assert first.codes(60) == [143] * n, first.text()
    state = folders.read_state(root / "runs" / name / "checkpoints" / "latest")
    assert state is not None and 20 <= state["step"] < STEPS
    assert first.text().count(f"saved at step {state['step']}") == 1
    second = Run([f"paths.root={root}", f"run={name}"], root / "out" / f"{name}.txt", n)
    assert second.codes(250) == [0] * n, second.text()
    assert_same_bits(root / "runs" / name, whole)
    assert [r["train/loss"] for r in read_metrics(root / "runs" / name)] == [
        r["train/loss"] for r in read_metrics(whole)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[(4, 15), (1, 30), (-2, 50)], [(-4, 20), (2, 35), (1, 50)]])
def test_a_run_may_change_its_ranks_at_any_resume(
    world: World, straight: Callable[[int], Path], parts: list[tuple[int, int]]
) -> None:
    """(ranks, until step), negative for FSDP: the same curve, tokens seen and tokens a
    step; the same files, which transformers opens."""
    name = "changing" + "".join(f"_{ranks}" for ranks, _ in parts)
    for ranks, until in parts:
        how = "fsdp" if ranks < 0 else "ddp"
        settings = (f"trainer.max_steps={until}", f"runtime.parallel={how}")
        run, text = world(abs(ranks), name, *settings)
        n, accumulated = abs(ranks), 4 // abs(ranks)
        assert f"256 tokens (2 windows × {accumulated} micro-batches × {n} rank" in text
    one = straight(1)
    assert_same_curve(run, one)
    a, b = tensors(run), tensors(one)
    assert {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}
    state = folders.verify((run / "checkpoints" / "latest").resolve())
    assert state["tokens_seen"] == 256 * STEPS and state["world_size"] == abs(parts[-1][0])
    assert_opens_in_transformers(run / "checkpoints" / "latest")


def assert_opens_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    idx = torch.arange(32)[None]
    with torch.no_grad():
        ours = checkpoint.load_model(folder)(idx)
        torch.testing.assert_close(ours, theirs(idx).logits, atol=1e-5, rtol=0)


# --- what the ranks read


def note_batches(out: str) -> None:
    """Every pass of this rank goes to a file: whether it learns, and the first token of each window
    that counts."""
    forward, rank = NextTokenLoss.forward, os.environ.get("RANK", "0")

    def noted(self: NextTokenLoss, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counted = (y != IGNORE).all(1)
        row = [self.training, x[counted, 0].tolist(), int((y != IGNORE).sum())]
        with open(f"{out}.{rank}", "a") as file:
            file.write(json.dumps(row) + "\n")
        return forward(self, x, y)

    NextTokenLoss.forward = noted  # type: ignore[method-assign]
    torch.cuda.device_count = lambda: 4  # "visible" devices are not what steps are dealt out by


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_share_out_every_window_once(world: World, tmp_path: Path, parallel: str) -> None:
    """A token file that counts upwards, 33 windows to learn from and 7 to validate
    on: in an epoch each is read once by one rank; a step has the tokens that are printed."""
    ramp = np.arange(33 * 32 + 1, dtype=np.uint16)
    ramp.tofile(tmp_path / "train.bin")
    np.arange(7 * 32 + 1, dtype=np.uint16).tofile(tmp_path / "val.bin")
    settings = ["data=tokens", f"data.path={tmp_path}", "data.tokenizer=gpt2"]
    settings += ["trainer.max_steps=12", "trainer.eval_every=12"]
    settings += [f"runtime.parallel={parallel}", "model.embd_dropout=0"]
    out = tmp_path / "seen"
    run, text = world(2, f"ramp_{parallel}", *settings, hook=partial(note_batches, str(out)))
    assert "12 steps of 256 tokens (2 windows × 2 micro-batches × 2 ranks)" in text
    rows = [list(map(json.loads, Path(f"{out}.{n}").read_text().splitlines())) for n in (0, 1)]
    rows = [[r for r in of_rank if r[2] > 1] for of_rank in rows]  # without DDP's warming up
    learned = [[r for r in of_rank if r[0]] for of_rank in rows]
    assert [len(of_rank) for of_rank in learned] == [12 * 2, 12 * 2]
    for step in range(12):
        tokens = sum(r[2] for of_rank in learned for r in of_rank[2 * step : 2 * step + 2])
        assert tokens == 256
    order = [first for pair in zip(*learned, strict=True) for r in pair for first in r[1]]
    assert sorted(order[:33]) == list(range(0, 33 * 32, 32))  # the first epoch; j = i · 2 + rank
    looked = [sorted(f for r in of_rank if not r[0] for f in r[1]) for of_rank in rows]
    assert sorted([*looked[0], *looked[1]]) == list(range(0, 7 * 32, 32))
    assert sorted(map(len, looked)) == [3, 4]
    assert read_metrics(run)[-1]["tokens_seen"] == 12 * 256


def test_a_step_that_can_not_be_dealt_out_is_refused(tmp_path: Path) -> None:
    """The numbers, the nearest that can, one line, no work done."""
    args = [*SETTINGS, f"paths.root={tmp_path / 'root'}"]
    two = Run([*args, "trainer.batch_tokens=320"], tmp_path / "two.txt", 2)
    three = Run([*args, "trainer.batch_tokens=256"], tmp_path / "three.txt", 3)
    for refused, says in (
        (two, "is not a multiple of 128 (block_size 32 × micro_batch_size 2 × 2 ranks)"),
        (three, "a step can't be dealt out evenly; nearest that can: 192 or 384"),
    ):
        assert refused.codes(60) == [2] * len(refused.processes)
        lines = {line for line in refused.text().splitlines() if line}
        assert len(lines) == 1 and says in lines.pop()
    assert not (tmp_path / "root").exists()


# --- compiled


def keep_gradients(out: str) -> None:
    """The first step's gradients, as they are before clipping, go to a file."""
    norm, update = distributed.grad_norm, Trainer.update

    def keeping(self: Trainer) -> Any:
        names = [name for name, _ in self.model.named_parameters()]

        def kept(parameters: Iterator[torch.nn.Parameter]) -> Any:
            parameters = list(parameters)
            grads = [distributed.full(p.grad).clone() for p in parameters if p.grad is not None]
            how = type(self.module).__name__
            how += " of compiled blocks" if self.model.h[0].body != self.model.h[0]._body else ""
            named = dict(zip(names, grads, strict=True))
            save_file(named, f"{out}.{self.ranks.rank}", {"how": how})
            distributed.grad_norm = norm
            return norm(parameters)

        distributed.grad_norm = kept  # type: ignore[assignment]
        Trainer.update = update  # type: ignore[method-assign]
        return self.update()

    Trainer.update = keeping  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_ranks_have_the_gradients_of_one(
    world: World, tmp_path: Path, parallel: str
) -> None:
    """Blocks compiled, then wrapped: equal on both ranks, and to 1e-6 those of one eager
    process on the whole step. Without dropout, which compiled code draws in another way."""
    no_dropout = [f"model.{name}_dropout=0" for name in ("embd", "attn", "resid")]
    settings = [*no_dropout, "trainer.max_steps=1", f"runtime.parallel={parallel}"]
    settings += ["trainer.eval_every=null"]  # which would be compiled as well
    of_two, of_one = tmp_path / "two", tmp_path / "one"
    hooks = [partial(keep_gradients, str(out)) for out in (of_one, of_two)]
    args = [*settings, "trainer.micro_batch_size=8"]
    alone, _ = world(1, f"union_{parallel}", *args, hook=hooks[0])
    settings += ["runtime.compile=true"]
    run, _ = world(2, f"compiled_{parallel}", *settings, hook=hooks[1])
    one = load_file(f"{of_one}.0")
    two = [load_file(f"{of_two}.{rank}") for rank in (0, 1)]
    assert any(g.abs().max() > 1e-3 for g in one.values())
    for name, g in one.items():
        assert torch.equal(two[0][name], two[1][name])
        torch.testing.assert_close(two[0][name], g, atol=1e-6, rtol=0)
    from safetensors import safe_open

    with safe_open(f"{of_two}.0", "pt") as file:
        wrapper = DistributedDataParallel.__name__ if parallel == "ddp" else "FSDPNextTokenLoss"
        assert file.metadata()["how"] == f"{wrapper} of compiled blocks"
    assert {k: v.shape for k, v in load_file(run / SAVED).items()} == {
        k: v.shape for k, v in load_file(alone / SAVED).items()
    }


SAVED = Path("checkpoints") / "latest" / folders.WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "compiled"),
    [
        (1, "ddp", True),
        (2, "ddp", False),
        (2, "ddp", True),
        (2, "fsdp", False),
        (2, "fsdp", True),
    ],
)
def test_what_wrapped_runs_save_loads_everywhere(
    world: World, ranks: int, parallel: str, compiled: bool
) -> None:
    """The names in the file are those of transformers, without a wrapper's prefix; the run goes on
    alone, compiled if it was plain and plain if it was compiled, and is sampled from."""
    from transformers import GPT2Config, GPT2LMHeadModel

    name = f"saved_{ranks}_{parallel}_{compiled}"
    settings = ["trainer.max_steps=2", "trainer.eval_every=null", f"runtime.parallel={parallel}"]
    run, _ = world(ranks, name, *settings, f"runtime.compile={compiled}")
    shape = GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    theirs = set(GPT2LMHeadModel(shape).state_dict()) - {"lm_head.weight"}
    assert set(load_file(run / SAVED)) == theirs
    model = checkpoint.load_model(run / "checkpoints" / "latest")
    ids = generate(model, torch.zeros(1, 1, dtype=torch.int64), 4, seed=1)
    assert ids.shape == (1, 5)
    _, text = world(1, name, "trainer.max_steps=3", f"runtime.compile={not compiled}")
    assert "done: 3 steps" in text


# --- as a command


def torchrun(ranks: int, *args: str, handle: str = "") -> "subprocess.Popen[str]":
    """The documented command, on a free port."""
    base = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    base += [f"--signals-to-handle={handle}"] if handle else []
    return subprocess.Popen(
        [*base, f"--nproc_per_node={ranks}", "train.py", *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_jobs_of_two_ranks_on_one_machine(tmp_path: Path, book: Path) -> None:
    """Both run, at once, each with one folder, one console and one W&B run: the other rank has
    none, not even an empty one. Training and validation share the axis of steps."""
    args = [*SETTINGS, "data=text", f"data.path={book}", "trainer.max_steps=4"]
    args += ["trainer.eval_every=2"]
    args += [f"paths.root={tmp_path}", "tracker.wandb=offline"]
    jobs = [torchrun(2, *args, f"run={name}", f"paths.root={tmp_path / name}") for name in "ab"]
    for name, job in zip("ab", jobs, strict=True):
        out, error = job.communicate(timeout=200)
        assert job.returncode == 0, error
        assert out.count("done: 4 steps") == 1 and "Traceback" not in error
        runs = tmp_path / name / "runs"
        assert [p.name for p in runs.iterdir()] == [name]
        (offline,) = (runs / name / "wandb").glob("offline-run-*")
        assert [*(tmp_path / name).rglob("*.wandb")] == [*offline.glob("*.wandb")]
        assert len(list(offline.glob("*.wandb"))) == 1
        rows = read_metrics(runs / name)
        assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
        assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]


@pytest.mark.slow
def test_torchrun_passes_slurms_signal_on(tmp_path: Path, book: Path) -> None:
    """SIGUSR1 to torchrun, as docs/parallel.md has it: saved, ended, and the run goes on."""
    args = [f"paths.root={tmp_path}", "run=r"]
    first = [*SETTINGS, "data=text", f"data.path={book}", "trainer.max_steps=100000", *args]
    job = torchrun(2, *first, handle="SIGTERM,SIGINT,SIGUSR1")
    assert job.stdout is not None
    for line in job.stdout:
        if line.split()[:1] == ["step"] and int(line.split()[1].split("/")[0]) >= 20:
            job.send_signal(signal.SIGUSR1)
            break
    out, error = job.communicate(timeout=60)
    assert job.returncode == 1, error
    step = (folders.read_state(tmp_path / "runs" / "r" / "checkpoints" / "latest") or {})["step"]
    assert step >= 20 and f"saved at step {step}" in out
    again = Run([*args, f"trainer.max_steps={step + 2}"], tmp_path / "out", ranks=2)
    assert again.codes(100) == [0, 0], again.text()
    assert f"continuing after step {step}" in again.text()


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_one_line(tmp_path: Path) -> None:
    """Exit code 1, as torchrun has it, and one `error:` line whatever else it prints."""
    job = torchrun(2, *SETTINGS, "trainer.batch_tokens=320", f"paths.root={tmp_path / 'root'}")
    _, error = job.communicate(timeout=100)
    assert job.returncode == 1
    lines = re.findall(r"^error: .*", error, re.MULTILINE)
    assert len(lines) == 1 and "nearest that can: 256 or 384" in lines[0]


# --- blocks computed again


def test_recomputed_blocks_give_the_same_bits(world: World) -> None:
    """runtime.activation_checkpointing, eager, dropout 0.1 in all three places."""
    runs = []
    for again in (False, True):
        settings = ["trainer.max_steps=12", f"runtime.activation_checkpointing={again}"]
        runs.append(world(1, f"recompute_{again}", *settings)[0])
    assert_same_bits(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_recomputed_blocks_give_the_same_bits_on_two_ranks(world: World, parallel: str) -> None:
    """With the wrappers' hooks between the blocks, eager and compiled."""
    for compiled in (False, True):
        runs = []
        for again in (False, True):
            settings = ["trainer.max_steps=6", f"runtime.activation_checkpointing={again}"]
            settings += [f"runtime.parallel={parallel}", f"runtime.compile={compiled}"]
            settings += ["trainer.eval_every=null"]
            runs.append(world(2, f"recompute_{parallel}_{compiled}_{again}", *settings)[0])
        assert_same_bits(*runs)
