"""docs/security.md agrees with what the methods transmit."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedrema.methods import registry

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
TOOLS = PAGE.parents[1] / "tools"


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(TOOLS))  # the script imports modules of its folder
    try:
        specification = importlib.util.spec_from_file_location("make_security", TOOLS / "make_security.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))


def test_the_table_agrees_with_the_methods(generator):
    shown = re.search(r"<!-- transmitted -->\n(.*?)<!-- /transmitted -->", PAGE.read_text(), re.S)[1]
    assert shown.strip() == generator.transmitted(), "python tools/make_security.py rewrites the table"
    for name in registry():
        assert f"| `{name}` |" in shown


def test_the_table_of_secure_aggregation_agrees_with_the_methods(generator):
    shown = re.search(r"<!-- covered -->\n(.*?)<!-- /covered -->", PAGE.read_text(), re.S)[1]
    assert shown.strip() == generator.covered(), "python tools/make_security.py rewrites the table"
    for name in registry():
        assert f"| `{name}` |" in shown


def test_the_table_of_refusals_is_complete(generator):
    shown = re.search(r"<!-- refusals -->\n(.*?)<!-- /refusals -->", PAGE.read_text(), re.S)[1]
    assert shown.strip() == generator.refusals(), "python tools/make_security.py rewrites the table"


def test_the_page_claims_nothing_that_does_not_exist():
    text = PAGE.read_text()
    assert "Secure aggregation is off by default" in text
    assert "A node without `peers` contributes to no sum" in text
    assert "Models from the server are not checked by the node" in text
    assert (PAGE.parents[1] / "SECURITY.md").is_file()
