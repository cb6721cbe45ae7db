"""Methods with settings that shorten slow loops, for tests that run every method."""

from fedrema.cli.arguments import as_arguments
from fedrema.core import Method
from fedrema.methods import registry

LESS = {
    "creff": {"synthetic": 3, "match_steps": 2, "retrain_epochs": 1},
    "fedala": {"first_epochs": 2},
    "fedrep": {"head_epochs": 2},
    "pfedme": {"inner_steps": 2},
}


def quick(name: str) -> Method:
    """Return a method by its name, with settings that make it fast."""
    return registry()[name](**LESS.get(name, {}))


def quick_arguments(name: str) -> list[str]:
    """Return these settings as command-line arguments."""
    return as_arguments(LESS.get(name, {}))
