"""The paper's tables as grid files."""

from pathlib import Path

import pytest

import fedrema
from fedrema.experiments.spec import Published
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import key_of

FOLDER = Path(fedrema.__file__).parent / "experiments" / "paper"


def table(name):
    return read_experiment(FOLDER / f"{name}.toml")


@pytest.mark.parametrize(
    ("name", "cells", "published"),
    [
        ("table1", 33, 33),
        ("table2", 36, 36),
        ("table3", 5, 5),
        ("table4", 4, 4),
        ("table5", 3, 3),
        ("motivation", 30, 0),
    ],
)
def test_every_cell_can_be_run_and_has_the_papers_number(name, cells, published):
    experiment = table(name)
    assert len(experiment.cells) == cells
    assert sum(cell.published is not None for cell in experiment.cells) == published
    assert experiment.seeds == 5
    for cell in experiment.cells:
        settings = cell.settings(0)
        assert (settings.simulation.rounds, settings.data.clients, settings.local.epochs) == (500, 20, 5)


def test_some_cells_have_the_papers_settings():
    first, second = table("table1"), table("table2")
    assert first.cell("fedrema", "cifar10").published == Published(65.4, 0.3)
    assert first.cell("per-fedavg", "mnist").published == Published(97.6, 0.3)
    assert first.cell("moon", "cifar10").settings(0).method.mu == 5
    assert first.cell("moon", "fmnist").settings(0).method.mu == 1
    assert second.cell("fedpac", "s8").published == Published(38.3, 0.3)
    assert second.cell("fedpac", "s8").settings(0).data.s == 0.8
    assert second.cell("fedpac", "s8").settings(0).data.samples == 100
    assert table("table4").cell("af", "").settings(0).method.called() == "FedReMa+A&F"
    assert table("motivation").cell("fedper", "n50").settings(0).data.samples == 50


def test_runs_that_tables_share_have_the_same_key():
    cells = {
        "fedrema": [("table1", "fedrema", "cifar10"), ("table3", "delta5", ""), ("table4", "fedrema", ""),
                    ("table5", "both", ""), ("motivation", "fedrema", "n600")],
        "mds": [("table3", "delta1", ""), ("table5", "mds", "")],
        "fedavg": [("table1", "fedavg", "cifar10"), ("table5", "none", ""), ("motivation", "fedavg", "n600")],
        "fedpac": [("table1", "fedpac", "cifar10"), ("table4", "fedpac", ""), ("motivation", "fedpac", "n600")],
    }  # fmt: skip
    keys = {
        name: {key_of(table(where).cell(row, column).settings(0)) for where, row, column in places}
        for name, places in cells.items()
    }
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == 4
