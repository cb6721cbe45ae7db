"""Metrics, computed for all clients at once.

Every metric is a quotient of two numbers per client, such as correct predictions and samples. Over several clients, the
numerators and the denominators are added. So accuracy, log loss, MAE and RMSE are those of all samples together, and a
metric that is no mean over samples, such as AUC, is averaged over clients in proportion to their samples. A client for
which a metric is undefined has the denominator 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedrema.errors import BadInput
from fedrema.tasks.predictions import Predictions
from fedrema.tasks.task import Task

Quotients = tuple[Tensor, Tensor]
"""Numerators and denominators [k]."""
BINS = 15
"""Number of bins of the calibration error."""


@dataclass(frozen=True)
class Metric:
    """A measure of how well a client's model works."""

    name: str
    """Name on the command line and in records."""
    title: str
    """Name in tables and figures."""
    description: str
    tasks: tuple[str, ...]
    """Tasks that it is defined for."""
    quotients: Callable[[Predictions], Quotients]
    higher_is_better: bool = True
    percent: bool = False
    """Whether it is shown in per cent."""
    transform: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
    """Applied to the quotient, such as a square root."""
    denominator: Literal["samples", "samples or 0", "other"] = "other"
    """What denominators are: numbers of samples, with numerators that add up over parts of a client's samples; numbers
    of samples, or 0 where the metric is undefined; or something else."""
    highest: float = float("inf")
    """The highest possible quotient; the lowest is 0."""

    @property
    def is_mean_over_samples(self) -> bool:
        """Whether numerators and denominators add up over a client's samples."""
        return self.denominator == "samples"

    def value(self, numerator: float, denominator: float) -> float | None:
        """Return the metric from sums of numerators and of denominators; None where it is undefined or infinite."""
        if not denominator > 0 or not math.isfinite(numerator):
            return None
        quotient = numerator / denominator
        return quotient if self.transform is None else float(self.transform(np.asarray(quotient)))

    def better(self, first: float, second: float) -> bool:
        """Return whether the first value is better than the second."""
        return first > second if self.higher_is_better else first < second

    def shown(self, value: float) -> str:
        """Return a value as text, in per cent where that is usual."""
        return f"{100 * value:.1f}" if self.percent else f"{value:.3g}"


def find_metric(name: str) -> Metric:
    """Return a metric by its name."""
    if name not in METRICS:
        raise BadInput(f"metric {name!r} is unknown; valid are {', '.join(METRICS)}.")
    return METRICS[name]


def metrics_of(task: Task, added: tuple[str, ...] = ()) -> tuple[Metric, ...]:
    """Return the task's usual metrics and those that the user added, each once."""
    for name in added:
        if task.name not in find_metric(name).tasks:
            valid = ", ".join(metric.name for metric in METRICS.values() if task.name in metric.tasks)
            raise BadInput(f"--metrics {name} is not defined for the task {task.name}; valid are {valid}.")
    return tuple(METRICS[name] for name in dict.fromkeys((*task.usual, *added)))


def _accuracy(found: Predictions) -> Quotients:
    correct = (found.predicted == found.target).to(found.outputs.dtype)
    return found.mean(correct.mean(-1) if correct.dim() == 3 else correct)


