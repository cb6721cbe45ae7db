"""New clients start with the shared model, or the mean of personal ones: simulated, deployed, and with personalize."""

import numpy as np
import pytest
import torch

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.core import LocalTraining, Role
from fedrema.data import build_federation
from fedrema.deploy.node import Node
from fedrema.deploy.server import CentralServer
from fedrema.methods.apfl import APFL
from fedrema.methods.cwfedavg import CwFedAvg
from fedrema.methods.ditto import Ditto
from fedrema.methods.fedala import FedALA
from fedrema.methods.fedamp import FedAMP
from fedrema.methods.fedkd import FedKD
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.fedrod import FedRoD
from fedrema.methods.fedselect import FedSelect
from fedrema.methods.fedvf import FedVF
from fedrema.methods.pfedgraph import PFedGraph
from fedrema.methods.pfedme import PFedMe
from fedrema.runs.checkpoint import load_state
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import build_simulator
from fedrema.runs.new_clients import personalize
from fedrema.runs.trained_clients import dummy_federation
from tests.fixtures import label, make_federation, make_simulator

WITH_COPIES = [
    Ditto(),
    APFL(),
    APFL(mixing="outputs"),
    FedKD(),
    FedRoD(),
    FedSelect(select_every=1),
    FedALA(),
    FedVF(first_stage=0.0, head_every=5),
    PFedMe(),
]
"""Methods that share a whole network and keep copies of it, or of its head, at their clients."""
PERSONAL = [FedReMa(), PFedGraph(), CwFedAvg(), CwFedAvg(layers="head"), FedAMP(), FedPAC()]
"""Methods of which the server sends each client parameters of its own."""
LOCAL = LocalTraining(epochs=2, batch=5, lr=0.05)


def predicts_like_the_shared_model(simulator, state, client) -> bool:
    """Return whether a client's predictions equal those of the shared network."""
    x = simulator.train.of(0).x
    shared = {name: state.params.common[name] for name in simulator.net.initial}
    found, expected = simulator.method.predict(simulator.net, client, x), simulator.net(shared, x)
    return bool(torch.allclose(found, expected, rtol=0, atol=1e-12))


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("method", WITH_COPIES, ids=label)
def test_a_late_client_starts_with_the_shared_model(method, backend, monkeypatch):
    simulator = make_simulator(method, make_federation(), LOCAL, backend=backend, late=0.25, late_round=4, rounds=5)
    (late,) = [row for row, joins in enumerate(simulator.participation.joins) if joins == 4]
    state, arrived = simulator.start(), []
    begin = simulator.begin

    def watched(cohort, moment):
        if moment.round == 4:
            arrived.extend(predicts_like_the_shared_model(simulator, state, cohort.one(row)) for row in range(4))
        return begin(cohort, moment)

    monkeypatch.setattr(simulator, "begin", watched)
    list(simulator.run(state))
    # The other clients have personal models by then.
    assert arrived == [row == late for row in range(4)]


@pytest.mark.parametrize("method", WITH_COPIES, ids=label)
def test_a_late_client_that_has_not_trained_yet_uses_the_current_shared_model(method):
    simulator = make_simulator(method, make_federation(), LOCAL, late=0.25, late_round=3, rounds=5)
    (late,) = [row for row, joins in enumerate(simulator.participation.joins) if joins == 3]
    others = [row for row in range(4) if row != late]
    simulator.participation.choose = lambda number: (others, [late] if number == 4 else [])  # it drops out once
    state = simulator.start()
    for record in (each.record for each in simulator.run(state)):
        if record["round"] >= 3:
            assert predicts_like_the_shared_model(simulator, state, simulator.cohort(state, torch.arange(4)).one(late))
            assert record["client_accuracy"][late] is not None


@pytest.mark.parametrize("method", WITH_COPIES, ids=label)
def test_initial_clients_keep_their_initial_state_until_they_take_part(method):
    simulator = make_simulator(method, make_federation(), LOCAL, rounds=3)
    simulator.participation.choose = lambda number: ([0, 1, 2], [])
    state = simulator.start()
    before = {name: value[3].clone() for name, value in (state.params.own | state.memory).items()}
    list(simulator.run(state))
    for name, value in (state.params.own | state.memory).items():
        assert torch.equal(value[3], before[name]), name


