"""The model card of an export: what the models predict, the data, metrics with intervals, settings and limitations."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedrema.base.options import Purpose
from fedrema.config.settings import Settings
from fedrema.data.preprocessing import Preprocessing
from fedrema.runs.manifest import FederationFacts
from fedrema.runs.run import Run
from fedrema.simulation.gains import FEWEST_SAMPLES
from fedrema.simulation.metric_intervals import Interval, metric_intervals
from fedrema.tasks import Metric, Predictions, Task, find_metric

_PREDICTED = {
    "multiclass": "one of {} classes",
    "binary": "one of {} classes",
    "multilabel": "each of {} labels",
    "ordinal": "one of {} ordered levels",
    "regression": "a quantity",
    "count": "a number of events",
}
_MOST_NAMES = 20
OF_SEVERAL_CLASSES = ("balanced_accuracy", "f1")
"""Means over classes, which are only the accuracy of one class where there is no other."""


def model_card(run: Run, rows: Sequence[int]) -> str:
    """Return the model card of the models of clients in some rows, as Markdown."""
    sections = (_overview(run), _data(run), _metrics(run, rows), _training(run), _limitations(run, rows))
    return "\n".join(line for section in sections for line in (*section, "")).rstrip() + "\n"


def _overview(run: Run) -> Iterator[str]:
    facts, task = run.manifest.federation, run.manifest.federation.task
    yield "# Model card"
    yield ""
    yield (
        f"Personal models of {len(facts.names)} clients, trained together by federated learning with "
        f"{run.manifest.title or run.method}. Each model predicts {_PREDICTED[task.name].format(task.classes)}"
        f"{_named(facts, task)} for samples of its own client."
    )


def _named(facts: FederationFacts, task: Task) -> str:
    if not task.has_classes:
        return ""
    names = facts.labels[:_MOST_NAMES]
    return f" ({', '.join(names)}{', …' if len(facts.labels) > len(names) else ''})"


def _data(run: Run) -> Iterator[str]:
    facts = run.manifest.federation
    train, test = np.array(facts.train_counts), np.array(facts.test_counts)
    source = ", ".join(f"{name} {value}" for name, value in facts.info.items())
    yield "## Data"
    yield ""
    yield f"- Source: {source or 'not recorded'}"
    yield f"- Training samples: {train.sum():,} ({train.min():,} to {train.max():,} per client)"
    yield f"- Test samples: {test.sum():,} ({test.min():,} to {test.max():,} per client)"
    yield f"- Inputs of a model: {' × '.join(map(str, facts.sample_shape))} numbers per sample"
    if facts.task.name in ("regression", "count"):
        yield f"- Target in training samples: mean {facts.task.centre:.4g}" + (
            f", standard deviation {facts.task.scale:.4g}" if facts.task.name == "regression" else ""
        )
    if facts.preprocessing is not None:
        yield ""
        yield from _columns(facts.preprocessing)


def _columns(rules: Preprocessing) -> Iterator[str]:
    yield "Columns, and how they are preprocessed (fitted to training samples only):"
    yield ""
    yield "| column | kind | details |"
    yield "|---|---|---|"
    for entry in rules.describe():
        details = []
        for name, value in entry.items():
            if name not in ("column", "kind"):
                shown = f"{value:.4g}" if isinstance(value, float) else value
                if isinstance(value, list):
                    shown = f"{len(value)}: {', '.join(map(str, value[:_MOST_NAMES]))}"
                details.append(f"{name} {shown}")
        yield f"| {_cell(entry['column'])} | {_cell(entry['kind'])} | {_cell('; '.join(details))} |"


def _metrics(run: Run, rows: Sequence[int]) -> Iterator[str]:
    yield "## Metrics"
    yield ""
    if not run.finished or not run.directory.predictions_file.exists():
        yield "The run has no predictions of its final models, from which metrics are computed."
        return
    found = run.predictions()
    metrics = [find_metric(name) for name in run.rounds[-1].metrics] or [find_metric(found.task.primary)]
    yield (
        "On each client's own test samples, with the models of the last round. In brackets: 95 % intervals over the "
        "client's test samples, where there are enough of them for a valid interval of the metric. –: undefined, such "
        "as an AUC with one class only."
    )
    yield ""
    yield f"| client | test samples | {' | '.join(metric.title for metric in metrics)} |"
    yield f"|---|---:|{'---:|' * len(metrics)}"
    models = [found.of(row) for row in found.rows]
    intervals = [metric_intervals(metric, models) for metric in metrics]  # of all clients: they share a deviation
    for place, row in enumerate(found.rows):
        if row in rows:
            model = models[place]
            cells = " | ".join(
                _value(metric, model, each[place]) for metric, each in zip(metrics, intervals, strict=True)
            )
            yield f"| {_cell(run.names[row])} | {int(model.mask.sum())} | {cells} |"
    yield ""
    for metric in metrics:
        better = "higher" if metric.higher_is_better else "lower"
        yield f"- {metric.title}: {metric.description}; {better} is better{', in per cent' if metric.percent else ''}."


def _value(metric: Metric, model: Predictions, between: Interval | None) -> str:
    if metric.name in OF_SEVERAL_CLASSES and _has_one_class(model):
        return "–"
    numerators, denominators = metric.quotients(model)
    value = metric.value(float(numerators[0]), float(denominators[0]))
    if value is None:
        return "–"
    interval = "" if between is None else f" [{metric.shown(between[0])}, {metric.shown(between[1])}]"
    return metric.shown(value) + interval


def _has_one_class(predictions: Predictions) -> bool:
    return predictions.task.name != "multilabel" and len(torch.unique(predictions.target[predictions.mask])) == 1


def _training(run: Run) -> Iterator[str]:
    manifest = run.manifest
    defining = Settings.names(Purpose.RESULT, Purpose.ROUNDS, Purpose.SEED, Purpose.SOURCE)
    common = Settings.names(*Purpose)
    yield "## Training"
    yield ""
    yield f"- Method: {manifest.method}; rounds trained: {len(run.rounds)}"
    yield f"- Trained on: {manifest.ran_on.device}, {manifest.ran_on.dtype}, started {manifest.ran_on.started}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.ran_on.versions.items())
    yield f"- Versions: {versions}, Python {manifest.ran_on.python}"
    shown = {
        name: value
        for name, value in manifest.settings.items()
        if (name in defining or name not in common) and value not in (None, "")
    }
    yield f"- Settings: {', '.join(f'`{name} = {value}`' for name, value in shown.items())}"


def _limitations(run: Run, rows: Sequence[int]) -> Iterator[str]:
    facts = run.manifest.federation
    few = sum(facts.test_counts[row] < FEWEST_SAMPLES for row in rows)
    yield "## Limitations"
    yield ""
    yield "- A model is personal: it was fitted and evaluated for its own client, and may be worse for any other."
    yield "- Metrics describe samples like those of the test split. They do not show how the model behaves when data"
    yield "  changes over time, or for groups of people that are rare in it."
    yield "- The number of rounds was set in advance; the metrics above are those of the last round, not of the best."
    if few:
        yield f"- {few} of {len(rows)} clients have fewer than {FEWEST_SAMPLES} test samples, too few for intervals."
    yield "- A model and its preprocessing contain information about the training data, such as means of columns and"
    yield "  names of categories. Federated learning alone does not make it anonymous."


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
