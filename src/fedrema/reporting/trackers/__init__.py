"""Sends a run's numbers and pictures to TensorBoard, MLflow or W&B, where their packages are installed."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedrema.base.terminal import print_safe
from fedrema.errors import BadInput
from fedrema.runs.directory import RunDirectory
from fedrema.simulation.records import RoundRecord

MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""What each needs to be installed."""


class Tracker(Protocol):
    """A place that numbers and pictures are sent to."""

    def __init__(self, directory: RunDirectory, config: dict[str, Any], after: int) -> None:
        """Begin, or go on after a round."""

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Take the numbers of a round."""

    def pictures(self, number: int, files: dict[str, Path]) -> None:
        """Take pictures, as PNG files, by name."""

    def close(self, finished: bool) -> None:
        """Write out everything."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse what is not installed, before anything is run."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise BadInput(f"--track {name} needs a package that is not installed: pip install 'fedrema[{name}]'.")


class Tracking:
    """Everything that a run is sent to."""

    def __init__(self, trackers: list[Tracker], directory: RunDirectory) -> None:
        self.trackers, self.directory = trackers, directory
        self.finished = False

    def _send(self, what: Callable[[Tracker], None]) -> None:
        """Send to all; one that fails is left out from now on, for training is worth more than its diary."""
        for tracker in list(self.trackers):
            try:
                what(tracker)
            except Exception as error:  # whatever another program's store or network does
                self.trackers.remove(tracker)
                name = type(tracker).__module__.rpartition("_")[2]
                print_safe(f"fedrema: {name} gets no more numbers of {self.directory.path}: {error}", file=sys.stderr)

    def round(self, record: RoundRecord) -> None:
        """Send the numbers of a round."""
        if self.trackers:
            values = scalars_of(record)
            self._send(lambda tracker: tracker.scalars(record.round, values))

    def close(self) -> None:
        """Let all write out everything."""
        self._send(lambda tracker: tracker.close(self.finished))

    def end(self) -> None:
        """Send pictures of the run, which has ended."""
        self.finished = True
        if self.trackers:
            from fedrema.reporting.trackers.figures import drawn

            with drawn(self.directory) as (number, files):
                self._send(lambda tracker: tracker.pictures(number, files))


@contextmanager
def tracking(names: Sequence[str], directory: RunDirectory, after: int) -> Iterator[Tracking]:
    """Keep connections open while a run is played."""
    trackers: list[Tracker] = []
    everyone = Tracking(trackers, directory)
    try:
        for name in names:
            kind = importlib.import_module(f"fedrema.reporting.trackers.to_{name}").Tracker
            try:
                trackers.append(kind(directory, directory.config(), after))
            except Exception as error:  # whatever another program's store, server or account lacks
                reason = " ".join(str(error).split()).rstrip(".")
                again = f"fedrema resume {directory.path} tries again"
                raise BadInput(f"--track {name} cannot begin: {reason}; {again}.") from error
        yield everyone
    finally:
        everyone.close()


def scalars_of(record: RoundRecord) -> dict[str, float]:
    """Return the plain numbers of a round's record by name: those of its parts as part/name."""
    names = [*record.metrics, "worst_tenth", *(f"trained_{name}" for name in record.trained)]
    found = {name: record.quantity(name) for name in (*names, "loss", "bytes_up", "bytes_down")}
    found |= {f"seconds/{name}": value for name, value in record.seconds.items()}
    found |= {f"trace/{name}": value for name, value in record.trace.items()}
    for name, values in record.alternatives.items():
        found |= {f"{name}/{metric}": value for metric, value in values.items()}
    if record.nodes is not None:
        found |= {f"epsilon/{name}": value for name, value in record.nodes.epsilon.items()}
    sizes = record.trace.get("set_sizes")
    if isinstance(sizes, list) and sizes:
        found["trace/mean_set_size"] = sum(sizes) / len(sizes)
    found["clients/took_part"] = len(record.participants)
    found["clients/failed"] = len(record.dropped) + len(record.rejected)
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
