"""Whether joining is worthwhile: for each client, the gain of a federated method over a baseline, with its interval."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedrema.errors import BadInput
from fedrema.reporting.groups import Group, group_runs
from fedrema.reporting.simple_models import find_simple_models
from fedrema.reporting.verdict_text import conclusions_text, mean_text, notes
from fedrema.runs.run import Run
from fedrema.simulation.gains import CONCLUSIONS, LEVEL, Gain, compare_models
from fedrema.simulation.mean_gains import MeanGain
from fedrema.simulation.scoring import metric_for
from fedrema.tasks import Metric

BASELINES = ("local", "fedavg")
"""Methods that are baselines by default, in order of preference."""
SHOWN = 15
"""With more than 40 clients, so many of the best and of the worst are shown."""
MANY = 40
EXPLANATION = (
    "Intervals are 95 % intervals. They do not contain the variation over training seeds and splits. Those of clients "
    "hold for one client at a time: they are not corrected for the number of clients."
)


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client."""

    name: str
    gain: Gain


@dataclass(frozen=True)
class Verdict:
    """The gains of all clients of one method over a baseline; positive gains are better for every metric."""

    label: str
    """The method, as in tables."""
    baseline: str
    metric: Metric
    clients: tuple[ClientGain, ...]
    """Largest gain first; clients without a gain last."""
    mean: MeanGain
    """The mean of the gains, each client counted once, and its interval."""

    @property
    def mean_gain(self) -> float | None:
        """Mean over the clients whose gain is defined."""
        return self.mean.mean

    @property
    def low(self) -> float | None:
        """Lower end of its 95 % interval; `mean.scope` says what it is for."""
        return None if self.mean.interval is None else self.mean.interval[0]

    @property
    def high(self) -> float | None:
        """Upper end of its 95 % interval."""
        return None if self.mean.interval is None else self.mean.interval[1]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of clients by conclusion."""
        found = Counter(client.gain.conclusion for client in self.clients)
        return {conclusion: found[conclusion] for conclusion in CONCLUSIONS}

    def sentence(self) -> str:
        """Return the conclusions about all clients as one sentence."""
        parts = (conclusions_text(self.counts, len(self.clients)), mean_text(self))
        return f"{'; '.join(filter(None, parts))}."

    def notes(self) -> list[str]:
        """Return sentences on which clients count in the mean, and on conclusions that are less certain."""
        return list(notes(self))

    def shown_gain(self, gain: float, low: float | None, high: float | None) -> str:
        """Return a gain with its unit and interval as text."""
        unit = " points" if self.metric.percent else ""
        between = "" if low is None or high is None else f" [{shown(self.metric, low)}, {shown(self.metric, high)}]"
        return f"{shown(self.metric, gain)}{unit}{between}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; percentages as shares."""
        return {
            "method": self.label,
            "baseline": self.baseline,
            "metric": self.metric.name,
            "counts": self.counts,
            "mean_gain": self.mean_gain,
            "low": self.low,
            "high": self.high,
            "interval_for": self.mean.scope or None,
            "clients_in_mean": self.mean.clients,
            "interval_over_clients": self.mean.over_clients,
            "notes": self.notes(),
            "clients": [{"name": client.name, **asdict(client.gain)} for client in self.clients],
        }


def verdicts(runs: Sequence[Run], metric: str | None = None, baseline: str | None = None) -> list[Verdict]:
    """Compare every method with the baseline, client by client.

    Parameters
    ----------
    runs
        Finished runs on the same federation. Of several seeds of a method, the first one given is used.
    metric
        Name of a metric; default: the task's primary one.
    baseline
        Name of a method, or label of a group; default: Local, or FedAvg where there is no run of Local. On own data,
        `constant` and `linear` are simple models of each client alone.
    """
    chosen = first_runs(runs)
    simple = find_simple_models(chosen, baseline)
    against = None if simple else baseline_of([group for group, _ in chosen], baseline)
    _check_same_data([run for _, run in chosen])
    compared = [(group, run) for group, run in chosen if group is not against]
    if against is not None and not compared:
        raise BadInput(f"{against.label} is the only method: give a run of another method, to compare with it.")
    measure = metric_for(chosen[0][1].manifest.federation.task, metric)
    theirs = simple.predictions if simple else next(run for group, run in chosen if group is against).predictions()
    called = simple.title if simple else against.label if against else ""
    names = chosen[0][1].names
    found = []
    for group, run in compared:
        mine = run.predictions()
        # A client that had not joined before the last round has no predictions.
        pairs = {
            name: (mine.of(row), theirs.of(row)) if row in mine.rows and row in theirs.rows else None
            for row, name in enumerate(names)
        }
        gains = compare_models(measure, pairs)
        clients = [ClientGain(name, gain) for name, gain in zip(names, gains.clients, strict=True)]
        clients.sort(key=lambda client: -np.inf if client.gain.gain is None else client.gain.gain, reverse=True)
        found.append(Verdict(group.label, called, measure, tuple(clients), gains.mean))
    return found


