"""Own data starts with values that learn; presets of the paper, leaderboard and grids set those of the authors."""

from pathlib import Path

import pytest

from fedrema.config.presets import PRESETS
from fedrema.config.settings import make_settings
from fedrema.data import build_federation
from fedrema.experiments.leaderboard.board import PACKAGED, Board
from fedrema.experiments.spec_file import read_experiment
from fedrema.runs.execute import build_simulator
from tests.fixtures import run_all

ROOT = Path(__file__).parents[2]
VALUES = {
    "fedprox": ("mu", 1.0, 0.01),
    "fedcp": ("align", 5.0, 1.0),
    "feddbe": ("mean_strength", 50.0, 1.0),
    "fedkd": ("least_loss", 0.01, 1.0),
}
"""By method: a setting, its value in published experiments, and its default."""


@pytest.mark.parametrize("method", VALUES)
def test_own_data_starts_with_the_value_that_learns(method):
    name, _, learns = VALUES[method]
    assert getattr(make_settings(method, {"federation": "own.csv"}).method, name) == learns


@pytest.mark.parametrize("method", VALUES)
def test_published_experiments_set_the_value_of_the_authors(method):
    name, published, _ = VALUES[method]
    found = [make_settings(method, {"paper": paper}).method for paper in PRESETS]
    board, tuning = Board().experiment, read_experiment(PACKAGED / "tuning-digits.toml")
    found += [board.cell(method, column.name).parsed.method for column in board.columns]
    found += [cell.parsed.method for cell in tuning.cells if cell.row.base == method]
    if method != "fedprox":
        found += [read_experiment(ROOT / "research/faults/settings.toml").cell(method, "").parsed.method]
    assert {getattr(each, name) for each in found} == {published}


def test_with_its_default_fedcp_learns_digits():
    settings = make_settings("fedcp", {"rounds": 3, "evaluate-every": 3, "clients": 10, "device": "cpu"})
    _, (*_, last) = run_all(build_simulator(settings, build_federation(settings.data)))
    assert last["accuracy"] > 0.8  # 0.28 with the value of its authors
