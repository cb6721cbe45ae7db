"""Progress of runs: a bar with round, primary metric and time left; without a terminal a line every half minute."""

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrema.base.terminal import Console, print_safe
from fedrema.config.settings import Settings
from fedrema.core import Period
from fedrema.reporting.quantities import metric_text
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.state import Round
from fedrema.tasks import Metric, find_metric

SECONDS_BETWEEN_LINES = 30.0


class RunProgress:
    """A bar per run, on stderr, so that results can be piped."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self.quiet = quiet
        self.lines = not quiet and not console.is_terminal
        self.printed: set[str] = set()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            expand=True,
        )

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.progress.live.is_started:  # otherwise older versions of rich print an empty line
            self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars; the same line of several runs only once."""
        if line and not self.quiet and line not in self.printed:
            self.printed.add(line)
            self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def watch(self, label: str, rounds: int, period: Period | None, done: int = 0) -> "Watch":
        """Add the bar of a run that has been prepared; `period` is what its method declares."""
        self.progress.start()
        task = self.progress.add_task(label, total=rounds, completed=done, state="")
        return Watch(self.progress, task, period, self.lines)


class Watch:
    """Advances a bar after each round."""

    def __init__(self, progress: Progress, task: TaskID, period: Period | None, lines: bool) -> None:
        self.progress, self.task, self.lines = progress, task, lines
        self.state = StateText(period)
        self.written = time.monotonic()

    def __call__(self, finished: Round) -> None:
        """Show a round."""
        record = finished.record
        state = self.state.after(record)
        self.progress.update(self.task, completed=record.round, state=state)
        if self.lines and time.monotonic() - self.written >= SECONDS_BETWEEN_LINES:
            self.written = time.monotonic()
            task = self.progress.tasks[self.task]
            done = f"round {record.round}/{int(task.total or 0)}"
            print_safe(f"{task.description} {done} {state}", file=sys.stderr, flush=True)


def label_of(settings: Settings) -> str:
    """Return the label of a run in messages."""
    seed = f" seed {settings.simulation.seed}" if settings.output.seeds > 1 else ""
    return f"{settings.method.called()}{seed}"


class StateText:
    """Describes the state of a run in a few words: the last value of its primary metric, and its method's period."""

    def __init__(self, period: Period | None) -> None:
        self.period, self.score = period, ""

    def after(self, record: RoundRecord) -> str:
        """Return the text after a round."""
        if record.primary is not None and record.primary.value is not None:
            self.score = self._text(find_metric(next(iter(record.metrics))), record.primary.value)
        inside = None if self.period is None else record.trace.get(self.period.name)
        period = "" if self.period is None or inside is None else self.period.inside if inside else self.period.after
        return f"{self.score}  {period}".rstrip()

    @staticmethod
    def _text(metric: Metric, value: float) -> str:
        """Return a metric as text, with the same width in most rounds."""
        return f"{metric.title} " + (f"{value:6.1%}" if metric.percent else f"{metric_text(metric, value):>6}")
