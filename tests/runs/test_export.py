import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedrema.cli.arguments import parse_settings
from fedrema.core import Method
from fedrema.data import Federation
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net
from fedrema.runs import model_folder
from fedrema.runs.execute import execute
from fedrema.runs.export import export_models, file_names
from fedrema.runs.plain_model import model_of_run
from fedrema.runs.run import Run
from tests.reporting.folders import replace_records

OWN_NETWORK = '''
from torch import nn

class Tied(nn.Module):
    """Batch norm brings a counter, and one weight has two names: neither is trained under that name."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(shape[0], shape[0])
        self.again = nn.Linear(shape[0], shape[0])
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(shape[0])
        self.fc = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.fc(self.norm(self.again(self.first(x).relu())))

def without_arguments():
    return Tied((6,), 4)

def cumulative(shape, classes):
    module = Tied(shape, classes)
    module.norm.momentum = None
    return module
'''

# The code in the README of an export, for users who have PyTorch but not fedrema.
README_CODE = """
import os, pathlib, re, sys, numpy, torch
for folder in sys.argv[1:]:
    os.chdir(folder)
    code = re.search(r"```python\\n(.*?)```", pathlib.Path("README.md").read_text("utf-8"), re.S).group(1)
    space = {"x": torch.from_numpy(numpy.load("../x.npy"))}
    exec(code, space)
    numpy.save("../logits.npy", space["model"](space["x"]).detach().numpy())
    numpy.save("../classes.npy", space["classes"].numpy())
assert not any(name.partition(".")[0] == "fedrema" for name in sys.modules)
"""


@dataclass(frozen=True)
class Adding(Method):
    """Trains a tensor besides the network, and adapts before use."""

    name: ClassVar[str] = "adding"
    title: ClassVar[str] = "Adding"
    paper: ClassVar[str] = "none"

    def start(self, net, client, moment):
        return client.having(params={**client.params, "second": net.initial["head.bias"].clone()})

    def adapt(self, local, moment):
        return self.phases(local, moment)


def make_federation(shape, names=("a/b", "A_b", "c"), classes=4):
    generator = np.random.default_rng(0)
    kind = np.uint8 if len(shape) > 1 else np.float32
    x = generator.integers(0, 255, (30, *shape)).astype(kind) / (1 if len(shape) > 1 else 255)
    return Federation.from_arrays(x.astype(kind), np.arange(30) % classes, np.repeat(names, 10), classes=classes)


