"""Accounting of differential privacy with Rényi divergences: ε for a δ, after all releases so far.

Three mechanisms occur in the simulator, each with its own bound:

- a Gaussian mechanism without sampling: α / (2 σ²) for order α (Mironov, 2017);
- Poisson sampling, as --dp sample draws its batches: Opacus's `compute_rdp` (Mironov et al., 2019);
- sampling a fixed number without replacement, as --participation draws clients: Theorem 9 of Wang, Balle and
  Kasiviswanathan (2019), which holds if one client is replaced by another. The bound for Poisson sampling is not valid
  here.
"""

import functools
import math
import warnings
from typing import Any

import numpy as np

from fedrema.errors import BadInput

ORDERS: tuple[float, ...] = (
    *(1 + step / 10 for step in range(1, 100)), *range(11, 64), *(64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
)  # fmt: skip
"""Orders α of the Rényi divergences; the smallest ε over them is reported."""


def gaussian(multiplier: float) -> np.ndarray:
    """Return the divergences [orders] of a Gaussian mechanism; `multiplier` is noise relative to sensitivity."""
    return np.array(ORDERS) / (2 * multiplier**2)


@functools.lru_cache(maxsize=4096)
def poisson(rate: float, multiplier: float) -> np.ndarray:
    """Return the divergences [orders] of a Gaussian mechanism on a sample that contains each entry with a probability.

    It holds if one entry is added or removed.
    """
    found: np.ndarray = np.asarray(_opacus().compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=ORDERS))
    return found


@functools.lru_cache(maxsize=4096)
def without_replacement(rate: float, multiplier: float) -> np.ndarray:
    """Return the divergences [orders] of a Gaussian mechanism on a share of the clients that is drawn in every round.

    It holds if one client is replaced by another; `multiplier` is relative to the sensitivity for that. The theorem is
    for whole orders; others have the bound of the next larger one, because divergences increase with the order. A
    sample never reveals more than all clients.
    """
    whole = gaussian(multiplier)
    if rate >= 1:
        return whole
    sampled: np.ndarray = np.array([_sampled(rate, multiplier, math.ceil(order - 1e-9)) for order in ORDERS])
    return np.where(sampled < whole, sampled, whole)


def _sampled(rate: float, multiplier: float, order: int) -> float:
    """Return the bound of Theorem 9 for a whole order, computed with logarithms."""
    j = np.arange(2, order + 1)
    log_factorials = np.array([math.lgamma(number + 1) for number in range(order + 1)])
    choose = log_factorials[order] - log_factorials[j] - log_factorials[order - j]
    second = 1 / multiplier**2  # ε(2); ε(j) = j / (2 σ²), and ε(∞) is infinite
    powers = (j - 1) * j / (2 * multiplier**2) + math.log(2)
    powers[0] = min(math.log(4) + _log_minus_one(second), math.log(2) + second)
    terms = j * math.log(rate) + choose + powers
    return float(np.logaddexp.reduce(np.concatenate([[0.0], terms]))) / (order - 1)


def _log_minus_one(value: float) -> float:
    """Return log(exp(value) − 1)."""
    return value + math.log(-math.expm1(-value))


def epsilon(divergences: np.ndarray, delta: float) -> float:
    """Return the ε of the sum of divergences [orders] of all releases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a larger range of orders would give a slightly smaller bound
        found, _ = _opacus().get_privacy_spent(orders=ORDERS, rdp=divergences, delta=delta)
    return max(0.0, float(found))


def check_available(setting: str = "--dp") -> None:
    """Raise `BadInput` if Opacus is not installed, which this setting needs."""
    _opacus(setting)


def _opacus(setting: str = "--dp") -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise BadInput(f"{setting} needs an accountant: pip install 'fedrema[privacy]'.") from error
    return rdp
