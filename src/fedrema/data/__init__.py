"""What the clients hold: datasets, partitions, federations, a user's own data."""

from fedrema.data.datasets import DatasetStatus, Pool, dataset_names, dataset_status, load_pool
from fedrema.data.federation import Federation, Split, to_float
from fedrema.data.own import load_own
from fedrema.data.picture import describe, draw_federation
from fedrema.data.prepared import keep_prepared
from fedrema.data.settings import DataSettings, build_federation

__all__ = [
    "DataSettings",
    "DatasetStatus",
    "Federation",
    "Pool",
    "Split",
    "build_federation",
    "dataset_names",
    "dataset_status",
    "describe",
    "draw_federation",
    "keep_prepared",
    "load_own",
    "load_pool",
    "to_float",
]
