"""Models of a deployed run: what the server can export, what a node writes itself, and a model for a new client."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

import fedrema
from fedrema.cli import main
from fedrema.core import overrides
from fedrema.data import build_federation
from fedrema.deploy.node_data import partitioned_dataset
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.execute import build_simulator
from fedrema.runs.plain_model import model_of_run
from fedrema.runs.run import Run
from tests.deploy.test_flower import CLIENTS, Federated, node
from tests.quick import quick_arguments

# Methods that predict with private parameters or memory, or adapt the model before it is used.
ONLY_ON_NODES = {
    *("apfl", "ditto", "fedala", "fedamp", "fedas", "fedbabu", "fedbn", "fedclassavg", "fedcp", "feddbe", "feddistill"),
    *("fedem", "fedkd", "fedper", "fedper++", "fedprior", "fedproto", "fedrep", "fedrod", "fedselect", "fedvf", "gpfl"),
    *("ifca", "knn-per", "lg-fedavg", "local", "per-fedavg", "pfedfda", "pfedme"),
}


def node_folder(tmp_path, row):
    """Return a node's folder as `fedrema deploy init` creates it, with the node's state."""
    folder = tmp_path / "nodes" / str(row)
    folder.mkdir(parents=True)
    (folder / "node.toml").write_text(f'name = "{row}"\nserver = "localhost:9092"\ndata = "data.npz"\n')
    shutil.copytree(tmp_path / f"node-{row}", folder / "kept")
    return folder


def loaded(folder, x):
    """Return the classes that the code in the README predicts."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S).group(1)
    space = {"x": x}
    exec(code.replace('load_file("', f'load_file("{folder}/'), space)
    return space["classes"]


@pytest.mark.parametrize("method", registry())
def test_a_node_writes_its_model_and_the_server_those_it_holds(method, tmp_path, capsys):
    more = ["--net", "mlp-bn"] if method == "fedbn" else []
    made = Federated(tmp_path, method, [*quick_arguments(method), *more, "--rounds", "2"])
    made.conductor().conduct()
    run, row = Run(tmp_path / "server"), 2
    recorded = run.rounds[-1]["client_accuracy"][row]
    # The node's own model.
    folder = node_folder(tmp_path, row)
    assert main(["deploy", "model", str(folder)]) == 0
    assert f"Model of 2: {folder / 'model' / '2.safetensors'}" in capsys.readouterr().out
    index = json.loads((folder / "model" / "index.json").read_text())
    (entry,) = index["clients"]
    assert (index["method"], index["round"], entry["client"]) == (method, 2, "2")
    assert entry["accuracy"] == recorded
    assert entry["train_count"] == run.config["federation"]["train_counts"][row]
    simulator = build_simulator(made.settings, build_federation(made.settings.data))
    batch = simulator.test.of(row)
    if not overrides(made.settings.method, "predict"):
        right = (loaded(folder / "model", batch.x) == batch.y).double().mean()
        assert float(right) == recorded
    # What the server holds.
    assert main(["export", str(run.path)]) == 0
    printed = capsys.readouterr().out
    index = json.loads((run.path / "models" / "index.json").read_text())
    names = [entry["client"] for entry in index["clients"]]
    elsewhere = [entry["client"] for entry in index["only_on_nodes"]]
    everyone = [str(number) for number in range(CLIENTS)]
    if method in ONLY_ON_NODES:
        assert (names, elsewhere) == ([], everyone)
        assert "fedrema deploy model NODE_FOLDER writes them: 0, 1, 2, 3." in printed
        assert not list((run.path / "models").glob("[0-9].safetensors"))
        assert (index["shared_file"] is None) == (not run.state().params.common)
    else:
        assert (names, elsewhere) == (everyone, [])
        mine, theirs = load_file(folder / "model" / "2.safetensors"), load_file(run.path / "models" / "2.safetensors")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert index["clients"][row]["accuracy"] == recorded


def test_a_private_head_is_not_exported(tmp_path, capsys):
    Federated(tmp_path, "fedper", ["--rounds", "1"]).conductor().conduct()
    assert main(["export", str(tmp_path / "server")]) == 0
    run = Run(tmp_path / "server")
    shared, names = load_file(run.path / "models" / "shared.safetensors"), model_of_run(run.manifest).names
    assert set(shared) == {own for name, own in names.items() if name.startswith("body.")}
    assert all(torch.equal(shared[names[name]], value) for name, value in run.state().params.common.items())
    readme = (run.path / "models" / "README.md").read_text()
    assert 'load_state_dict(load_file("shared.safetensors"), strict=False)' in readme
    assert "fedrema deploy model NODE_FOLDER" in readme
    capsys.readouterr()
    with pytest.raises(BadInput, match="exists only on its node: fedrema deploy model"):
        run.personal_model(run.names[0])
    Federated(tmp_path / "shared", "fedavg", ["--rounds", "1"]).conductor().conduct()
    assert (
        Run(tmp_path / "shared" / "server")
        .personal_model(row=0)(torch.zeros(2, *run.config["federation"]["sample_shape"]))
        .shape[0]
        == 2
    )