def _confusion(found: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each class or label [k, C]: true positives, samples of the class, and predictions of the class."""
    mask = found.mask[..., None].to(found.outputs.dtype)
    if found.task.name == "multilabel":
        target, predicted = found.target * mask, found.predicted * mask
    else:
        classes, outputs = found.task.classes, max(found.task.classes, found.outputs.shape[-1])
        each = (functional.one_hot(labels, outputs)[..., :classes] for labels in (found.target, found.predicted))
        target, predicted = (flags * mask for flags in each)
    return (target * predicted).sum(1), target.sum(1), predicted.sum(1)


def _balanced_accuracy(found: Predictions) -> Quotients:
    correct, actual, _ = _confusion(found)
    return _mean_over_classes(found, correct / actual.clamp(min=1), actual > 0)


def _f1(found: Predictions) -> Quotients:
    correct, actual, predicted = _confusion(found)
    return _mean_over_classes(found, 2 * correct / (actual + predicted).clamp(min=1), actual + predicted > 0)


def _auc(found: Predictions) -> Quotients:
    probabilities = found.probabilities
    if found.task.name == "binary":
        scores, target = probabilities[..., 1:], found.target[..., None] == 1
    elif found.task.name == "multilabel":
        scores, target = probabilities, found.target == 1
    else:
        classes = torch.arange(found.task.classes, device=found.target.device)
        scores, target = probabilities, found.target[..., None] == classes
    real = found.mask[..., None]
    # Padding ranks last, where it does not change the ranks of samples.
    scores = torch.where(real, scores, torch.inf).movedim(-1, 1).contiguous()  # [k, C, n]
    positive = (target & real).movedim(-1, 1)
    ranks = torch.from_numpy(_mean_ranks(scores.cpu().numpy())).to(scores)
    positives = positive.sum(-1).to(found.outputs.dtype)
    negatives = found.counts[:, None] - positives
    wins = torch.where(positive, ranks, 0).sum(-1) - positives * (positives + 1) / 2
    pairs = positives * negatives
    return _mean_over_classes(found, wins / pairs.clamp(min=1), pairs > 0)


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1 on along the last axis; equal values share their mean rank.

    With NumPy, which sorts short rows on a CPU several times faster than torch.
    """
    order = values.argsort(axis=-1)
    ascending = np.take_along_axis(values, order, axis=-1)
    places = np.arange(values.shape[-1])
    differs = ascending[..., 1:] != ascending[..., :-1]
    edge = np.ones((*values.shape[:-1], 1), np.bool_)
    first = np.maximum.accumulate(np.where(np.concatenate([edge, differs], -1), places, 0), axis=-1)
    is_last = np.concatenate([differs, edge], -1)
    last = np.minimum.accumulate(np.where(is_last, places, len(places))[..., ::-1], axis=-1)[..., ::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, axis=-1)
    return ranks


def _mean_over_classes(found: Predictions, values: Tensor, defined: Tensor) -> Quotients:
    """Return the mean of values [k, C] over the classes where they are defined, in proportion to samples."""
    number = defined.sum(-1)
    means = torch.where(defined, values, 0).sum(-1) / number.clamp(min=1)
    samples = torch.where(number > 0, found.counts, 0)
    return means * samples, samples


def _log_loss(found: Predictions) -> Quotients:
    smallest = torch.finfo(found.outputs.dtype).eps
    if found.task.name == "multilabel":
        likely = torch.where(found.target == 1, found.probabilities, 1 - found.probabilities)
        return found.mean(-likely.clamp(min=smallest).log().mean(-1))
    likely = found.probabilities.gather(-1, found.target[..., None])[..., 0]
    return found.mean(-likely.clamp(min=smallest).log())


def _brier(found: Predictions) -> Quotients:
    if found.task.name == "multilabel":
        return found.mean((found.probabilities - found.target).square().mean(-1))
    if found.task.classes == 2:
        return found.mean((found.probabilities[..., 1] - found.target).square())
    wanted = functional.one_hot(found.target, found.task.classes)
    return found.mean((found.probabilities - wanted).square().sum(-1))


def _calibration_error(found: Predictions) -> Quotients:
    confidence, predicted = found.probabilities.max(-1)
    excess = confidence - (predicted == found.target).to(confidence.dtype)
    bins = (confidence.nan_to_num() * BINS).ceil().clamp(1, BINS).long() - 1
    sums = confidence.new_zeros(len(confidence), BINS)
    sums.scatter_add_(1, bins, torch.where(found.mask, excess, 0))
    return sums.abs().sum(1), found.counts


def _error(found: Predictions) -> Tensor:
    return found.predicted.to(found.outputs.dtype) - found.target.to(found.outputs.dtype)


def _mae(found: Predictions) -> Quotients:
    return found.mean(_error(found).abs())


def _mse(found: Predictions) -> Quotients:
    return found.mean(_error(found).square())


def _unexplained(found: Predictions) -> Quotients:
    """Return the sums of squared errors, and of squared deviations from the client's mean."""
    errors, _ = found.mean(_error(found).square())
    target = found.target.to(found.outputs.dtype)
    # Relative to the client's first sample, so that equal targets deviate by exactly 0.
    target = target - target[:, :1]
    total, count = found.mean(target)
    deviations, _ = found.mean((target - (total / count.clamp(min=1))[:, None]).square())
    return errors, deviations


def _deviance(found: Predictions) -> Quotients:
    target, rate = found.target.to(found.outputs.dtype), found.predicted.clamp(min=1e-12)
    return found.mean(2 * (torch.xlogy(target, target / rate) - target + rate))


_CLASSES = ("multiclass", "binary", "ordinal")
_NUMBERS = ("regression", "count")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy",
            "accuracy",
            "share of correct predictions; with several labels, the mean over them",
            (*_CLASSES, "multilabel"),
            _accuracy,
            percent=True,
            denominator="samples",
            highest=1.0,
        ),
        Metric(
            "balanced_accuracy",
            "balanced accuracy",
            "mean over classes of the share of their samples that is predicted correctly",
            _CLASSES,
            _balanced_accuracy,
            percent=True,
            denominator="samples or 0",
            highest=1.0,
        ),
        Metric(
            "f1",
            "macro F1",
            "mean over classes or labels of the harmonic mean of precision and recall",
            (*_CLASSES, "multilabel"),
            _f1,
            percent=True,
            denominator="samples or 0",
            highest=1.0,
        ),
        Metric(
            "auc",
            "AUC",
            "area under the ROC curve; with more than two classes or labels, the mean of one against the rest",
            ("multiclass", "binary", "multilabel"),
            _auc,
            percent=True,
            denominator="samples or 0",
            highest=1.0,
        ),
        Metric(
            "log_loss",
            "log loss",
            "mean negative logarithm of the probability of the true outcome",
            (*_CLASSES, "multilabel"),
            _log_loss,
            higher_is_better=False,
            denominator="samples",
        ),
        Metric(
            "brier",
            "Brier score",
            "mean squared error of the probabilities; with more than two classes, summed over classes",
            (*_CLASSES, "multilabel"),
            _brier,
            higher_is_better=False,
            denominator="samples",
            highest=2.0,
        ),
        Metric(
            "calibration_error",
            "calibration error",
            f"difference between confidence and accuracy, averaged over {BINS} bins of confidence",
            ("multiclass", "binary"),
            _calibration_error,
            higher_is_better=False,
            percent=True,
            denominator="samples or 0",
            highest=1.0,
        ),
        Metric(
            "mae",
            "MAE",
            "mean absolute error",
            (*_NUMBERS, "ordinal"),
            _mae,
            higher_is_better=False,
            denominator="samples",
        ),
        Metric(
            "rmse",
            "RMSE",
            "root of the mean squared error",
            (*_NUMBERS, "ordinal"),
            _mse,
            higher_is_better=False,
            transform=np.sqrt,
            denominator="samples",
        ),
        Metric(
            "r2",
            "R²",
            "share of the variance around each client's own mean that is explained",
            _NUMBERS,
            _unexplained,
            transform=lambda unexplained: 1 - unexplained,
        ),
        Metric(
            "deviance",
            "Poisson deviance",
            "twice the difference of log-likelihoods between a perfect model and this one, per sample",
            ("count",),
            _deviance,
            higher_is_better=False,
            denominator="samples",
        ),
    )
}
"""All metrics by name."""
