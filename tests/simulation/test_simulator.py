"""The round loop."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedrema.core import LocalTraining, Method, Role, Simulation
from fedrema.data import Federation
from fedrema.errors import BadInput, Diverged
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedper import FedPer
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.local import Local
from fedrema.models.networks import Network, build_net
from fedrema.simulation.simulator import Simulator
from tests.fixtures import make_federation, make_simulator, run_all

LOCAL = LocalTraining(epochs=1, batch=5, lr=0.05)
MANY = (5,) * 20


def simple_simulator(method=FedAvg, federation=None, local=LOCAL, **settings) -> Simulator:
    return make_simulator(method(), federation, local, weights_seed=0, **{"seed": 0, **settings})


def run_simulation(*given, **settings):
    return run_all(simple_simulator(*given, **settings))


def everything_in(state):
    groups = {"common": state.params.common, "own": state.params.own, "memory": state.memory}
    groups |= {"velocity": state.velocity, "common inbox": state.inbox.common, "own inbox": state.inbox.own}
    groups["server"] = {name: torch.as_tensor(value) for name, value in state.server.items()}
    return {f"{group}/{name}": value.clone() for group, named in groups.items() for name, value in named.items()}


def assert_unchanged(state, before):
    after = everything_in(state)
    assert after.keys() == before.keys()
    for name in before:
        assert torch.equal(after[name], before[name]), name


# Participation


@pytest.mark.parametrize(("participation", "expected"), [(1.0, 20), (0.5, 10), (0.24, 5), (0.05, 1), (0.001, 1)])
def test_the_requested_share_of_clients_takes_part_and_at_least_one(participation, expected):
    simulator = simple_simulator(federation=make_federation(counts=MANY), participation=participation)
    for number in (1, 2, 7):
        answering, failing = simulator.participation.choose(number)
        assert len(answering) == expected
        assert failing == []
        assert answering == sorted(set(answering))


def test_all_clients_are_equally_likely_to_take_part():
    simulator = simple_simulator(federation=make_federation(counts=MANY), participation=0.25)
    times = np.zeros(20)
    for number in range(1, 401):
        times[simulator.participation.choose(number)[0]] += 1
    # 400 draws at 0.25: 100 expected, standard deviation 8.7
    assert times.sum() == 400 * 5
    assert (np.abs(times - 100) < 40).all()


def test_participants_depend_on_seed_round_and_name():
    federation = make_federation(counts=MANY)
    simulator = simple_simulator(federation=federation, participation=0.5)
    assert simulator.participation.choose(1) == simulator.participation.choose(1)
    assert simulator.participation.choose(1) != simulator.participation.choose(2)
    assert simulator.participation.choose(1) != simple_simulator(
        federation=federation, participation=0.5, seed=1
    ).participation.choose(1)
    order = list(reversed(range(20)))
    turned = simple_simulator(federation=federation.reorder(order), participation=0.5)
    assert sorted(19 - row for row in turned.participation.choose(1)[0]) == simulator.participation.choose(1)[0]


def test_the_requested_share_of_clients_fails_on_average():
    simulator = simple_simulator(federation=make_federation(counts=MANY), dropout=0.3, participation=0.5)
    failed = 0
    for number in range(1, 201):
        answering, failing = simulator.participation.choose(number)
        assert len(answering) + len(failing) == 10
        assert not set(answering) & set(failing)
        failed += len(failing)
    # 2000 draws at 0.3: 600 expected, standard deviation 20.5
    assert abs(failed - 600) < 82


def test_late_clients_join_in_their_round():
    simulator = simple_simulator(federation=make_federation(counts=MANY), late=0.33, late_round=4)
    early = [row for row, joins in enumerate(simulator.participation.joins) if joins == 1]
    assert sorted(simulator.participation.joins) == [1] * 14 + [4] * 6  # ⌊0.33 · 20⌋ are late
    assert simulator.participation.choose(3)[0] == early
    assert simulator.participation.choose(4)[0] == list(range(20))
    other = simple_simulator(federation=make_federation(counts=MANY), late=0.33, late_round=4, seed=1)
    assert other.participation.joins != simulator.participation.joins


def test_late_clients_are_neither_scored_nor_selected_before_they_join():
    _, records = run_simulation(federation=make_federation(counts=MANY), late=0.5, late_round=3, participation=0.5)
    assert [len(record["participants"]) for record in records] == [5, 5, 10]
    assert [sum(value is not None for value in record["client_accuracy"]) for record in records] == [10, 10, 20]


def test_a_round_in_which_all_clients_fail_is_recorded_and_changes_nothing():
    simulator = simple_simulator(FedReMa, dropout=0.999)
    state = simulator.start()
    before = everything_in(state)
    records = [each.record for each in simulator.run(state)]
    assert [record["round"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["participants"] == []
        assert record["dropped"] == [0, 1, 2, 3]
        assert "loss" not in record
        assert record["accuracy"] == records[0]["accuracy"] is not None
    assert state.round == 3
    assert_unchanged(state, before)


# Records


def test_rounds_are_scored_at_the_requested_interval_and_at_the_end():
    _, records = run_simulation(rounds=7, evaluate_every=3)
    assert [record["round"] for record in records if "accuracy" in record] == [3, 6, 7]
    assert [record["round"] for record in records if "trained_accuracy" in record] == [3, 6, 7]
    assert all(record["loss"] > 0 for record in records)
    assert set(records[0]["seconds"]) == {"train", "aggregate", "evaluate", "other"}
    assert records[0]["seconds"]["evaluate"] == 0
    assert records[2]["seconds"]["evaluate"] > 0


def test_scoring_less_often_does_not_change_training():
    often, _ = run_simulation(FedReMa)
    seldom, _ = run_simulation(FedReMa, evaluate_every=3, record="relations")
    assert_unchanged(seldom, everything_in(often))


def test_relations_are_recorded_at_the_requested_interval_and_in_the_first_and_last_round():
    simulator = simple_simulator(FedReMa, rounds=5, record="relations", record_every=2)
    kept = [sorted(each.relations) for each in simulator.run(simulator.start())]
    some = ["G", "S", "sets"]
    assert kept == [some, some, [], some, some]
    assert not any(each.relations for each in simple_simulator(FedReMa).run(simulator.start()))


def test_the_mean_loss_is_over_clients_and_steps():
    # Learning rate 0: every step of an epoch has the loss of the initial network on its own batch.
    simulator = simple_simulator(local=replace(LOCAL, lr=0.0, batch=1, epochs=2))
    record = simulator.run_round(simulator.start()).record
    train, initial = simulator.train, simulator.net.initial
    expected = []
    for row, count in enumerate(train.counts.tolist()):
        logits = simulator.net(initial, train.x[row, :count])
        expected.append(float(functional.cross_entropy(logits, train.y[row, :count])))
    assert record["client_loss"] == pytest.approx(expected)
    assert record["loss"] == pytest.approx(sum(expected) / 4)


# Scalars of 4 bytes: body 6·7 + 7 = 49, head 7·4 + 4 = 32
BODY, HEAD = 4 * 49, 4 * 32


@pytest.mark.parametrize(
    ("method", "each_way"), [(FedAvg, BODY + HEAD), (FedPer, BODY), (Local, 0), (FedReMa, BODY + HEAD)]
)
def test_bytes_equal_a_count_by_hand(method, each_way):
    _, records = run_simulation(method, precision="float32", participation=0.5)
    for record in records:
        assert record["bytes_up"] == 2 * each_way
        assert record["bytes_down"] == 2 * each_way


@dataclass(frozen=True)
class Correspondent(Method):
    """FedAvg that also sends numbers and receives messages."""

    name: ClassVar[str] = "correspondent"

    def end(self, net, client, data, moment):
        return client, {"number": client.count, "pair": client.params["head.bias"][:2]}

    def aggregate(self, net, state, uploads, moment):
        answer = super().aggregate(net, state, uploads, moment)
        messages = {"message": uploads.extras["pair"]}
        return replace(
            answer, shared={**answer.shared, "mean_number": uploads.extras["number"].mean()}, personal=messages
        )


def test_bytes_include_messages_besides_parameters():
    _, records = run_simulation(Correspondent, precision="float32")
    assert [record["bytes_up"] for record in records] == [4 * (BODY + HEAD + 4 * 3)] * 3
    # The first round's answer arrives with the second download: one common number, and two per client.
    assert [record["bytes_down"] for record in records] == [4 * (BODY + HEAD), *[4 * (BODY + HEAD + 4 * 3)] * 2]


# Errors


@dataclass(frozen=True)
class Poisoned(Method):
    """Training succeeds until round 2, when one client's loss is NaN."""

    name: ClassVar[str] = "poisoned"

    def role(self, net, name):
        return Role.PERSONAL if net.in_head(name) else Role.SHARED

    def start(self, net, client, moment):
        return client.having(memory={"round": client.count.new_zeros(())})

    def begin(self, net, client, data, moment):
        return client.having(memory={"round": client.memory["round"] + 1})

    def loss(self, net, client, batch):
        well = super().loss(net, client, batch)
        ill = (client.memory["round"] >= 2) & (client.count == 12)
        return torch.where(ill, torch.nan, 1.0) * well

    def aggregate(self, net, state, uploads, moment):
        answer = super().aggregate(net, state, uploads, moment)
        heads = {name: value for name, value in uploads.params.items() if net.in_head(name)}
        return replace(answer, personal=heads)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_loss_that_is_not_finite_is_reported_with_round_and_client_and_the_state_is_unchanged(backend):
    simulator = simple_simulator(Poisoned, backend=backend)
    assert simulator.train.counts.tolist() == [19, 8, 24, 12]
    state = simulator.start()
    simulator.run_round(state)
    before = everything_in(state)
    with pytest.raises(Diverged) as caught:
        simulator.run_round(state)
    assert str(caught.value) == (
        "Training diverged in round 2: the loss or weights of client 3 are not finite;"
        " a smaller --lr, or a smaller --clip above 0, may help."
    )
    assert state.round == 1
    assert_unchanged(state, before)


