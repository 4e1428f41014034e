"""Kills, signals, bad steps and failing ranks, in real processes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpt import folders
from gpt.tracker import read_metrics
from tests import faults
from tests.processes import EVALUATING, NAMES, PREPARING, SAVING, TRAINING, Run, script

ROOT = Path(__file__).parent.parent
SETTINGS = [
    *("model=tiny", "model.n_embd=32", "model.block_size=32", "schedule.warmup_steps=4"),
    *("model.embd_dropout=0.1", "model.attn_dropout=0.1", "model.resid_dropout=0.1"),
    *("data=text", "data.tokenizer=byte", "data.val_fraction=0.1"),
    *("trainer.batch_tokens=256", "trainer.micro_batch_size=4", "trainer.eval_tokens=4096"),
    *("trainer.eval_every=7", "trainer.save_every=10", "trainer.log_every=1"),
    *("runtime.device=cpu", "runtime.dtype=float32", "runtime.compile=false"),
    "tracker.wandb=disabled",
]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a run's newest checkpoint."""
    folder = run / "checkpoints" / "latest"
    return load_file(folder / folders.WEIGHTS) | load_file(folder / folders.MOMENTS)


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if not key.startswith("perf/")}
        for row in read_metrics(run)
    ]


def assert_same_run(run: Path, whole: Path) -> None:
    """To the bit: weights, moments, every row; the same checkpoints, and nothing else there."""
    a, b = tensors(run), tensors(whole)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert rows(run) == rows(whole)
    there = [sorted(p.name for p in (r / "checkpoints").iterdir()) for r in (run, whole)]
    assert there[0] == there[1]
    for name in ("latest", "best"):
        links = [os.readlink(r / "checkpoints" / name) for r in (run, whole)]
        assert links[0] == links[1], name


