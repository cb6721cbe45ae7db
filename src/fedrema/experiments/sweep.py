"""Sweeps: run rows with every combination of some settings, and choose the best by the honest primary metric."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedrema.errors import BadInput
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Experiment, Line, Value, Values
from fedrema.experiments.store import Store
from fedrema.experiments.table import ABOUT_OUTDATED, OUTDATED, Statistic, measured, values_of
from fedrema.experiments.tasks import finished_runs
from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import METRICS


def expanded(rows: Sequence[Line], sweep: Mapping[str, Any], where: str) -> tuple[Line, ...]:
    """Return a row for every combination of the swept settings.

    `sweep` holds lists of values by setting, for all rows, and such tables by the names of single rows.
    """
    tables = {name: value for name, value in sweep.items() if isinstance(value, dict)}
    for name in tables:
        if name not in {row.name for row in rows}:
            valid = ", ".join(row.name for row in rows)
            raise BadInput(f"{where}: [sweep.{name}] is not a row; rows are {valid}.")
    common = {name: value for name, value in sweep.items() if name not in tables}
    for setting, values in itertools.chain(common.items(), *(table.items() for table in tables.values())):
        if not isinstance(values, list) or not values:
            raise BadInput(f"{where}: {setting!r} in [sweep] must be a list of values, got {values!r}.")
    return tuple(variant for row in rows for variant in _variants(row, {**common, **tables.get(row.name, {})}))


def _variants(row: Line, swept: Mapping[str, list[Value]]) -> list[Line]:
    if not swept:
        return [row]
    found = []
    for values in itertools.product(*swept.values()):
        choice = dict(zip(swept, values, strict=True))
        words = [f"{name} = {json.dumps(value).strip(chr(34))}" for name, value in choice.items()]
        method = row.settings.get("method", row.name)
        settings = {"method": method, **row.settings, **choice}
        found.append(Line(" ".join([row.name, *words]), ", ".join([row.title, *words]), settings, row.name, choice))
    return found


@dataclass(frozen=True)
class Choice:
    """The settings that a sweep chose for a method on a dataset."""

    dataset: str
    method: str
    title: str
    settings: Values
    honest: float
    """Mean honest value over seeds (and columns of this dataset); shares in percent."""
    tried: int
    """How many combinations were compared."""
    metric: str = "accuracy"
    """Name of the primary metric."""
    outdated: bool = False
    """Whether some of their runs were computed by an older revision."""


def choices(experiment: Experiment, seeds: int, store: Store) -> list[Choice]:
    """Choose for every swept row and dataset the settings with the best mean honest value of the primary metric.

    Only combinations with the highest number of finished runs are compared.
    """
    by_row: dict[tuple[str, str], dict[str, list[float]]] = {}
    older: set[tuple[str, str]] = set()
    known: dict[tuple[str, str], list[FinishedRun]] = {}
    for cell in experiment.cells:
        if cell.row.swept:
            dataset = cell.parsed.data.federation or cell.parsed.data.dataset
            runs = finished_runs(cell, seeds, store)
            values = values_of(runs, "honest")
            known.setdefault((dataset, cell.row.base), []).extend(runs)
            older |= {(dataset, cell.row.base) for run in runs if run.outdated}
            by_row.setdefault((dataset, cell.row.base), {}).setdefault(cell.row.name, []).extend(values.values())
    found = []
    rows = {row.name: row for row in experiment.rows}
    for (dataset, base), variants in by_row.items():
        most = max(map(len, variants.values()))
        complete = {name: mean(values) for name, values in variants.items() if values and len(values) == most}
        if complete:
            honest_value = measured("honest", known[dataset, base])
            best = rows[max(complete, key=lambda name: honest_value.sign * complete[name])]
            method = str(best.settings.get("method", base))
            settings = {name: value for name, value in best.settings.items() if name != "method"}
            honest, doubt = complete[best.name], (dataset, base) in older
            metric = honest_value.metric.name
            found.append(Choice(dataset, method, best.title, settings, honest, len(complete), metric, doubt))
    return found


def choices_markdown(found: Sequence[Choice]) -> str:
    """Return the choices as a Markdown table."""
    rows = [
        [
            each.dataset,
            each.title,
            f"{Statistic(each.honest, 0.0, 1, METRICS[each.metric])}{OUTDATED if each.outdated else ''}",
            str(each.tried),
        ]
        for each in found
    ]
    lines = markdown_lines(["data", "chosen", "honest", "of"], rows, texts=2)
    titles = " or ".join(dict.fromkeys(METRICS[each.metric].title for each in found)) or "accuracy"
    note = f"Chosen by the mean honest {titles} over seeds, among combinations with all their runs finished."
    note += ABOUT_OUTDATED if any(each.outdated for each in found) else ""
    return "\n".join([*lines, "", note, ""])


def tuned_file(found: Sequence[Choice], title: str) -> str:
    """Return the choices as TOML for --tuned: [dataset.method] with settings; of several rows the best."""
    best: dict[tuple[str, str], Choice] = {}
    for each in sorted(found, key=lambda each: each.honest * (1 if METRICS[each.metric].higher_is_better else -1)):
        best[each.dataset, each.method] = each
    lines = [
        f"# Chosen by {json.dumps(title, ensure_ascii=False)}; for fedrema run METHOD --dataset DATASET --tuned FILE"
    ]
    for each in best.values():
        lines += ["", f"[{json.dumps(each.dataset)}.{json.dumps(each.method)}]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in each.settings.items()]
    return "\n".join([*lines, ""])
