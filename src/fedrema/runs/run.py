"""Read access to a run, finished or not, through its folder."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fedrema.base.html import html_table, paragraph, title_line
from fedrema.core.reports import Reports
from fedrema.errors import BadInput
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import Manifest
from fedrema.runs.run_clients import RunClients
from fedrema.runs.simple_models import read_simple_models
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.records import MetricSummary, RoundRecord, Summary
from fedrema.simulation.state import SimulationState
from fedrema.tasks import find_metric


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a run that has finished."""
    return (folder / "config.json").is_file() and Run(folder).finished


if TYPE_CHECKING:
    from fedrema.runs.prediction import PredictedSamples


class Run:
    """The content of a run's folder.

    Examples
    --------
    >>> import fedrema
    >>> run = fedrema.run("fedrema", rounds=3, clients=4, out="runs/four-clients", overwrite=True)
    >>> run = fedrema.load("runs/four-clients")
    >>> 0 < run.metrics[run.metric].honest <= run.summary["best_accuracy"] <= 1
    True
    >>> rounds, accuracy = run.curve("accuracy")
    >>> rounds.tolist()
    [1, 2, 3]
    >>> client = run.clients["2"]
    >>> client.train_samples == run.manifest.federation.train_counts[2]
    True
    >>> digits = fedrema.make_federation(clients=1).x[:5]
    >>> len(client.predict(digits).values)
    5
    """

    def __init__(self, path: Path | str, trust_code: bool = False) -> None:
        self.directory = RunDirectory.open(Path(path))
        self.path = self.directory.path
        self.manifest: Manifest = self.directory.manifest()
        self.module: nn.Module | None = None
        """The network, where it was given in Python."""
        self.trust_code = trust_code
        """Whether code that the run names may be imported although this user has not given it."""

    def __repr__(self) -> str:
        score, metric = "", find_metric(self.metric)
        if self.metric in self.metrics:
            best = metric.shown(self.metrics[self.metric].best)
            score = f", best {best}%" if metric.percent else f", best {metric.title} {best}"
        stopped = f" of {self.settings['rounds']}, stopped early" if self.stopped_early else ""
        return f"Run({str(self.path)!r}: {self.method}, {len(self.rounds)} rounds{stopped}{score})"

    def _repr_html_(self) -> str:
        federation, summary = self.manifest.federation, self.summary
        state = "stopped early" if self.stopped_early else "finished" if self.finished else "not finished"
        facts = f"{len(self.names)} clients, round {summary.rounds} of {self.settings['rounds']}, {state}"
        rows = []
        for name, values in self.metrics.items():
            metric = find_metric(name)
            found = (values.best, values.honest, values.final, values.worst_tenth)
            title = f"{metric.title} (%)" if metric.percent else metric.title
            rows.append((title, *("–" if each is None else metric.shown(each) for each in found)))
        table = html_table(("metric", "best (peeks)", "honest", "final (last 5)", "worst tenth"), rows) if rows else ""
        source = federation.info.get("dataset") or federation.info.get("federation") or "network"
        data = f"Data: {source}, {sum(federation.train_counts)} training and {sum(federation.test_counts)} test samples"
        return title_line(self.title, f"in {self.path}: {facts}") + table + paragraph(data, small=True)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.manifest.method

    @property
    def title(self) -> str:
        """The method's title in tables and figures."""
        return self.manifest.title or self.method.partition(":")[2] or self.method

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, under their names on the command line."""
        return dict(self.manifest.settings)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json as plain values; `manifest` has it typed."""
        return self.manifest.as_json()

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return list(self.manifest.federation.names)

    @property
    def finished(self) -> bool:
        """Whether it has finished."""
        return self.directory.finished()

    @property
    def stopped_early(self) -> bool:
        """Whether a callback ended it before its last round; `fedrema.resume` continues it."""
        return self.finished and self.summary.rounds < int(self.settings["rounds"])

    @cached_property
    def clients(self) -> RunClients:
        """Its clients by name: `run.clients["north"].predict(x)`."""
        return RunClients(self)

    @property
    def reports(self) -> Reports:
        """What the method declares about its reports: quantities per round, matrices, its colour."""
        return self.manifest.reports

    @cached_property
    def rounds(self) -> list[RoundRecord]:
        """One record per round, as of the first access."""
        return self.directory.rounds()

    @cached_property
    def summary(self) -> Summary:
        """Headline numbers; of the rounds so far where the run has not finished."""
        return self.directory.summary() or self.directory.summarise(self.rounds)

    @property
    def metric(self) -> str:
        """Name of the task's primary metric."""
        return self.manifest.federation.task.primary

    @property
    def metrics(self) -> dict[str, MetricSummary]:
        """Best, honest and final value of each metric, by its name, the primary one first; empty before evaluation."""
        return dict(self.summary.metrics)

    def curve(self, quantity: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return rounds and values of a quantity of the records, or of the method's trace.

        Default: the task's primary metric.
        """
        quantity = quantity or self.metric
        pairs = [(record.round, record.quantity(quantity)) for record in self.rounds]
        known = [(number, value) for number, value in pairs if value is not None]
        if not known:
            raise BadInput(f"{self.path} has no {quantity!r} in its rounds.")
        return np.array([number for number, _ in known]), np.array([value for _, value in known])

    def relations(self) -> dict[int, dict[str, np.ndarray]]:
        """Return the matrices between clients by round: S, sets and G (runs with --record relations)."""
        with self.directory.check_all_read() as counts:
            found = self.directory.relations()
            counts["relations"] = len(found)
        return found

    def predictions(self) -> FinalPredictions:
        """Return what each client's final model predicts for its own test samples; finished runs only."""
        if self.manifest.federation.is_deployed:
            raise BadInput(f"{self.path} belongs to a deployment: its test samples never leave the nodes.")
        if not self.finished:
            raise BadInput(f"{self.path} has not finished: continue it with fedrema resume {self.path}.")
        return self.directory.predictions()

    def simple_models(self) -> dict[str, FinalPredictions]:
        """Return what each client's constant and linear model predict for its own test samples, by their names.

        Empty for deployments and for datasets that fedrema partitions, whose runs do not store them.
        """
        return read_simple_models(self.directory) if self.finished else {}

    def state(self) -> SimulationState:
        """Return the last saved state."""
        return self.directory.state()

    def personal_model(
        self,
        client: str | None = None,
        *,
        row: int | None = None,
        adapt: bool = True,
        module: nn.Module | None = None,
    ) -> nn.Module:
        """Return a client's model as of the last checkpoint: called with inputs, it returns the client's logits.

        It is on the CPU, in eval mode and in the run's precision. It takes inputs [n, ...] as a federation holds them:
        uint8 pixels are scaled to -1..1, integers of a network with an embedding stay integers, anything else is only
        converted to the run's precision. Its state dict has the names of the file that `fedrema export` writes, unless
        the method computes predictions in its own way (FedProto, FedRoD, APFL): then the model calls the method.

        Parameters
        ----------
        client
            The client's name.
        row
            The client's row in `names`, instead of its name.
        adapt
            Where the method adapts models before they are used (FedBABU, Per-FedAvg, FedALA), adapt this one on the
            run's own data; otherwise it is returned without adapting.
        module
            The network, where it was given in Python; not needed for a run that `fedrema.run` has just returned.
        """
        from fedrema.runs.trained_clients import TrainedClients  # that module imports this one

        return TrainedClients(self, module or self.module).predictor(self._row(client, row), adapt)

    def predict(self, data: Any, client: str | None = None, *, adapt: bool = True) -> "PredictedSamples":
        """Predict raw rows of a table, images or arrays, each with the model of its client.

        Parameters
        ----------
        data
            A table (.csv, .csv.gz, .parquet, or a folder with one file per client), images, a .npz file with `x` and
            optionally `client`, a pandas or polars frame, or an array of inputs.
        client
            The client of all samples; default: a table's client column, or the folder of an image.
        adapt
            As for `personal_model`.
        """
        from fedrema.runs.prediction import models_of_run  # that module imports this one

        return models_of_run(self, adapt=adapt).predict(data, client)

    def personal_parameters(self, client: str | None = None, *, row: int | None = None) -> dict[str, Tensor]:
        """Return a client's parameters as of the last checkpoint, by fedrema's names (`body.…`, `head.…`).

        Parameters that a method adds to the network's (Ditto's `personal.…`) are included. See `personal_model` for
        tensors under the names of the exported file.
        """
        return self.state().params.row(self._row(client, row))

    def _row(self, client: str | None, row: int | None) -> int:
        if (client is None) == (row is None):
            raise BadInput("Name a client, or give row=: one of them.")
        if row is not None:
            if not isinstance(row, int) or not 0 <= row < len(self.names):
                raise BadInput(f"There is no client in row {row!r} of {self.path}; rows: 0 to {len(self.names) - 1}.")
            return row
        if not isinstance(client, str):
            raise BadInput(f"A client's name is a string, got {client!r}: write {str(client)!r}, or row={client!r}.")
        if client not in self.names:
            some = ", ".join(self.names[:10]) + (" …" if len(self.names) > 10 else "")
            raise BadInput(f"There is no client {client!r} in {self.path}; it has {some}.")
        return self.names.index(client)
