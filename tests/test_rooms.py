"""The rules between rooms that import-linter cannot express, and that every room is under a rule at all."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "modelworks"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imported_names(source: Path) -> set[str]:
    """Modules imported and dotted names used in a file, such as `torch.distributed`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


def test_only_parallel_speaks_to_other_ranks() -> None:
    offenders = [
        str(source.relative_to(PACKAGE))
        for source in sorted(PACKAGE.rglob("*.py"))
        if source.relative_to(PACKAGE).parts[0] != "parallel"
        and any(f"{name}.".startswith("torch.distributed.") for name in imported_names(source))
    ]
    assert offenders == []


def test_every_room_is_under_a_rule() -> None:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    named = {word for section in rules.sections() for value in rules[section].values() for word in value.split()}
    assert [room for room in ROOMS if f"modelworks.{room}" not in named] == []


@pytest.mark.parametrize(
    "name", ["modelworks.config.load", "modelworks.layout", "modelworks.plan", "modelworks.records"]
)
def test_plain_values_import_no_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
