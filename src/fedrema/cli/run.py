"""fedrema run, fedrema resume."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedrema.cli.after import common_folder
from fedrema.cli.progress import RunProgress
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.report.compare import comparison_table
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Interrupted, begin, take_up
from fedrema.runs.manifest import default_folder
from fedrema.runs.run import Run
from fedrema.settings import Settings, as_arguments, given, parse_arguments, parse_settings, read_config

DEMONSTRATION = ("local", "fedavg", "fedrema")


def run(arguments: list[str]) -> int:
    """Train with one method, or show three side by side."""
    method, rest = _method(arguments)
    if method is not None:
        return _run(_seeded(parse_settings(method, rest)))
    if {"-h", "--help"} & set(rest):
        print(_usage())
        return 0
    several = [parse_settings(name, ["--seeds", "3", *rest]) for name in DEMONSTRATION]
    out = several[0].output.out or default_folder(several[0], "demo")
    return _run([seeded for settings in several for seeded in _seeded(_placed(settings, out / settings.method.name))])


def _method(arguments: list[str]) -> tuple[str | None, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    config = given(arguments, "--config")
    named = read_config(Path(config)).get("method") if config else None
    return (None if named is None else str(named)), arguments


def _usage() -> str:
    return "\n".join(
        [
            "usage: fedrema run [METHOD] [OPTIONS]",
            "",
            f"METHOD is one of {', '.join(registry())}, or your own as module:Class.",
            "fedrema run METHOD --help lists all options; with --dataset NAME it shows that dataset's defaults.",
            "",
            "Without METHOD: Local, FedAvg and FedReMa side by side, three seeds each, on handwritten digits",
            "(or on what the options say).",
        ]
    )


def _placed(settings: Settings, out: Path) -> Settings:
    return dataclasses.replace(settings, output=dataclasses.replace(settings.output, out=out))


def _seeded(settings: Settings) -> list[Settings]:
    """Return one set of settings per training seed, each with a folder of its own."""
    out = settings.output.out or default_folder(settings)
    if settings.output.seeds == 1:
        return [_placed(settings, out)]
    first = settings.simulation.seed
    return [
        dataclasses.replace(
            _placed(settings, out / f"seed-{seed}"), simulation=dataclasses.replace(settings.simulation, seed=seed)
        )
        for seed in range(first, first + settings.output.seeds)
    ]


def _run(wanted: list[Settings]) -> int:
    for settings in wanted:  # a taken folder is refused before the first run begins, not after
        assert settings.output.out is not None
        RunDirectory(settings.output.out).check_free(settings.output.overwrite)
    quiet = wanted[0].output.quiet
    done: list[Run] = []
    try:
        with RunProgress(quiet) as progress:
            for settings in wanted:
                seed = f" seed {settings.simulation.seed}" if len(wanted) > 1 else ""
                prepared = begin(settings)
                watch = progress.watch(f"{settings.method.title}{seed}", settings.simulation.rounds)
                done.append(prepared.play(watch))
    except Interrupted as stop:
        return _interrupted(stop)
    if not quiet:
        _close(done)
    return 0


def _interrupted(stop: Interrupted) -> int:
    print(f"fedrema: {stop}", file=sys.stderr)
    return 130


def _close(runs: list[Run]) -> None:
    console = Console()
    console.print(comparison_table(runs))
    where = common_folder(tuple(run.path for run in runs))
    following = "compare" if len(runs) > 1 else "export"
    for line in (f"Results: {where}", f"Next:    fedrema {following} {where}"):
        console.print(line, highlight=False, soft_wrap=True)


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
    """No progress bar, no table."""


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
        _close([done])
    return 0