# --- kill -9


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 18), (2, 12)])
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(
    ranks: int, kills: int, tmp_path: Path, book: Path
) -> None:
    """30 kill −9 in all, at moments drawn from a seed, in every phase, of one rank
    or of all; the next start continues by itself, and the end is that of an undisturbed run."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):  # so that preparing takes a while
        (text / f"{i}.txt").write_bytes(book.read_bytes())
    args = [*SETTINGS, f"data.path={text}", "run=r", f"trainer.max_steps={20 * kills}"]
    args += ["trainer.eval_tokens=1024"]
    whole = Run([*args, f"paths.root={tmp_path / 'whole'}"], tmp_path / "whole.txt", ranks)
    assert whole.codes() == [0] * ranks, whole.text()

    draw = random.Random(ranks)
    args += [f"paths.root={tmp_path / 'killed'}"]
    aims = [PREPARING] * (kills // 4)
    aims += [(TRAINING, EVALUATING, SAVING)[i % 3] for i in range(kills - len(aims))]
    hit: dict[str, int] = {}
    for n, aim in enumerate(aims):
        run = Run(args, tmp_path / f"{n}.txt", ranks)
        steps = 0 if aim == PREPARING else draw.randint(1, 20)
        there = run.wait_until(lambda r: r.steps >= steps and aim in r.phases())  # noqa: B023
        assert there, f"kill {n} found it over:\n{run.text()}"
        time.sleep(draw.uniform(0, 0.03 if aim == PREPARING else 0.01))
        victims = [draw.randrange(ranks)] if draw.random() < 0.5 else list(range(ranks))
        at = run.phases()
        run.send(signal.SIGKILL, *victims)
        begun = time.monotonic()
        codes = run.codes(30)
        print(
            f"kill {n:2}: step +{run.steps:2}, {' and '.join(NAMES[p] for p in sorted(at))}, "
            f"ranks {victims} of {ranks}: exit codes {codes} after {time.monotonic() - begun:.1f} s"
        )
        assert all(codes[v] == -signal.SIGKILL for v in victims)
        assert all(code not in (0, None) for code in codes), run.text()
        for phase in at:
            hit[NAMES[phase]] = hit.get(NAMES[phase], 0) + 1
    last = Run(args, tmp_path / "last.txt", ranks)
    assert last.codes() == [0] * ranks, last.text()
    assert "continuing after step" in last.text()
    print("hit:", hit)
    assert {"preparing", "training", "evaluating", "saving"} <= hit.keys()
    killed = tmp_path / "killed" / "runs" / "r"
    assert_same_run(killed, tmp_path / "whole" / "runs" / "r")
    steps_logged = [row["step"] for row in rows(killed)]
    assert steps_logged == list(range(1, 20 * kills + 1))
    print(f"{len(tensors(killed))} tensors and {len(steps_logged)} rows equal to the bit")


def die_at_call(count: int, log: str) -> None:
    """Kill this process right before its call number `count` of those that change the disk, all of
    which go to the log."""
    calls = 0

    def wrap(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            with open(log, "a") as file:
                file.write(f"{name} {args[0]}\n")
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return inner(*args, **kwargs)

        setattr(owner, name, counted)

    for name in ("rename", "replace", "fsync", "symlink", "rmdir", "mkdir"):
        wrap(os, name)
    wrap(Path, "unlink")
    wrap(Path, "write_text")


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_a_kill_at_the_calls_of_a_save(anew: bool, tmp_path: Path, book: Path) -> None:
    """Right before each rename, link, sync and removal of a save that replaces `latest` and
    `best` and prunes, the next start goes on, and nothing is left. `anew`: a save that writes a
    step again, since the checkpoint there was damaged."""
    args = [*SETTINGS, f"data.path={book}", "run=r", f"trainer.max_steps={10 if anew else 8}"]
    args += ["trainer.eval_every=2", "trainer.save_every=2", f"trainer.keep_last={2 + anew}"]
    args += ["trainer.eval_tokens=512"]
    whole, log = tmp_path / "whole", tmp_path / "calls"

    def run_in(root: Path, n: int, to: Path = Path(os.devnull)) -> Run:
        out = root.with_suffix(".txt")
        return Run([*args, f"paths.root={root}"], out, hook=partial(die_at_call, n, str(to)))

    assert run_in(whole, -1).codes() == [0]
    begin = tmp_path / "begin"
    shutil.copytree(whole, begin, symlinks=True)
    checkpoints = begin / "runs" / "r" / "checkpoints"
    if anew:
        flip(checkpoints / "step_00000008" / folders.WEIGHTS)
        shutil.rmtree(checkpoints / "step_00000010")
    else:
        shutil.rmtree(begin / "runs")
    counted = tmp_path / "counted"
    shutil.copytree(begin, counted, symlinks=True)
    assert run_in(counted, -1, log).codes() == [0]
    calls = log.read_text().splitlines()
    states = [i for i, call in enumerate(calls) if call.endswith("/state.json")]
    span = range(0 if anew else states[1], states[-1])  # one that prunes, and the next
    assert len(span) > 20
    # Between two that move names lies what the next start finds; of the others, one in five.
    moving = [n for n in span if calls[n].startswith(("rename", "replace"))]
    chosen = sorted({*moving, *span[::5]})
    for n in chosen:
        root = tmp_path / str(n)
        shutil.copytree(begin, root, symlinks=True)
        run = run_in(root, n)
        assert run.codes() == [-signal.SIGKILL], run.text()
        last = run_in(root, -1)
        assert last.codes() == [0], calls[n] + last.text()
        assert_same_run(root / "runs" / "r", whole / "runs" / "r")
        shutil.rmtree(root)
    print(f"{len(chosen)} kills, from {calls[chosen[0]]} to {calls[chosen[-1]]}")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def put(path: Path, at: int, byte: int) -> None:
    """In place: a file that is written anew goes to the disk at once, which takes its time."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


# --- signals

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGHUP: 129}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Callable[[int], Path]:
    """whole(ranks) -> the run of `signalled` that nothing happens to, made once."""
    made: dict[int, Path] = {}

    def make(ranks: int) -> Path:
        if ranks not in made:
            root = tmp_path_factory.mktemp("whole")
            run = Run(signalled(book, root), root / "out", ranks)
            assert run.codes() == [0] * ranks, run.text()
            made[ranks] = root / "runs" / "r"
        return made[ranks]

    return make


