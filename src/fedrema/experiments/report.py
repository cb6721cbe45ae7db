"""Writes the results of experiments: tables, verdicts and figures, and the overview of a folder of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedrema.base.files import write_text
from fedrema.experiments import figures
from fedrema.experiments.claims import Judgement, claims_markdown, judge
from fedrema.experiments.command_log import read_log
from fedrema.experiments.comparisons import compare_with_reference, comparisons_markdown, runs_of, scores
from fedrema.experiments.components import components_markdown, components_of
from fedrema.experiments.forecast import duration
from fedrema.experiments.plan import Plan
from fedrema.experiments.spec import Experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.sweep import choices, choices_markdown, tuned_file
from fedrema.experiments.table import Sheet
from fedrema.experiments.tasks import outdated_keys
from fedrema.reporting.tables import markdown_lines


def write_report(experiment: Experiment, seeds: int, store: Store, out: Path) -> list[Judgement]:
    """Write NAME.md, NAME.csv, NAME.tex and the figures of an experiment; for a sweep also NAME-tuned.toml.

    Returns
    -------
    list[Judgement]
        The verdicts on its claims.
    """
    sheet = Sheet(experiment, seeds, store)
    judgements = [judge(claim, experiment, seeds, store) for claim in experiment.claims]
    drawn = [file for spec in experiment.figures for file in figures.draw(spec, experiment, seeds, store, out)]
    parts = [sheet.markdown()]
    if chosen := choices(experiment, seeds, store):
        parts += ["### Chosen", "", choices_markdown(chosen)]
        write_text(out / f"{experiment.name}-tuned.toml", tuned_file(chosen, experiment.title))
    if judgements:
        parts += ["### Claims", "", claims_markdown(judgements)]
    runs = runs_of(experiment.cells, seeds, store)
    older = {cell for cell, several in runs.items() if any(run.outdated for run in several)}
    crossed = any(spec.kind == "components" for spec in experiment.figures)
    if crossed and (found := components_of(experiment, runs)):
        parts += ["### Variance components", "", components_markdown(experiment, found)]
    table = scores(runs, experiment.quantity)
    columns, metric = [line.name for line in experiment.columns], sheet.quantity.metric
    compared = compare_with_reference(table, columns, higher_is_better=metric.higher_is_better)
    if tested := [each for each in compared if each.tested]:
        parts += [f"### Differences to the best in {sheet.quantity.words}", ""]
        parts += [comparisons_markdown(tested, experiment, older, metric)]
    parts += [f"![{file.stem.replace('-', ' ')}]({file.name})\n" for file in drawn if file.suffix == ".png"]
    write_text(out / f"{experiment.name}.md", "\n".join(parts))
    write_text(out / f"{experiment.name}.csv", sheet.comma_separated())
    write_text(out / f"{experiment.name}.tex", sheet.latex())
    return judgements


def write_overview(
    experiments: Sequence[Experiment],
    judged: Mapping[str, Sequence[Judgement]],
    seeds: int | None,
    store: Store,
    out: Path,
    plan: Plan,
) -> None:
    """Write README.md: finished and missing runs, commands, verdicts and figures of several experiments."""
    lines = ["# Results", "", *_progress(experiments, seeds, store), "", *_commands(store)]
    lines += ["## Missing runs", "", plan.markdown()]
    lines += ["## The claims", ""]
    for experiment in experiments:
        if judged[experiment.name]:
            lines += [f"**[{experiment.title}]({experiment.name}.md)**", ""]
            lines += [claims_markdown(judged[experiment.name]), ""]
    lines += ["## Figures", ""]
    for file in sorted(out.glob("*.png")):
        lines += [f"![{file.stem}]({file.name})", ""]
    write_text(out / "README.md", "\n".join(lines))


def _progress(experiments: Sequence[Experiment], seeds: int | None, store: Store) -> list[str]:
    lines = ["| experiment | runs finished | not finished |", "|---|---:|---|"]
    for experiment in experiments:
        wanted = seeds or experiment.seeds
        counts = {
            cell.title: sum(store.has(key_of(cell.settings(seed))) for seed in range(wanted))
            for cell in experiment.cells
        }
        older = len(outdated_keys(experiment.cells, wanted, store))
        lacking = [f"{title} ({wanted - count} of {wanted})" for title, count in counts.items() if count < wanted]
        files = ", ".join(f"[{kind}]({experiment.name}.{kind})" for kind in ("csv", "tex"))
        title = f"[{experiment.title}]({experiment.name}.md) ({files})"
        total = f"{sum(counts.values())} of {wanted * len(counts)}" + (f", {older} outdated" if older else "")
        lines.append(f"| {title} | {total} | {'all' if len(lacking) == len(counts) else '; '.join(lacking) or '–'} |")
    return lines


def _commands(store: Store) -> list[str]:
    commands = read_log(store)
    if not commands:
        return []
    rows = [[f"`{each.command}`", ", ".join(each.devices), str(each.runs), duration(each.seconds)] for each in commands]
    table = markdown_lines(["command", "device", "runs", "time"], rows, texts=2)
    total = duration(sum(each.seconds for each in commands))
    runs = sum(each.runs for each in commands)
    return ["## Commands", "", *table, "", f"{runs} runs in {total} altogether, starting and saving included.", ""]
