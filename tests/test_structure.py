"""The import directions and the few places where a package or a variable may be named."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENTRY_POINTS = {"train.py", "sample.py"} | {
    f"data/{name}.py" for name in ("prepare", "inspect", "train_tokenizer")
}
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.py",
        "gpt/*.py",
        "data/*.py",
        "conf/*.py",
        "tools/**/*.py",
        "benchmarks/*.py",
    )
    for path in ROOT.glob(pattern)
)


def imports(path: str) -> Iterator[str]:
    """Every module a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


def top_level(path: str) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def is_entry(path: str) -> bool:
    return path in ENTRY_POINTS or path.startswith(("tools/", "benchmarks/"))


def test_the_walk_over_sources_finds_them() -> None:
    assert {"train.py", "gpt/model.py", "data/windows.py", "conf/schema.py"} <= set(SOURCES)


@pytest.mark.parametrize("path", SOURCES)
def test_imports_point_one_way(path: str) -> None:
    """Entry points → conf → {gpt, data}; gpt and data know neither each other nor conf."""
    names, folder = top_level(path), path.partition("/")[0]
    if folder == "gpt":
        assert not names & {"data", "conf", "tools", "train", "sample"}
    elif folder == "data" and not is_entry(path):
        assert not names & {"gpt", "conf", "tools", "train", "sample"}
    elif folder == "data":
        assert not names & {"gpt", "tools", "train", "sample"}
    elif folder == "conf":
        assert not names & {"tools", "train", "sample"}


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("tiktoken", ["data/tokenizer.py"]),
        ("datasets", ["data/sources.py"]),
        ("wandb", ["gpt/tracker.py"]),
        ("safetensors", ["gpt/checkpoint.py"]),
    ],
)
def test_a_package_is_imported_in_one_place(package: str, home: list[str]) -> None:
    users = [p for p in SOURCES if package in top_level(p) and not p.startswith("benchmarks/")]
    assert users == home


def test_hydra_stays_in_conf_and_entry_points() -> None:
    users = [p for p in SOURCES if top_level(p) & {"hydra", "omegaconf"}]
    assert users
    assert [p for p in users if not is_entry(p) and not p.startswith("conf/")] == []


def test_rank_variables_are_read_in_one_place() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    users = []
    for path in SOURCES:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        if strings & set(names):
            users.append(path)
    assert users == ["gpt/ranks.py"]


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_can_unpickle(path: str) -> None:
    """No pickle is read or written, in any of its disguises."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not top_level(path) & {"pickle", "dill", "joblib", "cloudpickle"}
    for call in ("torch.load(", "torch.save(", "allow_pickle=True", "_object_list("):
        assert call not in text


def test_the_readme_has_the_two_commands_of_ci() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (
        "pip install -r requirements.txt && python train.py",
        "pip install -r requirements-test.txt && pytest",
    ):
        assert command in readme
        for part in command.split(" && "):
            assert part in ci


def test_no_text_has_a_place_left_to_fill() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [p.name for p in texts if "@@" in p.read_text(encoding="utf-8")] == []


def test_no_tracked_file_is_an_artifact() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tracked = listed.stdout.splitlines() if listed.returncode == 0 else []
    assert [p for p in tracked if p.startswith("artifacts/") or p.endswith((".pt", ".bin"))] == []
