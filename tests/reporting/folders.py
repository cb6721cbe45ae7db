"""Folders of made-up runs as `fedrema run` writes them."""

import dataclasses

from fedrema.core.reports import Reports
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.checkpoint import load_state
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import FederationFacts, Manifest, RanOn
from fedrema.runs.run import Run
from fedrema.simulation.records import MetricRecord, MetricSummary, RoundRecord, Summary


def write_run(
    path,
    method="fedavg",
    seed=0,
    honest=0.8,
    accuracies=(0.5, 0.7, 0.8),
    critical=(),
    fingerprint="a" * 64,
    ended=True,
    rounds=None,
    info=None,
    **settings,
) -> Run:
    """Write config.json, rounds.jsonl and, for a finished run, summary.json; return the run."""
    directory = RunDirectory(path)
    names = ["north", "south"]
    info = info or {"dataset": "digits", "partition": "grouped", "s": 0.1}
    values = {"seed": seed, "rounds": rounds or len(accuracies), "out": str(path), "lr": 0.05, **settings}
    directory.create(manifest(method, values, FederationFacts(fingerprint, names, 10, [], (8, 8), [], [], info)))
    directory.truncate_rounds(0)
    records = [
        round_record(
            place + 1,
            accuracy,
            worst_tenth=accuracy - 0.1,
            trace={"critical": critical[place]} if critical else {},
            seconds={"train": 1.0, "evaluate": 0.5},
        )
        for place, accuracy in enumerate(accuracies)
    ]
    for record in records:
        directory.append(record)
    if ended:
        best = max(accuracies)
        metric = MetricSummary(best, accuracies.index(best) + 1, accuracies[-1], honest, accuracies[-1] - 0.1)
        summary = Summary(
            len(records),
            {"accuracy": metric},
            period_rounds={"critical": sum(critical)} if critical else {},
            seconds={"train": 1.0 * len(records), "evaluate": 0.5 * len(records)},
        )
        directory.write_json(directory.summary_file, summary.as_json())
    return Run(path)


def manifest(method, settings, federation, identity="0") -> Manifest:
    """Return the manifest of a run on a CPU."""
    versions = {"fedrema": "1.0", "torch": "2.0", "numpy": "2.0"}
    ran_on = RanOn("cpu", "stacked", "float32", "exact", 1, 1, "2026-01-01T00:00:00+00:00", "3.11", versions)
    kind = registry().get(method)
    reports = Reports() if kind is None else kind.reports
    title = _title(kind, settings) if kind is not None else ""
    return Manifest(method, settings, identity, {"method": 1, "cpu": 1}, {}, federation, ran_on, reports, title)


def _title(kind, settings) -> str:
    """Return the method's title with the settings that are part of it."""
    names = {field.name for field in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in settings.items() if name in names}).called()
    except BadInput:
        return kind.title


def round_record(number, accuracy=None, clients=None, worst_tenth=None, **more) -> RoundRecord:
    """Return the record of a round in which both clients have this accuracy; None: not evaluated."""
    metrics = {}
    if accuracy is not None:
        each = [accuracy, accuracy] if clients is None else clients
        metrics["accuracy"] = MetricRecord(accuracy, (accuracy, accuracy), worst_tenth, each)
    return RoundRecord(number, metrics=metrics, **more)


def replace_records(run, records) -> None:
    """Replace the records of a run, and write its checkpoint, predictions and summary for them, if it has any."""
    directory = run.directory
    summary = directory.summary()
    state = load_state(directory.checkpoint_file, None) if directory.checkpoint_file.exists() else None
    predictions = directory.predictions() if directory.predictions_file.exists() else None
    directory.rounds_file.unlink()
    for record in records:
        directory.append(record)
    if state is not None:
        directory.save_state(state, {})
    if predictions is not None:
        directory.write_predictions(predictions, len(records))
    if summary is not None:
        changed = dataclasses.replace(summary, rounds=len(records))
        directory.write_json(directory.summary_file, changed.as_json())


def write_two_groups(folder) -> list[Run]:
    """FedReMa 80, 84, 82 and FedAvg 78, 80, 76 (honest, in percent), three seeds each."""
    honest = {"fedrema": (0.80, 0.84, 0.82), "fedavg": (0.78, 0.80, 0.76)}
    return [
        write_run(
            folder / method / f"seed-{seed}",
            method,
            seed,
            value,
            critical=(True, seed > 0, False) if method == "fedrema" else (),
        )
        for method, values in honest.items()
        for seed, value in enumerate(values)
    ]
