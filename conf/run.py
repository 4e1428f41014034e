"""From a Config to a run: its folder, data, weights and trainer, and what is said about it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from conf.door import RunError, memory_told
from conf.say import announce, report, say_where
from conf.schema import Config, to_plain
from data.lock import lock
from data.prepare import prepare, standing
from data.shards import Manifest, load_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from data.windows import Windows
from gpt import checkpoint, distributed, folders, runtime
from gpt.autobatch import find_micro_batch_size
from gpt.bad_steps import Progress, StepError
from gpt.config import Parallel
from gpt.generate import generate
from gpt.loss import NextTokenLoss
from gpt.model import GPT
from gpt.ranks import Ranks, find_ranks
from gpt.tracker import Tracker
from gpt.trainer import Trainer

# What must stay on resume, of the sections that are not science as a whole. The data itself is
# compared by its fingerprint.
SCIENCE = {
    "trainer": ["seed", "batch_tokens", "micro_batch_size", "grad_clip"],
    "data": ["stride", "document_mask"],
}
SAMPLE_TOKENS = 128
OTHER_TEXT = "going on would train on other text; restore the data, or start a new run"


def train(config: Config, overrides: list[str]) -> int:
    """A whole run, or the rest of one. Returns the exit code."""
    ranks = find_ranks()
    machine = runtime.resolve(config.runtime, ranks.local_rank)
    config.trainer.check_batch(config.model.block_size, ranks.world_size)
    distributed.start(ranks, machine)
    with Tracker(config.tracker, ranks.is_main) as tracker, contextlib.ExitStack() as around:
        code = _train(config, overrides, machine, ranks, tracker, around)
    distributed.barrier(ranks)  # nobody leaves while another still needs it
    return code


def _train(
    config: Config,
    overrides: list[str],
    machine: runtime.Runtime,
    ranks: Ranks,
    tracker: Tracker,
    around: contextlib.ExitStack,
) -> int:
    root = Path(config.paths.root)

    name = config.run or distributed.from_main(folders.new_name(root), ranks)
    folder = root / "runs" / name
    if locked := ranks.is_main and folder.is_dir():
        around.enter_context(_lock(folder))
        folders.recover(folder / "checkpoints")
    distributed.barrier(ranks)
    continue_with = f"python train.py run={name}" + _root_override(overrides)
    found, complaints = _newest(folder / "checkpoints", ranks)
    state = folders.read_state(found) if found else None
    for complaint in complaints:
        tracker.say(f"warning: {complaint}; going back to {found}")
    if state is not None:
        _check_settings(config, state)
        finished = state["step"] >= config.trainer.max_steps and not state.get("unevaluated")
        if finished and to_plain(config)["data"] == state["config"]["data"]:
            return _nothing_left(tracker, state, name, continue_with)

    source = None  # a run that goes on has weights of its own: its source may be gone by now
    if config.init_from and found is None:
        source = folders.find_weights(config.init_from, root)
    shards = Path(distributed.from_main(_prepare(config, root, tracker, ranks, state), ranks))
    manifest = load_manifest(shards)
    if state is not None and state["data_fingerprint"] != manifest.fingerprint:
        raise ValueError(
            f"the data of run {name} was {state['data_fingerprint'][:12]} and {shards} is "
            f"{manifest.fingerprint[:12]}; {OTHER_TEXT}"
        )
    if state is not None and finished:  # with other data settings, which turned out the same data
        return _nothing_left(tracker, state, name, continue_with)
    config.model.vocab_size = _vocab_size(config, manifest)
    train_windows, val_windows = _open(config, shards, manifest)
    around.enter_context(memory_told(lambda: _too_much(config, machine)))
    model = _build(config, found or source, manifest)
    if config.trainer.micro_batch_size == "auto":
        if config.runtime.parallel == Parallel.fsdp and not state:
            raise ValueError(
                "trainer.micro_batch_size=auto can't be tried before a model is sharded "
                "(runtime.parallel=fsdp); how much fits is unknown; give a number"
            )
        loss_of = NextTokenLoss(model, manifest.eot if config.data.document_mask else None)
        config.trainer.micro_batch_size = (
            state["config"]["trainer"]["micro_batch_size"]
            if state
            else find_micro_batch_size(loss_of, config.trainer.batch_tokens, machine, ranks)
        )
        config.trainer.check_batch(config.model.block_size, ranks.world_size)
        tracker.say(f"trainer.micro_batch_size=auto: {config.trainer.micro_batch_size}")

    if ranks.is_main:
        if not locked:
            folder = _claim(folder, config.run is not None)
            around.enter_context(_lock(folder))
        _create(folder, config, overrides)
    name = distributed.from_main(folder.name, ranks)
    folder = root / "runs" / name
    continue_with = f"python train.py run={name}" + _root_override(overrides)
    tracker.open(
        folder,
        to_plain(config),
        state["tracker_run_id"] if state else None,
        state["step"] if state else 0,
    )
    announce(
        tracker, config, model, machine, ranks, manifest, name, state is not None, continue_with
    )
    trainer = Trainer(
        model=model,
        train=train_windows,
        val=val_windows,
        token_bytes=torch.from_numpy(_token_bytes(shards)),
        config=config.trainer,
        optimizer=config.optimizer,
        schedule=config.schedule,
        machine=machine,
        ranks=ranks,
        tracker=tracker,
        checkpoints=folder / "checkpoints",
        state={
            "config": to_plain(config),
            "overrides": overrides,
            "data_fingerprint": manifest.fingerprint,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "git_commit": _git_commit(),
        },
        eot=manifest.eot,
        document_mask=config.data.document_mask,
        tokenizer=shards / "tokenizer",
        sample=_sampler(config, shards, manifest, ranks, tracker),
        progress=Progress.of(state) if state else Progress(),
    )
    if state is not None and found is not None:
        checkpoint.load_moments(found, model, trainer.optimizer)
        if state["loss_scaler"]:  # none, if it was saved under another number format
            trainer.scaler.load_state_dict(state["loss_scaler"])
        say_where(tracker, config, state)
    try:
        stopped_by = trainer.run()
    except StepError as e:
        tracker.close(exit_code=1)  # first, so that the error is the last thing seen
        raise RunError(
            f"{e}; going on would ruin the weights, so the run has stopped; last good checkpoint: "
            f"{trainer.newest()}; lower optimizer.lr, or look at the windows named above with "
            f"python -m data.inspect {shards} --window N"
        ) from e
    report(tracker, trainer, folder, continue_with, stopped_by)
    return 128 + stopped_by if stopped_by else 0


# --- before


def _newest(checkpoints: Path, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint by what the main rank sees, so that all continue the same one."""
    found, complaints = folders.newest_whole(checkpoints) if ranks.is_main else (None, [])
    name = distributed.from_main(found.name if found else None, ranks)
    if name is None:
        return None, []
    if not ranks.is_main:
        folders.verify(checkpoints / name)
    return checkpoints / name, complaints


