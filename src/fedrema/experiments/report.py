"""Writes what an experiment has come to: its table in three formats, its figures, and verdicts on its claims."""

from pathlib import Path

from fedrema.base.files import write_text
from fedrema.experiments import figures
from fedrema.experiments.claims import Judgement, claims_markdown, judge
from fedrema.experiments.comparisons import comparisons_markdown
from fedrema.experiments.spec import Experiment
from fedrema.experiments.statistics import compare_with_reference, runs_of, scores
from fedrema.experiments.store import Store
from fedrema.experiments.sweep import choices, choices_markdown, tuned_file
from fedrema.experiments.table import Sheet


def write_report(experiment: Experiment, seeds: int, store: Store, out: Path) -> list[Judgement]:
    """Write NAME.md, NAME.csv, NAME.tex and the figures of an experiment, of a sweep also NAME-tuned.toml.

    Returns
    -------
    list[Judgement]
        The verdicts on its claims.
    """
    sheet = Sheet(experiment, seeds, store)
    judgements = [judge(claim, experiment, seeds, store) for claim in experiment.claims]
    pictures = [file for file in _drawn(experiment, seeds, store, out) if file.suffix == ".png"]
    parts = [sheet.markdown()]
    if chosen := choices(experiment, seeds, store):
        parts += ["### Chosen", "", choices_markdown(chosen)]
        write_text(out / f"{experiment.name}-tuned.toml", tuned_file(chosen, experiment.title))
    if judgements:
        parts += ["### Claims", "", claims_markdown(judgements)]
    runs = runs_of(experiment.cells, seeds, store)
    older = {place for place, several in runs.items() if any(run.outdated for run in several)}
    table = scores(runs, experiment.quantity)
    tested = [each for each in compare_with_reference(table, [line.name for line in experiment.columns]) if each.tested]
    if tested:
        quantity = experiment.quantity.replace("_", " ")
        parts += [f"### Differences to the best in {quantity}", "", comparisons_markdown(tested, experiment, older)]
    parts += [f"![{file.stem.replace('-', ' ')}]({file.name})\n" for file in pictures]
    write_text(out / f"{experiment.name}.md", "\n".join(parts))
    write_text(out / f"{experiment.name}.csv", sheet.comma_separated())
    write_text(out / f"{experiment.name}.tex", sheet.latex())
    return judgements


def _drawn(experiment: Experiment, seeds: int, store: Store, out: Path) -> list[Path]:
    return [file for picture in experiment.figures for file in figures.draw(picture, experiment, seeds, store, out)]
