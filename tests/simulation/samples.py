"""Predictions of one client, constructed or random, for tests of what is computed from them."""

import numpy as np
import torch

from fedrema.tasks import METRICS, TASKS, Predictions, Task

SIZES = {"binary": 2, "multiclass": 4, "multilabel": 3, "ordinal": 4, "regression": 1, "count": 1}
CASES = [(task, metric.name) for task in TASKS for metric in METRICS.values() if task in metric.tasks]


def predictions(task, samples=25, seed=0, truth=99):
    """Return random predictions of one client, and its targets, which do not depend on the seed."""
    classes = SIZES[task]
    described = Task(task, classes, centre=2.0 if task in ("regression", "count") else 0.0)
    targets, generator = np.random.default_rng(truth), np.random.default_rng(seed)
    target = {
        "multilabel": lambda: targets.integers(0, 2, (samples, classes)),
        "regression": lambda: targets.normal(size=samples),
        "count": lambda: targets.poisson(2.0, samples),
    }.get(task, lambda: targets.integers(0, classes, samples))()
    outputs = generator.normal(size=(samples, described.outputs))
    return Predictions(
        described, torch.from_numpy(outputs)[None], torch.from_numpy(target)[None], torch.ones(1, samples).bool()
    )


def of_class(right, total):
    """Return predictions of a two-class task in which the given samples are right; the targets alternate."""
    target = torch.arange(total) % 2
    correct = torch.zeros(total, dtype=torch.bool)
    correct[torch.as_tensor(list(right), dtype=torch.long)] = True
    predicted = torch.where(correct, target, 1 - target)
    return labelled(torch.stack([predicted == 0, predicted == 1], -1).double(), target)


def labelled(outputs, target, task="binary"):
    """Return predictions with these outputs [n, C] and targets [n]."""
    outputs, target = torch.as_tensor(outputs, dtype=torch.float64), torch.as_tensor(target)
    return Predictions(
        Task(task, outputs.shape[-1]), outputs[None], target[None], torch.ones(1, len(target), dtype=torch.bool)
    )


def scored(scores, target):
    """Return predictions of a two-class task whose log odds are these scores."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    return labelled(torch.stack([torch.zeros_like(scores), scores], -1), target)


def numbers(values, target):
    """Return predictions of a regression."""
    values, target = (torch.as_tensor(each, dtype=torch.float64) for each in (values, target))
    return Predictions(Task("regression"), values[None, :, None], target[None], torch.ones(1, len(values)).bool())
