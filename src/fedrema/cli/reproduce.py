"""fedrema reproduce: the paper's tables and figures, with the published numbers next to ours."""

import dataclasses
import sys
import time
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from fedrema.base.terminal import Console
from fedrema.cli.arguments import parse_arguments, positional
from fedrema.cli.experiment import (
    ExperimentOptions,
    Part,
    check_folder,
    execute,
    plan_of,
    prepare,
    print_plan,
    read,
    select,
)
from fedrema.cli.grid import STOPPED, print_errors, show
from fedrema.errors import BadInput
from fedrema.experiments.command_log import log_command
from fedrema.experiments.report import write_overview, write_report
from fedrema.experiments.spec import Experiment, Values
from fedrema.experiments.store import FOLDER, Store
from fedrema.experiments.tasks import finished_runs
from fedrema.runs.execute import Interrupted

NAMES = (
    *("table1", "table2", "table4", "table5", "table3", "heatmaps", "curves", "motivation", "variance", "methods"),
)
"""The experiments; the most important run first."""
PAPER = tuple(name for name in NAMES if name != "methods")
"""The experiments that `all` selects."""
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
    "precision": "auto",  # of any machine; the experiments name that of their results
}
"""Settings of the smoke test."""
SMOKE_SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's experiments and compare the results with the published ones."""

    what: tuple[str, ...] = positional(("all",))
    """Experiments: table1, table2, table3, table4, table5, heatmaps, curves, motivation, variance; all for these
    nine; methods for all methods on CIFAR-10."""
    smoke: bool = False
    """Run everything on digits in about a minute, to test that it works; the results say nothing about the methods."""
    experiment: ExperimentOptions = dataclasses.field(default_factory=ExperimentOptions)


def reproduce(arguments: list[str]) -> int:
    """Run what is missing, write tables, figures and verdicts, and print the requested tables."""
    args = parse_arguments(Reproduce, arguments, "fedrema reproduce")
    options = args.experiment
    out = check_folder(options.out or Path("results") / ("smoke" if args.smoke else "paper"))
    if args.smoke:
        options = dataclasses.replace(options, seeds=options.seeds or SMOKE_SEEDS)
    experiments = [_experiment(name, args.smoke, options) for name in _names(args.what)]
    parts = select(experiments, options.only, options.seeds)
    if options.prepare is not None:
        prepare(parts, options.prepare)
        return 0
    store = Store(out / FOLDER)
    store.check()
    if options.plan:
        print_plan(_ordered(parts), options, store)
        return 0
    start, started = time.monotonic(), datetime.now(UTC)
    there = set(store.keys())
    before = _finished(store)
    code = 0
    try:
        failed = execute(parts, _ordered(parts), options, store, out / "unfinished")
    except Interrupted:
        failed, code = [], 130
        print(STOPPED, file=sys.stderr)
    new = _finished(store) - before
    if new:
        command = ["fedrema", "reproduce", *arguments]
        log_command(store, command, started, time.monotonic() - start, new, len(new & there))
    # Other tables may share runs with those just finished: their reports are rewritten.
    requested = {part.experiment.name for part in parts}
    every = [_experiment(name, args.smoke, options) for name in NAMES]
    reported = [each for each in every if each.name in requested or _started(each, options.seeds or each.seeds, store)]
    judged = {each.name: write_report(each, options.seeds or each.seeds, store, out) for each in reported}
    wanted = [Part(each, each.cells, options.seeds or each.seeds) for each in every if each.name in PAPER]
    write_overview(reported, judged, options.seeds, store, out, plan_of(_ordered(wanted), options.device, store))
    if not options.quiet and not code:
        for part in parts:
            show(part, store, out)
        Console().print(f"All tables, figures and verdicts: {out / 'README.md'}", highlight=False, soft_wrap=True)
    return print_errors(failed) or code


def _names(what: tuple[str, ...]) -> list[str]:
    for name in what:
        if name not in (*NAMES, "all"):
            raise BadInput(f"There is no experiment {name!r}; valid are {', '.join(NAMES)} and all.")
    return list(dict.fromkeys(each for name in what for each in (PAPER if name == "all" else (name,))))


def _experiment(name: str, smoke: bool, options: ExperimentOptions) -> Experiment:
    with resources.as_file(resources.files("fedrema") / "experiments" / "paper" / f"{name}.toml") as file:
        experiment = read(file, options, SMOKE if smoke else {})
    if not smoke:
        return experiment
    title, about = f"Smoke test on digits: {experiment.title}", "Six rounds, to see that everything works."
    return experiment.retitled(title, about)


def _finished(store: Store) -> set[str]:
    return {key for key in store.keys() if store.has(key)}  # noqa: SIM118 - not a dict


def _started(experiment: Experiment, seeds: int, store: Store) -> bool:
    return any(finished_runs(cell, seeds, store) for cell in experiment.cells)


def _ordered(parts: list[Part]) -> list[Part]:
    """Return parts in the order in which they are run."""
    return sorted(parts, key=lambda part: NAMES.index(part.experiment.name))
