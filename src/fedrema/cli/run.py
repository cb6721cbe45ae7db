"""fedrema run, fedrema resume."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import tyro

from fedrema.base.terminal import Console, print_safe
from fedrema.cli.after import common_folder
from fedrema.cli.page import REPORT, show
from fedrema.cli.progress import RunProgress, Watch
from fedrema.cli.spread import devices_for, spread
from fedrema.config.settings import (
    Settings,
    as_arguments,
    asks_for_help,
    fitting,
    given,
    parse_arguments,
    parse_settings,
    read_config,
)
from fedrema.core import LocalTraining
from fedrema.data import Federation
from fedrema.errors import Diverged
from fedrema.methods import find_method, registry
from fedrema.page.render import write_page
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.tables import comparison_table
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Interrupted, Prepared, begin_on
from fedrema.runs.joint import Outcome, Watching, play_seeds, seeds_apart
from fedrema.runs.manifest import default_folder
from fedrema.runs.run import Run
from fedrema.runs.series import check_folders, end_series, reached_round, resume_series, runs_in, seeds_of, write_series
from fedrema.simulation.simulator import Simulator

DEMONSTRATION = ("local", "fedavg", "fedrema")


def run(arguments: list[str]) -> int:
    """Train with one method, or show several side by side."""
    named, rest = _methods(arguments)
    names = DEMONSTRATION if named is None else tuple(registry()) if named == "all" else _apart(named)
    if len(names) == 1:
        settings = parse_settings(names[0], rest)
        out = settings.output.out or default_folder(settings)
        return _run(seeds_of(settings.placed(out)), out)
    if asks_for_help(rest):
        print(_usage())
        return 0
    # One thread for an operation: the demonstration shows the same numbers however many cores there are.
    options = rest if named else ["--seeds", "3", "--record", "relations", "--threads", "1", *rest]
    several = [parse_settings(name, fitting(name, options, names)) for name in names]
    out = several[0].output.out or default_folder(several[0], "comparison" if named else "demo")
    placed = [settings.placed(out / name.replace(":", "-")) for name, settings in zip(names, several, strict=True)]
    return _run([seeded for settings in placed for seeded in seeds_of(settings)], out)


def _methods(arguments: list[str]) -> tuple[str | None, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    config = given(arguments, "--config")
    named = read_config(Path(config)).get("method") if config else None
    return (None if named is None else str(named)), arguments


def _apart(named: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in named.split(",")))
    for name in names:
        find_method(name)  # refused now, not after the first has been run
    return names


def _usage() -> str:
    return "\n".join(
        [
            "usage: fedrema run [METHOD[,METHOD...]] [OPTIONS]",
            "",
            f"METHOD is one of {', '.join(registry())}, or your own as module:Class.",
            "fedrema run METHOD --help lists the essential options, fedrema run METHOD --help-all all of them; with",
            "--dataset NAME they show that dataset's defaults.",
            "",
            "Several methods, or all: one after the other, with a table and a picture of their curves at the end. An",
            "option that only some of them have is for those.",
            "",
            "Without METHOD: Local, FedAvg and FedReMa side by side, three seeds each, on handwritten digits",
            "(or on what the options say).",
        ]
    )


def _run(wanted: list[Settings], out: Path) -> int:
    check_folders(wanted)
    if len(wanted) > 1:
        write_series(out, wanted)
    groups, devices = seeds_apart(wanted), devices_for(wanted[0])
    if len(devices) > 1 and len(wanted) > 1:
        return _spread(groups, devices, wanted[0].output.quiet, out)

    def outcomes(watching: Watching, progress: RunProgress) -> Iterator[tuple[Settings, Outcome]]:
        def prepare(settings: Settings, federation: Federation) -> Prepared:
            prepared = begin_on(settings, federation)
            progress.say(_chosen(settings.local, prepared.simulator))
            return prepared

        for group in groups:
            yield from play_seeds(group, watching, prepare)

    return _follow(outcomes, wanted, out, wanted[0].output.quiet, wanted[0].output.open)


def _follow(
    outcomes: Callable[[Watching, RunProgress], Iterator[tuple[Settings, Outcome]]],
    wanted: list[Settings],
    out: Path,
    quiet: bool,
    look: bool,
    resumed: bool = False,
) -> int:
    """Show the progress of runs and, at the end, their results."""
    done: list[Run] = []
    failed: list[str] = []
    try:
        with RunProgress(quiet) as progress:

            def watching(settings: Settings) -> Watch:
                reached = reached_round(settings.output.folder) if resumed else 0
                return progress.watch(label_of(settings), settings.simulation.rounds, reached)

            for settings, outcome in outcomes(watching, progress):
                if isinstance(outcome, Diverged):  # one run that diverges is no reason to leave out the others
                    failed.append(f"fedrema: {label_of(settings)}: {outcome}")
                else:
                    done.append(outcome)
    except Interrupted as stop:
        if len(wanted) == 1:
            return _interrupted(str(stop))
        return _interrupted(f"Stopped; go on with all {len(wanted)} runs: fedrema resume {out}")
    end_series(out, [settings.output.folder for settings in wanted])
    if done and not quiet:
        _close(done, look)
    for sentence in failed:
        print_safe(sentence, file=sys.stderr)
    return 2 if failed else 0


def _spread(groups: list[list[Settings]], devices: list[str], quiet: bool, out: Path) -> int:
    done, complaints, stopped = spread(groups, devices)
    end_series(out, [settings.output.folder for group in groups for settings in group])
    if done and not quiet:
        _close(done, groups[0][0].output.open)
    if stopped:
        print_safe(f"fedrema: Stopped; go on with all runs: fedrema resume {out}", file=sys.stderr)
    return 130 if stopped else 2 if complaints else 0


def _chosen(asked: LocalTraining, simulator: Simulator) -> str:
    """Say which settings were chosen from the data; empty where none were."""
    used, federation = simulator.local, simulator.federation
    chosen = [f"--{name} {getattr(used, name):g}" for name in ("batch", "lr") if not getattr(asked, name)]
    if not chosen:
        return ""
    test = int(federation.test.sum())
    data = f"{len(federation)} clients, {len(federation.y) - test} training and {test} test samples"
    return f"Chosen from the data ({data}, {federation.classes} classes): {' '.join(chosen)}"


def label_of(settings: Settings) -> str:
    """Return how a run is called in messages."""
    seed = f" seed {settings.simulation.seed}" if settings.output.seeds > 1 else ""
    return f"{settings.method.called()}{seed}"


def _interrupted(sentence: str) -> int:
    print_safe(f"fedrema: {sentence}", file=sys.stderr)
    return 130


def _close(runs: list[Run], look: bool) -> None:
    console = Console()
    console.print(comparison_table(runs))
    where = common_folder(tuple(run.path for run in runs))
    lines = [f"Results: {where}"]
    if len(runs) > 1:
        draw_curves(runs, where / "curves.png")
        lines.append(f"Curves:  {where / 'curves.png'}")
    write_page([run.path for run in runs], where / REPORT)
    lines += [
        f"Report:  {where / REPORT}  (open it in a browser)",
        f"Next:    fedrema {'compare' if len(runs) > 1 else 'export'} {where}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if look:
        show(where / REPORT)


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on from the last checkpoint of a run, to the same end as if it had never stopped.

    A folder that holds several runs continues all of them, also those that had not begun when they were stopped.
    """

    dir: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or one that holds runs."""
    rounds: int | None = None
    """Play to this round instead of the one first asked for."""
    data_dir: Path | None = None
    """Folder that holds the datasets, if they have moved."""
    device: str | None = None
    """Where to train, if not where it began: auto, cpu or cuda."""
    quiet: bool = False
    """No progress bar, no table, no report."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the report in the browser at the end."""


def resume(arguments: list[str]) -> int:
    """Go on with a run, or with all runs in a folder."""
    asked: Resume = parse_arguments(Resume, arguments, "fedrema resume")
    changes = tuple(as_arguments({name: getattr(asked, name) for name in ("rounds", "data_dir", "device")}))
    wanted = runs_in(asked.dir, changes)
    for settings in wanted:
        RunDirectory(settings.output.folder).lock().check()

    def outcomes(watching: Watching, progress: RunProgress) -> Iterator[tuple[Settings, Outcome]]:
        return resume_series(wanted, watching, changes)

    return _follow(outcomes, wanted, asked.dir, asked.quiet, asked.open, resumed=True)