def _nothing_left(tracker: Tracker, state: dict[str, Any], name: str, continue_with: str) -> int:
    tracker.say(
        f"nothing left to do: run {name} has finished its {state['step']} steps "
        f"(go on with {continue_with} trainer.max_steps={2 * state['step']})"
    )
    return 0


def _prepare(
    config: Config, root: Path, tracker: Tracker, ranks: Ranks, state: dict[str, Any] | None
) -> str | None:
    """The main rank prepares; the others are told where."""
    if not ranks.is_main:
        return None
    if state is not None:  # preparing would replace the shards that the run was trained on
        now = standing(config.data, root)
        if now.surely and now.fingerprint == state["data_fingerprint"]:
            raise ValueError(
                f"the data of run {config.run} has changed: {now.changed}; {OTHER_TEXT}"
            )
    shards = prepare(config.data, root, tracker.say, tracker.live if tracker.has_terminal else None)
    tracker.pause()
    return str(shards)


def _lock(run: Path) -> contextlib.AbstractContextManager[None]:
    """One process (or job) at a time trains a run."""

    def busy() -> None:
        raise ValueError(
            f"run {run.name} is being trained by another process; two would write over each "
            "other; wait for it, stop it, or choose another run=NAME"
        )

    return lock(run / ".lock", busy)


def _too_much(config: Config, machine: runtime.Runtime) -> str:
    return (
        f"{machine.device} ran out of memory with micro-batches of "
        f"{config.trainer.micro_batch_size} windows; the run can't go on there; start it with "
        "a smaller trainer.micro_batch_size (or auto), runtime.activation_checkpointing=true, "
        "or, over several devices, runtime.parallel=fsdp"
    )


def _claim(folder: Path, named: bool) -> Path:
    """Make the folder of a new run, which another start may have made since it was looked for."""
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if named:
                raise ValueError(
                    f"run {folder.name} was begun by another process just now; two would write "
                    "over each other; wait for it, stop it, or choose another run=NAME"
                ) from None
            folder = folder.with_name(folders.new_name(folder.parent.parent))


def _root_override(overrides: list[str]) -> str:
    return "".join(f" {item}" for item in overrides if item.startswith("paths.root="))