def signalled(book: Path, root: Path) -> list[str]:
    """A run of 40 steps, with an evaluation long enough to be met."""
    args = [*SETTINGS, f"data.path={book}", f"paths.root={root}", "run=r", "trainer.max_steps=40"]
    return [*args, "trainer.eval_tokens=8192", "trainer.log_every=5"]


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGTERM) for phase in (PREPARING, TRAINING, EVALUATING, SAVING)),
        *(  # the same handlers take them all
            pytest.param(phase, number, marks=pytest.mark.slow)
            for phase, number in [
                (PREPARING, signal.SIGHUP),
                (TRAINING, signal.SIGUSR1),
                (EVALUATING, signal.SIGINT),
                (SAVING, signal.SIGHUP),
            ]
        ),
    ],
)
def test_a_signal_saves_and_the_rest_is_the_same(
    phase: int, number: signal.Signals, tmp_path: Path, book: Path, whole: Callable[[int], Path]
) -> None:
    """Exit code 128 + its number within 15 s; saved where training had begun; and the run that is
    then continued has the weights, moments and rows, validation too, of one that was not."""
    args = signalled(book, tmp_path)
    run = Run(args, tmp_path / "out")
    run.wait_until(lambda r: phase in r.phases() and r.steps >= (0 if phase == PREPARING else 5))
    run.send(number)
    assert run.codes(15) == [CODES[number]], run.text()
    text = run.text()
    assert "Traceback" not in text and "error" not in text
    if phase == PREPARING:
        assert "stopped; what was saved is whole: the same command goes on" in text
        assert not (tmp_path / "runs").exists()
    else:
        state = folders.verify((tmp_path / "runs/r/checkpoints/latest").resolve())
        assert f"saved at step {state['step']}" in text and state["step"] >= 5
        assert f"go on with: python train.py run=r paths.root={tmp_path}" in text
    again = Run([f"paths.root={tmp_path}", "run=r", *(args if phase == PREPARING else [])], run.out)
    assert again.codes() == [0], again.text()
    assert_same_run(tmp_path / "runs" / "r", whole(1))


def test_a_signal_in_the_last_evaluation_loses_no_row(
    tmp_path: Path, book: Path, whole: Callable[[int], Path]
) -> None:
    """All steps are done, and the validation of the last is cut short: the next start makes it."""
    args = signalled(book, tmp_path)
    run = Run(args, tmp_path / "out")
    run.wait_until(lambda r: EVALUATING in r.phases() and r.steps == 40)
    run.send(signal.SIGTERM)
    assert run.codes(15) == [143], run.text()
    assert rows(tmp_path / "runs" / "r")[-1]["step"] == 35  # that of 40 waits for its validation
    again = Run(args, tmp_path / "out")
    assert again.codes() == [0], again.text()
    assert_same_run(tmp_path / "runs" / "r", whole(1))


