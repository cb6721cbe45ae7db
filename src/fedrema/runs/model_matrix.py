"""Each client's final model on each client's test samples."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fedrema.engine import Cohort
from fedrema.engine.devices import torch_threads
from fedrema.errors import BadInput
from fedrema.runs.run import Run
from fedrema.runs.trained_clients import TrainedClients
from fedrema.simulation.scoring import metric_for
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import SimulationState
from fedrema.tasks import Metric


@dataclass(frozen=True)
class ModelMatrix:
    """A metric of each client's model on each client's test samples."""

    metric: Metric
    names: tuple[str, ...]
    values: np.ndarray
    """[K, K] a row per model, a column per client whose samples it predicts; NaN where the metric is undefined."""


def model_matrix(run: Run, metric: str | None = None, module: nn.Module | None = None) -> ModelMatrix:
    """Evaluate each client's model, as of the last checkpoint, on the test samples of every client.

    Models are adapted to their own client first, if the method adapts them. The data is built again from the run's
    settings. `metric` is the name of a metric; default: the task's primary one. `module` is the network, where it was
    given in Python.
    """
    measured = metric_for(run.manifest.federation.task, metric)
    if run.manifest.federation.is_deployed:
        raise BadInput(f"{run.path} belongs to a deployment: its test samples never leave the nodes.")
    clients = TrainedClients(run, module or run.module)
    simulator, state = clients.for_inspection("its models cannot be evaluated on it")
    with torch_threads(simulator.threads):
        return ModelMatrix(measured, tuple(run.names), _evaluate(simulator, state, measured))


def _evaluate(simulator: Simulator, state: SimulationState, metric: Metric) -> np.ndarray:
    everyone = torch.arange(state.clients)
    values = np.full((len(everyone), len(everyone)), np.nan)
    for models in simulator.chunks(everyone):  # as many as are scored at once, so memory is bounded in the same way
        cohort = simulator.adapted(simulator.method, simulator.cohort(state, models), simulator.moment(state.round))
        for column in everyone.tolist():
            values[models.numpy(), column] = _on_samples_of(simulator, cohort, column, metric)
    return values


def _on_samples_of(simulator: Simulator, cohort: Cohort, client: int, metric: Metric) -> list[float]:
    """Return the metric of each model of a cohort on the test samples of one client."""
    rows = torch.full((len(cohort),), client)
    # The clients keep their tensors, names and sample counts; only the samples are those of another client.
    moved = replace(cohort, clients=rows, index=rows.to(simulator.device))
    predicted = simulator.predictions(simulator.method, moved)
    numerators, denominators = (part.tolist() for part in metric.quotients(predicted))
    found = [metric.value(*pair) for pair in zip(numerators, denominators, strict=True)]
    return [np.nan if value is None else value for value in found]
