"""The paper's settings by name."""

import pytest

from fedrema.config.presets import PRESETS, data_defaults


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_papers_settings(name):
    preset = PRESETS[name].common
    stated = {"clients": 20, "epochs": 5, "rounds": 500, "batch": 100, "lr": 0.01, "groups": 5}
    assert stated.items() <= preset.items()
    assert preset["keep-momentum"] is True
    assert preset["participation"] == 1.0


def test_tables_differ_in_what_they_study():
    assert {PRESETS[f"table1-{name}"].common["dataset"] for name in ("mnist", "fmnist", "cifar10")} == {
        *("mnist", "fmnist", "cifar10")
    }
    for s in (0.2, 0.4, 0.6, 0.8):
        table2 = PRESETS[f"table2-s{s}"].values("fedrema")
        assert (table2["dataset"], table2["samples"], table2["s"]) == ("cifar10", 100, s)
    for delta in (0.1, 0.3, 0.5, 0.7, 0.9):
        table3 = PRESETS[f"table3-delta{delta}"].values("fedrema")
        assert (table3["dataset"], table3["samples"], table3["delta"]) == ("cifar10", 600, delta)


def test_digits_has_its_own_defaults_and_other_datasets_have_the_papers():
    assert data_defaults("digits")["samples"] == 60
    assert data_defaults("cifar10")["samples"] == 600
    assert data_defaults("cifar10") == data_defaults("something else")


def test_methods_are_compared_as_the_paper_states():
    assert PRESETS["table1-cifar10"].values("moon")["mu"] == 5
    assert PRESETS["table1-mnist"].values("moon")["mu"] == 1
    for method, setting in (("fedprox", "mu"), ("fedproto", "align"), ("fedpac", "align")):
        assert PRESETS["table1-cifar10"].values(method)[setting] == 1
    assert "align" not in PRESETS["table1-cifar10"].values("fedrema")


def test_table_4_extends_fedrema_alone():
    feature, both = (PRESETS[f"table4-{name}"].values("fedrema") for name in ("f", "af"))
    assert (feature["align"], "alternate" in feature) == (1, False)
    assert (both["align"], both["alternate"]) == (1, True)
    assert PRESETS["table4-af"].values("fedavg") == PRESETS["table1-cifar10"].values("fedavg")
