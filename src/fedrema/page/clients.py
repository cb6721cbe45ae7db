"""The part of the document about single clients: primary metric by round, class counts, participation."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict, TypeVar

import numpy as np

from fedrema.page.encode import Packed, packed
from fedrema.page.reading import DownsampledRun
from fedrema.tasks import find_metric

CELLS = 750_000
"""Rounds × clients of all runs together, about eight bytes each."""

T = TypeVar("T")


class ClientsOfRun(TypedDict):
    """The clients of one run; arrays are [rounds, clients]."""

    rounds: list[int]
    labels: dict[str, Packed] | None
    """Samples by client and class, for `train` and `test`; None where unknown, and for tasks without classes."""
    note: NotRequired[str]
    score: NotRequired[Packed]
    """The primary metric."""
    trained: NotRequired[Packed]
    """The primary metric right after local training."""
    loss: NotRequired[Packed]
    presence: NotRequired[Packed]
    """0: absent, 1: failed, 2: participated."""
    traces: NotRequired[dict[str, Packed]]
    """What the method traces per client, by name."""
    final: NotRequired[Packed]
    """Mean of the primary metric over the last five evaluated rounds, by client."""


class ClientsPart(TypedDict):
    """The part of the document about single clients."""

    runs: list[ClientsOfRun]


def clients_part(runs: Sequence[DownsampledRun]) -> ClientsPart:
    """Return the data of each client of each run."""
    most = CELLS // max(1, sum(len(run.names) for run in runs))
    return {"runs": [_clients(run, max(2, most)) for run in runs]}


def _clients(run: DownsampledRun, most: int) -> ClientsOfRun:
    kept = evenly_spaced(run.kept, most)
    found: ClientsOfRun = {"rounds": [one.record.round for one in kept], "labels": _labels(run)}
    if not kept:
        return found
    if len(kept) < len(run.kept):
        found["note"] = f"Single clients are shown in {len(kept)} of these rounds."
    rows = [one.clients for one in kept]
    highest = 1.0 if find_metric(run.metric).percent else None
    if (score := _stacked([one.score for one in rows], highest)) is not None:
        found["score"] = score
    if (trained := _stacked([one.trained for one in rows], highest)) is not None:
        found["trained"] = trained
    if (loss := _stacked([one.loss for one in rows])) is not None:
        found["loss"] = loss
    found["presence"] = packed(np.stack([one.presence for one in rows]))
    traces = {name: _stacked([one.traces[name] for one in rows]) for name in run.file.traces}
    found["traces"] = {name: values for name, values in traces.items() if values is not None}
    if (final := _final(run)) is not None:
        found["final"] = packed(final, highest)
    return found


def _stacked(rows: Sequence[np.ndarray], highest: float | None = None) -> Packed | None:
    """Return rows as one array; None if all values are unknown."""
    values = np.stack(rows)
    return None if np.isnan(values).all() else packed(values, highest)


def _final(run: DownsampledRun) -> np.ndarray | None:
    every = np.stack([one.clients.score for one in run.kept])
    evaluated = every[~np.isnan(every).all(axis=1)][-5:]
    if not len(evaluated):
        return None
    known = (~np.isnan(evaluated)).sum(axis=0)
    means = np.full(len(run.names), np.nan)
    np.divide(np.nansum(evaluated, axis=0), known, out=means, where=known > 0)
    return means


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[place] for place in places]


def _labels(run: DownsampledRun) -> dict[str, Packed] | None:
    if not run.manifest.federation.task.has_classes:
        return None
    counts = run.directory.label_counts()
    if counts is None or len(counts["train"]) != len(run.names):
        return None
    return {part: packed(held, max(1.0, float(held.max()))) for part, held in counts.items()}
