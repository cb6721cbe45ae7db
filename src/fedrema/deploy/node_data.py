"""A node's own data: its samples, preprocessed as the federation agreed, and the statistics that it sends before."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrema.config.settings import Settings
from fedrema.data import DataSettings, Federation, Preprocessing, build_federation, load_user_data, read_user_table
from fedrema.data.checks import list_names
from fedrema.data.npz import read_npz
from fedrema.data.readers.files import is_table, open_file
from fedrema.data.roles import CLIENT_NAMES, SPLIT_NAME, TableOptions
from fedrema.data.statistics import NumberSummary, Statistics, local_statistics, summarise_numbers
from fedrema.data.table import CategoryColumn, NumberColumn, Table
from fedrema.data.table_targets import make_target, target_codes
from fedrema.data.text_columns import parse_numbers
from fedrema.deploy.agreement import Needs, NodeStatistics, listed
from fedrema.deploy.refusals import Refusal, Refused
from fedrema.deploy.run_config import Plan
from fedrema.errors import BadInput

MOST_NUMBERS = 10
"""A column of categories may have this many different numbers as names, if most of its names are numbers."""


def own_samples(
    data: str, settings: Settings, name: str, plan: Plan, preprocessing: Preprocessing | None = None
) -> Federation:
    """Read a node's samples, labelled with the federation's classes if they are known.

    `data` is a file, a folder or module:function. A single file need not name its client; of several clients, the one
    called `name` is used. `preprocessing` is the federation's, for tables.
    """
    share, seed, file = settings.data.test_share, settings.data.data_seed, Path(data)
    class_names = plan.names if plan.classes and plan.predicted.has_classes else None
    task = plan.task or None
    if plan.is_table or preprocessing is not None:
        options = _table_options(file, settings)
        if preprocessing is not None and preprocessing.scale == "site":
            preprocessing = _with_own_scale(
                preprocessing, read_user_table(data, options, preprocessing, name), settings, plan
            )
        federation = load_user_data(data, seed, share, class_names, options, preprocessing, name, plan.rare_classes)
    elif file.is_file() and is_table(file):
        raise BadInput(
            f"data={data} is a table, but this federation is for samples of shape {plan.sample_shape}: a federation for"
            " tables is created with --columns or --example."
        )
    else:
        if file.suffix == ".npz" and file.is_file():
            arrays = read_npz(file, required=("x", "y"), optional=("split", "client", "meta"))
            if "client" not in arrays:
                client, split = np.full(len(arrays["y"]), name), arrays.get("split")
                return Federation.from_arrays(
                    arrays["x"],
                    arrays["y"],
                    client,
                    split,
                    None,
                    None,
                    seed,
                    share,
                    class_names=class_names,
                    task=task,
                    rare=plan.rare_classes,
                )
        options = TableOptions(task=task or "auto")  # type: ignore[arg-type]  # a task
        federation = load_user_data(data, seed, share, class_names, options, rare=plan.rare_classes)
    if len(federation) > 1 and name not in federation.names:
        raise BadInput(f"data={data} holds {len(federation)} clients, and none is called {name!r}.")
    return federation.only(federation.names.index(name)) if len(federation) > 1 else federation


@functools.lru_cache(maxsize=1)  # Flower's simulation engine runs many nodes in one process
def partitioned_dataset(data: DataSettings) -> Federation:
    """Return the partitioned dataset of a federation whose nodes have no own data."""
    return build_federation(data)


def statistics_of_samples(samples: Federation, needs: Needs, plan: Plan) -> NodeStatistics:
    """Return the statistics of the targets of a node's samples, if they are arrays."""
    training = samples.y[~samples.test]
    if needs.target:
        return NodeStatistics(len(training), target=summarise_numbers(training))
    counts = plan.with_classes(samples).label_counts("train")[0].tolist()
    return NodeStatistics(len(training), classes=dict(zip(plan.names, counts, strict=True)))


def statistics_of_table(data: str, settings: Settings, name: str, needs: Needs, plan: Plan) -> NodeStatistics:
    """Return the statistics of a node's table that the federation needs."""
    table = read_user_table(data, _table_options(Path(data), settings), client=name)
    rows, training = _own_rows(table, settings, name, plan)
    _check_categories(table)
    columns = replace(local_statistics(table, training), target_numbers={}, target_classes={})
    if not needs.moments:
        columns = replace(columns, numbers={each: _without_moments(found) for each, found in columns.numbers.items()})
    classes, target = _target_statistics(table, rows, training, needs, plan)
    return NodeStatistics(len(training), columns, classes, target)


