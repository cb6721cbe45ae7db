"""Create a federation from a table: draw the splits, fit the preprocessing, and transform all samples."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import check_split_settings, list_names
from fedrema.data.federation import Federation
from fedrema.data.load_options import LoadOptions
from fedrema.data.preprocessing import Preprocessing, fit_preprocessing
from fedrema.data.rare_classes import has_rare_class
from fedrema.data.readers.image_files import find_image_column, read_image_table
from fedrema.data.readers.source import TableSource, read_table
from fedrema.data.roles import TableOptions, find_roles
from fedrema.data.statistics import Statistics, check_statistics, local_statistics, merge_statistics
from fedrema.data.table import Table
from fedrema.data.table_targets import make_target
from fedrema.errors import BadInput
from fedrema.tasks import CLASSIFICATION

log = logging.getLogger("fedrema")
_FEW = 3
"""Clients with fewer samples than this are reported."""
_OF_IMAGES = ("--target", "--task", "--client-column", "--split-column", "--columns", "--image-size")
"""Options of tables of images."""


def federation_from_source(
    source: TableSource, options: LoadOptions, info: Mapping[str, Any], folder: Path = Path()
) -> Federation:
    """Read a source of tables and create a federation; paths of images are relative to `folder`."""
    return federation_from_table(table_from_source(source, options.table, options.preprocessing, folder), options, info)


def table_from_source(
    source: TableSource,
    options: TableOptions,
    preprocessing: Preprocessing | None = None,
    folder: Path = Path(),
    need_target: bool = True,
) -> Table:
    """Read a source of tables, or of paths of images relative to `folder`.

    `preprocessing` says what the columns must hold; by default this is inferred. Without `need_target`, the target may
    be absent.
    """
    roles = find_roles(source.names, options, source.clients is not None, need_target)
    column = find_image_column(source, roles)
    if column is not None:
        options.refuse("images", "pixels", *_OF_IMAGES)
        return read_image_table(source, roles, column, folder, options.image_size, image_shape(preprocessing))
    if options.image_size:
        raise BadInput(f"--image-size {options.image_size} has no meaning for a table without image files.")
    return read_table(source, roles, None if preprocessing is None else preprocessing.kinds())


def image_shape(preprocessing: Preprocessing | None) -> tuple[int, int, int] | None:
    """Return channels, height and width of the images of a federation; None if they are not known."""
    if preprocessing is None or not preprocessing.images:
        return None
    (rule,) = preprocessing.images
    return rule.channels, rule.height, rule.width


def federation_from_table(table: Table, options: LoadOptions, info: Mapping[str, Any]) -> Federation:
    """Create a federation from a table; the preprocessing is fitted to the training samples only."""
    check_split_settings(options.data_seed, options.test_share)
    target = make_target(table, options.table.task, options.class_names)
    rare = options.rare if target.task in CLASSIFICATION else False
    if rare is None:
        rare = has_rare_class(np.bincount(target.y, minlength=len(target.names)))
    test = table.test_mask(options.data_seed, options.test_share, target.y if rare else None)
    _check_clients(table, test)
    preprocessing = options.preprocessing or _fitted(table, test, options.table)
    # Federations are sorted by client. The inputs are written in this order, and are valid: `from_arrays` would copy
    # them twice to validate and sort them.
    x = preprocessing.transform(table, np.argsort(table.client, kind="stable"))
    placeholder = np.broadcast_to(np.uint8(0), (len(x), 1))
    classes: dict[str, Any] = {"classes": len(target.names), "class_names": target.names} if target.names else {}
    federation = Federation.from_arrays(
        placeholder,
        target.y,
        table.client,
        test,
        info=info,
        **classes,
        task=target.task,
        preprocessing=preprocessing,
        rare=rare,
    )
    return replace(federation, x=x, names=table.names)


def statistics_by_client(table: Table, test: NDArray[np.bool_]) -> dict[str, Statistics]:
    """Return for each client the statistics of its training samples."""
    rows = table.rows_by_client()
    return {name: local_statistics(table, mine[~test[mine]]) for name, mine in zip(table.names, rows, strict=True)}


def _fitted(table: Table, test: NDArray[np.bool_], options: TableOptions) -> Preprocessing:
    sites = statistics_by_client(table, test)
    merged = check_statistics(merge_statistics(sites.values()), tuple(table.inputs), tuple(table.targets))
    fitted = fit_preprocessing(merged, options, sites)
    for name, reason in fitted.left_out.items():
        log.warning("Note: column %r is not used, because %s.", name, reason)
    return fitted


def _check_clients(table: Table, test: NDArray[np.bool_]) -> None:
    sizes = np.bincount(table.client, minlength=len(table.names))
    trained = np.bincount(table.client[~test], minlength=len(table.names))
    if not trained.all():
        name = table.names[int(np.argmin(trained))]
        raise BadInput(f"client {name!r} has only test samples; every client needs at least one training sample.")
    small = [name for name, size in zip(table.names, sizes, strict=True) if size < _FEW]
    if small:
        log.warning("Warning: %d clients have fewer than %d samples: %s.", len(small), _FEW, list_names(small))
