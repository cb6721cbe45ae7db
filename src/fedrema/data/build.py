"""Build the federation that the settings describe: from a dataset and a partition, a partition file, or own data.

A federation can be prepared in advance for machines without the dataset (`fedrema.data.prepared`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.base.files import regular_file
from fedrema.data import partitions
from fedrema.data.checks import are_integers
from fedrema.data.datasets import Pool, is_available, load_pool, pool_size
from fedrema.data.federation import Federation
from fedrema.data.natural import NATURAL, natural_federation
from fedrema.data.npz import read_npz
from fedrema.data.options import DataSettings
from fedrema.data.prepared import find_prepared
from fedrema.data.user_data import load_user_data
from fedrema.errors import BadInput

_PARTITION_SETTINGS: dict[str, tuple[str, ...]] = {
    "grouped": ("s", "groups"),
    "dirichlet": ("alpha",),
    "shards": ("classes_per_client",),
    "iid": (),
    "quantity": ("alpha",),
}
"""Settings that each partition depends on, in addition to the numbers of clients and samples."""


def build_federation(settings: DataSettings, download: bool = True) -> Federation:
    """Build the federation that the settings describe; equal settings give equal federations."""
    if settings.federation is not None:
        return load_user_data(
            settings.federation, settings.data_seed, settings.test_share, options=settings.table_options
        )
    if settings.dataset in NATURAL:
        return natural_federation(settings.dataset, settings.data_seed, settings.test_share, settings.table_options)
    settings.table_options.refuse("a dataset", "arrays")
    if settings.partition_file is not None:
        pool = load_pool(settings.dataset, settings.data_dir, download)
        return _from_partition_file(settings, settings.partition_file, pool)
    # Checked before loading, which may download 160 MB.
    requested = partitions.describe_request(settings.clients, settings.samples)
    partitions.check_total(pool_size(settings.dataset), settings.clients * settings.samples, requested)
    names = ("dataset", "partition", "clients", "samples", *_PARTITION_SETTINGS[settings.partition])
    info: dict[str, object] = {name: getattr(settings, name) for name in names}
    info |= {"test_share": settings.test_share, "data_seed": settings.data_seed}
    if not is_available(settings.dataset, settings.data_dir) and (found := find_prepared(info, settings.data_dir)):
        return found
    pool = load_pool(settings.dataset, settings.data_dir, download)
    parts = _partition(settings, pool)
    index = np.concatenate(parts)
    client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return _select(settings, pool, index, client, None, info)


def _partition(settings: DataSettings, pool: Pool) -> partitions.Indices:
    """Return the indices of the samples of each client."""
    clients, samples, seed = settings.clients, settings.samples, settings.data_seed
    match settings.partition:
        case "grouped":
            return partitions.grouped(pool.y, pool.classes, clients, samples, settings.s, settings.groups, seed)
        case "dirichlet":
            return partitions.dirichlet(pool.y, pool.classes, clients, samples, settings.alpha, seed)
        case "shards":
            return partitions.shards(pool.y, pool.classes, clients, samples, settings.classes_per_client, seed)
        case "iid":
            return partitions.iid(pool.y, clients, samples, seed)
        case "quantity":
            return partitions.quantity(pool.y, clients, samples, settings.alpha, seed)


def _select(
    settings: DataSettings,
    pool: Pool,
    index: NDArray[np.int64],
    client: NDArray[Any],
    split: NDArray[Any] | None,
    info: dict[str, object],
) -> Federation:
    """Return the federation of the samples at `index`, which belong to the clients `client`."""
    return Federation.from_arrays(
        pool.x[index],
        pool.y[index],
        client,
        split,
        classes=pool.classes,
        info=info,
        data_seed=settings.data_seed,
        test_share=settings.test_share,
    )


def _from_partition_file(settings: DataSettings, path: Path, pool: Pool) -> Federation:
    """Return the federation that a partition file describes."""
    if path.suffix == ".json":
        index, client, split = _read_json(path)
    else:
        arrays = read_npz(path, required=("index", "client"), optional=("split",))
        index, client, split = arrays["index"], arrays["client"], arrays.get("split")
    if index.dtype.kind not in "iu" or index.ndim != 1 or index.shape != client.shape:
        raise BadInput(
            f"--partition-file {path}: index and client must have the same length, and index must hold whole numbers."
        )
    if not len(index) or index.min() < 0 or index.max() >= len(pool.y):
        raise BadInput(
            f"--partition-file {path}: indices must be between 0 and {len(pool.y) - 1}, the samples of {pool.name}."
        )
    values, uses = np.unique(index, return_counts=True)
    if (uses > 1).any():
        raise BadInput(
            f"--partition-file {path} assigns sample {values[np.argmax(uses)]} more than once; use each sample once."
        )
    info: dict[str, object] = {"dataset": pool.name, "partition_file": path.name}
    try:
        return _select(settings, pool, index, client, split, info)
    except BadInput as error:
        raise BadInput(f"--partition-file {path}: {error}") from error


def _read_json(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Return indices, client names and, if the file has them, splits."""
    try:
        table = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--partition-file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--partition-file {path} is not valid JSON: {error}.") from error
    entries = list(table.values()) if isinstance(table, dict) else []
    has_splits = bool(entries) and all(isinstance(entry, dict) for entry in entries)
    lists = [indices for entry in entries for indices in entry.values()] if has_splits else entries
    if not lists or not all(isinstance(indices, list) for indices in lists):
        raise BadInput(
            f"--partition-file {path} must map each client to a list of indices, or each client to "
            '{"train": [...], "test": [...]}.'
        )
    rows = [
        (index, name, part)
        for name, entry in table.items()
        for part, indices in (entry if has_splits else {"": entry}).items()
        for index in indices
    ]
    if empty := set(table) - {name for _, name, _ in rows}:
        raise BadInput(
            f"--partition-file {path}: client {min(empty)!r} has no samples; every client needs at least one."
        )
    index, client, split = (np.array(column) for column in zip(*rows, strict=True))
    if are_integers(table):
        client = client.astype(np.int64)
    return index, client, split if has_splits else None
