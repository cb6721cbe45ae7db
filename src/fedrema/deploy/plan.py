"""What a federation on the network is to do, as Flower's run configuration holds it."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedrema.base.options import Purpose
from fedrema.config.settings import Settings, as_arguments, parse_settings
from fedrema.data import Federation
from fedrema.errors import BadInput, at_least
from fedrema.runs.provenance import method_name

NOT_DEFINING = (Purpose.SOURCE, Purpose.COMPUTATION, Purpose.PLACE, Purpose.OUTPUT)
NOT_CARRIED = (Settings.names(*NOT_DEFINING) - {"device", "backend", "federation", "partition-file"}) | {
    "late",
    "late-round",
    "dropout",
}
"""Settings that say nothing to a federation of real clients."""


HELD_BY_NODES = "(held by the nodes)"
"""Stands for --federation where every node brings samples of its own."""


@dataclass(frozen=True)
class Plan:
    """How the server conducts the federation."""

    folder: str = ""
    """Folder of the run on the server's machine, an absolute path; the same folder goes on where it stopped."""
    sample_shape: str = ""
    """Shape of a sample, such as 3x32x32; all nodes must have the same."""
    classes: int = 0
    """How many classes there are."""
    class_names: str = ""
    """Their names, as a JSON list; empty: 0 to classes-1."""
    least_clients: int = 2
    """A round needs usable replies of at least this many clients."""
    most_clients: int = 100
    """Room for this many clients in all, with those that join later."""
    most_samples: int = 0
    """Reject a node that says it has more samples; 0: more than ten times the median node's."""
    most_noise: float = 0.0
    """Allow nodes with a privacy budget this standard deviation of noise, beyond what is usual; 0: none."""
    wait_seconds: float = 600.0
    """Give up when there are fewer, or fewer usable replies, for so long."""
    round_seconds: float = 300.0
    """End a round after so long; replies that come later do not count."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        at_least(1, self, "least_clients", "most_clients")
        at_least(0, self, "most_samples", "most_noise", "wait_seconds", "round_seconds")
        if not Path(self.folder).is_absolute():
            raise BadInput(f"folder must be an absolute path on the server's machine, got {self.folder!r}.")
        if self.classes < 1:
            raise BadInput(f"classes must be at least 1, got {self.classes}.")
        if self.class_names and (not _is_list_of_names(self.class_names) or len(set(self.names)) != self.classes):
            raise BadInput(f"class-names must be a JSON list of {self.classes} names, got {self.class_names!r}.")
        if not self.shape or min(self.shape) < 1:
            raise BadInput(f"sample-shape must be written as 3x32x32, got {self.sample_shape!r}.")

    def fitted(self, samples: Federation) -> Federation:
        """Return a node's samples as those of this federation, whose classes it need not all have; refuses others."""
        if samples.sample_shape != self.shape:
            found = "x".join(map(str, samples.sample_shape))
            raise BadInput(f"Its samples are of shape {found}, but this federation is for {self.sample_shape}.")
        return samples.relabelled(self.names)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(json.loads(self.class_names)) if self.class_names else tuple(map(str, range(self.classes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        parts = self.sample_shape.split("x")
        return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _is_list_of_names(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, list) and all(isinstance(name, str) and name for name in found)


def run_config(settings: Settings, plan: Plan) -> dict[str, bool | float | int | str]:
    """Return everything as Flower carries it: names as on the command line, nothing that is None."""
    carried = {name: value for name, value in settings.described().items() if name not in NOT_CARRIED}
    told = {field.name.replace("_", "-"): getattr(plan, field.name) for field in fields(plan)}
    everything = {"method": method_name(settings.method), **carried, **told}
    if not plan.class_names:  # as before there were any: the identity of a running federation depends on it
        del everything["class-names"]
    return {name: value for name, value in everything.items() if value is not None}


def read_run_config(config: Mapping[str, Any]) -> tuple[Settings, Plan]:
    """Return the settings and the plan that a run configuration holds."""
    return _read(tuple(sorted(config.items())))


@functools.lru_cache(maxsize=4)  # every message brings it again
def _read(items: tuple[tuple[str, Any], ...]) -> tuple[Settings, Plan]:
    config = dict(items)
    own = {field.name.replace("_", "-"): field.name for field in fields(Plan)}
    plan = Plan(**{own[name]: value for name, value in config.items() if name in own})
    method = str(config.get("method", "fedrema"))
    rest = {name: value for name, value in config.items() if name not in own and name != "method"}
    if not {"dataset", "federation", "partition-file"} & rest.keys():
        rest["federation"] = HELD_BY_NODES
    return parse_settings(method, as_arguments(rest), "run-config"), plan
