"""From a command line to a Config, and from any mistake in it to one line.

Shared by the commands that take a config: train.py, data.prepare and their like.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import Config, register, to_config

FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "-m", "--multirun", "-c", "--cfg"),
    *("--resolve", "-p", "--package", "-i", "--info", "-sc", "--shell-completion"),
}


def compose_and_run(command: Callable[[Config, list[str]], int], argv: list[str]) -> int:
    """Compose a Config from overrides and give it, with the overrides, to `command`.

    Returns the command's exit code; in a sweep (-m) the worst of its jobs. Mistakes come out as
    ValueError with a one-line message.
    """
    for argument in argv:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in FLAGS:
            raise ValueError(
                f"{argument} is no option; settings have no dashes; "
                f"write {argument.lstrip('-')}, or see --help"
            )
    codes: list[int] = []

    def task(composed: DictConfig) -> None:
        settings = HydraConfig.get()
        overrides = list(settings.overrides.task)
        if settings.mode == RunMode.MULTIRUN:
            # Two jobs of one name would continue each other.
            name = f"{composed.run or 'sweep'}_{settings.job.num}"
            composed.run = name
            overrides = merge_overrides(overrides, [f"run={name}"])
        codes.append(command(to_config(composed), overrides))

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of several lines and exit 1
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(Path(__file__).parent), config_name="train")(
            task
        )()
    except (HydraException, OmegaConfBaseException) as e:
        raise ValueError(explain(e)) from e
    finally:
        sys.argv = before
    return max(codes, default=0)


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
    root = values.get("paths.root") or os.environ.get("GPT_ROOT") or "artifacts"
    return values.get("run") or None, Path(root.strip("'\""))


def stored_overrides(run: Path) -> list[str]:
    """What an existing run was started with; empty for a new one."""
    path = run / "overrides.yaml"
    if not path.is_file():
        return []
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(loaded, list)
    return [str(item) for item in loaded]


def explain(error: Exception) -> str:
    """One line for what Hydra or OmegaConf found wrong."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and isinstance(cause, Exception):
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ValueError) and str(cause).count(";") >= 2:
            return str(cause)  # one of our own, raised while the config was built
    text = "\n".join(str(cause) for cause in causes)
    key = next(iter(re.findall(r"full_key: (\S+)", text)), None)
    if re.search(r"Key '.*' (is not in struct|not in )|Could not append", text):
        key = key or next(iter(re.findall(r"Could not (?:override|append) '?([^\s'.]+\S*?)'?\.?\s", text)), "?")
        return f"{key} is no setting; nothing was started; {_suggest(key)}"
    if match := re.search(r"Could not find '([^']+)'|In '[^']*': Could not find '([^']+)'", text):
        group, _, option = (match[1] or match[2]).partition("/")
        folder = Path(__file__).parent / group
        options = sorted(p.stem for p in folder.glob("*.yaml") if p.stem != "common")
        if options:
            return f"{group}={option} is no option; nothing was started; there are: {', '.join(options)}"
    if match := re.search(r"[Cc]ould not override '?([^\s']+?)'?\.\s*\n?No match in the defaults list", text):
        return f"{match[1]} is no setting; nothing was started; {_suggest(match[1])}"
    if match := re.search(r"(Value '.*?'.*?could not be converted to .*|Invalid value '.*?'.*|Cannot convert .*|Incompatible value .*|Value .* is not a supported.*|.*is not Optional.*)", text):
        return f"{key or 'a setting'} has a wrong value ({_line(match[1])}); nothing was started; correct it"
    if "mismatched input" in text or "extraneous input" in text or "token recognition" in text:
        bad = next(iter(re.findall(r"Error parsing override '(.*?)'\n", text)), "an override")
        return (
            f"{bad} can't be parsed; nothing was started; quote values that hold = , ( ) or spaces "
            "twice, as in 'data.path=\"my, file.txt\"'"
        )
    if "missing" in text.lower() and (missing := re.findall(r"Missing mandatory value: (\S+)", text)):
        return f"{missing[0]} is not set; this command needs it; add {missing[0]}=…"
    return f"the settings can't be composed ({_line(text)}); nothing was started; see --help"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _suggest(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1)
    return f"did you mean {near[0]}? (python train.py --cfg job lists all)" if near else (
        "python train.py --cfg job lists all"
    )


def known_keys() -> list[str]:
    """Every dotted key of every group's schema."""
    from dataclasses import fields, is_dataclass

    from conf.schema import GROUPS
    from gpt.trainer import TrainerConfig

    groups = {**GROUPS, "trainer": {"trainer": TrainerConfig}}
    keys = [f.name for f in fields(Config)] + ["paths.root"]
    for group, options in groups.items():
        for node in options.values():
            assert is_dataclass(node)
            keys += [f"{group}.{f.name}" for f in fields(node)]
    return sorted(set(keys))
