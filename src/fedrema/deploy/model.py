"""fedrema deploy model: a node's own model, which it keeps with every message from the server."""

from pathlib import Path

from fedrema.config.settings import Settings
from fedrema.core import overrides
from fedrema.deploy.letters import Reply
from fedrema.deploy.node import Node
from fedrema.deploy.places import NodePlace
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.models.networks import Network
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.export import write_node_model
from fedrema.runs.model_folder import ExportedClient, ExportIndex
from fedrema.runs.plain_model import plain_model
from fedrema.runs.provenance import method_name
from fedrema.simulation.state import SimulationState

MODEL = "model.safetensors"


def keep_model(folder: Path, settings: Settings, node: Node, number: int, reply: Reply) -> None:
    """Keep the model that a node predicts with after a round, and all that is needed to write it out."""
    simulator, client = node.simulator, node.in_use
    assert client is not None
    method, net, federation = simulator.method, simulator.net, simulator.federation
    found = method.model(net, client)
    model = {name: found[name] for name in net.initial}
    added = {name: value for name, value in client.params.items() if name not in net.initial}
    if overrides(method, "predict"):
        added |= client.inbox | client.memory
    flat, score = settings.flat(), reply.received
    facts = {
        "client": node.name,
        "method": method_name(method),
        "train_count": reply.count,
        "accuracy": None if score is None else sum(score.correct) / sum(score.asked),
        "class_names": list(federation.class_names),
        "predicts_otherwise": overrides(method, "predict"),
        # What `plain_model` builds the network from.
        "config": {
            "settings": {name: flat[name] for name in ("net", "head", "hidden", "projection") if name in flat},
            "federation": {"sample_shape": list(federation.sample_shape), "classes": federation.classes},
            "ran_on": {"dtype": str(simulator.dtype).removeprefix("torch.")},
        },
    }
    state = SimulationState(1, number, ClientTensors(_row(added), model), {}, ClientTensors(), {}, {})
    save_state(state, folder / MODEL, node.identity, facts)


def write_model(place: NodePlace, out: Path | None, overwrite: bool) -> Path:
    """Write a node's model as a folder like those of fedrema export; returns the model's file."""
    file = place.kept / MODEL
    if not file.is_file():
        raise BadInput(f"{place.path} has no model yet: it has one once the node has taken part in a round.")
    facts, _ = read_checkpoint(file)
    state, known = load_state(file, None), facts["more"]
    if not state.round:
        raise BadInput(f"{place.path} has no trained model yet: no round has been closed since the node joined.")
    built = known["config"]
    shape, classes = tuple(built["federation"]["sample_shape"]), built["federation"]["classes"]
    return write_node_model(
        place.path / "model" if out is None else out,
        overwrite,
        plain_model(Network(**built["settings"]), shape, classes, built["ran_on"]["dtype"]),
        ExportIndex(known["method"], state.round, state.round, known["class_names"]),
        ExportedClient(str(known["client"]), "", None, known["accuracy"], known["train_count"]),
        state.params.common,
        {name: value[0] for name, value in state.params.own.items()},
        known["predicts_otherwise"],
    )


def _row(tensors: Tensors) -> Tensors:
    return {name: value[None] for name, value in tensors.items()}
