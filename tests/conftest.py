"""Small federations that every test can afford."""

import os

import numpy as np
import pytest
import torch

from fedrema.data import Federation

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which is when it is read


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side; more threads only get in each other's way."""
    torch.set_num_threads(1)


def make_federation(counts=(23, 9, 30, 14), classes=4, features=6, seed=0, names=None) -> Federation:
    """Unequal clients with classes that can be learnt: blobs, each client short of one class."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, features)) * 2
    x, y, client = [], [], []
    for row, count in enumerate(counts):
        labels = generator.choice([c for c in range(classes) if c != row % classes], size=count)
        x.append(centres[labels] + generator.normal(size=(count, features)))
        y.append(labels)
        client += [row if names is None else names[row]] * count
    return Federation.from_arrays(
        np.concatenate(x).astype(np.float32), np.concatenate(y), np.array(client), classes=classes, data_seed=seed
    )


@pytest.fixture
def federation() -> Federation:
    return make_federation()
