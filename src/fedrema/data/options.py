"""Settings of the data: the dataset and its partition, or own data."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fedrema.base.options import Purpose, option
from fedrema.data.checks import check_split_settings
from fedrema.data.datasets import dataset_names
from fedrema.data.roles import CategoriesName, ScaleName, TableOptions, TaskChoice
from fedrema.errors import BadInput, at_least

NATURAL_NAMES = ("nlschools", "insteval", "lung", "adult")
"""Datasets whose clients are given, so that they are not partitioned."""
PartitionName = Literal["grouped", "dirichlet", "shards", "iid", "quantity"]


@dataclass(frozen=True)
class DataSettings:
    """The data and how it is partitioned among clients."""

    dataset: str = option("digits", partitions=True)
    """Dataset: digits (included with scikit-learn), mnist, fmnist or cifar10; or a natural federation: nlschools,
    insteval, lung or adult."""

    federation: str | None = option(None, Purpose.SOURCE)
    """Your own data or a saved federation instead of a dataset: a file (.npz, .csv, .csv.gz, .parquet, LEAF's .json), a
    folder with one file or one folder of images per client, or module:function; docs/own-data.md describes them."""

    target: str | None = option(None, added=True)
    """Tables: column to predict; several, separated by commas, are labels of 0 and 1. Default: the column target,
    label, y or class."""

    task: TaskChoice = option("auto", added=True)
    """Own data: what is predicted. auto chooses by the values of the target; docs/own-data.md explains how."""

    client_column: str | None = option(None, added=True)
    """Tables: column that names the client. Default: the column client or site."""

    split_column: str | None = option(None, added=True)
    """Tables: column that marks training and test samples (train and test, or 0 and 1). Default: split, if present."""

    columns: str | None = option(None, added=True)
    """Tables: input columns, separated by commas. Default: all other columns."""

    scale: ScaleName = option("federation", added=True)
    """Tables: standardise numbers by mean and standard deviation of all clients (federation), of each client (site), or
    not at all (none)."""

    categories: CategoriesName = option("onehot", added=True)
    """Tables: encode categories as one column of 0 and 1 each (onehot), or as one column of whole numbers (embed)."""

    image_size: int = option(0, added=True)
    """Image files: height and width after resizing. Default: those of the first image, at most 64."""

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
        """Validate all settings whose valid range does not depend on the data."""
        known = (*dataset_names(), *NATURAL_NAMES)
        if self.dataset not in known:
            raise BadInput(f"--dataset {self.dataset} is unknown; valid are {', '.join(known)}.")
        if self.dataset in NATURAL_NAMES and self.partition_file is not None:
            raise BadInput(f"--partition-file cannot be used with --dataset {self.dataset}, whose clients are given.")
        if self.partition not in get_args(PartitionName):
            raise BadInput(f"--partition {self.partition} is unknown; valid are {', '.join(get_args(PartitionName))}.")
        if self.federation is not None and self.partition_file is not None:
            raise BadInput("--federation and --partition-file exclude each other: use only one of them.")
        at_least(1, self, "clients", "groups", "classes_per_client")
        at_least(2, self, "samples")
        if not 0 <= self.s <= 1:
            raise BadInput(f"--s {self.s} is outside 0 to 1; 0 is dominant labels only, 1 is IID.")
        if not 0 < self.alpha < float("inf"):
            raise BadInput(f"--alpha {self.alpha} is not valid; it must be a finite number above 0.")
        check_split_settings(self.data_seed, self.test_share)
        self.table_options  # noqa: B018  # validates them

    @property
    def table_options(self) -> TableOptions:
        """How own data in tables and images is read."""
        return TableOptions(**{field.name: getattr(self, field.name) for field in fields(TableOptions)})

    @property
    def is_partitioned(self) -> bool:
        """Whether the data is a dataset that is partitioned among simulated clients."""
        return self.federation is None and self.dataset not in NATURAL_NAMES

    def without_unused(self) -> "DataSettings":
        """Return the settings with everything that own data makes irrelevant reset to its default."""
        if self.is_partitioned:
            return self
        unused: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in UNUSED}
        if self.federation is None:
            del unused["dataset"]
        return replace(self, **unused)


UNUSED = tuple(field.name for field in fields(DataSettings) if field.metadata.get("partitions"))
"""Settings that have no effect with --federation."""