def test_weights_that_overflow_are_reported():
    # Client 1 has samples for one step only, after which its weights are still finite.
    simulator = simple_simulator(local=replace(LOCAL, lr=1e300, clip=0.0), backend="loop")
    with pytest.raises(Diverged, match="in round 1: the loss or weights of client 0, 2, 3 are not finite"):
        simulator.run_round(simulator.start())


def test_an_answer_without_a_shared_parameter_is_refused():
    @dataclass(frozen=True)
    class Forgetful(Method):
        name: ClassVar[str] = "forgetful"

        def aggregate(self, net, state, uploads, moment):
            answer = super().aggregate(net, state, uploads, moment)
            return replace(answer, shared={name: value for name, value in answer.shared.items() if name != "head.bias"})

    simulator = simple_simulator(Forgetful)
    state = simulator.start()
    before = everything_in(state)
    with pytest.raises(TypeError, match=r"Forgetful.aggregate must return 'head.bias' as shared"):
        simulator.run_round(state)
    assert_unchanged(state, before)


def test_memory_that_was_not_created_in_start_is_refused():
    @dataclass(frozen=True)
    class Sudden(Method):
        name: ClassVar[str] = "sudden"

        def end(self, net, client, data, moment):
            return client.having(memory={"late": client.count}), {}

    simulator = simple_simulator(Sudden)
    state = simulator.start()
    before = everything_in(state)
    with pytest.raises(TypeError, match=r"Sudden.start must add 'late' to the memory"):
        simulator.run_round(state)
    assert_unchanged(state, before)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rounds": 0}, "--rounds must be at least 1, got 0."),
        ({"evaluate_every": 0}, "--evaluate-every must be at least 1, got 0."),
        ({"record_every": -1}, "--record-every must be at least 1, got -1."),
        ({"late_round": 0}, "--late-round must be at least 1, got 0."),
        ({"participation": 0.0}, "--participation must be in (0, 1], got 0.0."),
        ({"participation": 1.5}, "--participation must be in (0, 1], got 1.5."),
        ({"dropout": 1.0}, "--dropout must be in [0, 1), got 1.0."),
        ({"dropout": -0.1}, "--dropout must be in [0, 1), got -0.1."),
        ({"late": 1.0}, "--late must be in [0, 1), got 1.0."),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput) as caught:
        Simulation(**settings)
    assert str(caught.value) == sentence


