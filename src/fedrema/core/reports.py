"""What a method reports beyond the metrics of every run; reports, page, trackers and grids read this."""

from dataclasses import dataclass
from typing import Literal

MatrixKind = Literal["similarity", "selection", "weights", "counts"]


@dataclass(frozen=True)
class Trace:
    """A quantity that `aggregate` puts into `Answer.trace` every round."""

    name: str
    """Its key in `Answer.trace`."""
    title: str
    """Its title on axes and in tables."""
    per_client: bool = False
    """Whether it is a list with one number per participating client."""
    percent: bool = False
    """Whether it is a share, shown in percent."""
    description: str = ""
    """What it measures, in sentences for a caption."""


@dataclass(frozen=True)
class Period:
    """An initial part of training in which the method works differently, such as FedReMa's critical period."""

    name: str
    """The key in `Answer.trace` that is true while the period lasts; a summary counts its rounds as NAME_rounds."""
    title: str
    """Its title in text: "critical period"."""
    inside: str
    """The label of its rounds, in the progress bar and as a column of tables ("critical rounds")."""
    after: str
    """The label of later rounds in the progress bar."""
    measure: str | None = None
    """The trace whose curve shows when it ends."""
    threshold: str | None = None
    """The hyper-parameter at which `measure` ends the period."""
    description: str = ""
    """When and why it ends, in sentences for a caption."""


@dataclass(frozen=True)
class Matrix:
    """A matrix between clients that `aggregate` puts into `Answer.trace`: row i is about client i's peers."""

    name: str
    """Its key in `Answer.trace`."""
    title: str
    """Its title above a heat map."""
    kind: MatrixKind
    """similarity: in [0, 1], symmetric; selection: true for chosen peers; weights: rows sum to 1; counts: how often
    each peer was chosen. Of weights, counts and selections the page draws who learns from whom."""
    state: str | None = None
    """The key of its latest value in the server's state, if the state has it."""
    description: str = ""
    """What an entry means, in sentences for a caption."""


@dataclass(frozen=True)
class Alternative:
    """Another way of scoring the same clients that `Method.beside` names."""

    name: str
    """Its key in `Method.beside`."""
    title: str
    """Its title in tables: "without fine-tuning"."""


@dataclass(frozen=True)
class Reports:
    """What to show of a method's runs beyond accuracy and loss, and how to draw its curves."""

    colour: str | None = None
    """Colour of its curves, as #rrggbb; default: an unused one."""
    stroke: Literal["-", "--", "-.", ":"] = "-"
    """Stroke of its curves."""
    emphasis: float = 1.0
    """Line width relative to other methods."""
    traces: tuple[Trace, ...] = ()
    """Quantities by round."""
    period: Period | None = None
    """An initial part of training that differs from the rest."""
    matrices: tuple[Matrix, ...] = ()
    """Matrices between clients."""
    alternatives: tuple[Alternative, ...] = ()
    """Titles of what `Method.beside` returns."""


HEAD_SIMILARITY = Matrix(
    "S",
    "Similarity of classifiers",
    "similarity",
    description="How similar the classifiers of two clients are: S compares their outputs for the same random features;"
    " 1 means equal outputs. Similar clients are next to each other, so that groups appear as light squares.",
)
"""Recorded for every method with --record relations."""
