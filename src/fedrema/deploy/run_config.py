"""The run configuration of a federation: the settings and the server's plan, as one table in Flower's app."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from fedrema.base.options import Purpose, option, purpose_of
from fedrema.base.tables import read_table
from fedrema.config.settings import Settings, make_settings
from fedrema.core import Simulation
from fedrema.data import Federation
from fedrema.deploy.limits import AUTOMATIC_NEIGHBOURS
from fedrema.errors import BadInput, at_least
from fedrema.runs.provenance import method_name
from fedrema.tasks import TASKS, Task, TaskName

Value = bool | float | int | str
RunConfig = dict[str, Value]
FORMAT = 1
"""Version of the run configuration."""
HELD_BY_NODES = "(held by the nodes)"
"""Value of --federation where every node has its own samples."""
SAME_ON_ALL_NODES = {"device", "backend", "partition-file"}
"""Settings of a single machine that a run configuration contains nevertheless, for all nodes."""
IN_EARLIER_CONFIGS = {"augment"}
"""A setting that was added to fedrema, but has been in run configurations from the beginning."""
COLUMNS = "columns"
"""Sample shape of nodes whose data is a table: it follows from the preprocessing that the nodes agree on."""
NO_FOLDER = "/unknown"
"""Placeholder for the run's folder in the run configuration; the server replaces it when it starts the run."""
WHERE = "run-config"
"""How error messages name the run configuration."""


@dataclass(frozen=True)
class Plan:
    """The server's settings for a federation: the shape of its data, and the limits of its rounds."""

    folder: str = option("", Purpose.PLACE)
    """Folder of the run on the server's machine, an absolute path; an existing run in it is resumed."""
    sample_shape: str = ""
    """Shape of a sample, such as 3x32x32; the same on all nodes. For tables: columns."""
    classes: int = 0
    """Number of classes, levels or labels; 1 for quantities and counts; 0 for those of tables: found by the nodes."""
    class_names: str = ""
    """The names of the classes, as a JSON list; empty: 0 to classes-1."""
    task: str = ""
    """What is predicted; empty: classes."""
    target_centre: float = 0.0
    """Mean of the target over all training samples; quantities and counts only."""
    target_scale: float = 0.0
    """Standard deviation of the target over all training samples; 0: found by the nodes, with the mean."""
    class_counts: str = ""
    """Training samples of each class, as a JSON list, if the loss is weighted by them; empty: found by the nodes."""
    rare_classes: bool = False
    """Whether a class has less than 10 % of the samples: nodes then draw test splits that are stratified by class, and
    log loss is the primary metric."""
    least_clients: int = option(2, Purpose.OPERATION)
    """A round needs usable replies from at least this many nodes."""
    most_clients: int = 100
    """Largest number of nodes, including those that join later."""
    most_samples: int = option(0, Purpose.OPERATION)
    """Reject a node that reports more samples; 0: more than ten times the median node's."""
    most_noise: float = option(0.0, Purpose.OPERATION)
    """Largest standard deviation of noise that nodes with a privacy budget may add to their updates; 0: none."""
    secure_threshold: float = 0.67
    """With secure aggregation: more than this share of a node and its neighbours must complete a round."""
    secure_neighbours: int = 0
    """With secure aggregation: with how many other nodes a node exchanges shares; 0: with all, and at most 32."""
    secure_least: int = 3
    """With secure aggregation: nodes contribute only to sums over at least this many nodes."""
    wait_seconds: float = option(600.0, Purpose.OPERATION)
    """Stop if fewer nodes than `least_clients` are connected, or send usable replies, for this many seconds."""
    round_seconds: float = option(300.0, Purpose.OPERATION)
    """End a round after this many seconds; later replies are rejected."""
    format: int = option(FORMAT, Purpose.OPERATION)
    """Version of the run configuration."""

    def __post_init__(self) -> None:
        """Validate the plan."""
        if self.format != FORMAT:
            raise BadInput(f"format must be {FORMAT}, which this version of fedrema reads, got {self.format}.")
        at_least(1, self, "least_clients", "most_clients")
        at_least(0, self, "most_samples", "most_noise", "wait_seconds", "round_seconds")
        if not 0.5 <= self.secure_threshold < 1:
            raise BadInput(f"secure-threshold must be at least 0.5 and below 1, got {self.secure_threshold}.")
        if self.secure_neighbours % 2 or not 0 <= self.secure_neighbours <= 1000:
            raise BadInput(f"secure-neighbours must be an even number up to 1000, got {self.secure_neighbours}.")
        at_least(2, self, "secure_least")
        if self.secure_least > (self.secure_neighbours or AUTOMATIC_NEIGHBOURS) + 1:
            raise BadInput(
                f"secure-least {self.secure_least} must be at most secure-neighbours + 1: a node counts itself and its"
                f" {self.secure_neighbours or AUTOMATIC_NEIGHBOURS} neighbours, whose keys it has verified."
            )
        if not Path(self.folder).is_absolute():
            raise BadInput(f"folder must be an absolute path on the server's machine, got {self.folder!r}.")
        if self.task and self.task not in TASKS:
            raise BadInput(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.")
        least = 0 if self.is_table else 2 if self.task in ("binary", "ordinal") else 1
        if self.classes < least:
            raise BadInput(f"classes must be at least {least}, got {self.classes}.")
        if self.class_names and (not _is_list_of_names(self.class_names) or len(set(self.names)) != self.classes):
            raise BadInput(f"class-names must be a JSON list of {self.classes} names, got {self.class_names!r}.")
        if not self.is_table and (not self.shape or min(self.shape) < 1):
            raise BadInput(f"sample-shape must be written as 3x32x32, got {self.sample_shape!r}.")
        if self.rare_classes and self.task not in ("", "binary"):
            raise BadInput(f"rare-classes is for the tasks binary and multiclass, not for {self.task}.")
        if not math.isfinite(self.target_centre) or not 0 <= self.target_scale < math.inf:
            raise BadInput(f"target-scale must be 0 or more, and finite, got {self.target_scale}.")
        if self.class_counts and (not _is_list_of_counts(self.class_counts) or len(self.counts) != self.classes):
            raise BadInput(f"class-counts must be a JSON list of {self.classes} numbers, got {self.class_counts!r}.")

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(json.loads(self.class_names)) if self.class_names else tuple(map(str, range(self.classes)))

    @property
    def predicted(self) -> Task:
        """What is predicted."""
        name = self.task or ("binary" if self.classes == 2 else "multiclass")
        scale = self.target_scale or 1.0
        return Task(cast(TaskName, name), self.classes, self.target_centre, scale, rare=self.rare_classes)

    def least_in_round(self, settings: Settings) -> int:
        """Return how many usable replies a round needs."""
        return (
            max(self.least_clients, self.secure_least) if settings.simulation.secure_aggregation else self.least_clients
        )

    @property
    def is_table(self) -> bool:
        """Whether the nodes' data are tables, so that the shape of a sample is not known in advance."""
        return self.sample_shape == COLUMNS

    @property
    def counts(self) -> tuple[int, ...]:
        """Training samples of each class; empty if the loss does not need them."""
        return tuple(json.loads(self.class_counts)) if self.class_counts else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        parts = self.sample_shape.split("x")
        return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()

    def relabelled(self, samples: Federation) -> Federation:
        """Return a node's samples with the federation's task; refuses samples of another shape or task."""
        if samples.sample_shape != self.shape:
            shape = "x".join(map(str, samples.sample_shape))
            raise BadInput(f"Its samples are of shape {shape}, but this federation is for {self.sample_shape}.")
        samples, task = self.with_classes(samples), self.predicted
        own_task = task if task.rare or not task.has_softmax else None
        return replace(samples, own_task=own_task, class_counts=self.counts)

    def with_classes(self, samples: Federation) -> Federation:
        """Return a node's samples labelled with all classes of the federation; refuses samples of another task."""
        expected, found = self.predicted, samples.task
        if found.name != expected.name and not (found.has_softmax and expected.has_softmax):
            raise BadInput(f"Its targets are for the task {found.name}, but this federation's task is {expected.name}.")
        return samples.relabelled(self.names)

    def values(self, *purposes: Purpose) -> RunConfig:
        """Return the values by name; if purposes are given, only the values with these purposes."""
        fields = [field for field in dataclasses.fields(self) if not purposes or purpose_of(field) in purposes]
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields}
        for name in ADDED:  # federations that older versions created do not have these keys
            if values.get(name) == getattr(Plan, name.replace("-", "_")):
                del values[name]
        return values


