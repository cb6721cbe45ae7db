"""`Run.personal_model` returns the model that a client uses."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedrema
from fedrema.cli.arguments import parse_settings
from fedrema.data import Federation
from fedrema.data.federation import to_float
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.apfl import APFL
from fedrema.methods.fedbabu import FedBABU
from fedrema.methods.fedproto import FedProto
from fedrema.methods.fedrep import FedRep
from fedrema.runs.execute import execute
from fedrema.runs.export import export_models
from fedrema.runs.run import Run
from tests.engine.test_backends import Words, sentences
from tests.fixtures import make_federation
from tests.quick import quick

NAMES = ("1", "0", "north", "3")
VARIANTS = [
    APFL(mixing="outputs"),
    APFL(predict_by="global"),
    FedRep(head_epochs=1, finetune_epochs=1),
    FedProto(predict_by="classifier"),
    FedBABU(finetune="head"),
]


def make_run(path, method, federation, *arguments, module=None) -> Run:
    quickly = ["--rounds", "3", "--epochs", "2", "--batch", "5", "--lr", "0.05", "--hidden", "7", "--device", "cpu"]
    settings = parse_settings("fedavg", [*quickly, "--quiet", "--out", str(path), *arguments])
    return execute(dataclasses.replace(settings, method=method), federation, module)


def accuracies(run: Run, federation: Federation) -> list[float]:
    """Score each client's model on its test samples."""
    found = []
    for row, name in enumerate(federation.names):
        mine = (federation.client == row) & federation.test
        with torch.no_grad():
            predicted = run.personal_model(name)(torch.from_numpy(federation.x[mine])).argmax(dim=1)
        found.append(float((predicted.numpy() == federation.y[mine]).mean()))
    return found


@pytest.mark.parametrize("method", [*map(quick, registry()), *VARIANTS], ids=str)
def test_a_personal_model_has_exactly_the_accuracy_that_was_recorded(method, tmp_path):
    federation = make_federation(counts=(40, 20, 60, 30), names=NAMES)
    run = make_run(tmp_path / "run", method, federation)
    assert accuracies(Run(run.path), federation) == run.rounds[-1]["client_accuracy"]


def test_integers_reach_a_network_with_an_embedding(tmp_path):
    torch.manual_seed(0)
    module, federation = Words(), sentences()
    run = make_run(tmp_path / "run", registry()["fedavg"](), federation, module=module)
    assert accuracies(run, federation) == run.rounds[-1]["client_accuracy"]


def test_pixels_and_batch_norm_in_double_precision(tmp_path):
    generator = np.random.default_rng(0)
    y = np.arange(80) % 4
    x = (40 * y[:, None, None, None] + generator.integers(0, 60, (80, 1, 4, 4))).astype(np.uint8)
    federation = Federation.from_arrays(x, y, np.repeat(["a", "b"], 40))
    arguments = ("--net", "mlp-bn", "--precision", "float64", "--rounds", "4")
    run = make_run(tmp_path / "run", quick("fedavg"), federation, *arguments)
    assert accuracies(run, federation) == run.rounds[-1]["client_accuracy"]
    model, pixels = run.personal_model("a"), torch.from_numpy(x)
    assert model(pixels).dtype == torch.float64
    assert torch.equal(model(pixels), model(to_float(pixels, torch.float64)))
    assert not model.training


@pytest.mark.parametrize("method", ["ditto", "fedbabu", "fedrema", "pfedfda"])
def test_names_and_tensors_equal_those_of_the_exported_file(method, tmp_path):
    run = make_run(tmp_path / "run", quick(method), make_federation(names=NAMES))
    files = export_models(run)
    for file, name in zip(files, run.names, strict=True):
        written, held = load_file(file), run.personal_model(name).state_dict()
        assert written.keys() == held.keys()
        assert all(torch.equal(value, held[key]) for key, value in written.items())


@pytest.mark.parametrize("method", ["fedproto", "fedrod", "knn-per"])
def test_a_model_that_calls_its_method_contains_all_its_tensors(method, tmp_path):
    run = make_run(tmp_path / "run", quick(method), make_federation(names=NAMES))
    model, x = run.personal_model("north"), torch.randn(5, 6)
    expected = model(x)
    assert model.double()(x).dtype == torch.float64
    assert torch.allclose(model(x).float(), expected, atol=1e-5)
    cleared = model.float().state_dict()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in cleared.items()})
    assert not torch.allclose(model(x), expected)


def test_clients_are_selected_by_name_and_rows_by_row(tmp_path):
    run = make_run(tmp_path / "run", quick("local"), make_federation(names=NAMES))
    x = torch.randn(5, 6)
    assert run.names == ["0", "1", "3", "north"]
    assert torch.equal(run.personal_model("3")(x), run.personal_model(row=2)(x))
    assert torch.equal(run.personal_parameters("3")["head.bias"], run.state().params.own["head.bias"][2])
    for selected, sentence in {
        1: r"A client's name is a string, got 1: write '1', or row=1",
        "2": "There is no client '2' in .*; it has 0, 1, 3, north",
    }.items():
        with pytest.raises(BadInput, match=sentence):
            run.personal_model(selected)
        with pytest.raises(BadInput, match=sentence):
            run.personal_parameters(selected)
    with pytest.raises(BadInput, match=r"no client in row 4 .*0 to 3"):
        run.personal_model(row=4)
    for nothing_or_both in ({}, {"client": "1", "row": 1}):
        with pytest.raises(BadInput, match="Name a client, or give row=: one of them"):
            run.personal_model(**nothing_or_both)


def test_a_network_given_in_python_is_remembered_or_given_again(tmp_path):
    module = nn.Sequential()
    module.add_module("start", nn.Linear(6, 5))
    module.add_module("fc", nn.Linear(5, 4))
    run = make_run(tmp_path / "run", quick("fedbabu"), make_federation(names=NAMES), module=module)
    x = torch.randn(5, 6)
    expected = run.personal_model("1")(x)
    assert set(run.personal_model("1").state_dict()) == set(module.state_dict())
    opened = fedrema.load(run.path)
    with pytest.raises(BadInput, match="was given in Python: give it again as module="):
        opened.personal_model("1")
    assert torch.equal(opened.personal_model("1", module=module)(x), expected)


def test_adapting_needs_the_data_and_can_be_disabled(tmp_path):
    run = make_run(tmp_path / "run", quick("fedbabu"), make_federation(names=NAMES))
    x = torch.randn(5, 6)
    adapted, plain = run.personal_model("1"), run.personal_model("1", adapt=False)
    assert not torch.allclose(adapted(x), plain(x))
    (run.path / "federation.npz").rename(tmp_path / "elsewhere.npz")
    make_federation(names=NAMES, seed=1).save(run.path / "federation.npz")
    with pytest.raises(BadInput, match=r"has changed since.*adapt=False"):
        run.personal_model("1")
    assert torch.equal(run.personal_model("1", adapt=False)(x), plain(x))
