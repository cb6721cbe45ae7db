"""Captured steps, predictions and hooks, with graphs that record operators on the CPU. On a GPU: tests/gpu."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedrema.core import Method, Moment
from fedrema.engine.cuda_graphs import CudaGraphs
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedprior import FedPrior
from tests.contract.test_methods import METHODS
from tests.engine.recorded_graphs import RecordedGraph, recorded
from tests.fixtures import label, make_federation, make_simulator, run_all, snapshot, tanh_simulator


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


def with_graphs(simulator):
    """Return a simulator that captures what it would capture on a GPU."""
    simulator.engine.graphs = CudaGraphs()
    return simulator


def hook_graphs(simulator, hook):
    """Return the graphs of a method's `begin` or `end`."""
    called = getattr(type(simulator.method), hook)
    captured = simulator.engine.graphs.captured.items()
    return [graph for (_, what, _), (graph, _, _) in captured if isinstance(what[0], tuple) and called in what[0]]


@pytest.mark.parametrize("settings", [{"rounds": 5}, {"participation": 0.75, "rounds": 5}], ids=["all", "some absent"])
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_captured_rounds_equal_those_without_graphs(method, settings):
    federation = make_federation(counts=(14, 6, 19, 9))
    simulator = with_graphs(make_simulator(method, federation, **settings))
    state, records = run_all(simulator)
    expected, expected_records = run_all(make_simulator(method, federation, **settings))
    assert any(graph.replays for graph, _, _ in simulator.engine.graphs.captured.values())
    found, wanted = snapshot(state), snapshot(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for record, other in zip(records, expected_records, strict=True):
        assert (record["loss"], record["client_accuracy"]) == (other["loss"], other["client_accuracy"])


@pytest.mark.parametrize("method", [FedPAC(), FedPrior()], ids=label)
def test_feature_statistics_are_replayed_from_the_third_round_on(method):
    # Tensors that the server sends first arrive in round 2, which is therefore the first round with these buffers.
    simulator = with_graphs(make_simulator(method, rounds=6))
    run_all(simulator)
    for hook in ("begin", "end"):
        assert [graph.replays for graph in hook_graphs(simulator, hook)] == [4], hook


class Sending(Method):
    """The server returns what clients sent besides their parameters."""

    def aggregate(self, net, state, uploads, moment):
        answer = super().aggregate(net, state, uploads, moment)
        return replace(answer, shared={**answer.shared, "sent": uploads.extras["sent"].sum()})


def numbers_sent(method, rounds=6):
    """Return what the server sent after each round."""
    simulator = with_graphs(tanh_simulator(method, "stacked", rounds=rounds))
    state = simulator.start()
    return [float(state.inbox.common["sent"]) for _ in simulator.run(state)], simulator


def test_a_hook_that_reads_the_moment_is_called_in_every_round():
    @dataclass(frozen=True)
    class Dated(Sending):
        name: ClassVar[str] = "dated"

        def end(self, net, client, data, moment):
            return client, {"sent": client.count.new_full((), moment.round)}

    sent, simulator = numbers_sent(Dated())
    assert sent == [4, 8, 12, 16, 20, 24]
    assert hook_graphs(simulator, "end") == []


@pytest.mark.parametrize("read", [hash, lambda moment: moment == Moment(2, 6, 0), replace])
def test_a_hook_that_compares_the_moment_is_called_in_every_round(read):
    @dataclass(frozen=True)
    class Compared(Sending):
        name: ClassVar[str] = "compared"

        def end(self, net, client, data, moment):
            read(moment)
            return client, {"sent": client.count}

    _, simulator = numbers_sent(Compared())
    assert hook_graphs(simulator, "end") == []


def test_a_hook_that_reads_the_moment_only_with_a_message_is_called_in_every_round_with_one():
    @dataclass(frozen=True)
    class Answering(Sending):
        name: ClassVar[str] = "answering"

        def end(self, net, client, data, moment):
            number = moment.round if "sent" in client.inbox else -1
            return client, {"sent": client.count.new_full((), number)}

    assert numbers_sent(Answering())[0] == [-4, 8, 12, 16, 20, 24]


def test_a_hook_that_cannot_be_captured_is_called_in_every_round():
    calls = []

    @dataclass(frozen=True)
    class Looking(Sending):
        name: ClassVar[str] = "looking"

        def end(self, net, client, data, moment):
            calls.append(float(net.initial["head.bias"].sum()))  # reads a value, which a capture does not allow
            return client, {"sent": client.count}

    sent, simulator = numbers_sent(Looking())
    assert sent == [sum(simulator.counts.tolist())] * 6
    assert hook_graphs(simulator, "end") == []
    assert len(calls) >= 6


def test_results_of_a_captured_hook_are_not_overwritten_by_its_next_call():
    @dataclass(frozen=True)
    class Keeping(Method):
        name: ClassVar[str] = "keeping"

        def end(self, net, client, data, moment):
            return client, {"moved": client.params["head.bias"] - client.received["head.bias"]}

        def aggregate(self, net, state, uploads, moment):
            answer = super().aggregate(net, state, uploads, moment)
            return replace(answer, state={**state, f"moved {moment.round}": uploads.extras["moved"]})

    rounds = 6
    states = []
    for wrapped in (with_graphs, lambda simulator: simulator):
        simulator = wrapped(tanh_simulator(Keeping(), "stacked", rounds=rounds))
        states.append(run_all(simulator)[0])
    for name, value in states[1].server.items():
        assert torch.equal(states[0].server[name], value), name
    assert len(states[0].server) == rounds