def test_a_second_signal_ends_at_once(tmp_path: Path, book: Path) -> None:
    """While the first is being honoured: a step that never ends here."""
    args = signalled(book, tmp_path)
    stuck = partial(faults.before_update, 12, faults.stand_still)
    run = Run(args, tmp_path / "out", hook=stuck)
    run.wait_until(lambda r: r.steps == 13)
    run.send(signal.SIGINT)
    time.sleep(0.5)
    assert run.processes[0].is_alive()
    run.send(signal.SIGTERM)
    assert run.codes(2) == [143], run.text()
    assert folders.newest_whole(tmp_path / "runs/r/checkpoints")[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_signal_to_one_rank_stops_all(
    victims: list[int], tmp_path: Path, book: Path, whole: Callable[[int], Path]
) -> None:
    args = signalled(book, tmp_path)
    run = Run(args, tmp_path / "out", ranks=2)
    run.wait_until(lambda r: r.steps >= 5)
    run.send(signal.SIGTERM, *victims)
    assert run.codes(15) == [143, 143], run.text()
    assert run.text().count("saved at step") == 1
    assert Run(args, tmp_path / "out", ranks=2).codes() == [0, 0]
    assert_same_run(tmp_path / "runs" / "r", whole(2))


def start(*command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A command in a group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def end(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Exit code and what it said; the whole group is killed where it has not ended by then."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        raise AssertionError(f"still there after {seconds} s:\n{text}") from None
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay", "number"),
    [
        (0.0, signal.SIGINT),
        (0.0, signal.SIGTERM),
        (0.1, signal.SIGUSR1),
        (0.1, signal.SIGINT),
        (0.4, signal.SIGHUP),
        (0.4, signal.SIGTERM),
    ],
)
def test_a_signal_while_torch_is_imported(
    delay: float, number: signal.Signals, tmp_path: Path, book: Path
) -> None:
    """One line, no traceback, nothing begun."""
    with start("train.py", *signalled(book, tmp_path)) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch_cpu" not in maps.read_text():
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        code, text = end(process, 15)
    assert code == CODES[number], text
    assert text == "stopped; what was saved is whole: the same command goes on\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiles", "made", "number"),
    [("true", "cpp", signal.SIGTERM), ("auto", "hpp", signal.SIGINT)],
)
def test_a_signal_while_the_first_step_is_compiled(
    compiles: str, made: str, number: signal.Signals, tmp_path: Path, book: Path
) -> None:
    """To the whole group, as Ctrl-C goes: the compiler's own processes get it too. A cold cache."""
    cold = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    args = [*signalled(book, tmp_path / "root"), f"runtime.compile={compiles}"]
    args += ["trainer.eval_every=null"]  # which would be compiled as well
    with start("train.py", *args, env=cold) as process:
        cache = tmp_path / "cache"
        while not any(cache.rglob(f"*.{made}")):
            assert process.poll() is None
            time.sleep(0.002)
        os.killpg(process.pid, number)
        code, text = end(process, 15)
    assert code == CODES[number], text
    assert "Traceback" not in text and "error" not in text, text
    done = subprocess.run(
        [sys.executable, "train.py", *args, "trainer.max_steps=3"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **cold},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("then", ["raise ValueError('half')", "raise ImportError('half')"])
def test_a_signal_that_became_another_error_is_a_signal(then: str) -> None:
    """As where torch's C++ swallows it while NumPy is imported, and half of NumPy stays."""
    command = f"""
import os, signal
from conf.door import door

def command(argv):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        pass
    {then}

door(command, "nothing")
"""
    with start("-c", command) as process:
        code, text = end(process, 15)
    assert code == 143
    assert text == "stopped; what was saved is whole: the same command goes on\n"


@pytest.mark.parametrize(
    ("broken", "shows", "argument", "code", "says"),
    [
        ("stdout", True, "x", 0, ""),
        ("stdout", False, "--cfg=job", 0, ""),
        ("stdout", False, "x", 2, "error: nobody reads standard output any more; nothing; run"),
        ("stdout at the end", True, "x", 0, ""),
        ("stdout at the end", False, "x", 2, "error: nobody reads standard output any more; nothi"),
        ("another", True, "x", 1, "Traceback"),
        ("another", False, "--help", 1, "Traceback"),
    ],
)
def test_a_broken_pipe_is_well_only_where_it_ends_what_is_read(
    broken: str, shows: bool, argument: str, code: int, says: str
) -> None:
    command = f"""
import os, sys
from conf.door import door

def command(argv):
    print("words", flush={broken == "stdout"})
    if {broken == "another"}:
        read, write = os.pipe()
        os.close(read)
        os.write(write, b"to a worker that has gone")
    return 0

door(command, "nothing", shows={shows})
"""
    read, write = os.pipe()
    if broken != "another":
        os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", command, argument],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(says) and bool(done.stderr) == bool(says), done.stderr


def test_a_signal_waits_for_an_import() -> None:
    command = """
import os, signal
from conf.door import door
from gpt.stopping import held_back

def command(argv):
    with held_back():
        os.kill(os.getpid(), signal.SIGTERM)
        print("imported", flush=True)
    print("went on")

door(command, "nothing")
"""
    with start("-c", command) as process:
        code, text = end(process, 15)
    assert code == 143
    assert text == "imported\nstopped; what was saved is whole: the same command goes on\n"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_hands_a_signal_on(
    number: signal.Signals, tmp_path: Path, book: Path, whole: Callable[[int], Path]
) -> None:
    """Ctrl-C goes to the whole group, and torchrun sends it once more; SIGTERM goes to torchrun
    alone. Saved once, said once, and the rest is the same."""
    args = signalled(book, tmp_path)
    slow = tmp_path / "slow.py"
    slow.write_text(script("faults.before_update(6, functools.partial(faults.say_and_sleep, 1.5))"))
    with start(*TORCHRUN, str(slow), *args) as process:
        assert process.stdout is not None
        text = ""
        while "reached" not in text:
            line = process.stdout.readline()
            assert line, text
            text += line
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, more = end(process, 30)
    text += more
    assert text.count("saved at step 7") == 1, text
    assert "error: " not in text, text
    assert folders.verify((tmp_path / "runs/r/checkpoints/latest").resolve())["step"] == 7
    assert Run(args, tmp_path / "out", ranks=2).codes() == [0, 0]
    assert_same_run(tmp_path / "runs" / "r", whole(2))


# --- a rank that fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("faults.before_update(5, functools.partial(faults.fail, 1))", "broken on purpose"),
        ("faults.fail_in_save()", "broken on purpose"),  # on rank 0
        ("faults.lose_shards(1)", "train_00000.npy"),
    ],
)
def test_a_rank_that_fails_ends_the_job(fault: str, says: str, tmp_path: Path, book: Path) -> None:
    """Under torchrun, with 2 ranks: not zero, within 30 s of the fault, and the one cause is to be
    seen: a traceback or an error line, not two, before torchrun's own report."""
    broken, happened = tmp_path / "broken.py", tmp_path / "happened"
    broken.write_text(script(fault))
    args, env = signalled(book, tmp_path / "root"), {"FAULT_AT": str(happened)}
    with start(*TORCHRUN, str(broken), *args, env=env) as process:
        code, text = end(process, 60)
    assert time.time() - happened.stat().st_mtime < 30, text
    assert code == 1, text
    assert says in text
    ours = text.partition("torch/distributed/elastic")[0].partition("W1")[0]
    print(text[-3000:])
    count = ours.count("Traceback (most recent call last)") + ours.count("error: ")
    assert count == 1, text


