"""fedrema run, fedrema resume."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from fedrema.cli.after import common_folder
from fedrema.cli.page import REPORT, show
from fedrema.cli.progress import RunProgress, Watch
from fedrema.cli.spread import devices_for, spread
from fedrema.errors import BadInput, Diverged
from fedrema.methods import find_method, registry
from fedrema.page.render import write_page
from fedrema.report.compare import comparison_table
from fedrema.report.curves import draw_curves
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Interrupted, take_up
from fedrema.runs.manifest import default_folder
from fedrema.runs.run import Run
from fedrema.runs.together import play_seeds, seeds_apart
from fedrema.settings import Settings, as_arguments, fitting, given, parse_arguments, parse_settings, read_config
from fedrema.text import Console, print_safe

DEMONSTRATION = ("local", "fedavg", "fedrema")


def run(arguments: list[str]) -> int:
    """Train with one method, or show several side by side."""
    named, rest = _methods(arguments)
    names = DEMONSTRATION if named is None else tuple(registry()) if named == "all" else _apart(named)
    if len(names) == 1:
        return _run(_seeded(parse_settings(names[0], rest)))
    if {"-h", "--help"} & set(rest):
        print(_usage())
        return 0
    options = rest if named else ["--seeds", "3", "--record", "relations", *rest]
    several = [parse_settings(name, fitting(name, options, names)) for name in names]
    out = several[0].output.out or default_folder(several[0], "comparison" if named else "demo")
    placed = [settings.placed(out / name.replace(":", "-")) for name, settings in zip(names, several, strict=True)]
    return _run([seeded for settings in placed for seeded in _seeded(settings)])


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
            "fedrema run METHOD --help lists all options; with --dataset NAME it shows that dataset's defaults.",
            "",
            "Several methods, or all: one after the other, with a table and a picture of their curves at the end. An",
            "option that only some of them have is for those.",
            "",
            "Without METHOD: Local, FedAvg and FedReMa side by side, three seeds each, on handwritten digits",
            "(or on what the options say).",
        ]
    )


def _seeded(settings: Settings) -> list[Settings]:
    """Return one set of settings per training seed, each with a folder of its own."""
    out = settings.output.out or default_folder(settings)
    if settings.output.seeds == 1:
        return [settings.placed(out)]
    first = settings.simulation.seed
    return [settings.seeded(seed).placed(out / f"seed-{seed}") for seed in range(first, first + settings.output.seeds)]


def _run(wanted: list[Settings]) -> int:
    for settings in wanted:  # a taken folder is refused before the first run begins, not after
        RunDirectory(settings.output.folder).check_free(settings.output.overwrite)
    quiet = wanted[0].output.quiet
    groups, devices = seeds_apart(wanted), devices_for(wanted[0])
    if len(devices) > 1 and len(wanted) > 1:
        return _spread(groups, devices, quiet)
    done: list[Run] = []
    failed: list[str] = []
    try:
        with RunProgress(quiet) as progress:

            def watching(settings: Settings) -> Watch:
                return progress.watch(_label(settings), settings.simulation.rounds)

            for group in groups:
                for settings, outcome in play_seeds(group, watching):
                    if isinstance(outcome, Diverged):  # one method's bad luck is no reason to leave out the others
                        failed.append(f"fedrema: {_label(settings)}: {outcome}")
                    else:
                        done.append(outcome)
    except Interrupted as stop:
        return _interrupted(stop)
    if done and not quiet:
        _close(done, wanted[0].output.open)
    for sentence in failed:
        print_safe(sentence, file=sys.stderr)
    return 2 if failed else 0


def _spread(groups: list[list[Settings]], devices: list[str], quiet: bool) -> int:
    done, complaints, stopped = spread(groups, devices)
    if done and not quiet:
        _close(done, groups[0][0].output.open)
    if stopped:
        print("fedrema: stopped; each run that was going on can be taken up with fedrema resume DIR.", file=sys.stderr)
    return 130 if stopped else 2 if complaints else 0


def _label(settings: Settings) -> str:
    seed = f" seed {settings.simulation.seed}" if settings.output.seeds > 1 else ""
    return f"{settings.method.called()}{seed}"


def _interrupted(stop: Interrupted) -> int:
    print_safe(f"fedrema: {stop}", file=sys.stderr)
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
    """Go on from the last checkpoint of a run, to the same end as if it had never stopped."""

    dir: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
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
    """Go on with a run."""
    asked: Resume = parse_arguments(Resume, arguments, "fedrema resume")
    run = Run(asked.dir)
    changes = as_arguments({name: getattr(asked, name) for name in ("rounds", "data_dir", "device")})
    rounds = asked.rounds if asked.rounds is not None else int(run.settings["rounds"])
    if rounds < len(run.rounds):
        raise BadInput(f"--rounds {rounds} lies before round {len(run.rounds)}, which {asked.dir} has reached.")
    prepared = take_up(asked.dir, tuple(changes))
    try:
        with RunProgress(asked.quiet) as progress:
            done = prepared.play(progress.watch(run.method, rounds, prepared.world.round))
    except Interrupted as stop:
        return _interrupted(stop)
    if not asked.quiet:
        _close([done], asked.open)
    return 0
