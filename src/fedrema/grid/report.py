"""Writes what an experiment has come to: its table in three formats, its figures, and verdicts on its claims."""

from pathlib import Path

from fedrema.data.atomic import written_whole
from fedrema.grid.experiment import Experiment
from fedrema.grid import pictures
from fedrema.grid.store import Store
from fedrema.grid.table import Sheet
from fedrema.grid.verdicts import Judgement, claims_markdown, judge


def write_report(experiment: Experiment, seeds: int, store: Store, out: Path) -> list[Judgement]:
    """Write NAME.md, NAME.csv, NAME.tex and the figures of an experiment; returns the verdicts on its claims."""
    sheet = Sheet(experiment, seeds, store)
    judgements = [judge(claim, experiment, seeds, store) for claim in experiment.claims]
    pictures = [file for file in _drawn(experiment, seeds, store, out) if file.suffix == ".png"]
    parts = [sheet.markdown()]
    if judgements:
        parts += ["### Claims", "", claims_markdown(judgements)]
    parts += [f"![{file.stem.replace('-', ' ')}]({file.name})\n" for file in pictures]
    write_text(out / f"{experiment.name}.md", "\n".join(parts))
    write_text(out / f"{experiment.name}.csv", sheet.comma_separated())
    write_text(out / f"{experiment.name}.tex", sheet.latex())
    return judgements


def _drawn(experiment: Experiment, seeds: int, store: Store, out: Path) -> list[Path]:
    return [file for picture in experiment.figures for file in pictures.draw(picture, experiment, seeds, store, out)]


def write_text(file: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with written_whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
