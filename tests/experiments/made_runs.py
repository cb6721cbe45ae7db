"""Made-up finished runs with chosen numbers, from which expected results can be computed by hand."""

import msgspec

from fedrema.engine import REVISIONS
from fedrema.experiments.finished_run import ClientScores, FinishedRun, Machine, Matching
from fedrema.simulation.records import MetricSummary, Summary


def made_summary(rounds=0, seconds=None, critical_rounds=None, metric="accuracy", **values):
    """Return a summary with some values of a metric; missing ones equal the first, except that honest is None."""
    metrics, given = {}, [value for value in values.values() if value is not None]
    if given:
        best, final = (values.get(f"{name}_{metric}", given[0]) for name in ("best", "final"))
        metrics[metric] = MetricSummary(best, 1, final, values.get(f"honest_{metric}"), best)
    periods = {} if critical_rounds is None else {"critical": critical_rounds}
    return Summary(rounds, metrics, {}, periods, seconds or {})


def made_run(key="", method="fedavg", seed=0, settings=None, ran_on=None, clients=None, matching=None, **parts):
    """Return a run of the current revisions."""
    return FinishedRun(
        key,
        method,
        {"seed": seed, **(settings or {})},
        clients=ClientScores(**(clients or {})),
        matching=Matching(**matching) if matching else None,
        ran_on=Machine(**ran_on) if ran_on else None,
        revisions={"method": 1, **REVISIONS},
        **parts,
    )


def keep(store, run):
    """Store a run as its process does."""
    store.put_text(run.key, msgspec.json.encode(run).decode())