def first_runs(runs: Sequence[Run]) -> list[tuple[Group, Run]]:
    """Return each group with its run that was named first; other seeds are not used."""
    return [(group, min(group.runs, key=lambda run: _place(runs, run))) for group in group_runs(runs)]


def _place(runs: Sequence[Run], run: Run) -> int:
    return next(place for place, each in enumerate(runs) if each is run)


def baseline_of(groups: Sequence[Group], wanted: str | None = None) -> Group:
    """Return the group of the baseline: the named one, or Local, or FedAvg."""
    if wanted is None:
        for method in BASELINES:
            if found := [group for group in groups if group.method == method]:
                return found[0]
        raise BadInput("there is no run of Local or FedAvg to compare with: give one, or choose a run with --baseline.")
    name = wanted.casefold()
    found = [group for group in groups if group.label.casefold() == name]
    found = found or [group for group in groups if name in (group.method.casefold(), group.title.casefold())]
    if len(found) != 1:
        problem = "matches several methods" if found else "is not among the methods"
        labels = ", ".join(repr(group.label) for group in found or groups)
        raise BadInput(f"--baseline {wanted!r} {problem}; valid are {labels}.")
    return found[0]


def _check_same_data(runs: Sequence[Run]) -> None:
    first = runs[0].manifest.federation
    for run in runs[1:]:
        other = run.manifest.federation
        if other.fingerprint != first.fingerprint:
            raise BadInput(
                f"{runs[0].path} and {run.path} were trained on different federations: their clients cannot be"
                " compared."
            )
        if other.task != first.task:
            raise BadInput(
                f"{runs[0].path} and {run.path} have different tasks ({first.task.name} and {other.task.name}): their"
                " clients cannot be compared."
            )


def shown(metric: Metric, gain: float | None) -> str:
    """Return a gain as text: in percentage points where the metric is shown in per cent."""
    if gain is None:
        return "–"
    if not metric.percent:
        return f"{gain:.3g}"
    text = f"{100 * gain:.1f}"
    return "0.0" if text == "-0.0" else text


def conclusion_text(gain: Gain) -> str:
    """Return the conclusion; with the p-value of a test that is not significant although the interval is."""
    includes_zero = gain.low is None or gain.high is None or gain.low <= 0 <= gain.high
    if gain.p is None or gain.p <= LEVEL or includes_zero:
        return gain.conclusion
    return f"{gain.conclusion} (p = {gain.p:.3f})"


def best_and_worst(clients: Sequence[ClientGain], everything: bool = False) -> tuple[Sequence[ClientGain], int]:
    """Return the clients to show, and after how many of them others are left out; 0 where none is."""
    if everything or len(clients) <= MANY:
        return clients, 0
    return [*clients[:SHOWN], *clients[-SHOWN:]], SHOWN


def verdict_csv(found: Sequence[Verdict]) -> str:
    """Return the gains of all clients of all methods as CSV; percentages as shares."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = ("samples", "value", "baseline", "gain", "low", "high", "conclusion", "p")
    writer.writerow(["method", "compared_with", "metric", "client", *names])
    for one in found:
        for client in one.clients:
            values = asdict(client.gain)
            cells = ["" if values[name] is None else values[name] for name in names]
            writer.writerow([one.label, one.baseline, one.metric.name, client.name, *cells])
    return stream.getvalue()
