"""A node's own data in every format; the node refuses data that does not fit."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedrema.deploy.node_data import own_samples
from fedrema.deploy.run_config import read_run_config
from fedrema.runs.run import Run
from tests.deploy.test_flower import CLIENTS, Federated

DATA = "data: its data cannot be used in this federation, and its node.log says why"


def samples(seed, classes=10, shape=(1, 8, 8), count=24):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, classes, count)
    return generator.normal(size=(count, *shape)).astype(np.float32), y


def federation(tmp_path, *data):
    made = Federated(tmp_path, "fedavg", ["--rounds", "1"])
    made.grid.names = {7 + row: name for row, name in enumerate(("north", "south", "west", "east"))}
    for row, one in enumerate(data):
        made.grid.contexts[7 + row].node_config = {"data": str(one), "folder": str(tmp_path / f"node-{row}")}
    return made


def test_data_from_a_file_a_folder_and_a_function(tmp_path, monkeypatch):
    for number, file in enumerate(("one.npz", "folder/south.npz", "whose.npz")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        x, y = samples(number, classes=3)  # these nodes have seen three of ten classes
        whose = {"client": np.full(len(y), "west")} if file == "whose.npz" else {}
        np.savez(tmp_path / file, x=x, y=y, **whose)
    (tmp_path / "ward.py").write_text(
        "import numpy as np\nfrom fedrema.data import Federation\n\ndef load():\n"
        "    x = np.random.default_rng(5).normal(size=(20, 1, 8, 8)).astype(np.float32)\n"
        "    return Federation.from_arrays(x, np.arange(20) % 10, ['east'] * 20)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = federation(tmp_path, tmp_path / "one.npz", tmp_path / "folder", tmp_path / "whose.npz", "ward:load")
    made.conductor().conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert record["rejected"] == {}
    assert record["participants"] == list(range(CLIENTS))
    assert Run(tmp_path / "server").config["federation"]["names"] == sorted(("north", "south", "west", "east"))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (samples(1, shape=(1, 9, 9)), "Its samples are of shape 1x9x9, but this federation is for 1x8x8."),
        (
            samples(1, classes=12, count=60),
            "y has the label '10' in row 10 (client 'north'); the classes are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9.",
        ),
    ],
)
def test_samples_of_another_shape_or_class_are_refused(data, sentence, tmp_path):
    np.savez(tmp_path / "odd.npz", x=data[0], y=data[1])
    made = federation(tmp_path, tmp_path / "odd.npz")
    made.conductor().conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert record["rejected"]["north"] == DATA
    assert len(record["participants"]) == CLIENTS - 1
    assert sentence in (tmp_path / "node.log").read_text()  # where the node's owner sees it


def test_a_node_without_data(tmp_path):
    made = federation(tmp_path)
    made.grid.contexts[7].node_config = {"folder": str(tmp_path / "node-0")}
    made.conductor().conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert record["rejected"]["north"] == "no-data: the node has no data"


@pytest.mark.parametrize("method", ["fedavg", "fedbabu"])
def test_without_a_folder_flower_keeps_the_nodes_state(method, tmp_path):
    accuracies = {}
    for kept in ("folder", "flower"):
        made = Federated(tmp_path / kept, method)
        for row, context in enumerate(made.grid.contexts.values()):
            context.node_config = {"partition-id": row}
            if kept == "folder":
                context.node_config |= {"folder": str(tmp_path / kept / f"node-{row}")}
        (tmp_path / kept).mkdir()
        made.conductor().conduct()
        accuracies[kept] = [record["client_accuracy"] for record in Run(tmp_path / kept / "server").rounds]
        assert all(len(r["participants"]) == CLIENTS for r in Run(tmp_path / kept / "server").rounds)
    assert accuracies["flower"] == accuracies["folder"]


def test_no_more_than_most_clients_take_part(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "2"], most_clients=3)
    made.conductor().conduct()
    assert [record["participants"] for record in Run(tmp_path / "server").rounds] == [[0, 1, 2]] * 2


def test_nodes_use_the_classes_of_the_federation_and_not_their_own(tmp_path):
    names = ["blue", "green", "red"]
    federation = {"class_names": json.dumps(names), "classes": 3}
    files = []
    for number, held in enumerate((names, names[1:], names[2:], ["green", "pink"])):  # the third holds a single class
        x, _ = samples(number, count=24)
        files.append(tmp_path / f"{number}.npz")
        np.savez(files[-1], x=x, y=np.resize(held, 24))
    made = Federated(tmp_path, "fedavg", ["--rounds", "1"], **federation)
    made.grid.names = {7 + row: name for row, name in enumerate(("north", "south", "west", "east"))}
    for row, file in enumerate(files):
        made.grid.contexts[7 + row].node_config = {"data": str(file), "folder": str(tmp_path / f"node-{row}")}
    settings, plan = read_run_config(made.config)
    for row, expected in enumerate(([0, 1, 2], [1, 2], [2])):
        held = plan.relabelled(own_samples(str(files[row]), settings, "north", plan))
        assert (sorted(set(held.y.tolist())), held.class_names) == (expected, tuple(names))
    made.conductor().conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert len(record["participants"]) == 3
    assert record["rejected"]["east"] == DATA
    why = "y has the label 'pink' in row 1 (client 'east'); the classes are blue, green, red."
    assert why in (tmp_path / "node.log").read_text()
    assert Run(tmp_path / "server").config["federation"]["class_names"] == names
