"""A node's own model, which it saves when a request arrives, and its export: `fedrema deploy model`."""

from pathlib import Path

import msgspec

from fedrema.config.settings import Settings
from fedrema.core import overrides
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.messages import Reply
from fedrema.deploy.node import Node
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.networks import Network
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.export import write_node_model
from fedrema.runs.model_folder import ExportedClient, ExportIndex, PredictionFacts
from fedrema.runs.plain_model import plain_model
from fedrema.runs.provenance import method_name
from fedrema.simulation.state import SimulationState

MODEL_FILE = "model.safetensors"


def save_model(folder: Path, settings: Settings, node: Node, number: int, reply: Reply) -> None:
    """Save the model that a node predicts with after a round, and the facts that are needed to export it."""
    simulator, client = node.simulator, node.client
    assert client is not None
    method, net, federation = simulator.method, simulator.net, simulator.federation
    params = method.model(net, client)
    model = {name: params[name] for name in net.initial}
    added = {name: value for name, value in client.params.items() if name not in net.initial}
    if overrides(method, "predict"):
        added |= client.inbox | client.memory
    network, score = settings.for_columns(federation).network, reply.received
    dtype, shape = str(simulator.dtype).removeprefix("torch."), tuple(federation.sample_shape)
    own_prediction = overrides(method, "predict")
    facts = {
        "client": node.name,
        "method": method_name(method),
        "train_count": reply.count,
        "accuracy": None if score is None else score.value("accuracy"),
        "class_names": list(federation.class_names),
        "predicts_otherwise": own_prediction,
        "prediction": msgspec.to_builtins(
            PredictionFacts(
                federation.task, network, shape, dtype, federation.preprocessing, own_prediction=own_prediction
            )
        ),
        # What `plain_model` builds the network from.
        "config": {
            "settings": msgspec.to_builtins(network),
            "federation": {"sample_shape": list(shape), "classes": federation.task.outputs},
            "ran_on": {"dtype": dtype},
        },
    }
    state = SimulationState(
        1,
        number,
        ClientTensors({name: value[None] for name, value in added.items()}, model),
        {},
        ClientTensors(),
        {},
        {},
    )
    save_state(state, folder / MODEL_FILE, node.identity, facts)


def export_model(folder: NodeFolder, out: Path | None, overwrite: bool) -> Path:
    """Write a node's model into a folder, as fedrema export does; return the model's file."""
    file = folder.kept / MODEL_FILE
    if not file.is_file():
        raise BadInput(f"{folder.path} has no model yet: it has one after the first request from the server.")
    checkpoint, _ = read_checkpoint(file)
    state, facts = load_state(file, None), checkpoint["more"]
    if not state.round:
        raise BadInput(f"{folder.path} has no trained model yet: no round has been completed since the node joined.")
    config = facts["config"]
    shape, classes = tuple(config["federation"]["sample_shape"]), config["federation"]["classes"]
    return write_node_model(
        folder.path / "model" if out is None else out,
        overwrite,
        plain_model(Network(**config["settings"]), shape, classes, config["ran_on"]["dtype"]),
        ExportIndex(
            facts["method"],
            state.round,
            state.round,
            facts["class_names"],
            prediction=msgspec.convert(facts.get("prediction"), PredictionFacts | None),
        ),
        ExportedClient(str(facts["client"]), "", None, facts["accuracy"], facts["train_count"]),
        state.params.common,
        {name: value[0] for name, value in state.params.own.items()},
        facts["predicts_otherwise"],
    )
