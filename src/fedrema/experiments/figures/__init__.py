"""Pictures of an experiment's results, drawn of what is there."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.base.files import atomic_file
from fedrema.experiments.figures.clients import figure_of_clients
from fedrema.experiments.figures.gap import figure_of_gap
from fedrema.experiments.figures.learning import figure_of_curves, figure_of_matching
from fedrema.experiments.figures.matrices import figure_of_dependencies, figure_of_similarity
from fedrema.experiments.figures.ranks import figure_of_ranks
from fedrema.experiments.figures.results import Results
from fedrema.experiments.figures.samples import figure_of_samples
from fedrema.experiments.spec import Experiment, Picture, PictureKind
from fedrema.experiments.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: dict[PictureKind, "Callable[[Results], Figure | None]"] = {
    "curves": figure_of_curves,
    "samples": figure_of_samples,
    "similarity": figure_of_similarity,
    "matching": figure_of_matching,
    "gap": figure_of_gap,
    "dependencies": figure_of_dependencies,
    "clients": figure_of_clients,
    "ranks": figure_of_ranks,
}
DOTS_PER_INCH = 200


def draw(picture: Picture, experiment: Experiment, seeds: int, store: Store, folder: Path) -> list[Path]:
    """Draw a picture as PNG and PDF, and return their paths; where there is nothing to draw, none is left of before."""
    figure = FIGURES[picture.kind](Results(picture, experiment, seeds, store))
    paths = [folder / f"{file_stem(picture, experiment)}.{kind}" for kind in ("png", "pdf")]
    if figure is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return []
    import matplotlib

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # everything has its place now: to find it again for each file takes long
    for path, undated in zip(paths, ({}, {"CreationDate": None}), strict=True):
        # TrueType, so that letters can be searched and journals take it; no date: same results, same file.
        with atomic_file(path) as temporary, matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(temporary, format=path.suffix[1:], dpi=DOTS_PER_INCH, metadata=undated)
    return paths


def file_stem(picture: Picture, experiment: Experiment) -> str:
    """Return how a picture's files are called: by the experiment and its kind, numbered from the second of a kind."""
    alike = [other for other in experiment.figures if other.kind == picture.kind]
    number = alike.index(picture) + 1 if picture in alike else 1
    return f"{experiment.name}-{picture.kind}" + (f"-{number}" if number > 1 else "")
