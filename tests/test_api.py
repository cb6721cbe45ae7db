"""The public API: all names exist, are documented, and work as in the README."""

import doctest
import importlib
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import fedrema
import fedrema.api
from fedrema.methods.fedrema import FedReMa


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", fedrema.__all__)
def test_every_public_name_exists_and_is_documented(name):
    found = getattr(fedrema, name)
    assert inspect.getdoc(found)
    assert name in dir(fedrema)


def test_the_names_for_type_checkers_are_the_public_names():
    source = inspect.getsource(fedrema)
    declared = {
        line.split(" as ")[1] for line in source.splitlines() if line.startswith("    from ") and " as " in line
    }
    assert declared == set(fedrema.__all__)


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        fedrema.train  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    "name", ["fedrema", "fedrema.api", "fedrema.runs.callbacks", "fedrema.runs.run", "fedrema.data.federation"]
)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


def test_a_method_may_be_an_instance():
    run = fedrema.run(FedReMa(delta=0.9), rounds=2, clients=4, out="run")
    assert run.settings["delta"] == 0.9
    assert fedrema.resume("run", rounds=3).settings["delta"] == 0.9


def test_a_module_may_be_given():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run = fedrema.run("fedavg", net=module, head="1", rounds=2, clients=4, out="run")
    assert set(run.personal_parameters(row=0)) == {"head.weight", "head.bias"}
    assert fedrema.resume("run", net=module, rounds=3).summary["rounds"] == 3


def test_own_data_has_the_same_defaults_as_a_file_and_as_a_federation():
    federation = fedrema.make_federation(clients=2, samples=20)
    federation.save("own.npz")
    handed = fedrema.run("local", federation=federation, rounds=1, out="handed")
    named = fedrema.run("local", federation="own.npz", rounds=1, out="named")
    for name in ("batch", "lr", "test-share"):
        assert handed.settings[name] == named.settings[name]
    assert (handed.settings["batch"], handed.settings["lr"], handed.settings["test-share"]) == (10, 0.02, 0.2)
    assert handed.settings["drop-incomplete"] is False
    assert not {"dataset", "clients", "samples"} & handed.settings.keys()
    assert fedrema.resume("handed", rounds=2).summary["rounds"] == 2


def test_forty_classes_with_few_samples_are_learnt_with_the_defaults():
    generator = np.random.default_rng(0)
    centres, labels = generator.normal(size=(40, 20)) / 2, generator.integers(0, 40, 1720)
    x = (centres[labels] + generator.normal(size=(1720, 20))).astype("float32")
    federation = fedrema.Federation.from_arrays(x, labels, np.repeat(np.arange(10), 172))
    run = fedrema.run("fedavg", federation=federation, rounds=5, out="run")
    assert run.settings["batch"] == 10
    # The former defaults gave 2 %, the chance level is 2.5 %, logistic regression on pooled data 42 %.
    assert run.rounds[-1]["accuracy"] > 0.28


def test_on_round_is_called_for_every_round():
    seen = []
    fedrema.run("local", rounds=3, clients=4, out="run", on_round=lambda result: seen.append(result.record["round"]))
    assert seen == [1, 2, 3]


def test_results_of_a_run_can_be_read():
    run = fedrema.run("fedrema", rounds=3, clients=4, out="run", evaluate_every=2, record="relations")
    assert run.curve()[0].tolist() == [2, 3]
    assert run.curve("mean_gap")[0].tolist()[0] == 1
    assert "fedrema, 3 rounds, best" in repr(run)
    assert run.finished
    assert run.personal_parameters("2").keys() == run.personal_parameters(row=2).keys()
    assert sorted(run.relations()) == [1, 2, 3]
    for selected in ({"client": "nobody"}, {"row": 4}, {"row": -1}):
        with pytest.raises(fedrema.BadInput, match="There is no client"):
            run.personal_model(**selected)
    with pytest.raises(fedrema.BadInput, match="has no 'speed' in its rounds"):
        run.curve("speed")


def test_settings_are_validated_like_arguments():
    with pytest.raises(
        fedrema.BadInput,
        match="'round' is not a setting of fedavg; perhaps you meant rounds or late_round",
    ):
        fedrema.run("fedavg", round=3)
    with pytest.raises(fedrema.BadInput, match="make_federation: 'client' is not a setting; perhaps you meant clients"):
        fedrema.make_federation(client=3)
    with pytest.raises(fedrema.BadInput, match=r"--s 2\.0 is outside 0 to 1"):
        fedrema.make_federation(s=2.0)


@pytest.mark.parametrize("library", ["pandas", "polars", "narwhals"])
def test_a_run_accepts_a_frame(library, tmp_path):
    columns = {"age": [float(n) for n in range(60)], "site": ["a", "b", "c"] * 20, "ill": [0, 1] * 30}
    frame = pytest.importorskip("pandas" if library == "pandas" else "polars").DataFrame(columns)
    if library == "narwhals":
        frame = pytest.importorskip("narwhals").from_native(frame)
    options = {"target": "ill", "client_column": "site", "rounds": 1, "progress": False}
    run = fedrema.run("fedavg", federation=frame, out=tmp_path / "run", **options)
    made = fedrema.federation_from(frame, target="ill", client_column="site")
    same = fedrema.run("fedavg", federation=made, out=tmp_path / "same", rounds=1, progress=False)
    assert run.names == ["a", "b", "c"]
    assert run.rounds[-1].metrics == same.rounds[-1].metrics


def test_no_error_quotes_data(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [41.70703] * 9, "name": ["Maria Schmidt"] * 9})
    array = frame.to_numpy()
    for wrong in (frame, array, [frame], {"a": array}, array.tolist()):
        calls = [
            lambda wrong=wrong: fedrema.run("fedavg", federation=wrong, out=tmp_path / "run"),
            lambda wrong=wrong: fedrema.run("fedavg", rounds=wrong, out=tmp_path / "run"),
            lambda wrong=wrong: fedrema.run("fedavg", dataset=wrong, out=tmp_path / "run"),
            lambda wrong=wrong: fedrema.compare(wrong),
            lambda wrong=wrong: fedrema.run("fedavg", on_round=wrong, out=tmp_path / "run"),
            lambda wrong=wrong: fedrema.federation_from(wrong),
        ]
        for call in calls:
            with pytest.raises((fedrema.BadInput, TypeError)) as caught:
                call()
            assert "Maria" not in str(caught.value)
            assert "41.7" not in str(caught.value)
