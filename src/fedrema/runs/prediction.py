"""Predict with the clients' models of a run or of an export: from raw rows to classes, probabilities and quantities."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedrema.base.files import write_text
from fedrema.data.checks import list_names
from fedrema.errors import BadInput
from fedrema.runs.directory import EXPORT_INDEX
from fedrema.runs.manifest import read_object
from fedrema.runs.new_samples import NewData, client_column
from fedrema.runs.run import Run
from fedrema.runs.trained_clients import TrainedClients
from fedrema.tasks import Task

ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class PredictedSamples:
    """Predictions for samples, in their order in the data."""

    task: Task
    class_names: tuple[str, ...]
    """Names of classes, levels or labels; empty for quantities and counts."""
    labels: list[str]
    """What each sample is in the data: its row, counted from 1, or its file."""
    clients: list[str]
    """The client whose model predicted each sample."""
    outputs: torch.Tensor
    """[N, outputs] of the networks, float64"""

    @cached_property
    def values(self) -> list[Any]:
        """The predicted class or level by name, the names of the predicted labels, or the quantity."""
        predicted = self.task.predict(self.outputs)
        if self.task.name == "multilabel":
            return [[name for name, on in zip(self.class_names, row, strict=True) if on] for row in predicted.tolist()]
        if self.task.has_classes:
            return [self.class_names[each] for each in predicted.tolist()]
        return list(predicted.tolist())

    def __len__(self) -> int:
        return len(self.labels)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values as an array; for labels, an array of lists."""
        if self.task.name != "multilabel":
            return np.array(self.values, dtype=dtype)
        found = np.empty(len(self), dtype=object)
        found[:] = self.values
        return found

    @cached_property
    def probabilities(self) -> NDArray[np.float64] | None:
        """[N, C] probability of each class, level or label; None for quantities and counts."""
        found = self.task.probabilities(self.outputs)
        return None if found is None else found.numpy()

    def table(self) -> dict[str, list[Any]]:
        """Return the columns of the CSV file."""
        columns: dict[str, list[Any]] = {"sample": self.labels, "client": self.clients}
        if self.task.name == "multilabel":
            columns["prediction"] = [" ".join(each) for each in self.values]
        else:
            columns["prediction"] = self.values
        if self.probabilities is not None:
            columns |= {
                f"probability of {name}": self.probabilities[:, place].tolist()
                for place, name in enumerate(self.class_names)
            }
        return columns

    def csv(self) -> str:
        """Return the predictions as CSV."""
        columns = self.table()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return text.getvalue()

    def save(self, file: Path) -> None:
        """Write the predictions as a CSV file, completely or not at all."""
        write_text(file, self.csv())


@dataclass(frozen=True, eq=False)
class Models:
    """The clients' models, and what is needed to predict from raw samples with them."""

    where: Path
    names: Sequence[str]
    task: Task
    class_names: tuple[str, ...]
    data: NewData
    model_of: Callable[[str], nn.Module]
    """Returns the model of a client: called with inputs, it returns outputs."""

    def predict(self, data: Any, client: str | None = None) -> PredictedSamples:
        """Predict samples, each with the model of its client.

        Parameters
        ----------
        data
            A table (.csv, .csv.gz, .parquet, or a folder with one file per client), images, a .npz file with `x` and
            optionally `client`, a pandas or polars frame, or an array of inputs.
        client
            The client of all samples; default: a table's client column, or the folder of an image.
        """
        if client is not None:
            self._check(client)
        samples = self.data.read(data, client)
        if not len(samples.x):
            raise BadInput(f"{data} has no samples.")
        for name in dict.fromkeys(samples.clients):
            self._check(name)
        outputs = torch.zeros(len(samples.x), self.task.outputs, dtype=torch.float64)
        owners = np.array(samples.clients)
        for name in dict.fromkeys(samples.clients):
            model, rows = self.model_of(name), np.flatnonzero(owners == name)
            for part in np.array_split(rows, -(-len(rows) // ROWS_AT_ONCE)):
                with torch.no_grad():
                    found = model(torch.from_numpy(samples.x[part]))
                outputs[torch.from_numpy(part)] = found[:, : self.task.outputs].double()
        return PredictedSamples(self.task, self.class_names, samples.labels, samples.clients, outputs)

    def _check(self, client: str) -> None:
        if client not in self.names:
            raise BadInput(f"{self.where} has no model of client {client!r}; it has {list_names(list(self.names))}.")


def models_of_run(run: Run, module: nn.Module | None = None, adapt: bool = True) -> Models:
    """Return the models of a run's clients, as of its last checkpoint."""
    facts, clients = run.manifest.federation, TrainedClients(run, module or run.module)
    data = NewData(facts.preprocessing, tuple(facts.sample_shape), client_column(run.manifest))
    labels = tuple(facts.labels) if facts.task.has_classes else ()
    return Models(
        run.path, run.names, facts.task, labels, data, lambda name: clients.predictor(run.names.index(name), adapt)
    )


def open_models(path: Path, adapt: bool = True, trust_code: bool = False) -> Models:
    """Return the models in the folder of a run, or in a folder that `fedrema export` has written."""
    if (path / EXPORT_INDEX).is_file():
        from fedrema.runs.exported import models_of_export  # that module imports this one

        return models_of_export(path, read_object(path / EXPORT_INDEX, "cannot be read"), trust_code)
    return models_of_run(Run(path, trust_code), adapt=adapt)
