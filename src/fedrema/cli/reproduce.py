"""fedrema reproduce: the paper's tables and figures, ours beside the published."""

import dataclasses
import sys
import time
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro

from fedrema.base.terminal import Console
from fedrema.cli.grid import STOPPED, complain, show
from fedrema.cli.playing import Part, Playing, check_folder, chosen, play, prepare, read
from fedrema.config.settings import parse_arguments
from fedrema.errors import BadInput
from fedrema.experiments.command_log import log_command
from fedrema.experiments.report import write_overview, write_report
from fedrema.experiments.spec import Experiment, Values
from fedrema.experiments.store import FOLDER, Store
from fedrema.experiments.tasks import finished
from fedrema.runs.execute import Interrupted

ORDER = (
    ("table1", "cifar10"),
    *((name, None) for name in ("table3", "table4", "table5", "heatmaps", "table2", "curves")),
    ("table1", "mnist,fmnist"),
    *((name, None) for name in ("motivation", "partitions", "methods")),
)
"""What is most telling comes first."""
NAMES = tuple(dict.fromkeys(name for name, _ in ORDER))
PAPER = tuple(name for name in NAMES if name != "methods")
"""What `all` stands for."""
SMOKE: Values = {
    "dataset": "digits",
    "clients": 10,
    "samples": 60,
    "test-share": 0.5,
    "net": "mlp",
    "hidden": 8,
    "rounds": 6,
    "epochs": 1,
    "batch": 10,
    "lr": 0.05,
    "record-every": 1,
}
SMOKE_SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments on the real data and lay the results beside the published ones."""

    what: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """table1, table2, table3, table4, table5, heatmaps, curves, motivation, partitions; or all: these nine.
    And methods: every method there is, on CIFAR-10."""
    smoke: bool = False
    """Try everything out on digits, in a minute; shows that it works, and nothing about the methods."""
    playing: Playing = dataclasses.field(default_factory=Playing)


def reproduce(arguments: list[str]) -> int:
    """Play what is missing, write tables, figures and verdicts, print the tables asked for."""
    asked: Reproduce = parse_arguments(Reproduce, arguments, "fedrema reproduce")
    playing = asked.playing
    out = check_folder(playing.out or Path("results") / ("smoke" if asked.smoke else "paper"))
    if asked.smoke:
        playing = dataclasses.replace(playing, seeds=playing.seeds or SMOKE_SEEDS)
    experiments = [_experiment(name, asked.smoke, playing) for name in _names(asked.what)]
    parts = chosen(experiments, playing.only, playing.seeds)
    if playing.prepare is not None:
        prepare(parts, playing.prepare)
        return 0
    store = Store(out / FOLDER)
    store.check()
    begun, started = time.monotonic(), datetime.now(UTC)
    there = set(store.keys())
    before = _finished(store)
    code = 0
    try:
        failed = play(parts, _ordered(parts), playing, store, out / "unfinished")
    except Interrupted:
        failed, code = [], 130
        print(STOPPED, file=sys.stderr)
    new = _finished(store) - before
    if new:
        command = ["fedrema", "reproduce", *arguments]
        log_command(store, command, started, time.monotonic() - begun, new, len(new & there))
    # Other tables may share runs with those just played: what can be told of them is told anew.
    asked_for = {part.experiment.name for part in parts}
    every = [_experiment(name, asked.smoke, playing) for name in NAMES]
    told = [each for each in every if each.name in asked_for or _begun(each, playing.seeds or each.seeds, store)]
    judged = {each.name: write_report(each, playing.seeds or each.seeds, store, out) for each in told}
    write_overview(told, judged, playing.seeds, store, out)
    if not playing.quiet and not code:
        for part in parts:
            show(part, store, out)
        Console().print(f"All tables, figures and verdicts: {out / 'README.md'}", highlight=False, soft_wrap=True)
    return complain(failed) or code


def _names(what: tuple[str, ...]) -> list[str]:
    for name in what:
        if name not in (*NAMES, "all"):
            raise BadInput(f"There is no experiment {name!r}; valid are {', '.join(NAMES)} and all.")
    return list(dict.fromkeys(each for name in what for each in (PAPER if name == "all" else (name,))))


def _experiment(name: str, smoke: bool, playing: Playing) -> Experiment:
    with resources.as_file(resources.files("fedrema") / "experiments" / "paper" / f"{name}.toml") as file:
        experiment = read(file, playing, SMOKE if smoke else {})
    if not smoke:
        return experiment
    title, about = f"Smoke test on digits: {experiment.title}", "Six rounds, to see that everything works."
    return experiment.retitled(title, about)


def _finished(store: Store) -> set[str]:
    return {key for key in store.keys() if store.has(key)}  # noqa: SIM118 - not a dict


def _begun(experiment: Experiment, seeds: int, store: Store) -> bool:
    return any(finished(cell, seeds, store) for cell in experiment.cells)


def _ordered(parts: list[Part]) -> list[Part]:
    """Return parts in the order in which they are played; a part may come in several pieces."""
    by_name = {part.experiment.name: part for part in parts}
    pieces = []
    for name, columns in ORDER:
        if (part := by_name.get(name)) is not None:
            wanted = set(columns.split(",")) if columns else {column.name for column in part.experiment.columns}
            cells = tuple(cell for cell in part.cells if cell.column.name in wanted)
            pieces.append(dataclasses.replace(part, cells=cells))
    return pieces
