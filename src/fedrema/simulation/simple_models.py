"""What a client can do without a federation or a network: predict a constant, or fit a linear model to its samples.

A method is of use to a client only if it is better than these. They are fitted to the client's own training samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.base.random import numpy_generator
from fedrema.data.federation import Federation
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.linear_models import Floats, Inputs, Kind, predict, work_of
from fedrema.tasks import Task

CONSTANT, LINEAR = "constant", "linear"
TITLES = {CONSTANT: "Constant, alone", LINEAR: "Linear, alone"}
"""Names in tables."""
MOST_WORK = 1e11
"""Operations above which linear models are not fitted: about ten seconds on one core."""

_Fit = Callable[[NDArray[np.bool_], Floats], Floats | None]
"""Fits a logistic regression to some of the training samples with targets of 0 and 1: logits of the test samples."""


def simple_models(federation: Federation, task: Task, embeds: bool = False) -> dict[str, FinalPredictions]:
    """Return what each client's constant and each client's linear model predict for its test samples.

    Linear models are left out where inputs are numbers of categories or words (`embeds`), and where they would take
    more than `MOST_WORK`.
    """
    kinds = [CONSTANT] if embeds or linear_work(federation) > MOST_WORK else [CONSTANT, LINEAR]
    train, test = _rows(federation, ~federation.test), _rows(federation, federation.test)
    targets = federation.y[np.concatenate(test)]
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in test])]).astype(np.int64)
    found = {}
    for kind in kinds:
        outputs = np.empty((len(targets), task.outputs), np.float32)
        for row, name in enumerate(federation.names):
            mine = slice(int(offsets[row]), int(offsets[row + 1]))
            y = federation.y[train[row]]
            outputs[mine] = _constant(task, y)
            if kind == LINEAR and len(test[row]):
                inputs = Inputs.of(_numbers(federation.x[train[row]]), _numbers(federation.x[test[row]]))
                _overwrite_linear(outputs[mine], task, inputs, y, name)
        found[kind] = FinalPredictions(task, tuple(range(len(federation))), offsets, outputs, targets)
    return found


def linear_work(federation: Federation) -> float:
    """Return about how many operations the linear models of all clients take."""
    columns = int(np.prod(federation.sample_shape))
    counts = np.bincount(federation.client[~federation.test], minlength=len(federation))
    models = max(1, federation.task.outputs if federation.classes > 2 else 1)
    return models * sum(work_of(int(count), columns) for count in counts)


def _rows(federation: Federation, chosen: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return for each client the rows of its samples among the chosen ones."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(federation.client[rows], kind="stable")]
    return np.split(rows, np.cumsum(np.bincount(federation.client[rows], minlength=len(federation)))[:-1])


def _numbers(x: NDArray[Any]) -> Floats:
    return x.reshape(len(x), -1).astype(np.float64)


def _constant(task: Task, y: NDArray[Any]) -> Floats:
    """Return the outputs of a network that predicts the same for each sample [outputs]."""
    n = len(y)
    if task.name == "regression":
        middle = np.median(y) if task.loss_name == "absolute" else np.mean(y)
        return np.array([(middle - task.centre) / task.scale])
    if task.name == "count":
        return np.array([np.log((y.sum() + 0.5) / (n + 0.5) / (task.centre or 1.0))])
    if task.name == "multilabel":
        return _logit((y.sum(axis=0) + 0.5) / (n + 1))
    # One imaginary sample that is divided among the classes: for two of them, shares are (k + 1/2) / (n + 1).
    shares = (np.bincount(y.astype(np.int64), minlength=task.classes) + 1 / task.classes) / (n + 1)
    if task.name == "ordinal":
        reached = shares[::-1].cumsum()[::-1]
        return _logit(reached[1:] / reached[:-1])
    return np.log(shares)


def _logit(share: Floats) -> Floats:
    return np.log(share) - np.log1p(-share)


def _overwrite_linear(outputs: NDArray[np.float32], task: Task, inputs: Inputs, y: NDArray[Any], name: str) -> None:
    """Replace the outputs of the constant [m, outputs] by those of the linear model, where it can be fitted."""
    everything = np.ones(len(y), np.bool_)

    def fit(chosen: NDArray[np.bool_], target: Floats, purpose: int = 0) -> Floats | None:
        order = numpy_generator("linear model", name, purpose).permutation(int(chosen.sum()))
        return predict(inputs.rows(chosen), target, kind, order)

    kind: Kind = "logistic"
    if task.name in ("regression", "count"):
        kind = "squared" if task.name == "regression" else "poisson"
        values = y.astype(np.float64)
        found = fit(everything, (values - task.centre) / task.scale if kind == "squared" else values)
        if found is not None:
            outputs[:, 0] = found if kind == "squared" else found - np.log(task.centre or 1.0)
    elif task.name in ("multilabel", "ordinal"):
        for place in range(task.outputs):
            chosen = everything if task.name == "multilabel" else y >= place
            flags = y[:, place] > 0 if task.name == "multilabel" else y[chosen] > place
            found = fit(chosen, flags.astype(np.float64), place)
            if found is not None:
                outputs[:, place] = found
    elif task.classes == 2:
        found = fit(everything, (y == 1).astype(np.float64))
        if found is not None:
            outputs[:] = -np.logaddexp(0, np.stack([found, -found], axis=1))
    else:
        _overwrite_classes(outputs, fit, y, task.classes)


def _overwrite_classes(outputs: NDArray[np.float32], fit: _Fit, y: NDArray[Any], classes: int) -> None:
    """Fit one class against the others for each class; those with fewer than two samples keep the constant's share."""
    everything = np.ones(len(y), np.bool_)
    counts = np.bincount(y.astype(np.int64), minlength=classes)
    fitted = np.flatnonzero(counts >= 2)
    if len(fitted) < 2:
        return
    share = np.exp(outputs[:, fitted].astype(np.float64)).sum(axis=1)
    logits = [fit(everything, (y == each).astype(np.float64)) for each in fitted]
    likely = np.stack([1 / (1 + np.exp(-each)) for each in logits if each is not None], axis=1)
    outputs[:, fitted] = np.log(share[:, None] * likely / likely.sum(axis=1, keepdims=True))
