"""Hooks that do nothing are not called."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fedrema.core import Method
from tests.fixtures import BACKENDS, tanh_simulator


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hook_that_changes_nothing_is_not_applied_to_the_cohort(backend, monkeypatch):
    @dataclass(frozen=True)
    class Sometimes(Method):
        name: ClassVar[str] = "sometimes"
        title: ClassVar[str] = "Sometimes"

        def begin(self, net, client, data, moment):
            return client if moment.round != 2 else client.having(inbox={"seen": data.mask.sum()})

        def end(self, net, client, data, moment):
            return client, ({"seen": client.inbox["seen"]} if moment.round == 2 else {})

    simulator = tanh_simulator(Sometimes(), backend)
    calls = []
    original = simulator.engine.apply_hook
    monkeypatch.setattr(simulator.engine, "apply_hook", lambda *given: calls.append(1) or original(*given))
    state = simulator.start()
    simulator.run_round(state)
    assert calls == []
    up = simulator.run_round(state).record["bytes_up"]
    assert len(calls) == 2
    assert up == simulator.run_round(state).record["bytes_up"] + 4 * 8
    assert len(calls) == 2
