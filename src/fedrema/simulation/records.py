"""The record of a round and the summary of a run, as the simulator and the server of a deployment produce them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from fedrema.core.reports import HEAD_SIMILARITY
from fedrema.tasks import METRICS

Scalar = float | int | bool | None
TraceValue = Scalar | str | list[Any] | dict[str, object]
"""What a method traces per round: usually a number, or a list with one number per participant."""


@dataclass(frozen=True)
class MetricRecord:
    """One metric in one round."""

    value: float | None
    """Over all test samples; None where there are none."""
    halves: tuple[float | None, float | None] = (None, None)
    """Over the two halves of every client's test samples, from which the honest value is computed."""
    worst_tenth: float | None = None
    """Mean over the tenth of the clients with the worst values."""
    clients: list[float | None] = field(default_factory=list)
    """Per client (in `RoundRecord.trained`: per participant); None without test samples or before joining."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of every client with the model that it would use after this round."""

    metrics: dict[str, MetricRecord]
    """By name of the metric, the primary one first."""
    alternatives: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Scores of the same clients by other predictions (`Method.beside`): name, then metric."""


@dataclass(frozen=True)
class NodeReports:
    """What the server of a deployment records about its nodes in a round."""

    rejected: dict[str, str] = field(default_factory=dict)
    """Why a node's reply was not used, by name."""
    clipped: dict[str, str] = field(default_factory=dict)
    """Why a node's update was scaled down."""
    epsilon: dict[str, float | None] = field(default_factory=dict)
    """The privacy budget that a node has spent so far; None where it is unlimited."""
    attempts: list[dict[str, str]] = field(default_factory=list)
    """For each earlier attempt at this round without enough replies: why, by node."""


@dataclass(frozen=True)
class PrivacyRecord:
    """What is recorded of a round with differential privacy (--dp)."""

    epsilon: float | None
    """The ε that has been spent so far, of the client that has spent most; None: unlimited, because there is no
    noise."""
    delta: float
    """The δ that it is computed for."""
    clip: float
    """The norm to which updates, or gradients of samples, were clipped in this round."""


@dataclass(frozen=True)
class SumRecord:
    """What is recorded of a round with --secure-aggregation."""

    samples: int
    """Number of training samples of all participants."""
    clipped_clients: int
    """Number of participants of which values were outside of --secure-range and were clipped."""


@dataclass(frozen=True)
class RoundRecord:
    """Everything that is recorded of a round: one line of rounds.jsonl."""

    round: int
    participants: list[int] = field(default_factory=list)
    """Rows of the clients whose uploads arrived."""
    dropped: list[int] = field(default_factory=list)
    """Rows of the clients that were chosen but failed."""
    loss: float | None = None
    """Mean training loss over the participants; None in a round without participants."""
    client_loss: list[float] = field(default_factory=list)
    """Training loss of each participant."""
    metrics: dict[str, MetricRecord] = field(default_factory=dict)
    """Scores of every client with the model it would use after this round, by metric, the primary one first; empty
    without evaluation."""
    trained: dict[str, MetricRecord] = field(default_factory=dict)
    """Scores of the participants right after local training, before aggregation."""
    alternatives: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Scores of the same clients by other predictions (`Method.beside`): name, then metric."""
    trace: dict[str, TraceValue] = field(default_factory=dict)
    """What the method traces."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by part of the round: train, aggregate, evaluate, other."""
    nodes: NodeReports | None = None
    """Deployments only."""
    privacy: PrivacyRecord | None = None
    """With differential privacy only."""
    attackers: list[int] = field(default_factory=list)
    """Rows of the participants that are attackers; they have no scores, and `loss` is without them."""
    secure_sum: SumRecord | None = None
    """With secure aggregation only."""

    @property
    def primary(self) -> MetricRecord | None:
        """The task's primary metric, which is recorded first; None in rounds without evaluation."""
        return next(iter(self.metrics.values()), None)

    @property
    def accuracy(self) -> float | None:
        """Accuracy over all test samples; None in rounds without evaluation, and in tasks without classes."""
        return self.metrics["accuracy"].value if "accuracy" in self.metrics else None

    @property
    def client_accuracy(self) -> list[float | None] | None:
        """Accuracy per client; None in rounds without evaluation, and in tasks without classes."""
        return self.metrics["accuracy"].clients if "accuracy" in self.metrics else None

    @property
    def rejected(self) -> dict[str, str]:
        """Why the replies of nodes were not used in this round, by name; deployments only."""
        return self.nodes.rejected if self.nodes is not None else {}

    def quantity(self, name: str) -> Any:
        """Return a quantity by its name in tables and curves; None where this round does not have it.

        Valid names: METRIC, client_METRIC, trained_METRIC, trained_client_METRIC, worst_tenth, a name in the trace, a
        field of `RoundRecord`, or one of `PrivacyRecord`, `NodeReports` or `SumRecord`.
        """
        try:
            return self[name]
        except KeyError:
            return None

    def __getitem__(self, name: str) -> Any:
        """Return a quantity by its name, as in `record["client_accuracy"]`; KeyError where this round lacks it."""
        for prefix, metrics in (("trained_", self.trained), ("", self.metrics)):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and rest in metrics:
                return metrics[rest].value
            if name.startswith(prefix) and rest.removeprefix("client_") in metrics:
                return metrics[rest.removeprefix("client_")].clients
        if name == "worst_tenth" and self.primary is not None:
            return self.primary.worst_tenth
        if name in self.trace:
            return self.trace[name]
        for owner in (self, self.privacy, self.nodes, self.secure_sum):
            if owner is not None and any(name == known.name for known in fields(owner)):
                return getattr(owner, name)
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        """Whether this round has a quantity."""
        return self.quantity(name) is not None


