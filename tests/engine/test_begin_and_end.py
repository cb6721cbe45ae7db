"""The inputs of `begin` and `end`, and what happens to their results."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedrema.core import Answer, Method, Role
from tests.fixtures import BACKENDS, tanh_simulator


class Echoing(Method):
    """The server returns everything that clients sent besides their parameters."""

    def aggregate(self, net, state, uploads, moment):
        answer = super().aggregate(net, state, uploads, moment)
        return replace(answer, shared={**answer.shared, **uploads.extras})


@pytest.mark.parametrize("backend", BACKENDS)
def test_end_is_given_the_received_parameters(backend):
    @dataclass(frozen=True)
    class Moved(Echoing):
        name: ClassVar[str] = "moved"

        def end(self, net, client, data, moment):
            return client, {"moved": client.params["head.bias"] - client.received["head.bias"]}

    simulator = tanh_simulator(Moved(), backend)
    state = simulator.start()
    cohort = simulator.cohort(state, torch.arange(4))
    trained = simulator.local_training(cohort, simulator.moment(1))[0].params.own
    simulator.run_round(state)
    expected = trained["head.bias"] - simulator.net.initial["head.bias"]
    assert expected.abs().min() > 1e-6
    assert torch.allclose(state.inbox.common["moved"], expected, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_a_hook_returns_unchanged_are_not_modified_later(backend):
    @dataclass(frozen=True)
    class Keeping(Method):
        """Sends the received parameters and the inbox unchanged; the server keeps the first of each."""

        name: ClassVar[str] = "keeping"

        def role(self, net, name):
            return Role.PERSONAL

        def end(self, net, client, data, moment):
            return client, {
                "received": client.received["head.bias"],
                "message": client.inbox.get("message", client.count),
            }

        def aggregate(self, net, state, uploads, moment):
            kept = state or {name: uploads.extras[name] for name in ("received", "message")}
            personal = {name: value + moment.round for name, value in uploads.params.items()}
            return Answer(shared={}, personal={**personal, "message": uploads.counts * 0 + moment.round}, state=kept)

    simulator = tanh_simulator(Keeping(), backend, rounds=3)
    state = simulator.start()
    simulator.run_round(state)
    first = {name: value.clone() for name, value in state.server.items()}
    simulator.run_round(state)
    simulator.run_round(state)
    for name, value in first.items():
        assert torch.equal(state.server[name], value), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_begin_and_end_are_given_all_samples_in_the_original_order(backend):
    @dataclass(frozen=True)
    class Orderly(Echoing):
        """Sends a checksum of the client's samples that depends on their order and on the padding."""

        name: ClassVar[str] = "orderly"

        def begin(self, net, client, data, moment):
            return client.having(inbox={**client.inbox, "begun": self.checksum(data)})

        def end(self, net, client, data, moment):
            return client, {"begun": client.inbox["begun"], "ended": self.checksum(data)}

        def checksum(self, data):
            places = torch.arange(len(data.y))
            return (data.mask * (1 + places) * (1 + data.index) ** 2 * (1 + data.y)).sum()

    simulator = tanh_simulator(Orderly(), backend)
    state = simulator.start()
    simulator.run_round(state)
    split = simulator.federation.split("train")
    labels = [y[:count] for y, count in zip(split.y, split.count, strict=True)]
    assert len({len(y) for y in labels}) > 1, "without padding this would show less"
    expected = [sum((place + 1) ** 3 * (1 + int(label)) for place, label in enumerate(y)) for y in labels]
    assert state.inbox.common["begun"].tolist() == state.inbox.common["ended"].tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("removes", [False, True])
def test_messages_of_the_server_stay_common_to_all_clients_if_begin_only_adds_to_them(backend, removes):
    @dataclass(frozen=True)
    class Adding(Method):
        name: ClassVar[str] = "adding"

        def begin(self, net, client, data, moment):
            kept = {name: value for name, value in client.inbox.items() if not (removes and name == "unused")}
            renewed = {"renewed": kept["renewed"] + client.count} if "renewed" in kept else {}
            return client.having(inbox={**kept, **renewed, "added": data.mask.sum()})

        def aggregate(self, net, state, uploads, moment):
            answer = super().aggregate(net, state, uploads, moment)
            made = {name: uploads.counts.sum() for name in ("message", "renewed", "unused")}
            return replace(answer, shared={**answer.shared, **made}, personal={"own": uploads.counts})

    simulator = tanh_simulator(Adding(), backend)
    state = simulator.start()
    simulator.run_round(state)
    before = state.inbox.merged()
    inbox = simulator.begin(simulator.cohort(state, torch.arange(4)), simulator.moment(2)).inbox
    assert ("message" in inbox.common) == (not removes)
    assert ("unused" in inbox.merged()) == (not removes)
    for row in range(4):
        found = inbox.row(row)
        assert found["message"] == before["message"]
        assert found["own"] == found["added"] == simulator.counts[row]
        assert found["renewed"] == before["renewed"] + simulator.counts[row]
    assert "added" not in state.inbox.merged()
