"""What the clients hold: datasets, partitions, federations, a user's own data."""

from fedrema.data.datasets import DatasetStatus, Pool, dataset_names, dataset_status, load_pool
from fedrema.data.federation import Federation, Split, to_float
from fedrema.data.options import DataSettings, build_federation
from fedrema.data.plot import describe, draw_federation
from fedrema.data.prepared import keep_prepared
from fedrema.data.user_data import load_own

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
