"""Documentation and defaults of settings, read from their dataclasses."""

import linecache
from dataclasses import dataclass

import pytest

from fedrema.base.options import class_source, field_documentation
from fedrema.core import LocalTraining, Simulation
from fedrema.models.networks import Network


@dataclass(frozen=True)
class Above:
    first_thing: int = 3
    """The first,
    over two lines."""
    bare: float = 0.5


@dataclass(frozen=True)
class Below(Above):
    second: str | None = None
    """The second."""


def test_inherited_fields_are_included_with_defaults_and_documentation():
    assert field_documentation(Below) == {
        "first-thing": (3, "The first, over two lines."),
        "bare": (0.5, ""),
        "second": (None, "The second."),
    }


def test_only_dataclasses_can_be_documented():
    with pytest.raises(TypeError, match="int is not a dataclass"):
        field_documentation(int)


@pytest.mark.parametrize("kind", [LocalTraining, Network, Simulation])
def test_every_setting_is_documented(kind):
    for name, (_, meaning) in field_documentation(kind).items():
        assert meaning.endswith("."), name


def test_a_class_of_a_notebook_is_documented():
    text = (
        "import dataclasses\n\n@dataclasses.dataclass\nclass Own:\n    rate: float = 0.5\n    '''How fast.'''\n\n"
        "    def go(self):\n        pass\n"
    )
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    found = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), found)
    assert field_documentation(found["Own"]) == {"rate": (0.5, "How fast.")}
    assert "class Own" in class_source(found["Own"])
    del linecache.cache["<cell 1>"]
    assert field_documentation(found["Own"]) == {"rate": (0.5, "")}
