"""The package's layers: a module imports from the lines above its own, or from its own folder."""

import ast
import sys
from pathlib import Path

import pytest

import shardtrain

ROOT = Path(shardtrain.__file__).parent
LAYERS = (
    ("errors",),
    ("sharding",),
    ("strategies",),
    ("ops",),
    ("models", "data", "optim"),
    ("tasks",),
    ("train",),
    ("checkpoint", "plan", "verify"),
    ("interop",),
    ("config",),
    ("run",),
    ("training",),
    ("commands", "launch", "report", "doctor", "bench"),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
IDS = [str(path.relative_to(ROOT)) for path in MODULES]


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module: its folder, or for a file the word before the underscore."""
    first = parts[0].removesuffix(".py")
    return "cli" if first == "__main__" else first.split("_")[0]


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            name = node.module or ""
            if name == "shardtrain":
                found += [(f"shardtrain.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((name, node.lineno))
    return found


def within(name: str) -> tuple[str, ...] | None:
    """The parts of a module name below the package, None for other packages."""
    head, *parts = name.split(".")
    return tuple(parts) if head == "shardtrain" and parts else None


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_imports_go_down(path: Path) -> None:
    own = layer_of(path.relative_to(ROOT).parts)
    wrong = []
    for name, line in imports(path):
        parts = within(name)
        if parts is None or parts[0].startswith("__"):
            continue
        other = layer_of(parts)
        if other != own and RANK[other] >= RANK[own]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/config.py")), ids=lambda p: p.parent.name)
def test_sections_import_only_pydantic_and_errors(path: Path) -> None:
    names = {name.split(".")[0] for name, _ in imports(path) if name != "shardtrain.errors"}
    assert names <= {"pydantic", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_folders_hold_only_a_docstring(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [type(node) for node in body] == [ast.Expr]


def test_private_parts_of_jax_are_not_used() -> None:
    used = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for name, line in imports(path)
        if name.startswith("jax._src")
    ]
    # The store of a run's processes has no public face in jax, nor have compiling elsewhere and a
    # callback that each device makes by itself.
    places = {place.split(":")[0] for place in used}
    assert places == {"plan/elsewhere.py", "sharding/disk.py", "sharding/processes.py"}


def test_only_three_layers_use_shard_map() -> None:
    users = {
        layer_of(path.relative_to(ROOT).parts)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "shard_map")
        or (isinstance(node, ast.Name) and node.id == "shard_map")
    }
    assert users <= {"sharding", "strategies", "ops"}


def test_there_are_no_leftover_modules() -> None:
    assert [name for name in IDS if Path(name).stem in ("utils", "misc", "common")] == []
