"""The pages of methods agree with docstrings and settings, and their figures exist."""

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from fedrema.base.options import field_documentation
from fedrema.methods import registry

DOCS = Path(__file__).parents[2] / "docs"
TOOLS = DOCS.parent / "tools"


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(TOOLS))  # the script imports modules of its folder
    try:
        specification = importlib.util.spec_from_file_location("make_methods", TOOLS / "make_methods.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))


def plain(text: str) -> str:
    """Return a text without Markdown's escapes and line breaks."""
    return " ".join(re.sub(r"\\([*_|<])", r"\1", text).split())


@pytest.mark.parametrize("name", registry())
def test_a_page_agrees_with_its_method(name, generator):
    kind = registry()[name]
    page = (DOCS / "methods" / generator.page_name(name)).read_text()
    assert page.startswith(generator.about(kind)), "python tools/make_methods.py FOLDER rewrites the pages"
    text = plain(page)
    assert plain(inspect.getdoc(kind)) in text
    assert kind.paper in text
    for field in dataclasses.fields(kind):
        option = field.name.replace("_", "-")
        assert f"| `--{option}` | {field.default} | {field_documentation(kind)[option][1]}" in text
    assert re.findall(r"^fedrema .*$", page, re.M) == [f"fedrema run {name}"]  # `run all` is tested in tests/cli
    (figure,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert (DOCS / "methods" / figure).is_file()
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (DOCS / "methods" / target).exists(), target


def test_the_index_names_every_method(generator):
    page = (DOCS / "methods.md").read_text()
    shown = re.search(r"<!-- index -->\n(.*?)<!-- /index -->", page, flags=re.S)[1]
    assert shown.strip() == generator.index()
    times = re.search(r"<!-- times -->\n(.*?)<!-- /times -->", page, flags=re.S)[1]
    assert all(f"| {kind.title} |" in times for kind in registry().values())
    assert sorted(file.name for file in (DOCS / "methods").iterdir()) == sorted(map(generator.page_name, registry()))


def test_reconstructions_are_always_labelled_as_such(generator):
    for name in ("fedvf", "fedper++"):
        kind = registry()[name]
        assert "RECONSTRUCTION" in generator.about(kind)
        assert "(reconstruction)" in kind.title
