"""Datasets, partitions, federations, and users' own data."""

from fedrema.data.build import build_federation
from fedrema.data.datasets import DatasetStatus, Pool, dataset_names, dataset_status, load_pool
from fedrema.data.federation import Federation, Split, to_float
from fedrema.data.from_source import federation_from
from fedrema.data.options import DataSettings
from fedrema.data.plot import draw_federation, federation_table
from fedrema.data.prepared import PreparedFolder
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.user_data import load_user_data, read_user_table

__all__ = [
    "DataSettings",
    "DatasetStatus",
    "Federation",
    "Pool",
    "PreparedFolder",
    "Preprocessing",
    "Split",
    "build_federation",
    "dataset_names",
    "dataset_status",
    "draw_federation",
    "federation_from",
    "federation_table",
    "load_pool",
    "load_user_data",
    "read_user_table",
    "to_float",
]