def test_a_network_with_too_few_classes_is_refused():
    federation = make_federation()
    net = build_net(Network(net="mlp"), federation.sample_shape, 3, seed=0)
    with pytest.raises(BadInput, match="The network predicts 3 classes, but the data has 4"):
        Simulator(FedAvg(), net, federation, LOCAL, Simulation(device="cpu"))


# Training


def test_momentum_is_kept_between_rounds_only_on_request():
    kept, _ = run_simulation(local=replace(LOCAL, keep_momentum=True))
    fresh, _ = run_simulation(local=replace(LOCAL, keep_momentum=False))
    assert kept.velocity
    assert fresh.velocity == {}
    apart = (kept.params.common["head.weight"] - fresh.params.common["head.weight"]).abs().max()
    assert apart > 1e-4
    # In the first round there is no earlier momentum.
    first = [run_simulation(local=replace(LOCAL, keep_momentum=keep), rounds=1)[0] for keep in (True, False)]
    for name, value in first[0].params.common.items():
        assert torch.equal(value, first[1].params.common[name])


def test_without_momentum_the_state_has_no_velocity():
    assert simple_simulator(local=replace(LOCAL, momentum=0.0)).start().velocity == {}


@pytest.mark.parametrize("counts", [(12, 12, 12), (30, 4, 11)])
def test_one_full_step_of_fedavg_is_a_gradient_step_on_all_clients_samples(counts):
    federation = make_federation(counts=counts)
    local = LocalTraining(epochs=1, batch=1000, lr=0.3, momentum=0.9, clip=0.0)
    state, _ = run_simulation(FedAvg, federation, local, rounds=1)
    net = build_net(Network(net="mlp", hidden=7), federation.sample_shape, federation.classes, seed=0)
    params = {name: value.double().requires_grad_() for name, value in net.initial.items()}
    x, y = torch.from_numpy(federation.x[~federation.test]).double(), torch.from_numpy(federation.y[~federation.test])
    hidden = (x @ params["body.1.weight"].T + params["body.1.bias"]).relu()
    functional.cross_entropy(hidden @ params["head.weight"].T + params["head.bias"], y).backward()
    for name, value in params.items():
        expected = value.detach() - 0.3 * value.grad
        assert torch.allclose(state.params.common[name], expected, atol=1e-12), name


