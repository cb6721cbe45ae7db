"""The settings that say what the clients hold, and the federation that follows from them."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedrema.base.options import Purpose, option
from fedrema.data import partitions
from fedrema.data.checks import are_numbers, check_draw
from fedrema.data.datasets import Pool, dataset_names, is_here, load_pool, pool_size
from fedrema.data.federation import Federation, read_npz
from fedrema.data.prepared import find_prepared
from fedrema.data.user_data import load_own
from fedrema.errors import BadInput

PartitionName = Literal["grouped", "dirichlet", "shards", "iid", "quantity"]


@dataclass(frozen=True)
class DataSettings:
    """The data and how it is partitioned among clients."""

    dataset: str = option("digits", partitions=True)
    """Dataset: digits (included with scikit-learn), mnist, fmnist or cifar10."""

    federation: str | None = option(None, Purpose.SOURCE)
    """Your own data or a saved federation instead of a dataset: .npz file, folder of .npz files, or module:function."""

    data_dir: Path | None = option(None, Purpose.PLACE)
    """Folder of the datasets, also for downloads. Default: $FEDREMA_DATA, otherwise the user's cache folder."""

    partition: PartitionName = option("grouped", partitions=True)
    """How the dataset is partitioned: grouped is the paper's; docs/federations.md explains all of them."""

    partition_file: Path | None = option(None, Purpose.PLACE)
    """Read the partition from a file: .npz with index, client and optionally split, or .json {client: [indices]}."""

    clients: int = option(20, partitions=True)
    """Number of clients."""

    samples: int = option(40, partitions=True)
    """Samples per client, for training and testing together (quantity: on average)."""

    s: float = option(0.1, partitions=True)
    """grouped: fraction of IID samples, from 0 (dominant labels only) to 1 (IID)."""

    alpha: float = option(0.5, partitions=True)
    """dirichlet and quantity: concentration; the smaller, the more clients differ."""

    groups: int = option(5, partitions=True)
    """grouped: number of groups of clients with the same dominant labels."""

    classes_per_client: int = option(2, partitions=True)
    """shards: number of classes per client."""

    test_share: float = 0.2
    """Fraction of each client's samples that is used for testing."""

    data_seed: int = 0
    """Seed of the partition; training has its own seed, --seed."""

    def __post_init__(self) -> None:
        """Check every range that does not depend on the data."""
        if self.dataset not in dataset_names():
            raise BadInput(f"--dataset {self.dataset} is unknown; valid are {', '.join(dataset_names())}.")
        if self.partition not in get_args(PartitionName):
            raise BadInput(f"--partition {self.partition} is unknown; valid are {', '.join(get_args(PartitionName))}.")
        if self.federation is not None and self.partition_file is not None:
            raise BadInput("--federation and --partition-file exclude each other: give one of them.")
        for name, least in (("clients", 1), ("samples", 2), ("groups", 1), ("classes_per_client", 1)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise BadInput(f"--{flag} {getattr(self, name)} is too small; {least} or more is valid.")
        if not 0 <= self.s <= 1:
            raise BadInput(f"--s {self.s} is outside 0 to 1; 0 is dominant labels only, 1 is IID.")
        if not 0 < self.alpha < float("inf"):
            raise BadInput(f"--alpha {self.alpha} is not valid; a finite number above 0 is.")
        check_draw(self.data_seed, self.test_share)

    def without_unused(self) -> "DataSettings":
        """Reset what own data leaves unused (how a dataset is divided among clients), so that it has no effect."""
        if self.federation is None:
            return self
        unused: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in UNUSED}
        return replace(self, **unused)


UNUSED = ("dataset", "partition", "clients", "samples", "s", "alpha", "groups", "classes_per_client")
"""Settings that mean nothing where --federation says what the clients hold."""


def build_federation(settings: DataSettings, download: bool = True) -> Federation:
    """Make the federation that the settings describe; the same settings give the same one."""
    if settings.federation is not None:
        return load_own(settings.federation, settings.data_seed, settings.test_share)
    if settings.partition_file is not None:
        return _from_file(settings, settings.partition_file, load_pool(settings.dataset, settings.data_dir, download))
    # Before the data is loaded: nobody should download 160 MB to learn that it is not enough.
    who = f"{settings.clients} clients of {settings.samples}"
    partitions.check_total(pool_size(settings.dataset), settings.clients * settings.samples, who)
    info: dict[str, Any] = {"dataset": settings.dataset}
    info |= {name: getattr(settings, name) for name in ("partition", "clients", "samples", *_OWN[settings.partition])}
    info |= {"test_share": settings.test_share, "data_seed": settings.data_seed}
    if not is_here(settings.dataset, settings.data_dir) and (found := find_prepared(info, settings.data_dir)):
        return found
    pool = load_pool(settings.dataset, settings.data_dir, download)
    parts = _deal(settings, pool)
    index = np.concatenate(parts)
    client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return _gather(settings, pool, index, client, None, info)


# Which settings, besides the number of clients and samples, each partition depends on.
_OWN: dict[str, tuple[str, ...]] = {
    "grouped": ("s", "groups"),
    "dirichlet": ("alpha",),
    "shards": ("classes_per_client",),
    "iid": (),
    "quantity": ("alpha",),
}


def _deal(settings: DataSettings, pool: Pool) -> partitions.Indices:
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


def _gather(
    settings: DataSettings,
    pool: Pool,
    index: NDArray[np.int64],
    client: NDArray[Any],
    split: NDArray[Any] | None,
    info: dict[str, Any],
) -> Federation:
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


def _from_file(settings: DataSettings, path: Path, pool: Pool) -> Federation:
    if path.suffix == ".json":
        index, client, split = _read_json(path)
    else:
        arrays = read_npz(path, required=("index", "client"), optional=("split",))
        index, client, split = arrays["index"], arrays["client"], arrays.get("split")
    if index.dtype.kind not in "iu" or index.ndim != 1 or index.shape != client.shape:
        raise BadInput(f"--partition-file {path}: index and client must be equally long, index of whole numbers.")
    if not len(index) or index.min() < 0 or index.max() >= len(pool.y):
        raise BadInput(f"--partition-file {path}: indices 0 to {len(pool.y) - 1} of {pool.name} are valid.")
    values, uses = np.unique(index, return_counts=True)
    if (uses > 1).any():
        raise BadInput(f"--partition-file {path} gives sample {values[np.argmax(uses)]} away more than once.")
    info = {"dataset": pool.name, "partition_file": path.name}
    try:
        return _gather(settings, pool, index, client, split, info)
    except BadInput as error:
        raise BadInput(f"--partition-file {path}: {error}") from error


def _read_json(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--partition-file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--partition-file {path} is not valid JSON: {error}.") from error
    entries = list(table.values()) if isinstance(table, dict) else []
    divided = bool(entries) and all(isinstance(entry, dict) for entry in entries)
    lists = [indices for entry in entries for indices in entry.values()] if divided else entries
    if not lists or not all(isinstance(indices, list) for indices in lists):
        raise BadInput(
            f"--partition-file {path} must map each client to a list of indices, or all of them to "
            '{"train": [...], "test": [...]}.'
        )
    rows = [
        (index, name, part)
        for name, entry in table.items()
        for part, indices in (entry if divided else {"": entry}).items()
        for index in indices
    ]
    if idle := set(table) - {name for _, name, _ in rows}:
        raise BadInput(f"--partition-file {path}: client {min(idle)!r} has no samples.")
    index, client, split = (np.array(column) for column in zip(*rows, strict=True))
    if are_numbers(table):
        client = client.astype(np.int64)
    return index, client, split if divided else None
