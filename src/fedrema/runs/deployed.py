"""A run trained over a network: the server's checkpoint holds neither private parameters nor clients' memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrema.config.settings import Settings
from fedrema.core import Client
from fedrema.data import Federation
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.runs.directory import is_deployed
from fedrema.runs.execute import prepare
from fedrema.simulation.state import SimulationState

SAMPLES = 4
"""Inputs with which it is tried out what a prediction depends on."""


def counted_clients(state: SimulationState, config: Mapping[str, Any]) -> tuple[SimulationState, list[str], list[int]]:
    """Return the clients whose replies have counted, with their names and sample counts.

    The checkpoint of a deployed run has rows for clients that never joined; every other run is returned as it is.
    """
    known = config["federation"]
    if not is_deployed(config):
        return state, list(known["names"]), list(known["train_counts"])
    rows = [row for row, last in enumerate(known["last_counted"]) if last]
    if not rows:
        raise BadInput("No client of this run has counted in a round yet.")
    own, mail = (
        {name: value[torch.tensor(rows)] for name, value in group.items()}
        for group in (state.params.own, state.inbox.own)
    )
    held = replace(
        state,
        clients=len(rows),
        params=ClientTensors(own, state.params.common),
        inbox=ClientTensors(mail, state.inbox.common),
    )
    return held, [known["names"][row] for row in rows], [known["train_counts"][row] for row in rows]


def depends_on_nodes(
    settings: Settings,
    state: SimulationState,
    row: int,
    config: Mapping[str, Any],
    module: nn.Module | None,
    adapt: bool,
) -> bool:
    """Tell whether clients predict with something that the server does not hold.

    It is tried out: what the server does not hold is given two different values, and the predictions are compared.
    """
    known = config["federation"]
    shape = tuple(known["sample_shape"])
    simulation = replace(settings.simulation.for_inspection(), device="cpu", backend="loop")
    simulator = prepare(replace(settings, simulation=simulation), _dummy(shape, int(known["classes"])), module)
    if adapt and simulator.method.adapt(settings.local, simulator.moment(state.round)):
        return True  # on samples of its own
    begun = simulator.start()
    held, inbox = state.params.row(row), state.inbox.row(row)
    x = torch.linspace(-1, 1, SAMPLES * int(np.prod(shape))).reshape(SAMPLES, *shape).to(simulator.dtype)
    x = torch.zeros_like(x, dtype=torch.long) if simulator.net.integers else x
    count = torch.tensor(float(known["train_counts"][row]))

    def predicted(change: int) -> Tensor:
        params = {**_changed(begun.params.row(0), change), **held}
        memory = _changed(ClientTensors(begun.memory).row(0), change)
        simulator.net.train(False)
        with torch.no_grad():
            return simulator.method.predict(simulator.net, Client(params, params, memory, inbox, count), x)

    return not torch.equal(predicted(0), predicted(1))


def _changed(tensors: Tensors, change: int) -> Tensors:
    return {name: ~value if change and value.dtype is torch.bool else value + change for name, value in tensors.items()}


def _dummy(shape: tuple[int, ...], classes: int) -> Federation:
    """Return a federation that is used for its shapes only."""
    samples = np.zeros((3, *shape), np.float32)  # two to train on: some layers refuse a batch of one
    return Federation.from_arrays(samples, [0] * 3, ["nobody"] * 3, [False, False, True], classes=classes)
