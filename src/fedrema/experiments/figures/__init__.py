"""Figures of an experiment, drawn from the runs that have finished."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.base.files import atomic_file
from fedrema.experiments.figures.by_round import figure_of_curves, figure_of_matching, figure_of_period
from fedrema.experiments.figures.by_row import figure_of_clients, figure_of_ranks, figure_of_samples
from fedrema.experiments.figures.components import figure_of_components
from fedrema.experiments.figures.matrices import figure_of_peers, figure_of_similarity
from fedrema.experiments.figures.panels import Results
from fedrema.experiments.spec import Experiment, FigureKind, FigureSpec
from fedrema.experiments.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: dict[FigureKind, "Callable[[Results], Figure | None]"] = {
    "curves": figure_of_curves,
    "samples": figure_of_samples,
    "similarity": figure_of_similarity,
    "matching": figure_of_matching,
    "period": figure_of_period,
    "peers": figure_of_peers,
    "clients": figure_of_clients,
    "ranks": figure_of_ranks,
    "components": figure_of_components,
}
DOTS_PER_INCH = 200


def draw(spec: FigureSpec, experiment: Experiment, seeds: int, store: Store, folder: Path) -> list[Path]:
    """Draw a figure as PNG and PDF and return their paths; with nothing to draw, remove earlier files."""
    figure = FIGURES[spec.kind](Results(spec, experiment, seeds, store))
    paths = [folder / f"{file_stem(spec, experiment)}.{kind}" for kind in ("png", "pdf")]
    if figure is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return []
    import matplotlib

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is final: computing it again for each file takes long
    for path, undated in zip(paths, ({}, {"CreationDate": None}), strict=True):
        # TrueType, so that text can be searched and journals accept it; no date: same results, same file.
        with atomic_file(path) as temporary, matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(temporary, format=path.suffix[1:], dpi=DOTS_PER_INCH, metadata=undated)
    return paths


def file_stem(spec: FigureSpec, experiment: Experiment) -> str:
    """Return the name of a figure's files: the experiment and the kind, numbered from the second of a kind."""
    alike = [other for other in experiment.figures if other.kind == spec.kind]
    number = alike.index(spec) + 1 if spec in alike else 1
    return f"{experiment.name}-{spec.kind}" + (f"-{number}" if number > 1 else "")
