"""Groups of runs that differ only in their training seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedrema.base.options import Purpose
from fedrema.config.presets import PlainValue
from fedrema.config.settings import Settings
from fedrema.core.reports import Reports
from fedrema.errors import BadInput
from fedrema.reporting.quantities import Quantity, find_quantity
from fedrema.reporting.statistics import t_interval
from fedrema.runs.run import Run
from fedrema.tasks import Metric, find_metric

# Own data is identified by its fingerprint, not by the setting that names its source.
IGNORED = Settings.names(*(purpose for purpose in Purpose if purpose not in (Purpose.RESULT, Purpose.ROUNDS)))
"""Settings in which the runs of a group may differ."""
SHOWN_SETTINGS = 3


@dataclass(frozen=True)
class Statistic:
    """A quantity over the seeds of a group."""

    mean: float
    spread: float | None
    """Sample standard deviation; None for one seed."""
    count: int


@dataclass(frozen=True)
class Group:
    """Runs of one method with the same settings on the same data, one per training seed, in ascending order."""

    label: str
    """The method's title and, where it appears more than once, the settings in which its groups differ."""
    method: str
    title: str
    runs: tuple[Run, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data."""
        return self.runs[0].manifest.federation.fingerprint

    @property
    def reports(self) -> Reports:
        """The quantities and matrices that the method reports."""
        return self.runs[0].reports

    @property
    def metric(self) -> Metric:
        """The task's primary metric."""
        return find_metric(self.runs[0].metric)

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs that statistics are over: the finished ones, or all if none is finished."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @cached_property
    def progress(self) -> str:
        """Progress of the runs that are not finished; empty if all are."""
        running = [run for run in self.runs if not run.finished]
        if not running:
            return ""
        many = f"{len(running)} of {len(self.runs)} " if len(self.runs) > 1 else ""
        reached = min(_last_round(run) for run in running)
        return f"({many}running, round {reached}/{running[0].settings['rounds']})"

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of its runs, the primary one first, also before it has been evaluated."""
        names = (self.metric.name, *(name for run in self.counted for name in run.summary.metrics))
        return tuple(find_metric(name) for name in dict.fromkeys(names))

    def values(self, quantity: str) -> dict[int, float]:
        """Return a quantity of the summaries by training seed, for the counted runs that have it."""
        found = {int(run.settings["seed"]): _read(run, quantity) for run in self.counted}
        return {seed: value for seed, value in found.items() if value is not None}

    def statistic(self, quantity: str) -> Statistic | None:
        """Return mean and standard deviation over seeds; None where no run has the quantity."""
        values = list(self.values(quantity).values())
        if not values:
            return None
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Statistic(float(np.mean(values)), spread, len(values))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Sort runs into groups: methods in order of their first run, the groups of one method by label.

    Of several runs with the same settings and seed, only the last is used, or the last that is finished: they hold the
    same numbers, and using both would underestimate the spread.
    """
    if not runs:
        raise BadInput("There is no run to compare: give the folder of at least one run.")
    if len({run.metric for run in runs}) > 1:
        tasks = ", ".join(sorted({run.manifest.federation.task.name for run in runs}))
        if "," not in tasks:
            metrics = ", ".join(sorted({run.metric for run in runs}))
            raise BadInput(f"Runs with different primary metrics ({metrics}) cannot be compared: name runs with one.")
        raise BadInput(f"Runs of different tasks ({tasks}) cannot be compared: name runs of one task.")
    members_of: dict[str, list[Run]] = {}
    for run in runs:
        _check_settings(run)
        key = [run.method, sorted(_defining(run).items()), run.manifest.federation.fingerprint]
        members_of.setdefault(json.dumps(key), []).append(run)
    members = [_one_per_seed(found) for found in members_of.values()]
    labels = _labels([found[0] for found in members])
    groups = [
        Group(label, found[0].method, found[0].title, found) for label, found in zip(labels, members, strict=True)
    ]
    methods = [group.method for group in groups]
    return sorted(groups, key=lambda group: (methods.index(group.method), group.label))


def metrics_of(groups: Sequence[Group]) -> tuple[Metric, ...]:
    """Return the metrics of all groups, the primary one first."""
    return tuple({metric.name: metric for group in groups for metric in group.metrics}.values())


def data_title(groups: Sequence[Group]) -> str:
    """Describe the data of the groups in a few words."""
    if len({group.fingerprint for group in groups}) > 1:
        return "different data"
    federation = groups[0].runs[0].manifest.federation
    info = federation.info
    parts = [info.get("dataset") or info.get("federation"), info.get("partition")]
    if "s" in info and info.get("partition") == "grouped":
        parts.append(f"s = {info['s']}")
    return ", ".join([*(str(part) for part in parts if part), f"{len(federation.names)} clients"])


def _check_settings(run: Run) -> None:
    for name in ("seed", "rounds"):
        if name not in run.settings:
            raise BadInput(f"{run.directory.config_file} is incomplete: 'settings' lacks {name!r}.")


def _defining(run: Run) -> dict[str, PlainValue]:
    """Return the settings that define the result, except the training seed."""
    settings = {name: value for name, value in run.settings.items() if name not in IGNORED}
    if run.finished:  # it may have been resumed with more rounds
        settings["rounds"] = run.summary.get("rounds", settings["rounds"])
    return settings


def _one_per_seed(runs: list[Run]) -> tuple[Run, ...]:
    by_seed: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: run.finished):  # stable: finished runs come last
        by_seed[int(run.settings["seed"])] = run
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _labels(firsts: list[Run]) -> list[str]:
    """Return a distinct label for each group, given its first run."""
    labels = []
    # Shown for all methods: it is set by the device, not by the user, and differences include its effect.
    mixed = ("precision",) if len({run.settings.get("precision") for run in firsts}) > 1 else ()
    for run in firsts:
        same = [_defining(other) for other in firsts if (other.method, other.title) == (run.method, run.title)]
        own = _defining(run)
        differing = [name for name in own if name in mixed or len({json.dumps(one.get(name)) for one in same}) > 1]
        words = [f"{name}={_short(own[name])}" for name in differing[:SHOWN_SETTINGS]]
        more = len(differing) - SHOWN_SETTINGS
        labels.append(" ".join([run.title, *words, *([f"and {more} more"] if more > 0 else [])]))
    prints = [run.manifest.federation.fingerprint[:6] for run in firsts]
    if len(set(prints)) > 1:
        labels = [
            f"{label} data={fingerprint}" if labels.count(label) > 1 else label
            for label, fingerprint in zip(labels, prints, strict=True)
        ]
    return [
        f"{label} ({labels[:place].count(label) + 1})" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


def _short(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(run: Run, quantity: str) -> float | None:
    value = run.summary.get(quantity)
    if isinstance(value, dict):  # seconds, by part of a round
        return float(sum(value.values())) if value else None
    return None if value is None else float(value)


def _last_round(run: Run) -> int:
    return int(run.rounds[-1].round) if run.rounds else 0


@dataclass(frozen=True)
class Difference:
    """A group minus the reference, over the training seeds that both have."""

    label: str
    reference: str
    pairs: int
    """The number of seeds in common."""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    """Why there is no interval, if there is none."""


def paired_differences(runs: Sequence[Run], quantity: str = "honest", reference: str | None = None) -> list[Difference]:
    """Compare every group with the reference: mean paired difference and its 95 % t interval.

    The same seed gives all methods the same initial network and the same batches, so that paired differences vary less
    than two separate means. There is an interval only where two groups share at least two seeds and the data.

    Parameters
    ----------
    runs
        Runs of any number of methods, settings and seeds.
    quantity
        honest, best, final or worst_tenth, which are those of the task's primary metric; of another metric as in
        summary.json, such as final_auc.
    reference
        A method's name or a group's label; default: the group with the best mean.

    Returns
    -------
    list[Difference]
        One for every group but the reference; empty if there is no other, or if no run has been scored.
    """
    groups = group_runs(runs)
    compared = find_quantity(quantity, groups[0].metric.name)
    against = _reference(groups, compared, reference)
    if against is None:
        return []
    return [_difference(group, against, compared.name) for group in groups if group is not against]


def _reference(groups: Sequence[Group], quantity: Quantity, wanted: str | None) -> Group | None:
    if wanted is None:
        means = [(statistic.mean, group) for group in groups if (statistic := group.statistic(quantity.name))]
        return max(means, key=lambda pair: quantity.sign * pair[0])[1] if means else None
    name = wanted.casefold()
    found = [group for group in groups if group.label.casefold() == name]
    found = found or [group for group in groups if name in (group.method.casefold(), group.title.casefold())]
    if len(found) != 1:
        problem = "matches several groups" if found else "is not among the groups"
        labels = ", ".join(repr(group.label) for group in found or groups)
        raise BadInput(f"--reference {wanted!r} {problem}; valid are {labels}.")
    return found[0]


def _difference(group: Group, against: Group, quantity: str) -> Difference:
    if group.fingerprint != against.fingerprint:
        return Difference(group.label, against.label, 0, reason="other data")
    if not (group.counted[0].finished and against.counted[0].finished):
        return Difference(group.label, against.label, 0, reason="still running")
    mine, theirs = group.values(quantity), against.values(quantity)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return Difference(group.label, against.label, 0, reason="no seed in common")
    differences = [mine[seed] - theirs[seed] for seed in common]
    mean = float(np.mean(differences))
    if len(common) == 1:
        return Difference(group.label, against.label, 1, mean, reason="one seed in common: no interval")
    return Difference(group.label, against.label, len(common), mean, *t_interval(differences))
