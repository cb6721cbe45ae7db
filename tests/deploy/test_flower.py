"""The Flower apps in process: the same models as simulated, faults that affect no other client, resuming."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from fedrema.cli.arguments import parse_settings
from fedrema.core import Role
from fedrema.data import build_federation
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.run_config import Plan, read_run_config, run_config
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.execute import build_simulator
from fedrema.runs.run import Run
from tests.deploy.flower_in_process import InProcessGrid
from tests.quick import quick_arguments

CLIENTS = 4
ARGUMENTS = [
    *("--clients", str(CLIENTS), "--samples", "40", "--hidden", "6", "--rounds", "3", "--epochs", "1"),
    *("--precision", "float64", "--backend", "loop", "--device", "cpu", "--seed", "3"),
]


class Federated:
    """A federation of real apps in this process."""

    def __init__(self, tmp_path, method="fedrema", more=(), spoil=lambda node, reply: reply, **plan):
        self.settings = parse_settings(method, [*ARGUMENTS, *more])
        self.plan = Plan(str(tmp_path / "server"), "1x8x8", **{"classes": 10, "least_clients": 2, **plan})
        self.config = run_config(self.settings, self.plan)
        nodes = [{"partition-id": row, "folder": str(tmp_path / f"node-{row}")} for row in range(CLIENTS)]
        self.grid = InProcessGrid(self.config, nodes, spoil=spoil)

    def conductor(self):
        settings, plan = read_run_config(self.config)
        return Conductor(self.grid, settings, plan, pause=lambda seconds: None)


def node(row):
    return 7 + row


@pytest.mark.parametrize("method", registry())
def test_every_method_computes_the_same_models_as_the_simulator_and_sends_nothing_else(method, tmp_path):
    made = Federated(tmp_path, method, quick_arguments(method))
    conductor = made.conductor()
    conductor.conduct()
    simulator = build_simulator(made.settings, build_federation(made.settings.data))
    state = simulator.start()
    records = [result.record for result in simulator.run(state)]
    central = conductor.central
    for name, value in state.params.common.items():
        torch.testing.assert_close(central.state.params.common[name], value, rtol=0, atol=1e-6)
    for name, value in central.state.params.own.items():
        torch.testing.assert_close(value[:CLIENTS], state.params.own[name], rtol=0, atol=1e-6)
    run = Run(tmp_path / "server")
    assert run.finished
    assert [record["accuracy"] for record in run.rounds] == [record["accuracy"] for record in records]
    assert [record["client_accuracy"] for record in run.rounds] == [record["client_accuracy"] for record in records]
    assert run.summary["best_accuracy"] == max(record["accuracy"] for record in records)
    assert all(record.nodes.rejected == {} and record.nodes.clipped == {} for record in run.rounds)
    assert_nothing_else_left(made, conductor, state.params)


def assert_nothing_else_left(made, conductor, params):
    """Check that only what the method declares leaves a node."""
    net, central = conductor.central.net, conductor.central
    travelling = {name for name in params.merged() if made.settings.method.role(net, name) is not Role.PRIVATE}
    for _, reply in made.grid.received:
        arrays = {group: set(record) for group, record in reply.content.array_records.items()}
        if arrays and arrays["params"]:
            assert arrays == {"params": travelling, "extras": set(central.expected.extras)}
        assert set(reply.content) <= {"params", "extras", "facts", "audit"}
        facts = set(reply.content.config_records["facts"])
        assert facts <= {
            *("round", "count", "loss", "name"),
            *("received-accuracy", "received-total", "trained-accuracy", "trained-total"),
        }


def spoiled(change):
    """Return a function that changes the replies of node 1 to round 2."""

    def spoil(number, reply):
        if number == node(1) and reply.metadata.group_id == "2" and not reply.has_error():
            return change(reply)
        return reply

    return spoil


def with_arrays(change):
    def spoil(reply):
        record = reply.content.array_records["params"]
        arrays = {name: array.numpy() for name, array in record.items()}
        reply.content["params"] = ArrayRecord({name: Array(value) for name, value in change(arrays).items()})
        return reply

    return spoil


def with_count(count):
    def spoil(reply):
        reply.content["facts"]["count"] = count
        return reply

    return spoil


def with_header(header):
    """Replace the header of the first array."""

    def spoil(reply):
        record = reply.content.array_records["params"]
        name, array = next(iter(record.items()))
        record[name] = Array(array.dtype, array.shape, array.stype, array.data[:10] + header + array.data[128:])
        return reply

    return spoil


def first(arrays, change):
    name = next(iter(arrays))
    return {**arrays, name: change(arrays[name])}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_arrays(lambda arrays: first(arrays, lambda value: value * np.nan)), "is not finite"),
        (with_arrays(lambda arrays: first(arrays, lambda value: value + np.inf)), "is not finite"),
        (with_arrays(lambda arrays: first(arrays, lambda value: value[:1])), "has shape"),
        (with_arrays(lambda arrays: first(arrays, lambda value: value.astype(np.float32))), "torch.float32 instead of"),
        (with_arrays(lambda arrays: {**arrays, "more": np.zeros(3)}), "'more' is not expected"),
        (with_arrays(lambda arrays: dict(list(arrays.items())[1:])), "is missing"),
        (with_arrays(lambda arrays: first(arrays, lambda value: value + 1e9)), "implausibly large"),
        (with_arrays(lambda arrays: first(arrays, lambda value: value * 0 + 3e38)), "implausibly large"),
        (with_count(1e300), "count must be a whole number"),
        (with_count(10**9), "it joined with"),
        (with_header(b"(" * 118), "cannot be read"),
        (
            with_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,)}".ljust(117) + b"\n"),
            "header",
        ),
        (lambda reply: None, "no reply within"),
    ],
)
def test_an_invalid_reply_affects_no_other_client(change, why, tmp_path):
    made = Federated(tmp_path, spoil=spoiled(change))
    made.conductor().conduct()
    run = Run(tmp_path / "server")
    assert [record["participants"] for record in run.rounds] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert why in run.rounds[1]["rejected"]["1"]
    assert run.rounds[0]["rejected"] == run.rounds[2]["rejected"] == {}
    # The result is the same as if the client were absent in that round.
    absent = Federated(tmp_path / "absent", spoil=spoiled(lambda reply: None))
    conductor = absent.conductor()
    conductor.conduct()
    assert [record["accuracy"] for record in run.rounds] == [
        record["accuracy"] for record in Run(tmp_path / "absent" / "server").rounds
    ]


def test_a_killed_server_resumes_with_the_next_round(tmp_path):
    whole = Federated(tmp_path / "whole")
    straight = whole.conductor()
    straight.conduct()
    made = Federated(tmp_path / "killed")
    conductor = made.conductor()
    conductor.run.open()
    conductor._round()
    conductor._round()
    conductor.run.lock.release()  # then it is killed, and its lock is gone
    again = made.conductor()
    again.conduct()
    assert again.central.registry == straight.central.registry
    assert again.central.registry.norms.recent
    for name, value in again.central.state.params.own.items():
        torch.testing.assert_close(value, Run(tmp_path / "whole" / "server").state().params.own[name], rtol=0, atol=0)
    kept, expected = Run(tmp_path / "killed" / "server"), Run(tmp_path / "whole" / "server")
    assert [record["accuracy"] for record in kept.rounds] == [record["accuracy"] for record in expected.rounds]


def test_a_round_that_is_lost_leaves_no_trace_on_a_node(tmp_path):
    # Momentum and model stay on the node: if it kept those of the lost round, the third would start from another model.
    lost = Federated(tmp_path / "lost", "local", spoil=spoiled(lambda reply: None))
    lost.conductor().conduct()
    never = Federated(tmp_path / "never", "local")
    conductor = never.conductor()
    conductor.run.open()
    conductor._round()
    never.grid.offline = {node(1)}
    conductor._round()
    never.grid.offline = set()
    conductor.conduct()
    kept = [Run(tmp_path / name / "server").rounds[2] for name in ("lost", "never")]
    assert kept[0]["client_accuracy"] == kept[1]["client_accuracy"]
    assert kept[0]["loss"] == kept[1]["loss"]


def test_the_server_waits_for_too_few_clients_and_names_them(tmp_path):
    made = Federated(tmp_path, least_clients=3, wait_seconds=0.0)
    made.grid.offline = {node(1), node(2)}
    with pytest.raises(BadInput, match=r"Only 2 of at least 3 nodes were connected after 0 s \(0, 3\)"):
        made.conductor().conduct()


def test_a_client_that_joins_late_takes_part_from_then_on(tmp_path):
    made = Federated(tmp_path)
    made.grid.offline = {node(3)}
    conductor = made.conductor()
    conductor.run.open()
    conductor._round()
    made.grid.offline = set()
    conductor._round()
    conductor._round()
    conductor.run.finish({})
    run = Run(tmp_path / "server")
    assert [record["participants"] for record in run.rounds] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert json.loads((tmp_path / "server" / "config.json").read_text())["federation"]["names"] == ["0", "1", "2", "3"]


def test_two_nodes_of_one_name_are_one_client(tmp_path):
    made = Federated(tmp_path)
    made.grid.names = {node(0): "north", node(1): "north", node(2): "south", node(3): "west"}
    assert set(made.conductor()._online()) == {"north", "south", "west"}


def test_settings_survive_the_run_configuration(tmp_path):
    made = Federated(tmp_path, more=["--delta", "0.25", "--no-keep-momentum", "--participation", "0.5"])
    settings, plan = read_run_config(made.config)
    assert settings.method == made.settings.method
    assert (settings.local, settings.network) == (made.settings.local, made.settings.network)
    assert plan == made.plan
    assert settings.simulation.participation == 0.5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"folder": "here"}, "folder must be an absolute path"),
        ({"sample-shape": "big"}, "sample-shape must be written as 3x32x32"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"lr": -1.0}, "--lr must be"),
        ({"least-clients": 0}, "--least-clients must be at least 1"),
    ],
)
def test_an_invalid_plan_is_refused(change, sentence, tmp_path):
    with pytest.raises(BadInput, match=sentence):
        read_run_config({**Federated(tmp_path).config, **change})


def test_a_folder_of_another_plan_is_refused(tmp_path):
    made = Federated(tmp_path)
    made.conductor().conduct()
    other = Federated(tmp_path, more=["--lr", "0.5"])
    with pytest.raises(BadInput, match="have changed since it was started: it cannot be resumed"):
        other.conductor().conduct()


def test_a_round_without_usable_replies_is_repeated(tmp_path):
    lost = []

    def spoil(node, reply):
        if reply.metadata.group_id == "2" and len(lost) < CLIENTS:
            lost.append(node)
            return None
        return reply

    made = Federated(tmp_path, "fedavg", ["--rounds", "3"], spoil=spoil)
    made.conductor().conduct()
    assert len(lost) == CLIENTS
    assert [(record["round"], len(record["participants"])) for record in Run(tmp_path / "server").rounds] == [
        (number, CLIENTS) for number in (1, 2, 3)
    ]


def test_a_run_without_usable_replies_stops_with_the_reason(tmp_path):
    made = Federated(
        tmp_path, "fedavg", spoil=lambda node, reply: None if reply.metadata.group_id else reply, wait_seconds=0.0
    )
    with pytest.raises(BadInput, match=r"Round 1 needs 2 usable replies and had 0 for 0 s; 0: no reply within 300 s"):
        made.conductor().conduct()


def test_a_server_that_was_killed_before_its_first_round_starts_again(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "1"])
    made.conductor().run.open()  # and then it is killed
    made.conductor().conduct()
    assert [record["round"] for record in Run(tmp_path / "server").rounds] == [1]
    (tmp_path / "server" / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(BadInput, match="already exists"):  # completed rounds are not replaced
        made.conductor().conduct()
    (tmp_path / "server" / "rounds.jsonl").unlink()
    other = Federated(tmp_path, "fedavg", ["--rounds", "1", "--lr", "0.5"])
    with pytest.raises(BadInput, match="already exists"):  # nor a run of other settings
        other.conductor().conduct()
