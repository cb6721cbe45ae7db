"""Methods for tests of what holds for all of them: what a method repeats very often is done less often."""

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
    """Return a method by its name."""
    return registry()[name](**LESS.get(name, {}))


def quick_arguments(name: str) -> list[str]:
    """Return the same as it is written on the command line."""
    return as_arguments(LESS.get(name, {}))
