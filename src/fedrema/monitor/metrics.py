"""Metrics in the text format of Prometheus (version 0.0.4)."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


@dataclass
class Metric:
    """A metric with its samples: values by labels. Values that are not known are left out."""

    name: str
    kind: Literal["gauge", "counter"]
    description: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name!r} is not the name of a {self.kind}")

    def add(self, value: float | bool | None, **labels: object) -> "Metric":
        """Add a sample; None is left out."""
        if value is not None:
            self.samples.append(({name: str(label) for name, label in labels.items()}, float(value)))
        return self


def exposition(metrics: Iterable[Metric]) -> str:
    """Return metrics as text; a metric without samples is left out."""
    lines: list[str] = []
    for metric in metrics:
        if metric.samples:
            lines.append(f"# HELP {metric.name} {_escaped(metric.description, quotes=False)}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines += [f"{metric.name}{_labels(labels)} {_number(value)}" for labels, value in metric.samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, quotes: bool = True) -> str:
    # What other machines send may hold line breaks of any kind, and characters that UTF-8 cannot encode.
    plain = text.replace("\r", " ").encode("utf-8", "replace").decode()
    escaped = plain.translate(ESCAPES)
    return escaped if quotes else escaped.replace('\\"', '"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
