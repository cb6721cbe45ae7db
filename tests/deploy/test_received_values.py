"""What the server sends must be finite: nothing is computed from anything else, whatever the method."""

import math

import pytest

pytest.importorskip("flwr")
pytest.importorskip("opacus")

from dataclasses import fields, replace

from flwr.app import Array, ArrayRecord, MessageType

from fedrema.cli.arguments import parse_settings
from fedrema.deploy.flower_client_app import app
from fedrema.deploy.node import Node
from fedrema.deploy.server import CentralServer
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.trained_clients import dummy_federation
from tests.deploy.test_flower import Federated
from tests.fixtures import make_federation
from tests.quick import quick_arguments

SETTINGS = [
    *("--hidden", "4", "--rounds", "3", "--epochs", "1", "--batch", "10"),
    *("--backend", "loop", "--device", "cpu", "--seed", "3"),
]
GROUPS = ("common", "own", "inbox_common", "inbox_own")


@pytest.mark.parametrize("method", registry())
def test_a_request_with_one_value_that_is_not_finite_is_refused(method):
    settings = parse_settings(method, [*SETTINGS, *quick_arguments(method)])
    federation = make_federation(counts=(12, 10), names=["a", "b"])
    nodes = [Node(settings, federation.only(row)) for row in range(2)]
    central = CentralServer(settings, dummy_federation(federation.sample_shape, federation.task), 2)
    central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes})
    request = central.request("a")
    assert {*GROUPS} <= {field.name for field in fields(request)}
    spoilt = 0
    for group in GROUPS:
        for name, value in getattr(request, group).items():
            if not value.is_floating_point():
                continue
            changed = value.clone()
            changed.view(-1)[-1] = (math.nan, math.inf, -math.inf)[spoilt % 3]
            hostile = replace(request, **{group: {**getattr(request, group), name: changed}})
            for train in (True, False):
                with pytest.raises(BadInput, match=r"The server sent '.*' with values that are not finite"):
                    nodes[0].reply_to(replace(hostile, train=train))
            spoilt += 1
    assert spoilt or method == "local"
    assert nodes[0].reply_to(request).params.keys() == nodes[1].reply_to(central.request("b")).params.keys()


@pytest.mark.parametrize("tensor", ["sharing.body.1.weight", "sharing.head.bias"])
def test_one_such_value_does_not_turn_clipping_off(tensor, tmp_path):
    made = Federated(tmp_path, "fedselect", ["--rounds", "1", "--net", "mlp-bn"], wait_seconds=0.0)
    for row, context in enumerate(made.grid.contexts.values()):
        context.node_config |= {"privacy-clip": 1e-4, "folder": str(tmp_path / f"{row}" / "kept")}

    def answer(node, message, context):
        if message.metadata.message_type == MessageType.TRAIN:
            common = {name: array.numpy().copy() for name, array in message.content["common"].items()}
            common[tensor].reshape(-1)[0] = math.nan
            message.content["common"] = ArrayRecord({name: Array(array) for name, array in common.items()})
        return app(message, context)

    made.grid.answer = answer
    with pytest.raises(BadInput, match="Round 1 needs 2 usable replies and had 0"):
        made.conductor().conduct()
    replies = [reply for _, reply in made.grid.received if reply.metadata.message_type == MessageType.TRAIN]
    assert replies
    assert all(reply.has_error() for reply in replies)
