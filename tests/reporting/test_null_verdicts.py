"""Verdicts on random labels, where no method is better than another: few mean gains may exclude zero."""

import numpy as np
import pandas as pd
import pytest

import fedrema

SETTINGS = {"rounds": 3, "epochs": 1, "hidden": 6, "device": "cpu", "backend": "stacked"}


def excludes_zero(sites, seed, folder):
    """Return whether the interval of the mean gain of FedAvg over Local excludes zero."""
    random, rows = np.random.default_rng([sites, seed]), 60 * sites
    frame = pd.DataFrame(random.normal(size=(rows, 3)), columns=["a", "b", "c"])
    frame["outcome"] = random.integers(0, 2, rows)
    frame["site"] = np.arange(rows) % sites
    federation = fedrema.Federation.from_dataframe(frame, target="outcome", client="site")
    runs = [
        fedrema.run(method, federation=federation, out=folder / f"{method}{sites}-{seed}", seed=seed, **SETTINGS)
        for method in ("local", "fedavg")
    ]
    (found,) = fedrema.verdicts(runs)
    return found.low > 0 or found.high < 0


@pytest.mark.parametrize(("sites", "most"), [(3, 6), (5, 4)])
def test_random_labels(sites, most, tmp_path):
    assert sum(excludes_zero(sites, seed, tmp_path) for seed in range(40)) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "most"), [(3, 30), (5, 18), (9, 18), (20, 18)])
def test_random_labels_in_200_federations(sites, most, tmp_path):
    found = sum(excludes_zero(sites, seed, tmp_path) for seed in range(200))
    print(f"{sites} sites: {found} of 200")
    assert found <= most
