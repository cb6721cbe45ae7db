"""The experiments of research/: grid files are valid, and candidates compute the same in both backends."""

import inspect
from pathlib import Path

import pytest

from fedrema.experiments.spec_file import read_experiment
from tests.contract.test_methods import COUNTS, differences, models, run_simulation
from tests.fixtures import make_federation

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "research").glob("*.toml")), ROOT / "research" / "fedfa" / "fedfa.toml"]


def candidates():
    from research import candidates as module

    return [value for name in module.__all__ if inspect.isclass(value := getattr(module, name))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grid_files_can_be_read(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert read_experiment(file).cells


@pytest.mark.parametrize("kind", candidates(), ids=lambda kind: kind.__name__)
def test_candidates_compute_the_same_in_both_backends(kind):
    federation = make_federation(counts=COUNTS)
    looped, stacked = (run_simulation(kind(), federation, backend=backend)[0] for backend in ("loop", "stacked"))
    for first, second in zip(models(looped, 4), models(stacked, 4), strict=True):
        assert differences(first, second) < 1e-9
