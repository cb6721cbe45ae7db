"""Shared by `fedrema grid` and `fedrema reproduce`: their options, the selection of cells, and their execution."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from fedrema.base.terminal import Console, safe
from fedrema.cli.live_table import LiveTable
from fedrema.core.options import Precision, needs_gpu
from fedrema.data import PreparedFolder, build_federation
from fedrema.engine import choose_device
from fedrema.errors import BadInput, at_least
from fedrema.experiments.forecast import Forecaster
from fedrema.experiments.launchers import InProcess, Launcher, Workers
from fedrema.experiments.plan import HEADINGS, Plan, make_plan
from fedrema.experiments.spec import Cell, Experiment, Values
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import Task, missing_tasks, outdated_keys, remove_run, split_tasks
from fedrema.reporting.tables import plain_table
from fedrema.runs.execute_many import MOST_IN_TURNS
from fedrema.runs.worker_pool import gpu_names


@dataclasses.dataclass(frozen=True)
class ExperimentOptions:
    """What is run, where, and where the results are written."""

    out: Path | None = None
    """Folder of the results. Default: results/NAME, after the file."""
    seeds: int | None = None
    """How many times each cell is run, with seeds 0, 1, …. Default: the number in the file."""
    rounds: int | None = None
    """Number of rounds of every run, instead of those in the file; published numbers are then left out."""
    only: str | None = None
    """Run only the rows and columns with these names, separated by commas."""
    minutes: float | None = None
    """Start only runs that should finish within this many minutes; the same command continues later."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses all GPUs, if there are any."""
    precision: Precision | None = None
    """Numeric precision of every run, instead of that in the file; runs of another precision are kept apart."""
    workers: int = 1
    """Number of cells to run at the same time on each device; small networks do not use a GPU fully."""
    launcher: Literal["local", "ray"] = "local"
    """local: this machine; ray: the Ray cluster at RAY_ADDRESS, or a local one (pip install 'fedrema[ray]')."""
    plan: bool = False
    """Only list the cells with missing runs and their estimated cost, in the order in which they run; without a GPU,
    estimate for that of the finished runs."""
    prepare: Path | None = None
    """Only partition the data, into this folder, for machines without the datasets: copy it there and set FEDREMA_DATA
    to it."""
    quiet: bool = False
    """Show no progress and no table."""

    def __post_init__(self) -> None:
        """Validate the options."""
        for name, least in (("seeds", 1), ("rounds", 1), ("minutes", 0), ("workers", 1)):
            if getattr(self, name) is not None:
                at_least(least, self, name)

    def changes(self) -> Values:
        """Return the settings that override those of every cell."""
        given = {"rounds": self.rounds, "precision": self.precision}
        return {"device": self.device, **{name: value for name, value in given.items() if value is not None}}


@dataclasses.dataclass(frozen=True)
class Part:
    """An experiment, and the cells of it to run now."""

    experiment: Experiment
    cells: tuple[Cell, ...]
    seeds: int


