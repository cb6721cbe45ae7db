"""Simulate how often conclusions about single clients are wrong, with the functions of the program.

`python tools/make_verdict_rates.py` fills in the table of docs/verdict.md. In every situation, the models are equally
good in truth.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from make_figures import DOCS, fill
from scipy import optimize, special, stats

from fedrema.simulation.gains import compare_models
from fedrema.simulation.row_gains import Pair, row_gains
from fedrema.tasks import METRICS, Predictions, Task

PAGE = DOCS / "verdict.md"
SIZES = (10, 15, 20, 30, 50, 100, 300)
CLIENTS = 2000
"""Simulated clients of a rate."""
SITES = 20
"""Clients of a federation."""
FEWEST = 100
"""Simulated clients with a conclusion that a rate needs."""
CALIBRATION = 400_000
"""Rows on which two models are made equally good."""

Rows = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Outputs of the model, outputs of the baseline [n, outputs], and targets [n] of so many rows."""


def pair_of(task: Task, mine: np.ndarray, theirs: np.ndarray, target: np.ndarray) -> Pair:
    """Return the predictions of a model and of the baseline for one client."""
    mask = torch.ones(1, len(target), dtype=torch.bool)
    labels = torch.from_numpy(target)[None]
    return tuple(Predictions(task, torch.from_numpy(each)[None], labels, mask) for each in (mine, theirs))


# Two classes -----------------------------------------------------------------------------------------------------


def two(scores: np.ndarray) -> np.ndarray:
    """Return logits of two classes from log odds."""
    return np.stack([np.zeros_like(scores), scores], -1)


@lru_cache
def centre(share: float) -> float:
    """Return the mean of the true log odds with which this share is positive."""
    normal = stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000)
    return float(optimize.brentq(lambda mean: special.expit(mean + 1.5 * normal).mean() - share, -12, 12))