SECURE = ("secure-threshold", "secure-neighbours", "secure-least")
ADDED = ("class-names", "task", "target-centre", "target-scale", "class-counts", "rare-classes", *SECURE)
"""Values of a plan that are left out if they have their defaults."""
PLAN_NAMES = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Plan))


def plan_names(*purposes: Purpose) -> frozenset[str]:
    """Return the names of the plan's values that have these purposes."""
    return frozenset(
        field.name.replace("_", "-") for field in dataclasses.fields(Plan) if purpose_of(field) in purposes
    )


def run_config(settings: Settings, plan: Plan) -> RunConfig:
    """Return the method, the settings that apply to real clients, and the plan; names as on the command line."""
    return {"method": method_name(settings.method), **_deployed_settings(settings), **plan.values()}


def identity_values(settings: Settings, plan: Plan) -> RunConfig:
    """Return the part of the run configuration that cannot change while a federation is running."""
    changeable = Settings.names(Purpose.ROUNDS) | {"device"}
    fixed = {name: value for name, value in _deployed_settings(settings).items() if name not in changeable}
    return {"method": method_name(settings.method), **fixed, **plan.values(Purpose.RESULT)}


def read_run_config(config: Mapping[str, Value]) -> tuple[Settings, Plan]:
    """Return the settings and the plan in a run configuration."""
    return _read(tuple(sorted(config.items())))


@functools.lru_cache(maxsize=4)  # nodes read it for every message
def _read(items: tuple[tuple[str, Value], ...]) -> tuple[Settings, Plan]:
    config = dict(items)
    plan = read_table(Plan, {name: value for name, value in config.items() if name in PLAN_NAMES}, WHERE)
    rest = {name: value for name, value in config.items() if name not in PLAN_NAMES or name == "task"}
    method = str(rest.pop("method", "fedrema"))
    if not {"dataset", "federation", "partition-file"} & rest.keys():
        rest["federation"] = HELD_BY_NODES
    return make_settings(method, rest, WHERE, deployed=True), plan


def _deployed_settings(settings: Settings) -> RunConfig:
    """Return the settings that apply to real clients; those with the value None are left out."""
    machine = Settings.names(Purpose.OUTPUT, Purpose.PLACE, Purpose.COMPUTATION) - SAME_ON_ALL_NODES
    simulated = {
        field.name.replace("_", "-") for field in dataclasses.fields(Simulation) if field.metadata.get("simulated")
    }
    left_out = machine | simulated | (settings.added_defaults() - IN_EARLIER_CONFIGS)
    return {name: value for name, value in settings.described().items() if name not in left_out and value is not None}


def _is_list_of_names(text: str) -> bool:
    try:
        names = json.loads(text)
    except ValueError:
        return False
    return isinstance(names, list) and all(isinstance(name, str) and name for name in names)


def _is_list_of_counts(text: str) -> bool:
    try:
        counts = json.loads(text)
    except ValueError:
        return False
    return isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