PREFIXES = ("", "client_", "trained_", "trained_client_")
RECORDED = frozenset(
    [
        *(found.name for kind in (RoundRecord, PrivacyRecord, NodeReports, SumRecord) for found in fields(kind)),
        *(name for name in vars(RoundRecord) if not name.startswith("_")),
        *(f"{prefix}{metric}" for prefix in PREFIXES for metric in METRICS),
        *("worst_tenth", "rounds", "checksum", "belongs_to", HEAD_SIMILARITY.name),
    ]
)
"""Names that a method cannot trace, because records and files of a run have them already."""


@dataclass(frozen=True)
class MetricSummary:
    """One metric over a whole run."""

    best: float
    """The best value over rounds, as papers report it: its round is chosen by the samples that score it."""
    best_round: int
    final: float
    """Mean over the last five evaluated rounds."""
    honest: float | None
    """The round is chosen on one half of each client's test samples and scored on the other half; mean of both ways."""
    worst_tenth: float
    """Mean over the last five evaluated rounds of the mean over the worst tenth of the clients."""
    final_trained: float | None = None
    """Mean over the last five evaluated rounds right after local training."""


@dataclass(frozen=True, eq=False)  # equal mappings are equal
class Summary(Mapping[str, Any]):
    """The headline numbers of a run; as a mapping, the content of summary.json."""

    rounds: int
    metrics: dict[str, MetricSummary] = field(default_factory=dict)
    alternatives: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Best and final value under other ways of scoring: name, then metric."""
    period_rounds: dict[str, int] = field(default_factory=dict)
    """How many rounds the method's period lasted, by its name."""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    recorded_relations: int = 0
    """Number of rounds in relations.npz."""
    epsilon: float | None = None
    """With differential privacy: the ε that was spent, of the client that has spent most."""
    delta: float | None = None
    """The δ that it is computed for."""
    attackers: list[int] = field(default_factory=list)
    """Rows of the attackers that participated; all other numbers are without them."""

    @property
    def primary(self) -> str | None:
        """Name of the task's primary metric, which comes first; None without any evaluation."""
        return next(iter(self.metrics), None)

    def _key(self, key: str, metric: str) -> str:
        """Return the key in summary.json of what only the primary metric has under its plain name."""
        return key if metric == self.primary else f"{key}_{metric}"

    def as_json(self) -> dict[str, object]:
        """Return the content of summary.json."""
        found: dict[str, object] = {"rounds": self.rounds}
        for name, metric in self.metrics.items():
            found |= {
                f"best_{name}": metric.best,
                self._key("best_round", name): metric.best_round,
                f"final_{name}": metric.final,
                f"honest_{name}": metric.honest,
                self._key("worst_tenth", name): metric.worst_tenth,
            }
            if metric.final_trained is not None:
                found[f"final_trained_{name}"] = metric.final_trained
        for name, values in self.alternatives.items():
            for metric_name, (best, final) in values.items():
                found |= {f"best_{name}_{metric_name}": best, f"final_{name}_{metric_name}": final}
        found |= {f"{name}_rounds": count for name, count in self.period_rounds.items()}
        found |= {"seconds": self.seconds, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        if self.delta is not None:
            found |= {"epsilon": self.epsilon, "delta": self.delta}
        if self.attackers:
            found["attackers"] = self.attackers
        return found | ({"recorded_relations": self.recorded_relations} if self.recorded_relations else {})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Summary":
        """Return what `as_json` described; msgspec.ValidationError or KeyError where it does not fit."""
        names = _between(content, "honest_", "")
        metrics = {
            name: {
                "best": content[f"best_{name}"],
                "best_round": content["best_round" if name == names[0] else f"best_round_{name}"],
                "final": content[f"final_{name}"],
                "honest": content[f"honest_{name}"],
                "worst_tenth": content["worst_tenth" if name == names[0] else f"worst_tenth_{name}"],
                "final_trained": content.get(f"final_trained_{name}"),
            }
            for name in names
        }
        alternatives: dict[str, dict[str, tuple[float, float]]] = {}
        for name in _between(content, "best_", ""):
            # The longest name that fits: best_generic_balanced_accuracy is no accuracy.
            metric = max((each for each in metrics if name.endswith(f"_{each}")), key=len, default="")
            alternative = name.removesuffix(f"_{metric}")
            if metric and name not in metrics and alternative != "round":
                alternatives.setdefault(alternative, {})[metric] = content[f"best_{name}"], content[f"final_{name}"]
        plain = ("rounds", "seconds", "bytes_up", "bytes_down", "recorded_relations", "epsilon", "delta", "attackers")
        found = {name: content[name] for name in plain if name in content}
        found["period_rounds"] = {name: content[f"{name}_rounds"] for name in _between(content, "", "_rounds")}
        return msgspec.convert({**found, "metrics": metrics, "alternatives": alternatives}, cls)

    def __getitem__(self, name: str) -> Any:
        return self.as_json()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_json())

    def __len__(self) -> int:
        return len(self.as_json())


def _between(content: Mapping[str, Any], prefix: str, suffix: str) -> list[str]:
    """Return the part between a prefix and a suffix of each key that has both."""
    keys = [key for key in content if key.startswith(prefix) and key.endswith(suffix)]
    return [key[len(prefix) : len(key) - len(suffix)] for key in keys if len(key) > len(prefix) + len(suffix)]
