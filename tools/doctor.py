"""Does this machine train, and does this very config resume to the bit? Ask before the long run.

    python -m tools.doctor [--ranks N] [the same settings as train.py]

Says what the machine offers; then trains a few steps of the config in a folder that is removed
afterwards, once in one go and once killed (kill -9) and continued, and compares weights and
moments. On one rank, and on several where there are several CUDA devices (or N). Exit code 0: all
well, 1: something does not match, 2: a setting that can't be, in one line.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli import compose_and_run, merge_overrides
from conf.door import RunError, door
from gpt import folders
from gpt.config import DType
from gpt.ranks import find_ranks
from train import arguments
from train import main as train_main

if TYPE_CHECKING:
    from conf.schema import Config
    from gpt.runtime import Runtime

STEPS, SAVED, DIES = 6, 3, 4  # updates in all; saved after; killed before this one (from 0)
PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "hydra-core", "wandb", "transformers")
GB = 1e9


def main(argv: list[str]) -> int:
    if argv[:1] == ["--trial"]:
        return _trial(Path(argv[1]), argv[2] == "dies", argv[3:])
    ranks = None  # from the devices
    if argv[:1] == ["--ranks"]:
        if not argv[1:] or not argv[1].isdigit() or not int(argv[1]):
            raise ValueError("--ranks has no number; it is how many processes try; write --ranks 2")
        ranks, argv = int(argv[1]), argv[2:]
    if {"-m", "--multirun"} & set(argv):
        raise ValueError("a sweep (-m) is many configs; one is examined at a time; leave out -m")
    argv = arguments(argv)
    return compose_and_run(lambda config, given: _examine(config, given, ranks), argv)


def _examine(config: Config, overrides: list[str], ranks: int | None) -> int:
    from gpt import runtime

    machine = runtime.resolve(config.runtime)  # first: a device that isn't there is said at once
    root = Path(config.paths.root)
    root.mkdir(parents=True, exist_ok=True)
    _say_machine(config, machine)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root) as scratch:
        data = _share_data(config, Path(scratch))
        worlds = [ranks] if ranks else sorted({1, _cuda_devices(machine)})
        same = True
        for world_size in worlds:
            settings = merge_overrides(overrides, data, _cut(config, world_size, scratch))
            trial = Trial(Path(scratch) / f"{world_size}_ranks", world_size, settings)
            same &= trial.compare(config)
        _say_expectations(config, trial)
    print("\nall well" if same else "\nnot all well: see what differs above")
    return 0 if same else 1


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GB:.1f} GB" if n_bytes >= GB else f"{n_bytes / 1e6:.1f} MB"


# --- the machine


def _line(label: str, text: str) -> None:
    print(f"  {label:<12}{text}", flush=True)


def _say_machine(config: Config, machine: Runtime) -> None:
    import torch

    from data.tokenizer import load_tokenizer
    from gpt.tracker import wandb_has_key

    print("this machine")
    _line("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    _line("packages", ", ".join(filter(None, map(_version, PACKAGES))))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    _line("processor", f"{_processor()}, {cores} cores usable, {torch.get_num_threads()} threads")
    _line("memory", _memory())
    _line("devices", f"{', '.join(_devices())} (this config: {machine.device})")
    _line("numbers", _numbers(machine))
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "g++"), "clang++")), None)
    _line(
        "compiler",
        f"{compiler or 'none'}; this config runs {'compiled' if machine.compile else 'eager'}",
    )
    root = Path(config.paths.root)
    disk = shutil.disk_usage(root)
    _line("disk", f"{root}: {disk.free / GB:.1f} GB free of {disk.total / GB:.1f}, writable")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        _line("port", f"{s.getsockname()[1]} is free (torchrun --standalone finds one by itself)")
    tokenizer = load_tokenizer(config.data.tokenizer)
    text = "Well, résumé: 東京\n"
    if tokenizer.decode(tokenizer.encode(text)) != text:
        raise RunError(f"tokenizer {tokenizer.name} does not give back the text {text!r}")
    _line("tokenizer", f"{tokenizer.name} works, {tokenizer.n_vocab:,} ids")
    key = "a key is configured" if wandb_has_key() else "no key is configured"
    _line("W&B", f"tracker.wandb={config.tracker.wandb.value}, {key}")
    for note in machine.notes:
        _line("note", note)


def _version(package: str) -> str | None:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return "not told by this system"
    kb = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return f"{kb['MemAvailable'] * 1024 / GB:.1f} GB free of {kb['MemTotal'] * 1024 / GB:.1f}"


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        found.append(f"cuda:{i} {card.name} {card.total_memory / GB:.0f} GB")
    return found + ["mps"] * torch.backends.mps.is_available()


def _numbers(machine: Runtime) -> str:
    """Which number formats are fast here."""
    from gpt import runtime
    from gpt.metrics import measure_cpu_peak

    chosen = str(machine.dtype).removeprefix("torch.")
    own = runtime.has_bfloat16(machine.device)
    bfloat16 = "bfloat16 fast" if own else "bfloat16 not in the hardware: slow or absent"
    float16 = "float16 fast" if machine.device.type == "cuda" else f"{DType.float16.value} not here"
    rate = ""
    if machine.device.type == "cpu":
        rate = f" ({measure_cpu_peak(machine.dtype) / 1e9:,.0f} GFLOP/s in products)"
    return f"{bfloat16}, {float16}; this config: {chosen}{rate}"


def _cuda_devices(machine: Runtime) -> int:
    import torch

    return torch.cuda.device_count() if machine.device.type == "cuda" else 1


# --- the trial


def _share_data(config: Config, scratch: Path) -> list[str]:
    """Let the trial see the shards that are ready, by links. Returns settings for where they are
    not and would take a hub: the built-in text, by the same tokenizer."""
    from data.prepare import standing
    from data.sources import HFConfig, dataset_name

    print("\nthis config")
    root, name = Path(config.paths.root), dataset_name(config.data)
    (scratch / "shards").mkdir()
    for folder in sorted((root / "shards").glob("[!.]*")):
        (scratch / "shards" / folder.name).symlink_to(folder.resolve())
    now = standing(config.data, root)
    if now.fingerprint is not None and not now.changed:
        _line("data", f"{name} is ready and used as it is")
        return []
    (scratch / "shards" / name).unlink(missing_ok=True)
    if not isinstance(config.data, HFConfig):  # which may take hours, and a network
        _line("data", f"{name} is not ready: prepared for the trial, and once more by train.py")
        return []
    _line("data", f"{name} is not ready: the trial reads the built-in text, by the same tokenizer")
    return ["data=sotu", f"data.tokenizer={config.data.tokenizer}"]


def _cut(config: Config, world_size: int, scratch: str) -> list[str]:
    """The settings by which a trial differs: fewer and smaller steps, and a place of its own."""
    t, block_size = config.trainer, config.model.block_size
    batch_tokens = t.batch_tokens
    if t.micro_batch_size != "auto":
        batch_tokens = min(batch_tokens, 2 * t.micro_batch_size * block_size * world_size)
    less = "" if batch_tokens == t.batch_tokens else f" (the config: {t.batch_tokens:,})"
    _line("trial", f"{STEPS} steps of {batch_tokens:,} tokens{less} on {world_size} rank(s)")
    return [
        *(f"trainer.max_steps={STEPS}", f"trainer.save_every={SAVED}", "trainer.log_every=1"),
        *(f"trainer.batch_tokens={batch_tokens}", f"trainer.eval_tokens={block_size}"),
        *("trainer.sample_every=null", "trainer.save_minutes=null", "tracker.wandb=disabled"),
        f"paths.root={scratch}",
    ]


@dataclass(slots=True)
class Trial:
    """The same few steps in one go and in two, in processes of their own."""

    folder: Path
    world_size: int
    settings: list[str]

    def compare(self, config: Config) -> bool:
        """Whether weights and moments are equal to the bit; says what is not."""
        name = self.folder.name
        self._run(f"{name}_whole", dies=False)
        self._run(f"{name}_killed", dies=True)
        self._run(f"{name}_killed", dies=False)
        whole, killed = (
            folders.newest_whole(self.checkpoints(f"{name}_{kind}"))[0]
            for kind in ("whole", "killed")
        )
        assert whole is not None and killed is not None
        far = differences(whole, killed)
        ranks = f"{self.world_size} rank" + "s" * (self.world_size > 1)
        _line(
            "killed",
            f"before step {DIES + 1} by kill -9, on {ranks}; went on from step {SAVED}",
        )
        if not far:
            _line("compared", "weights and moments equal those of one go, to the bit")
            return True
        _line("compared", f"{len(far)} tensors are NOT those of one go:")
        for tensor, distance in list(far.items())[:8]:
            _line("", f"{tensor}: {distance}")
        if config.runtime.device != "cpu" and not config.runtime.deterministic:
            _line("", "GPUs add in any order unless runtime.deterministic=true: try that")
        return False

    def checkpoints(self, run: str) -> Path:
        return self.folder.parent / "runs" / run / "checkpoints"

    def report(self) -> dict[str, float]:
        """Memory of the largest process of the last run, in bytes."""
        found = [json.loads(p.read_text()) for p in self.folder.parent.glob("report_*.json")]
        return {key: max(r[key] for r in found) for key in found[0]}

    def _run(self, run: str, dies: bool) -> None:
        """Raises RunError where a process ends otherwise than it should."""
        command = [sys.executable]
        if self.world_size > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={self.world_size}"]
        report = self.folder.parent / "report"
        command += ["-m", "tools.doctor", "--trial", str(report), "dies" if dies else "ends"]
        command += merge_overrides(self.settings, [f"run={run}"])
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            text, _ = process.communicate()
        except BaseException:  # a signal: nothing of ours stays behind
            process.terminate()
            process.wait(30)
            raise
        code = process.returncode
        if code == 0 and not dies:
            return
        if dies and (code == -signal.SIGKILL or (code and self.world_size > 1)):
            return
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            said = errors[0].removeprefix("error: ")
            raise ValueError(said) if code == 2 else RunError(said)
        print("\n".join(lines[-30:]), file=sys.stderr)
        raise RunError(f"the trial ended with exit code {code}, for the reason above")


def _trial(report: Path, dies: bool, argv: list[str]) -> int:
    """In a process of the trial: train, and say how much memory it took."""
    import torch

    from gpt.trainer import Trainer

    if dies:
        _kill_before(Trainer, DIES)
    code = train_main(argv)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = {
        "process": peak * (1 if sys.platform == "darwin" else 1024),
        "device": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    rank = find_ranks().rank
    report.with_name(f"{report.name}_{rank}.json").write_text(json.dumps(sizes))
    return code


def _kill_before(trainer: Any, step: int) -> None:
    """End this process, as the system would for want of memory, before update `step`."""
    inner: Callable[..., Any] = trainer.update

    def update(self: Any) -> Any:
        if self.progress.step == step:
            self.saver.wait()  # a save cut short is another trial: the same bits, from step 0
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self)

    trainer.update = update


def differences(a: Path, b: Path) -> dict[str, str]:
    """Tensors of two checkpoints that are not equal to the bit, and how far they are apart."""
    import torch

    from gpt.checkpoint import load_tensors

    far = {}
    for name in (folders.WEIGHTS, folders.MOMENTS):
        ours, theirs = load_tensors(a / name), load_tensors(b / name)
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in ours or key not in theirs:
                far[key] = "only on one side"
            elif not torch.equal(ours[key], theirs[key]):
                gap = (ours[key].double() - theirs[key].double()).abs()
                size = ours[key].double().abs().max()
                far[key] = f"up to {gap.max():.1e} apart, of values up to {size:.1e}"
    return far


# --- what to expect


def _say_expectations(config: Config, trial: Trial) -> None:
    from gpt.tracker import read_metrics

    print("\nwhat to expect of the run")
    run = f"{trial.folder.name}_whole"
    rows = read_metrics(trial.folder.parent / "runs" / run)
    rate = max(row.get("perf/tokens_per_sec", 0.0) for row in rows)
    t = config.trainer
    if rate:
        seconds = t.max_steps * t.batch_tokens / rate
        long = f"{seconds:,.0f} s" if seconds < 300 else f"{seconds / 60:,.0f} min"
        long = f"{seconds / 86400:,.1f} days" if seconds > 86400 else long
        _line(
            "speed",
            f"about {rate:,.0f} tokens/s on {trial.world_size} rank(s), judged by {STEPS} steps: "
            f"{t.max_steps:,} steps in {long}, evaluation and saving not counted",
        )
    sizes = trial.report()
    device = f", {_size(sizes['device'])} of its GPU" if sizes["device"] else ""
    _line("memory", f"{_size(sizes['process'])} a process{device}")
    folder = folders.steps(trial.checkpoints(run))[-1]
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    most = size * (t.keep_last + 2)  # the best, and the one being written
    free = shutil.disk_usage(config.paths.root).free
    enough = "enough" if most < free else "NOT enough: a save would fail"
    _line(
        "checkpoints",
        f"{_size(size)} each; {t.keep_last} newest, the best and the one being written: "
        f"{_size(most)} of {_size(free)} free, {enough}",
    )


if __name__ == "__main__":
    door(main, "the trial could not be made")
