"""Callbacks that receive every round of a run: combined, checked, and early stopping."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedrema.config.settings import Settings
from fedrema.errors import BadInput, at_least
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.state import Round
from fedrema.tasks import METRICS

RoundCallback = Callable[[Round], object]
"""Receives the result of every round; returns True to stop the run after it, otherwise False or None."""
CallbackFor = Callable[[Settings], RoundCallback]
"""Returns the callback that receives the rounds of a run."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run when a quantity has not improved for some evaluated rounds; each run counts for itself.

    The metrics are computed on the test samples, so a run that is stopped by one of them has used the test samples to
    choose its length. To compare methods, give all of them the same number of rounds.

    Examples
    --------
    >>> import fedrema
    >>> stopping = fedrema.EarlyStopping(patience=2, min_change=0.5)
    >>> run = fedrema.run("fedavg", rounds=50, out="runs/stopped", overwrite=True, on_round=stopping)
    >>> run.finished, run.settings["rounds"], len(run.rounds) < 50
    (True, 50, True)
    """

    quantity: str | None = None
    """Name of a number in the rounds' records, such as accuracy, worst_tenth or loss. Default: the primary metric."""
    patience: int = 10
    """Number of evaluated rounds without an improvement after which the run stops."""
    min_change: float = 0.0
    """The quantity must change by more than this to count as an improvement."""
    higher_is_better: bool | None = None
    """Direction of the quantity. Default: known for metrics, worst_tenth and loss."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise BadInput(f"EarlyStopping(patience={self.patience}) is invalid: it must be 1 or more.")
        at_least(0, self, "min_change")

    def start(self) -> RoundCallback:
        """Return the callback of one run."""
        best, waited = -math.inf, 0

        def stop(finished: Round) -> bool:
            nonlocal best, waited
            value = self._value(finished.record)
            if value is None:
                return False
            improved = value > best + self.min_change
            best, waited = (value, 0) if improved else (best, waited + 1)
            return waited >= self.patience

        return stop

    def _value(self, record: RoundRecord) -> float | None:
        """Return the quantity in a round, negated if lower is better; None in rounds without evaluation."""
        if record.primary is None:
            return None
        primary = next(iter(record.metrics))
        name = self.quantity or primary
        value = record.quantity(name)
        if not isinstance(value, int | float):
            raise BadInput(f"EarlyStopping(quantity={name!r}) is invalid: round {record.round} has no such number.")
        return value if self._higher_is_better(name, primary) else -value

    def _higher_is_better(self, name: str, primary: str) -> bool:
        if self.higher_is_better is not None:
            return self.higher_is_better
        if name == "loss":
            return False
        metric = METRICS.get(primary if name == "worst_tenth" else name.removeprefix("trained_"))
        if metric is None:
            raise BadInput(
                f"EarlyStopping(quantity={name!r}) has no known direction: set higher_is_better to True or to False."
            )
        return metric.higher_is_better


def started(callbacks: Sequence[RoundCallback | EarlyStopping]) -> RoundCallback:
    """Return one callback for one run, which calls all of these."""
    ready = [each.start() if isinstance(each, EarlyStopping) else each for each in callbacks]

    def call_all(finished: Round) -> bool:
        # All are called in any case: one may log the round in which another stops the run.
        answers = [wants_stop(callback, finished) for callback in ready]
        return any(answers)

    return call_all


def wants_stop(callback: RoundCallback, finished: Round) -> bool:
    """Call a callback and return whether it asks to stop."""
    answer = callback(finished)
    if answer is None or isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise BadInput(
        f"on_round returned {answer!r} after round {finished.record.round}: it must return True to stop the run, or "
        "False or None to continue."
    )
