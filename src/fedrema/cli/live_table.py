"""The table of an experiment while it runs; without a terminal, a line every half minute."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedrema.base.terminal import Console, print_safe
from fedrema.experiments.forecast import Forecaster, duration
from fedrema.experiments.launchers import Event
from fedrema.experiments.spec import Cell, Experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.table import OUTDATED, measured, statistic
from fedrema.experiments.tasks import Task, finished_runs
from fedrema.reporting.quantities import Quantity, with_unit
from fedrema.reporting.tables import plain_table
from fedrema.tasks import find_metric

SECONDS_BETWEEN_LINES = 30.0
SHOWN_RUNNING = 6


class LiveTable:
    """Shows finished results, current runs and the remaining time, on stderr."""

    def __init__(
        self,
        experiments: Sequence[tuple[Experiment, int]],
        tasks: Sequence[Task],
        store: Store,
        forecaster: Forecaster,
        quiet: bool,
    ) -> None:
        self.experiments, self.store, self.forecaster = experiments, store, forecaster
        self.waiting = list(tasks)
        self.running: list[Task] = []
        self.rounds: dict[tuple[int, int], Event] = {}
        """The last finished round, by task and seed."""
        self.wanted, self.done = sum(len(task.seeds) for task in tasks), 0
        self.known = (-1, -1)
        self.expected: float | None = None
        """Estimated seconds of all tasks that have not started."""
        self.written = time.monotonic()
        console = Console(stderr=True)
        self.lines = not quiet and not console.is_terminal
        self.live = (
            Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
            if console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> "LiveTable":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def report(self, event: Event) -> None:
        """Update the table with an event."""
        task = event.task
        if event.kind == "started":
            self.running.append(task)
        elif event.kind == "round":
            self.rounds[id(task), event.seed] = event
        elif event.is_last:
            self.running.remove(task)
            self.done += sum(map(self.store.has, task.keys))  # without interrupted runs
            self._say(f"{task.cell.title}: {self._result(task.cell)}; {self._footer()}")
        if time.monotonic() - self.written >= SECONDS_BETWEEN_LINES:
            self._say(f"{'; '.join(map(self._state, self.running))}; {self._footer()}")
        if task in self.waiting and event.kind == "started":
            self.waiting.remove(task)
        if self.live and event.kind != "round":  # also show what ends before the next refresh
            self.live.refresh()

    def _say(self, line: str) -> None:
        self.written = time.monotonic()
        if self.lines:
            print_safe(line, file=sys.stderr, flush=True)

    def render(self) -> RenderableType:
        """Return the table of the current experiment, with current runs and the remaining time below it."""
        running = [Text(self._state(task), "cyan") for task in self.running[:SHOWN_RUNNING]]
        return Group(*self._table(), *running, Text(self._footer(), "dim"))

    def _table(self) -> list[RenderableType]:
        keys = {key for task in self.running for key in task.keys}
        for experiment, seeds in self.experiments:
            mine = {key_of(cell.settings(seed)) for cell in experiment.cells for seed in range(seeds)}
            if not keys & mine:
                continue
            columned = any(column.title for column in experiment.columns)
            metric = "" if columned else self._measured(experiment, seeds).metric.title
            table = plain_table(["", *(column.title if columned else metric for column in experiment.columns)])
            for row in experiment.rows:
                cells = (experiment.cell(row.name, column.name) for column in experiment.columns)
                table.add_row(row.title, *(self._cell(cell, seeds, experiment.quantity, keys) for cell in cells))
            return [Text(experiment.title, "bold"), table]
        return []

    def _cell(self, cell: Cell, seeds: int, quantity: str, running: set[str]) -> Text:
        runs = finished_runs(cell, seeds, self.store)
        found = statistic(runs, quantity)
        if found is not None:
            mark = OUTDATED if any(run.outdated for run in runs) else ""
            return Text(f"{found}{mark}" + (f" ({found.count})" if found.count < seeds else ""))
        if any(run.failed for run in runs):
            return Text("diverged", "red")
        now = any(key_of(cell.settings(seed)) in running for seed in range(seeds))
        return Text("…", "cyan") if now else Text("·", "dim")

    def _state(self, task: Task) -> str:
        started = self._started(task)
        if not started:
            return f"{task.cell.title}: starting"
        rounds = task.cell.parsed.simulation.rounds
        now = [event for event in started if event.round < rounds] or started[-1:]
        scored = [event.score for event in now if event.score is not None]
        metric = find_metric(now[-1].metric)
        score = f", {metric.title} {with_unit(metric, sum(scored) / len(scored))}" if scored else ""
        seeds = len(task.seeds)
        together = f" of {seeds} seeds" if len(now) == seeds else f", seed {len(started)} of {seeds}"
        return f"{task.cell.title}: round {now[-1].round}/{rounds}{together if seeds > 1 else ''}{score}"

    def _started(self, task: Task) -> list[Event]:
        return [event for seed in task.seeds if (event := self.rounds.get((id(task), seed)))]

    def _result(self, cell: Cell) -> str:
        experiment, seeds = next(
            ((experiment, seeds) for experiment, seeds in self.experiments if cell in experiment.cells),
            self.experiments[0],
        )
        runs = [run for run in finished_runs(cell, seeds, self.store) if not run.outdated]
        found = statistic(runs, experiment.quantity)
        return "no result" if found is None else f"{found} ({measured(experiment.quantity, runs).words})"

    def _measured(self, experiment: Experiment, seeds: int) -> Quantity:
        runs = (run for cell in experiment.cells for run in finished_runs(cell, seeds, self.store))
        return measured(experiment.quantity, runs)

    def _footer(self) -> str:
        done = self.done + sum(
            event.round == task.cell.parsed.simulation.rounds for task in self.running for event in self._started(task)
        )
        return f"{done} of {self.wanted} runs finished{self._left()}"

    def _left(self) -> str:
        if not self.waiting and not self.running:
            return ""
        if self.known != (len(self.waiting), self.done):  # costly: it reads many runs
            self.known, self.expected = (len(self.waiting), self.done), self.forecaster.of(self.waiting).seconds
        expected = self.expected
        started = [self._seconds_left(task) for task in self.running]
        if expected is None or None in started:
            return ""
        left = expected + sum(seconds for seconds in started if seconds is not None) / self.forecaster.workers
        return f", about {duration(left)} left"

    def _seconds_left(self, task: Task) -> float | None:
        expected = self.forecaster.seconds(task)
        done = sum(event.round for event in self._started(task))
        return None if expected is None else expected * (1 - done / task.rounds)
