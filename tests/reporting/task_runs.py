"""Folders of made-up runs of any task, with chosen metrics of every client."""

from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import FederationFacts
from fedrema.runs.run import Run
from fedrema.simulation.records import MetricRecord, RoundRecord
from fedrema.simulation.scoring import summarise
from fedrema.tasks import Task
from tests.reporting.folders import manifest

TWO_CLIENTS = {"rmse": [[2.0, 4.0], [1.0, 3.0], [1.5, 3.0]], "r2": [[0.0, -1.0], [0.9, 0.5], [0.8, 0.4]]}
"""Metrics of a regression in three rounds."""


def write_task_run(path, task="regression", values=None, method="fedavg", seed=0, classes=1, ended=True) -> Run:
    """Write a run whose metrics are the means of `values`: by metric, for each round one number per client."""
    values = values or TWO_CLIENTS
    rounds = len(next(iter(values.values())))
    clients = len(next(iter(values.values()))[0])
    names, directory = [f"site{row}" for row in range(clients)], RunDirectory(path)
    counts = [30 + row for row in range(clients)]
    own_task = None if task in ("binary", "multiclass") else Task(task, classes)
    facts = FederationFacts("a" * 64, names, classes, [], (3,), counts, counts, {"source": "arrays"}, own_task=own_task)
    settings = {"seed": seed, "rounds": rounds, "out": str(path), "lr": 0.05}
    directory.create(manifest(method, settings, facts))
    records = [
        RoundRecord(
            number + 1,
            participants=list(range(clients)),
            metrics={name: _metric(found[number]) for name, found in values.items()},
            seconds={"train": 1.0},
        )
        for number in range(rounds)
    ]
    for record in records:
        directory.append(record)
    if ended:
        directory.write_json(directory.summary_file, summarise(records).as_json())
    return Run(path)


def _metric(clients):
    known = [value for value in clients if value is not None]
    mean = sum(known) / len(known)
    return MetricRecord(mean, (mean, mean), max(known), clients)
