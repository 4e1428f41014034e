"""Which of several processes this is. Rank variables are read only here, and without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def find_ranks() -> Ranks:
    """This process's place, as torchrun set it; alone where nothing is set."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Ranks()
    return Ranks(int(env["RANK"]), int(env.get("LOCAL_RANK", env["RANK"])), int(env["WORLD_SIZE"]))


def leave(ranks: Ranks, code: int) -> NoReturn:
    """End the process with this code.

    With gloo, interpreter shutdown races against its threads and aborts now and then, after all
    work is done; and where another rank has died, it waits for it. So ranks leave without it.
    """
    if ranks.world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
