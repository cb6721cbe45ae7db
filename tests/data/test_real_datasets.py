"""The publishers' real files, in the folder FEDREMA_DATA."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedrema.data import DataSettings, Federation, build_federation, dataset_status, load_pool

pytestmark = [
    pytest.mark.datasets,
    pytest.mark.skipif("FEDREMA_DATA" not in os.environ, reason="FEDREMA_DATA does not say where the datasets lie"),
]


@pytest.mark.parametrize(
    ("name", "shape", "per_class"),
    [
        ("mnist", (70_000, 1, 28, 28), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]),
        ("fmnist", (70_000, 1, 28, 28), [7000] * 10),
        ("cifar10", (60_000, 3, 32, 32), [6000] * 10),
    ],
)
def test_each_dataset_is_complete(name, shape, per_class):
    pool = load_pool(name, download=False)
    assert (pool.x.shape, pool.x.dtype) == (shape, np.uint8)
    assert np.bincount(pool.y).tolist() == per_class


def test_all_datasets_are_found():
    assert all(status.found for status in dataset_status())


def test_the_papers_cifar_federation_is_saved_in_a_file_of_moderate_size(tmp_path):
    chosen = DataSettings(dataset="cifar10", samples=600, s=0.2, data_dir=Path(os.environ["FEDREMA_DATA"]))
    federation = build_federation(chosen, download=False)
    assert federation.split("train").x.shape == (20, 480, 3, 32, 32)
    federation.save(tmp_path / "cifar.npz")
    assert (tmp_path / "cifar.npz").stat().st_size < 40e6
    assert Federation.load(tmp_path / "cifar.npz").fingerprint == federation.fingerprint
