"""Real nodes and a central server compute the same models as the simulator, for every method."""

from dataclasses import replace

import pytest
import torch

from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.deploy.node import Node
from fedrema.deploy.server import CentralServer
from fedrema.methods import registry
from fedrema.runs.execute import build_simulator
from fedrema.runs.trained_clients import dummy_federation
from tests.fixtures import RANDOM_NETWORKS
from tests.quick import quick_arguments

CLIENTS, ROUNDS = 5, 3
ARGUMENTS = [
    *("--clients", str(CLIENTS), "--samples", "40", "--hidden", "6", "--rounds", str(ROUNDS), "--epochs", "1"),
    *("--precision", "float64", "--backend", "loop", "--device", "cpu", "--seed", "3"),
]
# Ordinary training, two phases, two batches per step, training before scoring, two models.
DIFFERENT = ("fedavg", "fedpac", "per-fedavg", "fedbabu", "ditto")
OTHER_NETWORKS = [
    "fedbn --net mlp-bn",
    *(f"{method} --net {net}" for method in DIFFERENT for net in RANDOM_NETWORKS),
    f"fedavg --net {RANDOM_NETWORKS[0]} --augment flip,crop,cutout,noise",
]


def run_rounds(settings, federation, folder=None):
    """Run rounds with real nodes, in this process; the simulator decides which of them take part."""
    simulator = build_simulator(settings, federation)
    nodes = [Node(settings, federation.only(row), folder and folder / str(row)) for row in range(len(federation))]
    central = CentralServer(settings, dummy_federation(federation.sample_shape, federation.task), len(federation))
    records = []
    for number in range(1, settings.simulation.rounds + 1):
        for node, joins in zip(nodes, simulator.participation.joins, strict=True):
            if joins == number:
                central.registry.row(node.name)
        answering, _ = simulator.participation.choose(number)
        replies = {nodes[row].name: nodes[row].reply_to(central.request(nodes[row].name)) for row in answering}
        records.append(central.complete_round(replies))
    return central, nodes, records


@pytest.mark.parametrize("late", [False, True], ids=["all from the start", "some join late"])
@pytest.mark.parametrize("method", [*registry(), *OTHER_NETWORKS])
def test_personal_models_equal_the_simulators_also_with_absent_clients(method, late):
    # With full participation this is tested through Flower, also for every method.
    method, *more = method.split()
    who = ("--participation", "0.6", *(("--late", "0.6", "--late-round", "2") if late else ()))
    settings = parse_settings(method, [*more, *ARGUMENTS, *quick_arguments(method), *who])
    federation = build_federation(settings.data)
    central, nodes, records = run_rounds(settings, federation)
    simulator = build_simulator(settings, federation)
    state = simulator.start()
    rows = [central.registry.names.index(node.name) for node in nodes]  # clients have rows in the order of joining
    assert (rows != sorted(rows)) == late
    for result, record in zip(simulator.run(state), records, strict=True):
        assert sorted(rows[row] for row in result.record["participants"]) == record["participants"]
        assert (record.nodes.rejected, record.nodes.clipped) == ({}, {})
        assert record["loss"] == pytest.approx(result.record["loss"], abs=1e-9)
    for row, node in enumerate(nodes):
        mine = node._start_state(central.request(node.name)).params.row(0)
        simulated = state.params.row(row)
        assert mine.keys() == simulated.keys()
        for name, value in simulated.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-6, msg=f"{name} of client {row}")
    scores = {node.name: node.reply_to(central.request(node.name, train=False)).received for node in nodes}
    expected = simulator.score(state, simulator.moment(ROUNDS))
    found = central.metrics(scores)
    found = {name: replace(metric, clients=[metric.clients[row] for row in rows]) for name, metric in found.items()}
    assert found == expected.metrics
