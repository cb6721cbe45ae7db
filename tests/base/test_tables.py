"""Tables of a TOML file as validated dataclasses."""

from dataclasses import dataclass

import pytest

from fedrema.base.tables import read_table
from fedrema.errors import BadInput, at_least


@dataclass(frozen=True)
class Example:
    """A table."""

    name: str
    wait_seconds: float = 3.0
    port: int | None = None
    quiet: bool = False

    def __post_init__(self):
        """Validate the values."""
        at_least(0, self, "wait_seconds")


def test_values_are_read_by_their_names_in_the_file():
    found = read_table(Example, {"name": "a", "wait-seconds": 2, "quiet": True}, "x.toml")
    assert found == Example("a", 2.0, None, True)
    assert isinstance(found.wait_seconds, float)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "x.toml: name is missing; name must be given."),
        ({"name": 3}, "x.toml: name must be a text, got 3."),
        ({"name": "a", "wait-seconds": "long"}, "x.toml: wait-seconds must be a number, got 'long'."),
        ({"name": "a", "wait-seconds": True}, "x.toml: wait-seconds must be a number, got True."),
        ({"name": "a", "port": 1.5}, "x.toml: port must be a whole number or none, got 1.5."),
        ({"name": "a", "port": True}, "x.toml: port must be a whole number or none, got True."),
        ({"name": "a", "quiet": 1}, "x.toml: quiet must be true or false, got 1."),
        (
            {"wait_seconds": 1},
            "x.toml: wait_seconds is unknown; valid are name, wait-seconds, port, quiet.",
        ),
        ({"name": "a", "wait-seconds": -1.0}, "x.toml: --wait-seconds must be 0 or more, got -1.0."),
    ],
)
def test_an_invalid_table_is_refused_with_one_sentence(values, sentence):
    with pytest.raises(BadInput) as refused:
        read_table(Example, values, "x.toml")
    assert str(refused.value) == sentence
