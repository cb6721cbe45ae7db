"""Flower is imported by the modules fedrema.deploy.flower_* only."""

import ast
from pathlib import Path

import fedrema

PACKAGE = Path(fedrema.__file__).parent


def imported(file):
    """Return the names of the top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_only_the_flower_modules_import_flower():
    importers = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if "flwr" in imported(file)}
    assert importers
    assert {(file.parent.name, file.name.partition("_")[0]) for file in importers} == {("deploy", "flower")}
