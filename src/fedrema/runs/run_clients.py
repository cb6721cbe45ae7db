"""The clients of a run, by name: samples, metrics, models and predictions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedrema.base.html import html_table, paragraph, title_line
from fedrema.errors import BadInput
from fedrema.tasks import find_metric

if TYPE_CHECKING:
    from fedrema.runs.prediction import PredictedSamples
    from fedrema.runs.run import Run

SHOWN = 20
"""Clients that a notebook shows."""


class UnknownClient(BadInput, KeyError):
    """A run has no client of this name."""

    __str__ = Exception.__str__  # a KeyError would show the sentence in quotes


@dataclass(frozen=True, eq=False)
class RunClient:
    """A client of a run, as of the run's last checkpoint."""

    run: "Run"
    row: int
    """Its place in `run.names`."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.run.names[self.row]

    @property
    def train_samples(self) -> int:
        """Number of its training samples."""
        return self.run.manifest.federation.train_counts[self.row]

    @property
    def test_samples(self) -> int:
        """Number of its test samples."""
        return self.run.manifest.federation.test_counts[self.row]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Its metrics in the last evaluated round, on its own test samples; None where one is undefined."""
        last = next((record for record in reversed(self.run.rounds) if record.metrics), None)
        return {} if last is None else {name: metric.clients[self.row] for name, metric in last.metrics.items()}

    @property
    def accuracy(self) -> float | None:
        """Its accuracy in the last evaluated round; None without test samples, and in tasks without classes."""
        return self.metrics.get("accuracy")

    def model(self, *, adapt: bool = True, module: nn.Module | None = None) -> nn.Module:
        """Return its model; see `Run.personal_model`."""
        return self.run.personal_model(row=self.row, adapt=adapt, module=module)

    def parameters(self) -> dict[str, Tensor]:
        """Return its parameters; see `Run.personal_parameters`."""
        return self.run.personal_parameters(row=self.row)

    def predict(self, data: Any, *, adapt: bool = True) -> "PredictedSamples":
        """Predict samples with its model; `data` is what `Run.predict` takes."""
        return self.run.predict(data, self.name, adapt=adapt)

    def __repr__(self) -> str:
        return f"RunClient({self.name!r} of {str(self.run.path)!r}: {self.train_samples} training samples)"


class RunClients(Mapping[str, RunClient]):
    """The clients of a run by name, in the order of `run.names`."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._rows = {name: row for row, name in enumerate(run.names)}

    def __getitem__(self, name: str) -> RunClient:
        if name not in self._rows:
            some = ", ".join(list(self._rows)[:10]) + (" …" if len(self._rows) > 10 else "")
            raise UnknownClient(f"There is no client {name!r} in {self._run.path}; it has {some}.")
        return RunClient(self._run, self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"RunClients({', '.join(map(repr, list(self)[:10]))}{', …' if len(self) > 10 else ''})"

    def _repr_html_(self) -> str:
        metric = find_metric(self._run.metric)
        rows = []
        for client in list(self.values())[:SHOWN]:
            value = client.metrics.get(metric.name)
            shown = "–" if value is None else metric.shown(value)
            rows.append((client.name, client.train_samples, client.test_samples, shown))
        score = f"{metric.title} (%)" if metric.percent else metric.title
        more = f"and {len(self) - SHOWN} more clients" if len(self) > SHOWN else ""
        table = html_table(("client", "train", "test", score), rows)
        return title_line(f"Clients of {self._run.path}") + table + (paragraph(more, small=True) if more else "")