def check_folder(out: Path) -> Path:
    """Check, before anything is run, that results can be written to a folder."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise BadInput(f"--out {out}: {path} is a file; name a folder for the results.")
    return out


def read(file: Path, args: ExperimentOptions, changes: Values | None = None) -> Experiment:
    """Read an experiment, with changes to the settings of every cell."""
    experiment = read_experiment(file, {**(changes or {}), **args.changes()})
    return experiment.retitled(f"{experiment.title} ({args.rounds} rounds)") if args.rounds else experiment


def select(experiments: Iterable[Experiment], names: str | None, seeds: int | None) -> list[Part]:
    """Return the cells of the named rows and columns, or all; experiments without any are left out."""
    experiments = list(experiments)
    wanted = None if names is None else {name.strip() for name in names.split(",")}
    known = {line.name for each in experiments for line in (*each.rows, *each.columns) if line.name}
    if wanted and (unknown := sorted(wanted - known)):
        raise BadInput(f"--only {unknown[0]!r} is neither a row nor a column; valid are {', '.join(sorted(known))}.")
    parts = [Part(each, _cells(each, wanted), seeds or each.seeds) for each in experiments]
    return [part for part in parts if part.cells]


def _cells(experiment: Experiment, wanted: set[str] | None) -> tuple[Cell, ...]:
    if wanted is None:
        return experiment.cells
    rows, columns = ({line.name for line in lines} & wanted for lines in (experiment.rows, experiment.columns))
    return tuple(
        cell
        for cell in experiment.cells
        if (rows or columns) and (not rows or cell.row.name in rows) and (not columns or cell.column.name in columns)
    )


def execute(
    parts: Sequence[Part], order: Sequence[Part], args: ExperimentOptions, store: Store, work: Path
) -> list[str]:
    """Run what is missing, in the order given, and return the errors.

    Raises
    ------
    Interrupted
        On Ctrl-C or SIGTERM; finished runs are kept, and the same call continues.
    """
    known: set[str] = set()
    tasks = [task for part in order for task in missing_tasks(part.cells, part.seeds, store, known)]
    launcher = _launcher(args, store, work) if tasks else InProcess(store, work)
    forecaster = Forecaster(store, args.device, launcher.at_once)
    if not args.quiet:
        print(forecaster.of(tasks), file=sys.stderr)
        if older := {key for part in parts for key in outdated_keys(part.cells, part.seeds, store)}:
            what = "1 finished run is outdated" if len(older) == 1 else f"{len(older)} finished runs are outdated"
            print(f"{what}: computed by an older revision of fedrema, run again.", file=sys.stderr)
    tasks = split_tasks(tasks, launcher.at_once)
    started = time.monotonic()

    def fits(*together: Task) -> bool:
        if args.minutes is None:
            return True
        left = 60 * args.minutes - (time.monotonic() - started)
        # Others run at the same time, so that each takes longer than its share.
        return left > 0 and sum(forecaster.seconds(task) or 0.0 for task in together) <= left

    if args.launcher == "local":
        for task in filter(fits, tasks):
            _check_precision(task)
    failed: list[str] = []
    try:
        experiments = [(part.experiment, part.seeds) for part in parts]
        with LiveTable(experiments, tasks, store, forecaster, args.quiet) as table:
            for event in launcher.run(tasks, fits, table.report):
                table.report(event)
                failed += event.failed
    finally:
        store.fold()
    for folder in work.glob("*"):
        if store.has(folder.name):  # a process was killed after it had stored the run
            with contextlib.suppress(BadInput):  # another process is at work
                remove_run(folder)
    with contextlib.suppress(OSError):  # not empty, because runs will be resumed; or never created
        work.rmdir()
    return failed


def _check_precision(task: Task) -> None:
    """Refuse a task that this machine cannot compute, before any other is run."""
    simulation = task.cell.parsed.simulation
    if needs_gpu(simulation.precision) and choose_device(simulation.device).type != "cuda":
        raise BadInput(
            f"{task.cell.title} is computed in {simulation.precision}, which needs a CUDA device: run it on a GPU, or"
            " everything in another precision with --precision float32; its runs are kept apart."
        )


def print_plan(parts: Sequence[Part], args: ExperimentOptions, store: Store) -> None:
    """Print the missing runs, cell by cell, with their estimated cost."""
    plan = plan_of(parts, args.device, store)
    shown = plain_table(HEADINGS, texts=2)
    for cell in plan.cells:
        shown.add_row(*map(safe, cell.texts))
    console = Console()
    if plan.cells:
        console.print(shown)
    console.print(plan.total, highlight=False)


def plan_of(parts: Sequence[Part], device: str, store: Store) -> Plan:
    """Return the plan of the missing runs of parts, in their order."""
    forecaster = Forecaster.of_finished_runs(store, device)
    return make_plan([(part.experiment, part.cells, part.seeds) for part in parts], store, forecaster)


def _launcher(args: ExperimentOptions, store: Store, work: Path) -> Launcher:
    if args.launcher == "ray":
        from fedrema.experiments.ray_launcher import OnRay

        return OnRay(store, args.workers, args.device)
    gpus = gpu_names(args.device)
    if args.workers * max(1, len(gpus)) > 1:
        return Workers(store, work, gpus or [""], args.workers)
    return InProcess(store, work, MOST_IN_TURNS if gpus else 1)


def prepare(parts: Sequence[Part], folder: Path) -> None:
    """Partition the data of all cells, for machines that have no datasets."""
    prepared, made = PreparedFolder(folder), set()
    for part in parts:
        for cell in part.cells:
            for seed in range(part.seeds if cell.vary == "both" else 1):
                data = cell.settings(seed).data
                own = not data.is_partitioned or data.partition_file is not None or data.dataset == "digits"
                if data not in made and not own:
                    made.add(data)
                    print(prepared.save(build_federation(data)))
