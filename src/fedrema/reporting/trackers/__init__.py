"""Sends a run's numbers and figures to TensorBoard, MLflow or Weights & Biases while it trains."""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedrema.base.terminal import print_safe
from fedrema.config.settings import Settings
from fedrema.core.reports import HEAD_SIMILARITY, Reports
from fedrema.errors import BadInput
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.matrices import declared_matrix, heat_map, order_by_similarity
from fedrema.reporting.trackers.services import SERVICES, Tracker
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run
from fedrema.simulation.records import RoundRecord


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed, before anything is run."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"--track {name} needs a package that is not installed: pip install 'fedrema[{name}]'.")


class Tracking:
    """Observes a run (`RunObserver`): the trackers of one run. One that fails is dropped; training continues."""

    def __init__(self, trackers: Sequence[Tracker], directory: RunDirectory) -> None:
        self.trackers, self.directory = list(trackers), directory
        self.reports = directory.manifest().reports
        self.finished = False

    def round(self, record: RoundRecord) -> None:
        """Send the numbers of a round."""
        if self.trackers:
            values = scalars_of(record, self.reports)
            self._send(lambda tracker: tracker.scalars(record.round, values))

    def finish(self) -> None:
        """Send figures of the run, which is finished."""
        self.finished = True
        if self.trackers:
            with drawn_figures(Run(self.directory.path)) as (number, files):
                self._send(lambda tracker: tracker.figures(number, files))

    def close(self) -> None:
        """Flush all trackers."""
        self._send(lambda tracker: tracker.close(self.finished))

    def _send(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                action(tracker)
            except Exception as error:  # any error of another program's store or network
                self.trackers.remove(tracker)
                message = f"fedrema: {tracker.name} failed and receives no more numbers of {self.directory.path}"
                print_safe(f"{message}: {error}", file=sys.stderr)


def open_trackers(settings: Settings, directory: RunDirectory, after: int) -> Tracking:
    """Open the trackers that a run's settings name; `after` is the number of rounds that the run has already."""
    check_trackers(settings.output.trackers)
    found = Tracking([], directory)
    for name in settings.output.trackers:
        try:
            found.trackers.append(SERVICES[name](directory, after))
        except Exception as error:  # any error of another program's store, server or account
            found.close()
            reason = " ".join(str(error).split()).rstrip(".")
            again = f"fedrema resume {directory.path} tries again"
            raise BadInput(f"--track {name} cannot start: {reason}; {again}.") from error
    return found


def scalars_of(record: RoundRecord, reports: Reports) -> dict[str, float]:
    """Return the numbers of a round by name; of a quantity per client that the method traces, the mean."""
    found: dict[str, object] = {"loss": record.loss, "bytes_up": record.bytes_up, "bytes_down": record.bytes_down}
    for prefix, metrics in (("", record.metrics), ("trained_", record.trained)):
        found |= {f"{prefix}{name}": metric.value for name, metric in metrics.items()}
    found["worst_tenth"] = record.quantity("worst_tenth")
    for name, values in record.alternatives.items():
        primary = next(iter(record.metrics), "")
        found |= {f"beside/{name}" + ("" if metric == primary else f"_{metric}"): one for metric, one in values.items()}
    found |= {f"seconds/{name}": value for name, value in record.seconds.items()}
    found |= {f"trace/{name}": value for name, value in record.trace.items()}
    for trace in reports.traces:
        traced = record.trace.get(trace.name)
        if trace.per_client and isinstance(traced, list) and traced:
            found[f"trace/mean_{trace.name}"] = sum(traced) / len(traced)
    if record.nodes is not None:
        found |= {f"epsilon/{name}": value for name, value in record.nodes.epsilon.items()}
    found["clients/took_part"] = len(record.participants)
    found["clients/failed"] = len(record.dropped) + len(record.rejected)
    return {name: float(value) for name, value in found.items() if isinstance(value, (bool, int, float))}


@contextmanager
def drawn_figures(run: Run) -> Iterator[tuple[int, dict[str, Path]]]:
    """Yield the last round and the figures of a run as PNG files, which are deleted afterwards.

    They show the metrics, what the method traces by round, and the matrices between clients that were recorded; of
    these, the selection of one round is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        traces = (trace.name for trace in run.reports.traces if not trace.per_client)
        for quantity in (*run.metrics, *traces):
            if any(quantity in record for record in run.rounds):
                files[quantity] = Path(folder) / f"{quantity}.png"
                draw_curves([run], files[quantity], quantity)
        relations = run.relations()
        latest = relations[max(relations)] if relations else {}
        similarity = latest.get(HEAD_SIMILARITY.name)
        if similarity is not None and len(similarity) > 1:
            order = order_by_similarity(similarity)
            for name, values in latest.items():
                matrix = declared_matrix(name, run.reports)
                if matrix.kind != "selection":
                    files[name] = Path(folder) / f"{name}.png"
                    figure = heat_map(values[np.ix_(order, order)], f"{matrix.title}, round {max(relations)}")
                    figure.savefig(files[name], dpi=120)
        yield (run.rounds[-1].round if run.rounds else 0), files
