"""Runs that differ only in their training seed belong together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.manifest import CIRCUMSTANCES
from fedrema.runs.run import Run

# Unlike for resuming, how many rounds were played matters here. Which data it was, the fingerprint tells.
IGNORED = (CIRCUMSTANCES - {"rounds"}) | {"seed", "record", "record-every"}
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
    """The method's title and, where it appears more than once, the settings that tell its groups apart."""
    method: str
    title: str
    runs: tuple[Run, ...]

    @property
    def fingerprint(self) -> str:
        """Says which data it ran on."""
        return str(self.runs[0].config["federation"]["fingerprint"])

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose numbers count: those that have ended, or, if none has, all as far as they are."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @cached_property
    def progress(self) -> str:
        """Say how far the runs that have not ended are; empty if all have."""
        running = [run for run in self.runs if not run.finished]
        if not running:
            return ""
        many = f"{len(running)} of {len(self.runs)} " if len(self.runs) > 1 else ""
        reached = min(_last_round(run) for run in running)
        return f"({many}running, round {reached}/{running[0].settings['rounds']})"

    def values(self, quantity: str) -> dict[int, float]:
        """Return a summary's quantity by training seed, of the runs that count and have it."""
        found = {int(run.settings["seed"]): _read(run, quantity) for run in self.counted}
        return {seed: value for seed, value in found.items() if value is not None}

    def statistic(self, quantity: str) -> Statistic | None:
        """Return mean and spread over seeds; None where no run has the quantity."""
        values = list(self.values(quantity).values())
        if not values:
            return None
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Statistic(float(np.mean(values)), spread, len(values))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Sort runs into groups: methods in the order in which they first appear, the groups of one by their labels.

    Of several runs with the same settings and seed, the last counts, or the last that has ended: they hold the
    same numbers, and counting them twice would make the spread look smaller than it is.
    """
    if not runs:
        raise BadInput("There is no run to compare: name the folder of at least one.")
    sorted_out: dict[str, list[Run]] = {}
    for run in runs:
        _check(run)
        key = [run.method, sorted(_telling(run).items()), run.config["federation"]["fingerprint"]]
        sorted_out.setdefault(json.dumps(key), []).append(run)
    members = [_one_per_seed(found) for found in sorted_out.values()]
    labels = _labels([found[0] for found in members])
    groups = [
        Group(label, found[0].method, _title(found[0]), found) for label, found in zip(labels, members, strict=True)
    ]
    methods = [group.method for group in groups]
    return sorted(groups, key=lambda group: (methods.index(group.method), group.label))


def data_title(groups: Sequence[Group]) -> str:
    """Say in a few words what the groups ran on."""
    if len({group.fingerprint for group in groups}) > 1:
        return "different data"
    federation = groups[0].runs[0].config["federation"]
    info = federation.get("info", {})
    parts = [info.get("dataset") or info.get("federation"), info.get("partition")]
    if "s" in info and info.get("partition") == "grouped":
        parts.append(f"s = {info['s']}")
    return ", ".join([*(str(part) for part in parts if part), f"{len(federation['names'])} clients"])


def _check(run: Run) -> None:
    # Any program may leave a config.json in a folder that is searched for runs.
    config = run.config
    for name, kind in (("method", str), ("settings", dict), ("federation", dict)):
        if not isinstance(config.get(name), kind):
            raise BadInput(f"{run.directory.config_file} is not that of a run: {name!r} is missing.")
    needed = {"settings": ("seed", "rounds"), "federation": ("fingerprint", "names")}
    for part, names in needed.items():
        for name in names:
            if name not in config[part]:
                raise BadInput(f"{run.directory.config_file} is not complete: {part!r} lacks {name!r}.")


def _telling(run: Run) -> dict[str, Any]:
    """Return the settings that make a difference to the result, other than the training seed."""
    settings = {name: value for name, value in run.settings.items() if name not in IGNORED}
    if run.finished:  # a run may have been resumed to another round than first asked for
        settings["rounds"] = run.summary.get("rounds", settings["rounds"])
    return settings


def _one_per_seed(runs: list[Run]) -> tuple[Run, ...]:
    by_seed: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: run.finished):  # stable: those that have ended come last
        by_seed[int(run.settings["seed"])] = run
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _title(run: Run) -> str:
    if ":" in run.method:
        return run.method.partition(":")[2]
    known = registry().get(run.method)
    if known is None:
        return run.method
    # By its settings, since variants have titles of their own; a run of an older version may lack some.
    own = {field.name: field.name.replace("_", "-") for field in fields(known)}
    try:
        return known(**{name: run.settings[option] for name, option in own.items() if option in run.settings}).called()
    except (BadInput, TypeError):  # another version's settings
        return known.title


def _labels(firsts: list[Run]) -> list[str]:
    """Label groups by their first runs, each label different."""
    labels = []
    for run in firsts:
        same = [_telling(other) for other in firsts if (other.method, _title(other)) == (run.method, _title(run))]
        mine = _telling(run)
        differing = [name for name in mine if len({json.dumps(one.get(name)) for one in same}) > 1]
        words = [f"{name}={_short(mine[name])}" for name in differing[:SHOWN_SETTINGS]]
        more = len(differing) - SHOWN_SETTINGS
        labels.append(" ".join([_title(run), *words, *([f"and {more} more"] if more > 0 else [])]))
    prints = [str(run.config["federation"]["fingerprint"])[:6] for run in firsts]
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
    return run.rounds[-1].round if run.rounds else 0