def make_run(path, *arguments, method="fedrema", shape=(6,), module=None, **federation):
    given = ["--rounds", "1", "--epochs", "1", "--batch", "4", "--backend", "loop", "--quiet", "--device", "cpu"]
    settings = parse_settings(method, [*given, "--out", str(path), *arguments])
    return execute(settings, make_federation(shape, **federation), module)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run that tests may read but not change."""
    return make_run(tmp_path_factory.mktemp("small") / "run")


@pytest.fixture
def run(small, tmp_path):
    return Run(shutil.copytree(small.path, tmp_path / "run"))


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    (tmp_path / "network_to_export.py").write_text(OWN_NETWORK)
    monkeypatch.chdir(tmp_path)
    yield "network_to_export"
    sys.modules.pop("network_to_export", None)


def test_the_code_in_the_readme_gives_the_same_logits_without_fedrema(tmp_path, own_network):
    cases = {
        "mlp": ((6,), ()),
        "cnn": ((1, 28, 28), ()),
        "alexnet": ((3, 32, 32), ()),
        "double": ((6,), ("--precision", "float64")),
        "own": ((6,), ("--net", f"{own_network}:Tied")),
        "bare": ((6,), ("--net", f"{own_network}:without_arguments")),
        "norm": ((6,), ("--net", "mlp-bn", "--backend", "stacked")),
        "cumulative": ((6,), ("--net", f"{own_network}:cumulative", "--backend", "stacked")),
    }
    expected, modules = {}, {}
    for name, (shape, arguments) in cases.items():
        run = make_run(tmp_path / name, *arguments, shape=shape)
        (run.path / "federation.npz").unlink()  # an export does not need the data
        export_models(run)
        double = name == "double"
        x = torch.randn(5, *shape, dtype=torch.float64 if double else torch.float32)
        np.save(run.path / "x.npy", x.numpy())
        plain = model_of_run(run.manifest)
        modules[name] = plain.module
        net = plain.net.to(torch.device("cpu"), x.dtype)
        expected[name] = net(run.personal_parameters(row=0), x).detach().numpy()
    command = [sys.executable, "-c", README_CODE, *(str(tmp_path / name / "models") for name in cases)]
    where = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, logits in expected.items():
        got = np.load(tmp_path / name / "logits.npy")
        assert got.dtype == logits.dtype
        np.testing.assert_allclose(got, logits, atol=1e-6, rtol=1e-6)
        assert (np.load(tmp_path / name / "classes.npy") == logits.argmax(axis=1)).all()
    # Plain torch layers with the running statistics of federated training.
    assert type(modules["norm"][2]) is nn.BatchNorm1d
    (file, *_) = (tmp_path / "cumulative" / "models").glob("*.safetensors")
    batches = load_file(file)["norm.num_batches_tracked"]
    assert (batches.dtype, int(batches)) == (torch.int64, 2)


@pytest.mark.parametrize("net", ["resnet8-bn", "vit", "gru", "transformer"])
def test_networks_that_are_not_a_chain_of_layers_are_built_by_fedrema(net, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "--net", net, "--projection", "3", shape=(1, 8, 8))
    export_models(run)
    monkeypatch.chdir(run.path / "models")
    code = re.search(r"```python\n(.*?)```", (run.path / "models" / "README.md").read_text("utf-8"), re.S).group(1)
    x = torch.randn(5, 1, 8, 8)
    space = {"x": x}
    exec(code, space)
    expected = model_of_run(run.manifest).net(run.personal_parameters(row=0), x)
    assert torch.allclose(space["model"](x), expected, atol=1e-6)
    assert "from fedrema.models.networks import NETWORKS" in code


def test_every_client_has_its_own_file_and_the_index_names_the_client(run):
    files = export_models(run)
    assert [file.name for file in files] == ["A_b.safetensors", "a_b-2.safetensors", "c.safetensors"]
    index = json.loads((run.path / "models" / "index.json").read_text())
    assert (index["method"], index["round"], index["accuracy_round"]) == ("fedrema", 1, 1)
    assert [entry["client"] for entry in index["clients"]] == ["A_b", "a/b", "c"]
    for row, entry in enumerate(index["clients"]):
        assert entry["file"] == files[row].name
        assert entry["accuracy"] == run.rounds[-1]["client_accuracy"][row]
        assert entry["train_count"] == 8
        exported = load_file(files[row])
        personal = run.personal_parameters(entry["client"])
        assert set(exported) == {"1.weight", "1.bias", "3.weight", "3.bias"}
        assert torch.equal(exported["3.weight"], personal["head.weight"])
    assert {file.name for file in (run.path / "models").iterdir()} == {
        "MODEL_CARD.md",
        "README.md",
        "index.json",
        *(file.name for file in files),
    }


def test_some_clients_can_be_exported_to_another_folder(run, tmp_path):
    files = export_models(run, tmp_path / "deep" / "place", ["c", "a/b", "c"])
    assert [file.name for file in files] == ["c.safetensors", "a_b-2.safetensors"]
    assert files[0].parent == tmp_path / "deep" / "place"
    with pytest.raises(BadInput, match=r"--clients 'nobody' is not in .*; it has A_b, a/b, c"):
        export_models(run, tmp_path / "other", ["nobody"])
    assert not (tmp_path / "other").exists()


def test_files_are_replaced_only_with_overwrite(run, tmp_path):
    (first, *_) = export_models(run)
    with pytest.raises(BadInput, match="already exists: choose another with --out, or --overwrite"):
        export_models(run)
    assert len(export_models(run, clients=["c"], overwrite=True)) == 1
    assert not first.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BadInput, match="holds something other than exported models"):
        export_models(run, tmp_path / "thesis", overwrite=True)
    with pytest.raises(BadInput, match="is a file: name a folder"):
        export_models(run, tmp_path / "thesis" / "chapter.txt")
    (tmp_path / "empty").mkdir()
    assert export_models(run, tmp_path / "empty")


def test_a_failed_export_leaves_no_files_and_keeps_the_old_ones(run, tmp_path, monkeypatch):
    files = export_models(run)

    def full(tensors, file, header):
        raise model_folder.SafetensorError("No space left on device")

    monkeypatch.setattr(model_folder, "save_file", full)
    with pytest.raises(BadInput, match=r"cannot write .*models: No space left on device"):
        export_models(run, overwrite=True)
    assert all(file.exists() for file in files)
    assert not list(run.path.glob(".*"))


def test_additional_tensors_of_a_method_are_in_a_second_file(tmp_path):
    run = make_run(tmp_path / "run", method="tests.runs.test_export:Adding")
    (file, *_) = export_models(run, adapt=False)
    assert set(load_file(file)) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    added = load_file(file.with_name("A_b.added.safetensors"))
    assert torch.equal(added["second"], run.personal_parameters("A_b")["second"])
    index = json.loads((file.parent / "index.json").read_text())
    assert index["clients"][0]["added_file"] == "A_b.added.safetensors"
    readme = (file.parent / "README.md").read_text()
    assert "holds tensors that tests.runs.test_export:Adding keeps in addition to this network's" in readme
    assert "trains a little more on its own samples first" in readme
    run.directory.write_json(run.directory.config_file, run.config | {"method": "gone:Away"})
    assert export_models(Run(run.path), overwrite=True)  # models can be exported without the method's code


@pytest.mark.parametrize(
    ("method", "group", "prefix"),
    [("ditto", "params", "personal."), ("fedkd", "params", "mentor."), ("fedamp", "memory", "own.")],
)
def test_the_exported_model_is_the_one_that_predicts(method, group, prefix, tmp_path):
    run = make_run(tmp_path / "run", method=method)
    (_, file, *_) = export_models(run)
    state = run.state()
    held = state.params.own if group == "params" else state.memory
    expected = {name.removeprefix(prefix): value[1] for name, value in held.items() if name.startswith(prefix)}
    written, names = load_file(file), model_of_run(run.manifest).names
    assert len(written) == len(expected) == 4
    assert all(torch.equal(written[names[name]], value) for name, value in expected.items())


def test_models_of_a_network_given_in_python_are_exported(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential()
    module.add_module("start", nn.Linear(6, 5))
    module.add_module("fc", nn.Linear(5, 4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = make_run(tmp_path / "run", module=module)
    with pytest.raises(BadInput, match="was given in Python: give it again"):
        export_models(run)
    (file, *_) = export_models(run, module=module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    x = torch.randn(3, 6)
    expected = Net(module, x)(run.personal_parameters("A_b"), x)
    module.load_state_dict(load_file(file))
    assert torch.allclose(module(x), expected, atol=1e-6)
    assert "model = module" in (file.parent / "README.md").read_text()


def test_export_before_the_first_evaluation_and_with_a_damaged_config(run):
    records = [replace(run.rounds[0], metrics={})]
    replace_records(run, records)
    run.directory.write_summary(records)
    (file, *_) = export_models(Run(run.path))
    index = json.loads((file.parent / "index.json").read_text())
    assert (index["accuracy_round"], index["clients"][0]["accuracy"]) == (None, None)
    config = {name: value for name, value in run.config.items() if name != "ran_on"}
    run.directory.write_json(run.directory.config_file, config)
    with pytest.raises(BadInput, match=r"config.json does not describe a run: object missing required field `ran_on`"):
        Run(run.path)


def test_file_names_are_valid_on_every_file_system():
    names = ["Ward 7", "ward 7", "../etc", "", "nul", "--help", "Ünï", "x.added", "y" * 300, "ward_7-2"]
    found = file_names(names)
    assert found[:8] == ["Ward_7", "ward_7-2", "___etc", "client", "client-nul", "help", "_n_", "x_added"]
    assert len(found[8]) == 100
    assert found[9] == "ward_7-2-2"
    assert len({name.casefold() for name in found}) == len(names)