def _check_settings(config: Config, state: dict[str, Any]) -> None:
    """What makes a run the run it is must not change on the way."""
    old, new = state["config"], to_plain(config)
    if new["model"]["vocab_size"] is None:
        new["model"]["vocab_size"] = old["model"]["vocab_size"]
    if new["trainer"]["micro_batch_size"] == "auto":
        new["trainer"]["micro_batch_size"] = old["trainer"]["micro_batch_size"]
    differ = []
    for section in ("model", "optimizer", "schedule", "trainer", "data"):
        keys = SCIENCE.get(section) or sorted({*old[section], *new[section]})
        for key in keys:
            before, now = old[section].get(key), new[section].get(key)
            if before != now:
                differ.append(f"{section}.{key} was {before} and is {now}")
    if differ:
        raise ValueError(
            f"run {config.run} was started with other settings ({', '.join(differ)}); it would not "
            "be the same run; leave them, or start a new run with another run=NAME (init_from "
            "takes its weights along)"
        )


def _vocab_size(config: Config, manifest: Manifest) -> int:
    wanted = config.model.vocab_size
    if wanted is not None and wanted < manifest.n_vocab:
        raise ValueError(
            f"model.vocab_size={wanted} is below the {manifest.n_vocab} ids of tokenizer "
            f"{manifest.tokenizer_name}; some tokens would have no embedding; leave it null"
        )
    return wanted or manifest.n_vocab


def _open(config: Config, shards: Path, manifest: Manifest) -> tuple[Windows, Windows | None]:
    size, stride, seed = config.model.block_size, config.data.stride, config.trainer.seed
    train_windows = Windows(shards, "train", size, stride, seed)
    if not config.trainer.eval_every or not manifest.val_tokens:
        return train_windows, None
    return train_windows, Windows(shards, "val", size, size, seed)


def _build(config: Config, source: Path | None, manifest: Manifest) -> GPT:
    """A new model, or one with the weights of `source` and this config's dropout and length."""
    attention = config.runtime.attention.value
    if source is None:
        model = GPT(config.model, attention)
        model.init_weights(runtime.seed_of("init", config.trainer.seed))
        return model
    model = checkpoint.load_model(source, attention=attention)
    have, want = model.config, config.model
    differ = [
        f"{key} {getattr(have, key)} there, {getattr(want, key)} here"
        for key in ("n_layer", "n_head", "n_embd", "vocab_size")
        if getattr(have, key) != getattr(want, key)
    ]
    if differ:
        raise ValueError(
            f"the weights of {source} are of another shape ({', '.join(differ)}); they can't be "
            "loaded into this model; leave out the model settings, or choose the matching model"
        )
    if (source / "vocab.json").exists() or (source / "tokenizer.json").exists():
        theirs = load_tokenizer(source)
        if theirs.sha256 != manifest.tokenizer_sha256:
            raise ValueError(
                f"the weights of {source} were trained with another tokenizer ({theirs.name}) than "
                f"the data ({manifest.tokenizer_name}); every id would mean another token; "
                f"prepare the data with data.tokenizer={source}"
            )
    if have.block_size != want.block_size:
        model.crop_block_size(want.block_size)
    rebuilt = GPT(want, attention)  # for the dropout, which is a property of the run
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt


def _create(folder: Path, config: Config, overrides: list[str]) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    for name, value in (("overrides", overrides), ("config", to_plain(config))):
        temporary = folder / f".{name}.yaml"
        OmegaConf.save(OmegaConf.create(value), temporary)
        os.replace(temporary, folder / f"{name}.yaml")


def _token_bytes(shards: Path) -> Any:
    import numpy as np

    return np.load(shards / "token_bytes.npy", allow_pickle=False).astype(np.int64)


def _sampler(
    config: Config, shards: Path, manifest: Manifest, ranks: Ranks, tracker: Tracker
) -> Any:
    if config.runtime.parallel == Parallel.fsdp and ranks.world_size > 1:
        tracker.say("note: no samples are shown: no rank holds the whole model (use sample.py)")
        return None
    seed = config.trainer.seed
    try:
        tokenizer: Tokenizer = load_tokenizer(shards / "tokenizer")
    except ValueError as e:
        tracker.say(f"no samples will be shown: {e}")
        return None

    def sample(model: GPT) -> str:
        start = torch.full((1, 1), manifest.eot, device=model.wte.weight.device)
        ids = generate(
            model,
            start,
            SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            seed=seed,
            eot=manifest.eot,
            n_vocab=manifest.n_vocab,
        )
        out = [i for i in ids[0].tolist() if i != manifest.eot]
        return tokenizer.decode(out)

    return sample


def _git_commit() -> str | None:
    """The checkout's commit, read from its files: no process is started for it."""
    git = Path(__file__).parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        return (git / head[5:]).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return None
