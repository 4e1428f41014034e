"""Train a GPT-2: python train.py [group=option] [key=value]

Composes the config, prepares data where shards are missing or stale, trains, and ends with a
sample. With no arguments: the quickstart. `run=NAME` continues a run.
"""

from __future__ import annotations

from conf.cli import (
    compose_and_run,
    init_from_of,
    joined,
    merge_overrides,
    run_of,
    stored_overrides,
)
from conf.door import door
from conf.schema import Config
from gpt.ranks import find_ranks
from gpt.stopping import held_back

SWEEP = {"-m", "--multirun"}


def train(config: Config, overrides: list[str]) -> int:
    """A whole run, or the rest of one. Returns the exit code."""
    with held_back():  # torch is loaded here, after the settings were found good
        from conf.run import train

    return train(config, overrides)


def arguments(argv: list[str]) -> list[str]:
    """The command line, after what the run it names was started with, and the shape of the
    weights it starts from."""
    argv = joined(argv)
    run, root = run_of(argv)
    swept = SWEEP & set(argv)  # its jobs have names of their own
    stored = stored_overrides(root / "runs" / run) if run and not swept else []
    given = merge_overrides(stored, [a for a in argv if not a.startswith("-")])
    init_from = init_from_of(given)
    if init_from and not stored:
        with held_back():
            from gpt.checkpoint import shape_overrides
            from gpt.folders import find_weights

        given = merge_overrides(shape_overrides(find_weights(init_from, root)), given)
    return [a for a in argv if a.startswith("-")] + given


def main(argv: list[str]) -> int:
    if SWEEP & set(argv) and find_ranks().world_size > 1:
        raise ValueError(
            "a sweep (-m) can't run under torchrun; its jobs would share the ranks; start one "
            "torchrun a job"
        )
    return compose_and_run(train, arguments(argv))


if __name__ == "__main__":
    door(main, "the run can't go on without it")