def _check_categories(table: Table) -> None:
    """Refuse numbers with some text between them: as names of categories, all of them would leave the node."""
    for name, column in table.inputs.items():
        if not isinstance(column, CategoryColumn):
            continue
        texts = [text for text in column.categories if parse_numbers([text]) is None]
        numbers = len(column.categories) - len(texts)
        if texts and numbers >= MOST_NUMBERS and numbers > len(texts):
            raise BadInput(
                f"Column {name!r} has {numbers} different numbers, but also {texts[0]!r}, so that all would be sent as"
                " names of categories: correct the text, or put a letter in front of the names if they are names."
            )


def _target_statistics(
    table: Table, rows: NDArray[np.int64], training: NDArray[np.int64], needs: Needs, plan: Plan
) -> tuple[dict[str, int], NumberSummary | None]:
    """Return the classes with their training samples, and the summary of a quantity."""
    task = plan.predicted
    if needs.target:
        return {}, summarise_numbers(make_target(table, task.name).y[training])
    if not needs.class_names and not needs.class_counts:
        return {}, None
    if task.name == "multilabel":
        found = make_target(table, task.name, plan.names)
        return dict(zip(found.names, map(int, found.y[training].sum(axis=0)), strict=True)), None
    targets = replace(table, inputs={})
    (column,) = table.targets
    held, trained = (_classes(local_statistics(targets, chosen), column, task.name) for chosen in (rows, training))
    if plan.classes and (unknown := held.keys() - set(plan.names)):  # their names would leave the node
        raise BadInput(
            f"The target {column!r} is {min(unknown)!r} in a sample; the classes are {list_names(plan.names)}."
        )
    return {name: trained.get(name, 0) if needs.class_counts else 0 for name in held}, None


def _classes(found: Statistics, column: str, task: str) -> dict[str, int]:
    """Return how many samples each class has."""
    if column not in found.target_classes:
        raise BadInput(f"The task {task} needs classes, but the target {column!r} has many different numbers.")
    summary = found.target_classes[column]
    if summary.missing:
        raise BadInput(f"The target {column!r} is missing in {summary.missing} samples; every sample needs one.")
    return summary.counts


def _without_moments(found: NumberSummary) -> NumberSummary:
    """Return a summary that says only how many values there are, and whether they differ."""
    return NumberSummary(found.count, 0.0, float(found.count) if found.m2 else 0.0, found.missing)


def _own_rows(table: Table, settings: Settings, name: str, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of this node's samples, and those of its training samples."""
    if len(table.names) > 1 and name not in table.names:
        raise BadInput(f"Its table holds {len(table.names)} clients, and none is called {name!r}.")
    rows = table.rows_by_client()[table.names.index(name) if len(table.names) > 1 else 0]
    classes = target_codes(table) if plan.rare_classes else None
    test = table.test_mask(settings.data.data_seed, settings.data.test_share, classes)
    return rows, rows[~test[rows]]


def _with_own_scale(preprocessing: Preprocessing, table: Table, settings: Settings, plan: Plan) -> Preprocessing:
    """Return the preprocessing with mean and standard deviation of the columns of each client of this table."""
    numbers = []
    for rule in preprocessing.numbers:
        column = table.inputs[rule.column]
        assert isinstance(column, NumberColumn)
        sites = {}
        for name in table.names:
            found = summarise_numbers(column.values[_own_rows(table, settings, name, plan)[1]])
            if found.count:
                sites[name] = (found.mean, found.deviation or 1.0)
        numbers.append(replace(rule, sites=sites))
    return replace(preprocessing, numbers=tuple(numbers))


def _table_options(file: Path, settings: Settings) -> TableOptions:
    """Return how to read a node's table; refuses one without the federation's columns, or with others."""
    options = settings.data.table_options
    if not file.is_file() or not is_table(file):
        raise BadInput(f"This federation is for tables, but data={file} is not a .csv, .csv.gz or .parquet file.")
    names, needed = open_file(file).names, [*listed(settings.data.columns), *listed(settings.data.target)]
    if missing := [name for name in needed if name not in names]:
        why = f"Column {missing[0]!r} is missing in its table; the federation's are {list_names(needed)}."
        raise Refused(Refusal.COLUMN_MISSING, why, name=missing[0])
    allowed = {*needed, *CLIENT_NAMES, SPLIT_NAME, options.client_column, options.split_column}
    if added := [name for name in names if name not in allowed]:
        why = f"Its table has the additional column {added[0]!r}; the federation's are {list_names(needed)}."
        raise Refused(Refusal.COLUMN_ADDED, why)
    return options