def outcome(random: np.random.Generator, rows: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return true log odds, with a standard deviation of 1.5, and outcomes of which this share is positive."""
    odds = centre(share) + 1.5 * random.normal(size=rows)
    return odds, (random.random(rows) < special.expit(odds)).astype(np.int64)


def alike(share: float, noise: float = 1.0) -> Rows:
    """Two models of the same kind and quality."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        odds, target = outcome(random, count, share)
        return two(odds + noise * random.normal(size=count)), two(odds + noise * random.normal(size=count)), target

    return rows


def equal(metric: str, task: Task, make: Callable[[float], Rows], low: float, high: float) -> Rows:
    """Return the rows with the parameter that makes both models equally good."""

    def gain(parameter: float) -> float:
        return row_gains(METRICS[metric], pair_of(task, *make(parameter)(np.random.default_rng(7), CALIBRATION))).gain

    @lru_cache
    def calibrated() -> Rows:
        return make(float(optimize.brentq(gain, low, high, xtol=1e-4)))

    return lambda random, count: calibrated()(random, count)


def overconfident(noise: float) -> Rows:
    """Compare a noisy model with a baseline that is three times as sharp as it should be."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        odds, target = outcome(random, count, 0.4)
        sharp = 3 * (odds + 0.5 * random.normal(size=count))
        return two(odds + noise * random.normal(size=count)), two(sharp), target

    return rows


def constant(share: float) -> Callable[[float], Rows]:
    """Compare a model that is too sharp by a factor with the share of positives."""

    def make(factor: float) -> Rows:
        def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            odds, target = outcome(random, count, share)
            prior = np.full(count, special.logit(share))
            return two(prior + factor * (odds - centre(share) + random.normal(size=count))), two(prior), target

        return rows

    return make


# Scores with known AUC, and classes with known recalls -------------------------------------------------------------


def binormal(share: float, deviation: float, signal: float = 1.0) -> Rows:
    """Scores of positives vary by `deviation` in one model and by 1 in the other; equal AUC."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        target = (random.random(count) < share).astype(np.int64)
        shared, first, second = random.normal(size=(3, count))
        mine, theirs = (np.sqrt(0.3) * shared + np.sqrt(0.7) * own for own in (first, second))
        wide = np.where(target == 1, deviation * mine + signal * np.sqrt((1 + deviation**2) / 2), mine)
        return two(wide), two(theirs + signal * target), target

    return rows


def against_constant(share: float) -> Rows:
    """Random scores against equal ones: both have an AUC of 0.5."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        target = (random.random(count) < share).astype(np.int64)
        return two(random.normal(size=count)), two(np.zeros(count)), target

    return rows


def classes(number: int, heavy: bool, skew: float = 1.0) -> Callable[[float], Rows]:
    """Classes one against the rest; the model's logits have normal or heavy-tailed noise, the baseline's normal."""

    def make(noise: float) -> Rows:
        def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            shares = skew ** np.arange(number)
            target = random.choice(number, count, p=shares / shares.sum())
            hot = np.eye(number)[target]
            own = random.standard_t(3, (count, number)) if heavy else random.normal(size=(count, number))
            return 1.5 * hot + noise * own, 1.5 * hot + random.normal(size=(count, number)), target

        return rows

    return make


def labels(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three labels, two models alike."""
    target = (random.random((count, 3)) < [0.5, 0.3, 0.2]).astype(np.int64)
    outputs = 1.5 * (target - 0.5) + random.normal(size=(2, count, 3))
    return outputs[0], outputs[1], target


def recalls(share: float, mine: tuple[float, float], theirs: tuple[float, float]) -> Rows:
    """Models that are right in given shares of each class."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        target = (random.random(count) < share).astype(np.int64)
        made = []
        for each in (mine, theirs):
            right = random.random(count) < np.array(each)[target]
            made.append(two(np.where(right == (target == 1), 1.0, -1.0)))
        return made[0], made[1], target

    return rows


# Quantities --------------------------------------------------------------------------------------------------------


def errors(draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]) -> Rows:
    """Models with these errors."""

    def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine, theirs = draw(random, count)
        return mine[:, None], theirs[:, None], np.zeros(count)

    return rows


def related(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return normal errors with a correlation of 0.5."""
    shared, first, second = random.normal(size=(3, count)) * np.sqrt(0.5)
    return shared + first, shared + second


def heavy_tailed(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return errors with three degrees of freedom."""
    return random.standard_t(3, count), random.standard_t(3, count)


def rare_errors(power: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """5 % of the baseline's errors are ten times as large; the model's are all somewhat larger."""
    size = (0.95 + 0.05 * 10**power) ** (1 / power)

    def draw(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return size * random.normal(size=count), random.normal(size=count) * np.where(
            random.random(count) < 0.05, 10, 1
        )

    return draw


def counts(rare: bool) -> Callable[[float], Rows]:
    """Rates of events; the baseline's are wrong by a little everywhere, or by much in 5 % of the rows."""

    def make(noise: float) -> Rows:
        def rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            rate = 0.5 + 0.7 * random.normal(size=count)
            target = random.poisson(np.exp(rate)).astype(np.float64)
            wrong = np.where(random.random(count) < 0.05, 1.5, 0.2) if rare else 0.4
            mine, theirs = rate + noise * random.normal(size=count), rate + wrong * random.normal(size=count)
            return mine[:, None], theirs[:, None], target

        return rows

    return make


def situations() -> Iterator[tuple[str, str, Task, Rows]]:
    """Yield metric, situation, task and rows."""
    binary, number, events = Task("binary", 2), Task("regression"), Task("count", centre=1.0)
    yield "accuracy", "half of the rows differ", binary, alike(0.5, 20)
    yield "accuracy", "alike", binary, alike(0.4)
    yield "accuracy", "alike, 10 % positive", binary, alike(0.1, 2)
    yield "accuracy", "alike, 2 % positive", binary, alike(0.02, 2)
    yield "accuracy", "three labels, alike", Task("multilabel", 3), labels
    for name in ("log_loss", "brier"):
        yield name, "alike", binary, alike(0.4)
        yield name, "overconfident", binary, equal(name, binary, overconfident, 0.5, 9)
        for share in (0.1, 0.02):
            rows = equal(name, binary, constant(share), 0.1, 3)
            yield name, f"constant, {100 * share:.0f} % positive", binary, rows
    for name, power in (("mae", 1), ("rmse", 2)):
        yield name, "alike", number, errors(related)
        yield name, "alike, t₃ errors", number, errors(heavy_tailed)
        yield name, "rare large errors", number, errors(rare_errors(power))
    yield "deviance", "alike", events, counts(False)(0.4)
    yield "deviance", "rare large errors", events, equal("deviance", events, counts(True), 0.05, 2)
    for share in (0.1, 0.3, 0.5):
        positive = f"{100 * share:.0f} % positive"
        yield "auc", f"alike, {positive}", binary, binormal(share, 1)
        yield "auc", f"unequal variances, {positive}", binary, binormal(share, 3)
        yield "auc", f"against a constant, {positive}", binary, against_constant(share)
    yield "auc", "alike, 50 % positive, AUC 0.98", binary, binormal(0.5, 1, 3.0)
    for classes_, skew in ((3, 1.0), (3, 0.5), (10, 1.0)):
        task = Task("multiclass", classes_)
        shape = f"{classes_} classes{' of unequal size' if skew < 1 else ''}"
        yield "auc", f"{shape}, alike", task, classes(classes_, False, skew)(1.0)
        yield "auc", f"{shape}, heavy tails", task, equal("auc", task, classes(classes_, True, skew), 0.2, 3)
    yield "auc", "three labels, alike", Task("multilabel", 3), labels
    for share in (0.1, 0.3, 0.5):
        positive = f"{100 * share:.0f} % positive"
        yield "balanced_accuracy", f"alike, {positive}", binary, recalls(share, (0.9, 0.6), (0.9, 0.6))
        yield "balanced_accuracy", f"other errors, {positive}", binary, recalls(share, (0.95, 0.55), (0.55, 0.95))
        yield "balanced_accuracy", f"few errors, {positive}", binary, recalls(share, (0.97, 0.97), (0.97, 0.97))
    yield "balanced_accuracy", "5 classes, alike", Task("multiclass", 5), classes(5, False)(1.0)


def false_rate(metric: str, task: Task, rows: Rows, size: int, sites: int = SITES) -> tuple[int, int]:
    """Return the number of simulated clients with a conclusion, and of those with a false one."""
    random = np.random.default_rng(size)
    clients = concluded = false = 0
    while clients < CLIENTS:
        pairs = {f"{clients} {site}": pair_of(task, *rows(random, size)) for site in range(sites)}
        gains = compare_models(METRICS[metric], pairs).clients
        clients += sites
        concluded += sum(gain.low is not None for gain in gains)
        false += sum(gain.conclusion in ("gain", "loss") for gain in gains)
    return concluded, false


def make() -> None:
    """Print the rates of all situations, and fill in the worst one of each metric."""
    worst: dict[str, list[float]] = {}
    for metric, situation, task, rows in situations():
        found = [false_rate(metric, task, rows, size) for size in SIZES]
        rates = [100 * false / concluded if concluded >= FEWEST else np.nan for concluded, false in found]
        print(metric, situation, *(f"{rate:.1f}" for rate in rates), flush=True)
        worst[metric] = np.fmax(worst.get(metric, np.full(len(SIZES), np.nan)), rates).tolist()
    lines = [f"| metric | {' | '.join(f'{size} samples' for size in SIZES)} |", f"|---|{'---:|' * len(SIZES)}"]
    for metric, rates in worst.items():
        cells = ("–" if np.isnan(rate) else f"{rate:.1f}" for rate in rates)
        lines.append(f"| {METRICS[metric].title} | {' | '.join(cells)} |")
    fill(PAGE, "rates", "\n".join(lines))


if __name__ == "__main__":
    make()
