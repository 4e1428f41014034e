"""The typed shape of every config, assembled from the parts that their owners define.

YAML holds values, dataclasses hold shape: a misspelt key or a wrong type stops a run at the door.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from data.sources import (
    DataConfig,
    HFConfig,
    MixConfig,
    ShakespeareConfig,
    SotuConfig,
    TextConfig,
    TokensConfig,
)
from gpt.config import AdamWConfig, GPTConfig, RuntimeConfig, TrainerConfig
from gpt.schedule import ConstantConfig, CosineConfig, ScheduleConfig, WSDConfig
from gpt.tracker import TrackerConfig


@dataclass(kw_only=True, slots=True)
class PathsConfig:
    root: str


@dataclass(kw_only=True, slots=True)
class Config:
    """A run. `run`: its name, null for a new one. `init_from`: weights to start from."""

    run: str | None
    init_from: str | None
    model: GPTConfig
    data: DataConfig
    optimizer: AdamWConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    runtime: RuntimeConfig
    tracker: TrackerConfig
    paths: PathsConfig

    def __post_init__(self) -> None:
        if self.run is not None and not re.fullmatch(r"\w[\w.-]*", self.run):
            raise ValueError(
                f"run={self.run!r} can't be a folder's name; a run lives in a folder of its name; "
                "use letters, digits, - . and _"
            )
        self.trainer.check_batch(self.model.block_size, world_size=1)


GROUPS: dict[str, dict[str, Any]] = {
    "model": {"model": GPTConfig},
    "data": {
        "sotu": SotuConfig,
        "shakespeare": ShakespeareConfig,
        "text": TextConfig,
        "hf": HFConfig,
        "tokens": TokensConfig,
        "mix": MixConfig,
    },
    "optimizer": {"adamw": AdamWConfig},
    "schedule": {"cosine": CosineConfig, "wsd": WSDConfig, "constant": ConstantConfig},
    "runtime": {"runtime": RuntimeConfig},
    "tracker": {"tracker": TrackerConfig},
}


def register() -> None:
    """Make the schemas known to Hydra under base_<option>."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, options in GROUPS.items():
        for option, node in options.items():
            store.store(group=group, name=f"base_{option}", node=node)


def to_config(composed: DictConfig) -> Config:
    """Hydra's composed config → plain dataclasses. Raises ValueError for values out of range,
    OmegaConf's errors for missing ones."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    for section, values in to_plain(config).items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(
                    f"{section}.{key}={value} is no finite number; checkpoints keep the settings "
                    "as JSON, which has none such; give a number, or null where a key may be off"
                )
    return config


def to_plain(config: Any) -> dict[str, Any]:
    """A config dataclass → nested dicts of strings, numbers, booleans and None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.value if isinstance(value, Enum) else value

    out: dict[str, Any] = plain(asdict(config))
    return out
