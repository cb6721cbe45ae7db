"""Simulate how often the interval of the mean gain contains the true mean, with the functions of the program.

`python tools/make_verdict_coverage.py` fills in the table of docs/verdict.md. A federation's clients have 5 to 300 test
rows, uniform in the logarithm. Their true gains are all zero, normal around zero, or larger at small clients.
"""

from collections.abc import Callable

import numpy as np
from make_figures import DOCS, fill
from make_verdict_rates import pair_of, two
from scipy import stats

from fedrema.simulation.auc_gains import auc_difference
from fedrema.simulation.mean_gains import FEWEST_CLIENTS, mean_gain
from fedrema.simulation.row_gains import Pair, row_gains
from fedrema.tasks import METRICS, Task

PAGE = DOCS / "verdict.md"
CLIENTS = (2, 3, 5, 9, 20, 50)
FEDERATIONS = 500
SETTINGS = ("no gain anywhere", "different clients", "small clients gain more")
POSITIVE = 0.35
"""Share of positives where AUC is simulated."""
SPREAD = {"accuracy": 0.05, "log_loss": 0.15, "brier": 0.04, "mae": 0.15, "rmse": 0.15, "auc": 0.08}
"""Standard deviation of the true gains of different clients."""
LARGEST = {"accuracy": 0.18, "log_loss": 0.5, "brier": 0.18, "mae": 0.6, "rmse": 0.6, "auc": 0.2}


def true_gains(random: np.random.Generator, metric: str, setting: str, rows: np.ndarray) -> np.ndarray:
    """Return the true gain of each client."""
    spread, noise = SPREAD[metric], random.normal(size=len(rows))
    if setting == SETTINGS[0]:
        return np.zeros(len(rows))
    smallness = np.log(300 / rows) / np.log(60)
    gains = spread * noise if setting == SETTINGS[1] else 2 * spread * smallness + spread / 2 * noise
    return np.clip(gains, -LARGEST[metric], LARGEST[metric])


def numbers_of_rows(random: np.random.Generator, clients: int) -> np.ndarray:
    """Return numbers of test rows."""
    return np.exp(random.uniform(np.log(5), np.log(300), clients)).round().astype(int)


def _accuracy(random: np.random.Generator, gain: float, rows: int) -> Pair:
    kind = random.choice(4, rows, p=[0.1 + gain / 2, 0.1 - gain / 2, 0.6, 0.2])
    target = random.integers(0, 2, rows)
    right = (kind == 0) | (kind == 2), (kind == 1) | (kind == 2)
    return pair_of(Task("binary", 2), *(two(np.where(each == (target == 1), 1.0, -1.0)) for each in right), target)


def _with_probability(random: np.random.Generator, *likely: np.ndarray) -> Pair:
    """Return models that give the true outcomes these probabilities."""
    target = random.integers(0, 2, len(likely[0]))
    odds = (np.log(each) - np.log1p(-each) for each in (np.clip(p, 1e-12, 1 - 1e-12) for p in likely))
    return pair_of(Task("binary", 2), *(two(np.where(target == 1, each, -each)) for each in odds), target)


def _log_loss(random: np.random.Generator, gain: float, rows: int) -> Pair:
    mine, theirs = random.gamma(1.0, 0.6 - gain, rows), random.gamma(0.5, 1.2, rows)  # the baseline is overconfident
    return _with_probability(random, np.exp(-mine), np.exp(-theirs))


def _brier(random: np.random.Generator, gain: float, rows: int) -> Pair:
    mean = 0.2 - gain
    mine, theirs = random.beta(2 * mean, 2 * (1 - mean), rows), random.beta(0.2, 0.8, rows)
    return _with_probability(random, 1 - np.sqrt(mine), 1 - np.sqrt(theirs))


def _errors(mine: np.ndarray, theirs: np.ndarray) -> Pair:
    return pair_of(Task("regression"), mine[:, None], theirs[:, None], np.zeros(len(mine)))


def _mae(random: np.random.Generator, gain: float, rows: int) -> Pair:
    rare = np.where(random.random(rows) < 0.05, 10, 1) / 1.45
    return _errors((1 - gain) * random.exponential(size=rows), rare * random.exponential(size=rows))


def _rmse(random: np.random.Generator, gain: float, rows: int) -> Pair:
    return _errors((1 - gain) * random.normal(size=rows), random.normal(size=rows))


def _auc(random: np.random.Generator, gain: float, rows: int) -> Pair:
    target = (random.random(rows) < POSITIVE).astype(np.int64)
    signals = np.sqrt(2) * stats.norm.ppf([0.75 + gain, 0.75])
    return pair_of(Task("binary", 2), *(two(each * target + random.normal(size=rows)) for each in signals), target)


MAKE: dict[str, Callable[[np.random.Generator, float, int], Pair]] = {
    "accuracy": _accuracy,
    "log_loss": _log_loss,
    "brier": _brier,
    "mae": _mae,
    "rmse": _rmse,
    "auc": _auc,
}


def expected(metric: str, setting: str) -> float:
    """Return the mean true gain of clients whose metric is defined."""
    random = np.random.default_rng(1)
    rows = numbers_of_rows(random, 400_000)
    weights = 1 - POSITIVE**rows - (1 - POSITIVE) ** rows if metric == "auc" else np.ones(len(rows))
    return float(np.average(true_gains(random, metric, setting, rows), weights=weights))


def covered(metric: str, setting: str, clients: int, federations: int) -> tuple[float, float, float]:
    """Return the coverage of clients like these by t, of these by the printed interval, and of zero by it."""
    measure, random, target = METRICS[metric], np.random.default_rng(clients), expected(metric, setting)
    hits = []
    while len(hits) < federations:
        rows = numbers_of_rows(random, clients)
        true = true_gains(random, metric, setting, rows)
        pairs = [MAKE[metric](random, gain, count) for gain, count in zip(true, rows.tolist(), strict=True)]
        gains = [row_gains(measure, pair) for pair in pairs]
        variances = [auc_difference(pair).variance for pair in pairs] if metric == "auc" else [
            each.variance for each in gains
        ]  # fmt: skip
        found = mean_gain(measure, gains, variances)
        if found.interval is None or found.over_clients is None:  # an AUC of fewer than two clients
            continue
        these = float(np.mean([gain for gain, each in zip(true, gains, strict=True) if each.is_defined]))
        hits.append([_inside(found.over_clients, target), _inside(found.interval, these), _inside(found.interval, 0.0)])
    like_these, these, zero = np.mean(hits, axis=0)
    return float(like_these), float(these), float(zero)


def _inside(interval: tuple[float, float], value: float) -> bool:
    return interval[0] <= value <= interval[1]


def make() -> None:
    """Fill in the table."""
    lines = ["| metric | true gains | " + " | ".join(f"{count} clients" for count in CLIENTS) + " |"]
    lines.append("|---|---|" + "---:|" * len(CLIENTS))
    for metric in MAKE:
        for setting in SETTINGS:
            cells = []
            for count in CLIENTS:
                found = covered(metric, setting, count, FEDERATIONS if count < 50 else FEDERATIONS // 2)
                print(metric, setting, count, *(f"{100 * each:.1f}" for each in found), flush=True)
                cells.append(f"{100 * found[0 if count >= FEWEST_CLIENTS else 1]:.1f}")
            lines.append(f"| {METRICS[metric].title} | {setting} | {' | '.join(cells)} |")
    fill(PAGE, "coverage", "\n".join(lines))


if __name__ == "__main__":
    make()
