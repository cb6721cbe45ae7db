"""New clients start with the shared model: in a simulation, in a deployment, and with personalize."""

import numpy as np
import pytest
import torch

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.core import LocalTraining
from fedrema.data import build_federation
from fedrema.deploy.node import Node
from fedrema.deploy.server import CentralServer
from fedrema.methods.apfl import APFL
from fedrema.methods.ditto import Ditto
from fedrema.methods.fedala import FedALA
from fedrema.methods.fedkd import FedKD
from fedrema.methods.fedrod import FedRoD
from fedrema.methods.fedselect import FedSelect
from fedrema.methods.fedvf import FedVF
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


ARGUMENTS = ["--clients", "4", "--samples", "40", "--hidden", "6", "--rounds", "6", "--epochs", "1", "--device", "cpu"]


@pytest.mark.parametrize("method", ["ditto", "apfl", "fedkd", "fedselect", "fedala"])
def test_a_node_that_joins_late_starts_with_the_shared_model(method):
    settings = parse_settings(method, [*ARGUMENTS, "--precision", "float64"])
    federation = build_federation(settings.data)
    nodes = [Node(settings, federation.only(row)) for row in range(4)]
    central = CentralServer(settings, dummy_federation(federation.sample_shape, federation.task), 4)
    for _ in range(3):
        central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes[:3]})
    request = central.request(nodes[3].name)
    assert request.late
    start = nodes[3]._start_state(request)
    late = nodes[3].simulator.cohort(start, torch.zeros(1, dtype=torch.long)).one(0)
    assert predicts_like_the_shared_model(nodes[3].simulator, central.state, late)
    central.complete_round({node.name: node.reply_to(central.request(node.name)) for node in nodes})
    assert not central.request(nodes[3].name).late  # from now on it has its own model


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
