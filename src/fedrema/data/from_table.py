"""Create a federation from a table: draw the splits, fit the preprocessing, and transform all samples."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import check_split_settings, list_names
from fedrema.data.federation import Federation
from fedrema.data.preprocessing import Preprocessing, fit_preprocessing
from fedrema.data.readers.source import TableSource, read_table
from fedrema.data.roles import TableOptions, find_roles
from fedrema.data.statistics import check_statistics, local_statistics, merge_statistics
from fedrema.data.table import Table
from fedrema.data.table_targets import make_target
from fedrema.errors import BadInput

log = logging.getLogger("fedrema")
_FEW = 3
"""Clients with fewer samples than this are reported."""


@dataclass(frozen=True)
class LoadOptions:
    """Settings for what the data does not specify itself."""

    data_seed: int = 0
    """Seed of the test splits, if the data has no `split`."""
    test_share: float = 0.2
    """Share of test samples, if the data has no `split`."""
    class_names: Sequence[str] | None = None
    """The classes of the run that the data is used for; None: those of the data."""
    table: TableOptions = field(default_factory=TableOptions)
    """How to read and preprocess tables and images."""
    preprocessing: Preprocessing | None = None
    """The preprocessing of the run that the data is used for; None: it is fitted to the data."""

    @property
    def for_arrays(self) -> dict[str, Any]:
        """The arguments of `Federation.from_arrays` that these options determine."""
        arguments = {"data_seed": self.data_seed, "test_share": self.test_share, "class_names": self.class_names}
        return arguments | accepted(task=None if self.table.task == "auto" else self.table.task)


def federation_from_source(source: TableSource, options: LoadOptions, info: Mapping[str, Any]) -> Federation:
    """Read a source of tables and create a federation."""
    roles = find_roles(source.names, options.table, source.clients is not None)
    kinds = None if options.preprocessing is None else options.preprocessing.kinds()
    return federation_from_table(read_table(source, roles, kinds), options, info)


def federation_from_table(table: Table, options: LoadOptions, info: Mapping[str, Any]) -> Federation:
    """Create a federation from a table; the preprocessing is fitted to the training samples only."""
    check_split_settings(options.data_seed, options.test_share)
    target = make_target(table, options.table.task, options.class_names)
    test = table.test_mask(options.data_seed, options.test_share)
    _check_clients(table, test)
    preprocessing = options.preprocessing or _fitted(table, test, options.table)
    x = preprocessing.transform(table)
    client, names = table.client, table.names
    del table  # its columns need as much memory as x
    classes = {"classes": len(target.names), "class_names": target.names} if target.names else {}
    federation = Federation.from_arrays(
        x, target.y, client, test, info=info, **classes, **accepted(task=target.task, preprocessing=preprocessing)
    )
    return replace(federation, names=names)


def statistics_by_client(table: Table, test: NDArray[np.bool_]) -> dict[str, Any]:
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


def accepted(**arguments: Any) -> dict[str, Any]:
    """Return those arguments that `Federation.from_arrays` has."""
    known = inspect.signature(Federation.from_arrays).parameters
    return {name: value for name, value in arguments.items() if name in known}
