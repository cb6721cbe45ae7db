"""The part of the page's document about single clients: accuracy by round, what they hold, when they were there."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedrema.page.encode import packed
from fedrema.page.reading import ThinnedRun
from fedrema.simulation.records import RoundRecord

CELLS = 750_000
"""Rounds × clients of all runs together: about eight bytes each."""


def people_part(runs: Sequence[ThinnedRun]) -> dict[str, Any]:
    """Return what is known of each client of each run."""
    most = CELLS // max(1, sum(len(run.names) for run in runs))
    return {"runs": [_people(run, max(2, most)) for run in runs]}


def _people(run: ThinnedRun, most: int) -> dict[str, Any]:
    clients = len(run.names)
    records = evenly(run.rounds, most)
    found: dict[str, Any] = {"rounds": [record.round for record in records], "labels": _labels(run, clients)}
    if records and len(records) < len(run.rounds):
        found["note"] = f"Single clients are drawn in {len(records)} of these rounds."
    if not records:
        return found
    everyone = range(clients)
    curves: dict[str, Callable[[RoundRecord], np.ndarray]] = {
        "accuracy": lambda record: spread(record.quantity("client_accuracy"), everyone, clients),
        "trained": lambda record: spread(record.quantity("trained_client_accuracy"), record.participants, clients),
        "loss": lambda record: spread(record.client_loss, record.participants, clients),
        "chosen": lambda record: spread(record.trace.get("set_sizes"), record.participants, clients),
        "there": lambda record: _there(record, run.names),
    }
    for name, row in curves.items():
        stack = np.stack([row(record) for record in records])
        if not np.isnan(stack).all():
            found[name] = packed(stack, 1.0 if name in ("accuracy", "trained") else None)
    final = np.array([spread(record.quantity("client_accuracy"), everyone, clients) for record in run.rounds])
    scored = final[~np.isnan(final).all(axis=1)][-5:]
    if len(scored):
        known = (~np.isnan(scored)).sum(axis=0)
        means = np.full(clients, np.nan)
        np.divide(np.nansum(scored, axis=0), known, out=means, where=known > 0)
        found["final"] = packed(means, 1.0)
    return found


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[place] for place in places]


def spread(values: Any, rows: Any, clients: int) -> np.ndarray:
    """Give values of some clients their place among all; NaN for the others."""
    everyone = np.full(clients, np.nan)
    if values is None or rows is None:
        return everyone
    if len(values) == clients:
        rows = range(clients)
    pairs = [(row, value) for row, value in zip(rows, values, strict=False) if 0 <= row < clients and value is not None]
    if pairs:
        places, found = zip(*pairs, strict=True)
        everyone[list(places)] = found
    return everyone


def _there(record: RoundRecord, names: Sequence[str]) -> np.ndarray:
    """Return who took part: 2; who failed on the way: 1; who was absent: 0."""
    present = np.zeros(len(names))
    for found, value in ((record.dropped, 1), (record.participants, 2)):
        rows = np.asarray(found, int)
        present[rows[rows < len(names)]] = value
    for name in record.rejected:
        if name in names:
            present[list(names).index(name)] = 1
    return present


def _labels(run: ThinnedRun, clients: int) -> dict[str, Any] | None:
    counts = run.directory.label_counts()
    if counts is None or len(counts["train"]) != clients:
        return None
    return {part: packed(held, max(1.0, float(held.max()))) for part, held in counts.items()}
