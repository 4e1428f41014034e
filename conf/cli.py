"""From a command line to a Config, and from any mistake in it to one line.

Shared by the commands that take a config: train.py, data.prepare and their like.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.door import ASKS, RunError
from conf.schema import GROUPS, Config, PathsConfig, register, to_config
from gpt import folders, stopping
from gpt.config import TrainerConfig

CONF = Path(__file__).parent
_NUMBER = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?|true|false|nan|[+-]?inf", re.IGNORECASE)
VALUED = {"-c", "--cfg", "-p", "--package", "-i", "--info", "-sc", "--shell-completion"}
FLAGS = ASKS | {"-m", "--multirun", "--resolve", "-p", "--package"}


def joined(argv: list[str]) -> list[str]:
    """Flags with their values in one piece: --cfg job → --cfg=job."""
    out: list[str] = []
    for argument in argv:
        if out and out[-1] in VALUED and not argument.startswith("-"):
            out[-1] += f"={argument}"
        else:
            out.append(argument)
    return out


def compose_and_run(command: Callable[[Config, list[str]], int], argv: list[str]) -> int:
    """Compose a Config from overrides and give it, with the overrides, to `command`.

    Returns the command's exit code; in a sweep (-m) the worst of its jobs, of which a signal starts
    no more. Mistakes come out as ValueError with a one-line message.
    """
    argv = joined(argv)
    for argument in argv:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in FLAGS:
            raise ValueError(
                f"{argument} is no option; settings have no dashes; "
                f"write {argument.lstrip('-')}, or see --help"
            )
        if not argument.startswith(("-", "~")) and "=" not in argument:
            raise ValueError(
                f"{argument} is no setting; settings are key=value, with no spaces around the =; "
                "see --help"
            )
    jobs: list[tuple[DictConfig, list[str]]] = []
    sweep: str | None = None  # the name of one that was given none

    def collect(composed: DictConfig) -> None:
        nonlocal sweep
        settings = HydraConfig.get()
        overrides = list(settings.overrides.task)
        if settings.mode == RunMode.MULTIRUN:
            # Two jobs of one name would continue each other.
            if not composed.run:
                sweep = sweep or folders.new_name(Path(composed.paths.root), "_0")
            composed.run = f"{composed.run or sweep}_{settings.job.num}"
            overrides = merge_overrides(overrides, [f"run={composed.run}"])
        jobs.append((composed, overrides))

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of several lines and exit 1
    before = sys.argv
    sys.argv = [before[0], *map(_as_text, argv)]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(collect)()
        configs = [(to_config(composed), overrides) for composed, overrides in jobs]
    except (HydraException, OmegaConfBaseException, ValueError, AttributeError) as e:
        raise ValueError(explain(e)) from e
    finally:
        sys.argv = before
    if len(configs) == 1:
        return command(*configs[0])
    worst = 0
    for config in configs:
        worst = max(worst, _job(command, *config))
        if worst >= 128:
            break
    return worst


def _job(command: Callable[[Config, list[str]], int], config: Config, overrides: list[str]) -> int:
    """One job of a sweep: what goes wrong with it is said, and leaves the others alone."""
    try:
        return command(config, overrides)
    except (ValueError, OSError, RunError) as e:
        stopping.check()
        print(f"error: {config.run}: {' '.join(str(e).split())}", file=sys.stderr, flush=True)
        return 1 if isinstance(e, RunError) else 2
    except Exception:
        stopping.check()
        traceback.print_exc()
        print(f"error: {config.run}: see the traceback above", file=sys.stderr, flush=True)
        return 1


def _as_text(argument: str) -> str:
    """Quote what Hydra would take for a number though the setting is a text: run=1_0, run=1e3."""
    key, _, value = argument.partition("=")
    group, _, name = key.rpartition(".")
    nodes = [*_schemas().get(group, {}).values()] if group else [Config]
    is_text = any(f.name == name and "str" in str(f.type) for node in nodes for f in fields(node))
    return f"{key}='{value}'" if is_text and _NUMBER.fullmatch(value) else argument


def merge_overrides(*lists: list[str]) -> list[str]:
    """One list in which a later override of the same key replaces the earlier one."""
    merged: dict[str, str] = {}
    for override in (item for part in lists for item in part):
        key = override.partition("=")[0].lstrip("+~")
        merged.pop(key, None)
        merged[key] = override
    return list(merged.values())


def run_of(argv: list[str]) -> tuple[str | None, Path]:
    """(run, paths.root) as the command line will have them, read before anything is composed."""
    values = dict(a.split("=", 1) for a in argv if "=" in a)
    root = values.get("paths.root") or str(folders.default_root())
    return values.get("run") or None, Path(root.strip("'\""))


def init_from_of(overrides: list[str]) -> str | None:
    """The weights that overrides start from. ValueError for several: each would bring its shape."""
    for override in overrides:
        if override.startswith("init_from="):
            try:
                parsed = OverridesParser.create().parse_override(_as_text(override))
            except HydraException as e:
                raise ValueError(explain(e)) from e
            if parsed.is_sweep_override():
                raise ValueError(
                    f"{override} names several weights; they bring their shapes along, and a sweep "
                    "has one; start a sweep for each, or quote a path that has a comma twice"
                )
            value = parsed.value()
            return None if value is None else str(value)
    return None


def stored_overrides(run: Path) -> list[str]:
    """What an existing run was started with; empty for a new one."""
    path = run / "overrides.yaml"
    if not path.is_file():
        found, _ = folders.newest_whole(run / "checkpoints")
        state = folders.read_state(found) if found else None
        return [str(item) for item in state["overrides"]] if state else []
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OSError, UnicodeDecodeError):
        loaded = None
    if not isinstance(loaded, list):
        raise ValueError(
            f"{path} is damaged; the run's settings are unknown; delete it, and they are taken "
            "from the newest checkpoint"
        )
    return [str(item) for item in loaded]


def explain(error: Exception) -> str:
    """One line for what Hydra or OmegaConf found wrong."""
    causes: list[Exception] = [error]
    while isinstance(cause := causes[-1].__cause__ or causes[-1].__context__, Exception):
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ValueError) and str(cause).count(";") >= 2:
            return str(cause)  # one of our own, raised while the config was built
    text = "\n".join(str(cause) for cause in causes)

    def find(pattern: str) -> re.Match[str] | None:
        return re.search(pattern, text)

    key = match[1] if (match := find(r"full_key: (\S+)")) else None
    if match := find(r"Could not find '([^'/]+)/([^']+)'"):
        group, option = match.groups()
        names = sorted(p.stem for p in (CONF / group).glob("*.yaml") if p.stem != "common")
        return f"{group}={option} is no option; nothing was started; choose {', '.join(names)}"
    if match := find(r"Could not (?:override|append) '([^']+?)'\.?"):
        return _unknown(key or match[1])
    if key and find(r"Key '.*' (?:is not in|not in)"):
        return _unknown(key)
    if match := find(r"'(\w+)' object has no attribute '(\w+)'"):  # +key=…, which slots refuse
        return _unknown(_group(match[1]) + match[2])
    if find(r"mismatched input|extraneous input|token recognition|no viable alternative"):
        return (
            "a setting can't be parsed; nothing was started; quote values that hold "
            "= , ( ) [ ] { } or quotes twice, as in \"data.path='my text, [1].txt'\""
        )
    if match := find(r"Error parsing override '(.*?)'\n|at input '(.*?)'"):
        return (
            f"{match[1] or match[2]} can't be parsed; nothing was started; quote values that hold "
            "= , ( ) or spaces twice, as in 'data.path=\"my, file.txt\"'"
        )
    if match := find(r"[Mm]issing mandatory value: (\S+)"):
        return f"{key or match[1]} is not set; this choice needs it; add {key or match[1]}=…"
    if match := find(r"(Value '.*|Invalid value .*|Invalid type .*|.*not Optional.*)"):
        return f"{key or 'a setting'}: {_line(match[1])}; nothing was started; correct the value"
    return f"the settings can't be composed ({_line(text)}); nothing was started; see --help"


def _line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")


def _schemas() -> dict[str, dict[str, Any]]:
    return {**GROUPS, "trainer": {"trainer": TrainerConfig}, "paths": {"paths": PathsConfig}}


def _group(class_name: str) -> str:
    """ "trainer." for TrainerConfig: where a class's fields stand."""
    for group, options in _schemas().items():
        if class_name in [node.__name__ for node in options.values()]:
            return f"{group}."
    return ""


def _unknown(key: str) -> str:
    group, _, name = key.rpartition(".")
    places: dict[str, list[str]] = {}  # last part of a key → the whole key, and who has it
    for g, options in _schemas().items():
        for option, node in options.items():
            for field in fields(node):
                places.setdefault(field.name, []).append(f"{g}.{field.name}")
                if f"{g}.{field.name}" == key:
                    return f"{key} belongs to {g}={option}; nothing was started; choose that too"
    whole = sorted({k for keys in places.values() for k in keys} | set(Config.__slots__))
    names = difflib.get_close_matches(name, places, n=1) if group else []
    near = sorted(places[names[0]], key=lambda k: not k.startswith(f"{group}.")) if names else []
    near = near or difflib.get_close_matches(key, whole, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key} is no setting; nothing was started; {hint}python train.py --cfg job lists all"