def test_models_before_adaptation_can_be_exported_from_the_server(tmp_path, capsys):
    made = Federated(tmp_path, "per-fedavg", [*quick_arguments("per-fedavg"), "--rounds", "1"])
    made.conductor().conduct()
    assert main(["export", str(tmp_path / "server"), "--no-adapt"]) == 0
    assert "4 models" in capsys.readouterr().out
    assert "trains a little more" in (tmp_path / "server" / "models" / "README.md").read_text()


def test_a_client_whose_replies_were_never_used_is_listed(tmp_path, capsys):
    def spoil(number, reply):
        return None if number == node(3) and reply.metadata.group_id else reply

    Federated(tmp_path, spoil=spoil).conductor().conduct()
    assert main(["export", str(tmp_path / "server")]) == 0
    assert "These clients have not contributed to any round: 3." in capsys.readouterr().out
    index = json.loads((tmp_path / "server" / "models" / "index.json").read_text())
    assert [entry["client"] for entry in index["clients"]] == ["0", "1", "2"]
    assert index["never_counted"] == ["3"]


def test_a_node_that_was_absent_at_the_end_keeps_the_last_received_model(tmp_path, capsys):
    made = Federated(tmp_path, "ditto")
    conductor = made.conductor()
    conductor.run.open()
    conductor._round()
    conductor._round()
    made.grid.offline = {node(1)}
    conductor.conduct()
    folder = node_folder(tmp_path, 1)
    assert main(["deploy", "model", str(folder), "--out", str(tmp_path / "mine")]) == 0
    index = json.loads((tmp_path / "mine" / "index.json").read_text())
    assert (index["round"], index["clients"][0]["accuracy"]) == (
        1,
        Run(tmp_path / "server").rounds[0]["client_accuracy"][1],
    )
    capsys.readouterr()


def test_a_node_without_a_model_is_refused_and_no_model_is_replaced_without_overwrite(tmp_path, capsys):
    made = Federated(tmp_path, "fedavg")
    conductor = made.conductor()
    conductor.run.open()
    conductor._round()
    folder = node_folder(tmp_path, 0)
    assert main(["deploy", "model", str(folder)]) == 2
    assert "has no trained model yet" in capsys.readouterr().err
    conductor._round()
    shutil.rmtree(folder)
    folder = node_folder(tmp_path, 0)
    assert main(["deploy", "model", str(folder)]) == 0
    assert main(["deploy", "model", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["deploy", "model", str(folder), "--overwrite"]) == 0
    (folder / "kept" / "model.safetensors").write_bytes(b"nonsense")
    assert main(["deploy", "model", str(folder), "--overwrite"]) == 2
    assert (folder / "model" / "0.safetensors").is_file()
    shutil.rmtree(folder / "kept")
    assert main(["deploy", "model", str(folder), "--overwrite"]) == 2
    assert "has no model yet" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedrema", "fedavg", "fedper"])
def test_a_new_client_gets_a_model_from_a_deployed_run(method, tmp_path, capsys):
    made = Federated(tmp_path, method, ["--rounds", "2"])
    made.grid.offline = {node(3)}
    made.conductor().conduct()
    part = partitioned_dataset(made.settings.data).only(3)
    part.save(tmp_path / "new.npz")
    arrays = dict(np.load(tmp_path / "new.npz"))
    np.savez(tmp_path / "new.npz", **{name: arrays[name] for name in ("x", "y", "split") if name in arrays})
    out = tmp_path / "new.safetensors"
    assert main(["personalize", str(tmp_path / "server"), "--data", str(tmp_path / "new.npz"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.is_file()
    assert "fine-tuned" in printed
    assert ("It learns from: " in printed) == (method == "fedrema")


def test_the_servers_config_is_complete(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "2"])
    made.conductor().conduct()
    config = Run(tmp_path / "server").config
    federation = build_federation(made.settings.data)
    assert config["federation"]["train_counts"] == build_simulator(made.settings, federation).train.counts.tolist()
    assert config["federation"]["last_counted"] == [2] * CLIENTS
    assert (config["ran_on"]["dtype"], config["ran_on"]["backend"]) == ("float64", "loop")
    config["ran_on"]["started"] = "2020-01-01T00:00:00+00:00"
    with pytest.raises(BadInput, match="belongs to a deployment: resume it with fedrema deploy server"):
        fedrema.resume(tmp_path / "server")
    directory = Run(tmp_path / "server").directory
    directory.write_json(directory.config_file, config)
    Federated(tmp_path, "fedavg", ["--rounds", "3"]).conductor().conduct()
    assert Run(tmp_path / "server").config["ran_on"]["started"] == "2020-01-01T00:00:00+00:00"