def test_zero_epochs_do_not_change_the_model():
    simulator = simple_simulator(FedAvg, local=replace(LOCAL, epochs=0))
    state = simulator.start()
    record = simulator.run_round(state).record
    for name, value in simulator.net.initial.items():
        assert torch.allclose(state.params.common[name], value, atol=1e-15)
    assert record["loss"] == 0


def test_local_training_does_not_depend_on_other_clients():
    both, _ = run_simulation(Local, make_federation(counts=(20, 15)))
    federation = make_federation(counts=(20, 15))
    mine = federation.client == 0
    alone = Federation(
        federation.x[mine], federation.y[mine], federation.client[mine], federation.test[mine], ("0",), 4, {}
    )
    one, _ = run_simulation(Local, alone)
    for name, value in one.params.own.items():
        assert torch.allclose(value[0], both.params.own[name][0], atol=1e-12)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_clients_without_test_samples_train_but_are_not_scored(backend):
    full = make_federation()
    test = full.test & (full.client != 1)
    _, records = run_simulation(FedReMa, replace(full, test=test), backend=backend)
    assert [value is None for value in records[-1]["client_accuracy"]] == [False, True, False, False]
    assert records[-1]["trained_client_accuracy"][1] is None
    _, records = run_simulation(FedReMa, replace(full, test=np.zeros_like(full.test)), backend=backend)
    assert records[-1]["accuracy"] is None
    assert records[-1]["trained_accuracy"] is None
    assert records[-1]["loss"] < records[0]["loss"]
