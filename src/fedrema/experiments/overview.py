"""The first page of a folder of results: what has been run where, every verdict, every table, what is missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrema.base.files import write_text
from fedrema.experiments.claims import Judgement, claims_markdown
from fedrema.experiments.command_log import read_sittings
from fedrema.experiments.forecast import duration
from fedrema.experiments.spec import Experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.work import outdated
from fedrema.reporting.tables import markdown_lines


def write_overview(
    experiments: Sequence[Experiment],
    judged: Mapping[str, Sequence[Judgement]],
    seeds: int | None,
    store: Store,
    out: Path,
) -> None:
    """Write README.md."""
    lines = ["# Results", "", *_state(experiments, seeds, store), "", *_sittings(out)]
    lines += ["## The claims", ""]
    for experiment in experiments:
        if judged[experiment.name]:
            lines += [f"**[{experiment.title}]({experiment.name}.md)**", ""]
            lines += [claims_markdown(judged[experiment.name]), ""]
    lines += ["## Figures", ""]
    for file in sorted(out.glob("*.png")):
        lines += [f"![{file.stem}]({file.name})", ""]
    write_text(out / "README.md", "\n".join(lines))


def _state(experiments: Sequence[Experiment], seeds: int | None, store: Store) -> list[str]:
    lines = ["| experiment | runs finished | not finished |", "|---|---:|---|"]
    for experiment in experiments:
        wanted = seeds or experiment.seeds
        counts = {
            cell.title: sum(store.has(key_of(cell.settings(seed))) for seed in range(wanted))
            for cell in experiment.cells
        }
        older = len(outdated(experiment.cells, wanted, store))
        lacking = [f"{title} ({wanted - count} of {wanted})" for title, count in counts.items() if count < wanted]
        files = ", ".join(f"[{kind}]({experiment.name}.{kind})" for kind in ("csv", "tex"))
        title = f"[{experiment.title}]({experiment.name}.md) ({files})"
        total = f"{sum(counts.values())} of {wanted * len(counts)}" + (f", {older} outdated" if older else "")
        lines.append(f"| {title} | {total} | {'all' if len(lacking) == len(counts) else '; '.join(lacking) or '–'} |")
    return lines


def _sittings(out: Path) -> list[str]:
    found = read_sittings(out)
    if not found:
        return []
    table = markdown_lines(["command", "device", "runs", "time"], [_sitting(each) for each in found], texts=2)
    total = duration(sum(each["seconds"] for each in found))
    runs = sum(each["runs"] for each in found)
    return ["## Commands", "", *table, "", f"{runs} runs in {total} altogether, starting and saving included.", ""]


def _sitting(content: dict[str, Any]) -> list[str]:
    devices = ", ".join(content["devices"])
    return [f"`{content['command']}`", devices, str(content["runs"]), duration(content["seconds"])]