@pytest.mark.parametrize(
    ("present", "late"),
    [([[0, 2], [1], [0, 1, 2], [1, 3]], {}), ([[], [2], [0, 2], [1, 3]], {}), (None, {"late": 0.25, "late_round": 3})],
)
@pytest.mark.parametrize("method", PERSONAL, ids=label)
def test_personal_parameters_start_from_the_mean_of_the_clients_that_took_part(method, present, late, monkeypatch):
    simulator = make_simulator(method, make_federation(), LOCAL, rounds=4, **late)
    choose = simulator.participation.choose if present is None else lambda number: (present[number - 1], [])
    simulator.participation.choose = choose
    initial, state, took_part = simulator.net.initial, simulator.start(), set()
    personal = [name for name in initial if method.role(simulator.net, name) is Role.PERSONAL]
    begin, starts = simulator.begin, {}

    def watched(cohort, moment):
        for place, row in enumerate(cohort.clients.tolist()):
            starts.setdefault(row, {name: cohort.params.row(place)[name].clone() for name in personal})
        return begin(cohort, moment)

    monkeypatch.setattr(simulator, "begin", watched)
    expected = {name: initial[name] for name in personal}
    for result in simulator.run(state):
        for row in set(result.record["participants"]) - took_part:
            for name, value in expected.items():  # also when it trains for the first time
                torch.testing.assert_close(starts[row][name], value, rtol=0, atol=1e-12)
        took_part |= set(result.record["participants"])
        rows = sorted(took_part)
        expected = {
            name: sum(state.params.own[name][row] for row in rows) / len(rows) if rows else initial[name]
            for name in personal
        }
        cohort = simulator.cohort(state, torch.arange(4))
        for row in set(range(4)) - took_part:
            found = method.model(simulator.net, cohort.one(row))  # what is scored
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert took_part == {0, 1, 2, 3}


ARGUMENTS = ["--clients", "4", "--samples", "40", "--hidden", "6", "--rounds", "6", "--epochs", "1", "--device", "cpu"]


def deployment(method, capacity):
    """Return four nodes and a server for so many clients, in float64."""
    settings = parse_settings(method, [*ARGUMENTS, "--precision", "float64"])
    federation = build_federation(settings.data)
    nodes = [Node(settings, federation.only(row)) for row in range(4)]
    return nodes, CentralServer(settings, dummy_federation(federation.sample_shape, federation.task), capacity)


@pytest.mark.parametrize("method", ["ditto", "apfl", "fedkd", "fedselect", "fedala"])
def test_a_node_that_joins_late_starts_with_the_shared_model(method):
    nodes, central = deployment(method, capacity=4)
    for _ in range(3):
        central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes[:3]})
    request = central.request(nodes[3].name)
    assert request.late
    start = nodes[3]._start_state(request)
    late = nodes[3].simulator.cohort(start, torch.zeros(1, dtype=torch.long)).one(0)
    assert predicts_like_the_shared_model(nodes[3].simulator, central.state, late)
    central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes})
    assert not central.request(nodes[3].name).late  # from now on it has its own model


@pytest.mark.parametrize("method", ["fedrema", "pfedgraph", "cwfedavg", "fedamp", "fedpac"])
def test_a_node_that_joins_late_starts_with_the_mean_of_personal_parameters(method):
    nodes, central = deployment(method, capacity=9)
    central.request(nodes[2].name)  # a request without a reply: it has a row, but has not taken part
    for _ in range(2):
        central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes[:2]})
    for node in nodes[2:]:
        found = node.simulator.method.model(central.net, started(node, central))
        for name, rows in central.state.params.own.items():
            two = [central.registry.row(each.name) for each in nodes[:2]]
            torch.testing.assert_close(found[name], rows[two].mean(dim=0), rtol=0, atol=1e-12)


def started(node, central):
    """Return a node's client as it starts the next round."""
    state = node._start_state(central.request(node.name))
    return node.simulator.cohort(state, torch.zeros(1, dtype=torch.long)).one(0)


def test_a_node_that_joined_in_the_first_round_is_not_late():
    settings = parse_settings("ditto", ARGUMENTS)
    federation = build_federation(settings.data)
    nodes = [Node(settings, federation.only(row)) for row in range(4)]
    central = CentralServer(settings, dummy_federation(federation.sample_shape, federation.task), 4)
    central.request(nodes[1].name)  # a request without a reply
    central.complete_round({nodes[0].name: nodes[0].reply_to(central.request(nodes[0].name))})
    assert not central.request(nodes[1].name).late
    assert central.request(nodes[2].name).late


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_personalize_starts_with_the_shared_model(method, tmp_path):
    run, data = tmp_path / "run", tmp_path / "new.npz"
    assert main(["run", method, "--clients", "5", "--rounds", "4", "--device", "cpu", "--out", str(run)]) == 0
    settings = parse_settings(method, ["--clients", "5", "--device", "cpu", "--data-seed", "9"])
    federation = build_federation(settings.data)
    simulator = build_simulator(settings, federation)
    part = np.repeat(["train", "test"], [len(simulator.train.of(0).y), len(simulator.test.of(0).y)])
    x, y = (
        torch.cat([getattr(samples.of(0), field) for samples in (simulator.train, simulator.test)]).numpy()
        for field in ("x", "y")
    )
    np.savez(data, x=x, y=y, split=part)
    directory = RunDirectory.open(run)
    state = load_state(directory.checkpoint_file, directory.config()["identity"])
    answers = simulator.net(state.params.common, torch.from_numpy(x[part == "test"])).argmax(1)
    expected = float((answers == torch.from_numpy(y[part == "test"])).float().mean())
    assert expected > 0.4, "the shared model has learnt something"
    assert personalize(run, data).scores["on arrival"] == pytest.approx(expected)