def test_a_rank_that_hangs_ends_the_job(tmp_path: Path, book: Path) -> None:
    """runtime.hang_minutes: the line names rank and place; the other rank does not wait."""
    stuck = partial(faults.before_update, 5, partial(faults.hang, 1))
    args = [*signalled(book, tmp_path), "runtime.hang_minutes=0.05"]
    run = Run(args, tmp_path / "out", ranks=2, hook=stuck)
    assert run.codes(30) == [1, 1], run.text()
    errors = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: rank 1 has stood still for \d s in stand_still \(.*faults.py", errors[0]
    )
    assert not any("rank 0 has stood still" in line for line in errors), run.text()


# --- checkpoints that are not what they were


def to_go_on(book: Path, root: Path) -> list[str]:
    """A run with checkpoints of steps 10 and 20, and on to 24."""
    args = [*SETTINGS, f"data.path={book}", f"paths.root={root}", "run=r", "trainer.max_steps=24"]
    return [*args, "trainer.eval_every=10", "trainer.eval_tokens=512", "schedule=constant"]


@pytest.fixture(scope="module")
def stopped_at_20(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    root = tmp_path_factory.mktemp("stopped") / "root"
    run = Run([*to_go_on(book, root), "trainer.max_steps=20"], root.parent / "out")
    assert run.codes() == [0], run.text()
    return root


@pytest.fixture
def two_checkpoints(tmp_path: Path, book: Path, stopped_at_20: Path) -> tuple[Path, list[str]]:
    """A copy of a run's checkpoints of steps 10 and 20, and the settings to go on to 24."""
    shutil.copytree(stopped_at_20, tmp_path / "root", symlinks=True)
    args = to_go_on(book, tmp_path / "root")
    return tmp_path / "root" / "runs" / "r" / "checkpoints", args


@pytest.mark.slow
def test_one_flipped_bit_in_any_file_is_found(
    two_checkpoints: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The file is named, the checkpoint before is taken, it is said, and the end is that of
    a run whose checkpoint was whole."""
    checkpoints, args = two_checkpoints
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "root", kept, symlinks=True)
    assert Run(args, tmp_path / "out").codes() == [0]
    whole = tmp_path / "whole"
    (tmp_path / "root").rename(whole)
    newest = kept / "runs" / "r" / "checkpoints" / "step_00000020"
    files = sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file())
    assert len(files) >= 7
    for file in files:
        shutil.copytree(kept, tmp_path / "root", symlinks=True)
        flip(checkpoints / "step_00000020" / file)
        run = Run(args, tmp_path / "out")
        assert run.codes() == [0], run.text()
        said = [line for line in run.text().splitlines() if line.startswith("warning: ")]
        assert len(said) == 1 and str(file) in said[0] and "step_00000010" in said[0], said
        assert "continuing after step 10" in run.text()
        assert_same_run(tmp_path / "root" / "runs" / "r", whole / "runs" / "r")
        shutil.rmtree(tmp_path / "root")
    print(f"{len(files)} files")


def test_any_flipped_bit_of_the_state_is_found(two_checkpoints: tuple[Path, list[str]]) -> None:
    """state.json has a sum of its own values: a digit of its step or its best loss counts too. Only
    a last digit that no float64 holds may pass, since the value is the same."""
    path = two_checkpoints[0] / "step_00000020" / "state.json"
    data, state = path.read_bytes(), folders.read_state(path.parent)
    for at in range(len(data)):
        put(path, at, data[at] ^ 1 << at % 8)
        try:
            same = folders.read_state(path.parent) == state
        except ValueError as e:
            same = "state.json" in str(e)
        assert same, f"{data[at - 20 : at + 20]!r}, {at}"
        put(path, at, data[at])
    folders.verify(path.parent)


@pytest.mark.parametrize("name", [folders.WEIGHTS, folders.MOMENTS, folders.STATE])
def test_parts_of_two_checkpoints_are_not_taken_for_one(
    name: str, two_checkpoints: tuple[Path, list[str]]
) -> None:
    """One file of step 10 among those of step 20."""
    older, newer = (two_checkpoints[0] / f"step_000000{step}" for step in (10, 20))
    shutil.copyfile(older / name, newer / name)
    with pytest.raises(ValueError, match="nothing of this checkpoint is used"):
        folders.verify(newer)
    assert folders.newest_whole(older.parent)[0] == older


# --- two at once, and the clock


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path, book: Path) -> None:
    """The second is refused in one line, whether the first has begun or begins at the same time;
    the first goes on."""
    args = signalled(book, tmp_path)
    waits = partial(faults.before_update, 15, partial(faults.wait_for, str(tmp_path / "go on")))
    first = Run(args, tmp_path / "first", hook=waits)
    first.wait_until(lambda r: r.steps == 16)
    second = Run(args, tmp_path / "second")
    assert second.codes() == [2]
    (tmp_path / "go on").touch()
    assert second.text().startswith("error: run r is being trained by another process")
    assert second.text().count("\n") == 1
    assert first.codes() == [0], first.text()

    args = [*signalled(book, tmp_path), "run=both"]
    both = [Run(args, tmp_path / f"both{i}") for i in range(2)]
    codes = [run.codes()[0] for run in both]
    assert sorted(codes, key=str) in ([0, 2], [0, 0]), [run.text() for run in both]
    if 2 in codes:
        assert "another process" in both[codes.index(2)].text()
    steps = [row["step"] for row in rows(tmp_path / "runs" / "both")]
    assert steps == sorted(set(steps)) and steps[-1] == 40


def test_two_new_runs_at_once_have_two_folders(tmp_path: Path, book: Path) -> None:
    """Both look for a name in the same second, before either has a folder."""
    args = [a for a in signalled(book, tmp_path) if not a.startswith("run=")]
    same = faults.turn_the_clock_back  # the same second for sure
    both = [Run(args, tmp_path / f"both{i}", hook=same) for i in range(2)]
    assert [run.codes()[0] for run in both] == [0, 0], [run.text() for run in both]
    made = sorted((tmp_path / "runs").iterdir())
    assert len(made) == 2
    a, b = (tensors(run) for run in made)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.slow
def test_nothing_depends_on_the_clock(
    tmp_path: Path, book: Path, whole: Callable[[int], Path]
) -> None:
    """It goes back an hour at every look, all the way: same bits, and names stay unique."""
    args = signalled(book, tmp_path)
    run = Run(args, tmp_path / "out", hook=faults.turn_the_clock_back)
    assert run.codes() == [0], run.text()
    assert_same_run(tmp_path / "runs" / "r", whole(1))
    unnamed = [a for a in args if not a.startswith("run=")]
    unnamed += ["trainer.max_steps=1", "schedule.warmup_steps=0"]
    for _ in range(2):
        run = Run(unnamed, tmp_path / "out", hook=faults.turn_the_clock_back)
        assert run.codes() == [0], run.text()
    assert len(list((tmp_path / "runs").iterdir())) == 3
