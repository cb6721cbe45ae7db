"""Every hook of a method in both backends."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedrema.core import Answer, LocalTraining, Method, Phase, Role, cross_entropy, mix
from fedrema.methods.local import Local
from fedrema.simulation.simulator import Simulator
from tests.fixtures import BACKENDS, LOCAL, tanh_module, tanh_simulator


class Watched(torch.autograd.Function):
    """The identity; counts backward passes through it."""

    generate_vmap_rule = True
    backwards = 0

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        Watched.backwards += 1
        return gradient


class Watch(nn.Module):
    def forward(self, x):
        return Watched.apply(x)


def counting_simulator(method, backend, local=LOCAL, **settings) -> Simulator:
    """Return a simulator of `tanh_module` whose body ends with a `Watch`."""
    module = tanh_module()
    module.body.append(Watch())
    return tanh_simulator(method, backend, local, module, **settings)


def only_head(name):
    return name.startswith("head.")


def only_body(name):
    return name.startswith("body.")


@dataclass(frozen=True)
class Staged(Method):
    """Trains everything in round 1, and one part from then on."""

    name: ClassVar[str] = "staged"
    part: str = "head"

    def role(self, net, name):
        return Role.PRIVATE

    def phases(self, local, moment):
        trains = only_head if self.part == "head" else only_body
        if moment.round == 1:
            return super().phases(local, moment)
        return (Phase(local.epochs, local.lr, local.momentum, trains=trains),)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("part", "frozen"), [("head", "body"), ("body", "head")])
def test_parameters_that_a_phase_does_not_train_and_their_momentum_are_unchanged(backend, part, frozen):
    simulator = tanh_simulator(Staged(part=part), backend)
    state = simulator.start()
    simulator.run_round(state)
    params = {name: value.clone() for name, value in state.params.own.items()}
    velocity = {name: value.clone() for name, value in state.velocity.items()}
    assert all(value.abs().max() > 0 for value in velocity.values())
    simulator.run_round(state)
    for name in params:
        same = name.startswith(frozen + ".")
        assert torch.equal(state.params.own[name], params[name]) == same, name
        assert torch.equal(state.velocity[name], velocity[name]) == same, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("part", "differentiated"), [("head", False), ("body", True)])
def test_a_frozen_body_is_not_differentiated(backend, part, differentiated):
    simulator = counting_simulator(Staged(part=part), backend)
    state = simulator.start()
    simulator.run_round(state)
    Watched.backwards = 0
    simulator.run_round(state)
    assert (Watched.backwards > 0) == differentiated


@dataclass(frozen=True)
class Shrinking(Method):
    """Its phase has a loss of its own."""

    name: ClassVar[str] = "shrinking"

    def phases(self, local, moment):
        return (
            Phase(1, lr=0.1, momentum=0.0, loss=lambda net, client, _: client.params["head.bias"].square().sum() / 2),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_phase_can_have_its_own_loss(backend):
    simulator = tanh_simulator(Shrinking(), backend, LocalTraining(batch=1000, clip=0))
    state = simulator.start()
    record = simulator.run_round(state).record
    initial = simulator.net.initial
    assert torch.allclose(state.params.common["head.bias"], 0.9 * initial["head.bias"], atol=1e-15)
    for name in ("body.0.weight", "body.0.bias", "head.weight"):
        assert torch.allclose(state.params.common[name], initial[name], atol=1e-15)
    assert record["loss"] == pytest.approx(float(initial["head.bias"].square().sum() / 2))


@dataclass(frozen=True)
class Everything(Method):
    """Uses every hook: two heads mixed by a trained number, two phases, two batches per step, messages both ways."""

    name: ClassVar[str] = "everything"
    reach: float = 0.1

    def role(self, net, name):
        if name.startswith("second.") or name == "balance":
            return Role.PRIVATE
        return Role.PERSONAL if net.in_head(name) else Role.SHARED

    def start(self, net, client, moment):
        weight, bias = client.params["head.weight"], client.params["head.bias"]
        noise = torch.randn(weight.shape, generator=moment.generator("second head"), dtype=weight.dtype)
        second = {"second.weight": weight + 0.1 * noise, "second.bias": bias.clone(), "balance": bias.new_tensor(0.3)}
        memory = {
            "rounds": bias.new_zeros(()),
            "received_mean": bias.new_zeros(4),
            "message": client.count.new_zeros(()),
        }
        return client.having(params={**client.params, **second}, memory=memory)

    def begin(self, net, client, data, moment):
        features = net.features(client.params, data.x) * data.mask[:, None]
        centre = features.sum(0) / data.mask.sum()
        memory = {**client.memory, "rounds": client.memory["rounds"] + 1}
        params = client.params
        if "mean_labels" in client.inbox:
            params = {**params, "head.bias": params["head.bias"] + 0.01 * client.inbox["mean_labels"]}
        return client.having(params=params, memory=memory, inbox={**client.inbox, "centre": centre})

    def phases(self, local, moment):
        second = Phase(
            1, local.lr, local.momentum, trains=lambda name: name.startswith("second."), loss=self.second_loss
        )
        return second, Phase(local.epochs, local.lr, local.momentum, step=self.ahead, batches_per_step=2)

    def logits(self, net, client, x):
        features = net.features(client.params, x)
        second = {"head.weight": client.params["second.weight"], "head.bias": client.params["second.bias"]}
        balance = client.params["balance"]
        return balance * net.classify(client.params, features) + (1 - balance) * net.classify(second, features)

    def second_loss(self, net, client, batch):
        features = net.features(client.params, batch.x)
        second = {"head.weight": client.params["second.weight"], "head.bias": client.params["second.bias"]}
        return cross_entropy(net.classify(second, features), batch)

    def loss(self, net, client, batch):
        apart = sum((client.params[name] - client.received[name]).square().sum() for name in client.received)
        features = (net.features(client.params, batch.x) - client.inbox["centre"]).square().sum(1)
        pull = (features * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        return cross_entropy(self.logits(net, client, batch.x), batch) + 0.05 * apart + 0.02 * pull

    def ahead(self, gradient, client, batches):
        inner = gradient(client, batches[0])
        ahead = {name: client.params[name] - self.reach * inner[name] for name in inner}
        return gradient(client.having(params={**client.params, **ahead}), batches[1])

    def end(self, net, client, data, moment):
        labels = (torch.nn.functional.one_hot(data.y, 4) * data.mask[:, None]).sum(0)
        if "mean_labels" in client.inbox:
            mean, message = client.inbox["mean_labels"], client.inbox["message"]
            client = client.having(memory={**client.memory, "received_mean": mean, "message": message})
        return client, {"labels": labels, "samples": client.count}

    def adapt(self, local, moment):
        return (Phase(1, local.lr, 0.0, trains=lambda name: name.startswith("second."), loss=self.second_loss),)

    def predict(self, net, client, x):
        return self.logits(net, client, x)

    def server(self, net, clients):
        return {"answered": 0, "seen": torch.zeros(clients)}

    def aggregate(self, net, state, uploads, moment):
        neighbours = torch.eye(len(uploads.clients)) + 1
        seen = state["seen"].clone()
        seen[uploads.clients] += 1
        return Answer(
            shared={**uploads.mean, "mean_labels": uploads.extras["labels"].mean(0)},
            personal={**mix(uploads.params, neighbours), "message": uploads.extras["samples"] * 10 + moment.round},
            state={"answered": state["answered"] + len(uploads.clients), "seen": seen},
            trace={"answered": state["answered"]},
        )


@pytest.mark.parametrize("settings", [{}, {"participation": 0.5, "rounds": 4}, {"dropout": 0.4, "rounds": 4}])
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_method_that_uses_every_hook_computes_the_same_in_both_backends(settings, clip):
    local = LocalTraining(epochs=2, batch=5, lr=0.05, clip=clip, drop_incomplete=False)
    states, records = {}, {}
    for backend in BACKENDS:
        simulator = tanh_simulator(Everything(), backend, local, **settings)
        states[backend] = simulator.start()
        records[backend] = [each.record for each in simulator.run(states[backend])]
    one, other = states["loop"], states["stacked"]
    for groups in (
        (one.params.common, other.params.common),
        (one.params.own, other.params.own),
        (one.memory, other.memory),
        (one.velocity, other.velocity),
        (one.inbox.common, other.inbox.common),
        (one.inbox.own, other.inbox.own),
    ):
        assert groups[0].keys() == groups[1].keys()
        assert groups[0]
        for name in groups[0]:
            assert float((groups[0][name] - groups[1][name]).abs().max()) < 1e-9, name
    assert one.server["answered"] == other.server["answered"] == sum(len(r["participants"]) for r in records["loop"])
    for first, second in zip(records["loop"], records["stacked"], strict=True):
        assert first["client_accuracy"] == second["client_accuracy"]
        assert first.quantity("client_loss") == pytest.approx(second.quantity("client_loss"), abs=1e-9)
        assert first.quantity("trained_client_accuracy") == second.quantity("trained_client_accuracy")
        assert first.quantity("bytes_up") == second.quantity("bytes_up")
        assert first.quantity("bytes_down") == second.quantity("bytes_down")


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_kept_and_the_inbox_is_available_in_the_next_round(backend):
    simulator = tanh_simulator(Everything(), backend)
    state = simulator.start()
    assert state.memory["rounds"].tolist() == [0, 0, 0, 0]
    train = simulator.federation.label_counts("train")
    simulator.run_round(state)
    assert state.memory["rounds"].tolist() == [1, 1, 1, 1]
    assert state.memory["received_mean"].abs().max() == 0
    assert state.inbox.common["mean_labels"].tolist() == pytest.approx(train.mean(0).tolist())
    assert state.inbox.own["message"].tolist() == (train.sum(1) * 10 + 1).tolist()
    simulator.run_round(state)
    assert state.memory["rounds"].tolist() == [2, 2, 2, 2]
    assert state.memory["received_mean"].tolist() == [pytest.approx(train.mean(0).tolist())] * 4
    assert state.memory["message"].tolist() == (train.sum(1) * 10 + 1).tolist()
    assert state.inbox.own["message"].tolist() == (train.sum(1) * 10 + 2).tolist()
    assert state.server["seen"].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_personal_messages_reach_only_the_participants(backend):
    simulator = tanh_simulator(Everything(), backend, participation=0.5)
    state = simulator.start()
    present = simulator.run_round(state).record["participants"]
    absent = [row for row in range(4) if row not in present]
    assert (state.inbox.own["message"][present] > 0).all()
    assert (state.inbox.own["message"][absent] == 0).all()
    assert (state.memory["rounds"][absent] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_clients_start_with_the_same_second_head(backend):
    simulator = tanh_simulator(Everything(), backend)
    second = simulator.start().params.own["second.weight"]
    noise = torch.randn(4, 5, generator=simulator.moment(0).generator("second head"), dtype=torch.float64)
    for row in range(4):
        assert torch.equal(second[row], simulator.net.initial["head.weight"] + 0.1 * noise)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_are_adapted_for_scoring_on_a_copy(backend):
    simulator = tanh_simulator(Everything(), backend)
    state = simulator.start()
    simulator.run_round(state)
    before = {name: value.clone() for name, value in state.params.own.items()}
    momentum = {name: value.clone() for name, value in state.velocity.items()}
    moment = simulator.moment(1)
    first = simulator.score(state, moment)
    assert simulator.score(state, moment) == first
    assert all(torch.equal(state.params.own[name], before[name]) for name in before)
    assert all(torch.equal(state.velocity[name], momentum[name]) for name in momentum)
    cohort = simulator.cohort(state, torch.arange(4))
    adapted = simulator.adapted(simulator.method, cohort, moment).params.own
    for name in adapted:
        expected = state.params.merged()[name].expand_as(adapted[name])
        assert torch.equal(adapted[name], expected) == (not name.startswith("second.")), name


@dataclass(frozen=True)
class Adapting(Method):
    """Trains only to adapt before scoring, not in the round."""

    name: ClassVar[str] = "adapting"

    def phases(self, local, moment):
        return ()

    def adapt(self, local, moment):
        return super().phases(local, moment)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_are_scored_after_adapting(backend):
    # All samples in every step: adapting then equals local training.
    whole = LocalTraining(epochs=20, batch=1000, lr=0.1)
    adapted, alone = (tanh_simulator(method, backend, whole) for method in (Adapting(), Local()))
    state = adapted.start()
    record = adapted.run_round(state).record
    expected = alone.run_round(alone.start()).record
    assert record["client_accuracy"] == expected["client_accuracy"]
    assert record["trained_client_accuracy"] != expected["client_accuracy"]
    for name, value in adapted.net.initial.items():
        assert torch.allclose(state.params.common[name], value, atol=1e-15)


def test_adapting_uses_other_batches_than_training():
    @dataclass(frozen=True)
    class Both(Method):
        name: ClassVar[str] = "both"

        def adapt(self, local, moment):
            return self.phases(local, moment)

    simulator = tanh_simulator(Both(), "stacked")
    cohort, moment = simulator.cohort(simulator.start(), torch.arange(4)), simulator.moment(1)
    trained = simulator.local_training(cohort, moment)[0].params.own
    adapted = simulator.adapted(simulator.method, cohort, moment).params.own
    assert (trained["head.weight"] - adapted["head.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_use_the_predictions_of_the_method(backend):
    @dataclass(frozen=True)
    class Stubborn(Method):
        name: ClassVar[str] = "stubborn"

        def predict(self, net, client, x):
            return torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=x.dtype).expand(len(x), 4)

    simulator = tanh_simulator(Stubborn(), backend)
    record = simulator.run_round(simulator.start()).record
    truth = simulator.federation.label_counts("test")
    assert record["accuracy"] == pytest.approx(truth[:, 2].sum() / truth.sum())
    assert record["client_accuracy"] == pytest.approx((truth[:, 2] / truth.sum(1)).tolist())
