"""docs/tasks.md agrees with the tasks and metrics in the code."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fedrema.tasks import LOSSES, METRICS, TASKS

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
TOOLS = PAGE.parents[1] / "tools"


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(TOOLS))  # the script imports modules of its folder
    try:
        specification = importlib.util.spec_from_file_location("make_tasks", TOOLS / "make_tasks.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize("table", ["tasks", "metrics"])
def test_a_table_agrees_with_the_code(table, generator):
    shown = re.search(rf"<!-- {table} -->\n(.*?)<!-- /{table} -->", PAGE.read_text(), re.S)[1]
    assert shown.strip() == getattr(generator, table)(), "python tools/make_tasks.py rewrites the tables"
    for name in {"tasks": TASKS, "metrics": METRICS}[table]:
        assert f"| `{name}` |" in shown


def test_every_loss_of_a_regression_is_described():
    text = PAGE.read_text().lower()
    assert all(loss in text for loss in LOSSES)
