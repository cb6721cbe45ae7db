"""The live bar of a run: round, accuracy, critical period, time left; without a terminal a line now and then."""

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrema.base.terminal import Console, print_safe
from fedrema.simulation.state import Round

SECONDS_BETWEEN_LINES = 30.0


class RunProgress:
    """A bar per run, on the error stream, so that results can be piped."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self.quiet = quiet
        self.lines = not quiet and not console.is_terminal
        self.said: set[str] = set()
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
        self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars; one that several runs have in common only once."""
        if line and not self.quiet and line not in self.said:
            self.said.add(line)
            self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def watch(self, label: str, rounds: int, done: int = 0) -> "Watch":
        """Add the bar of a run that is ready to play."""
        self.progress.start()
        return Watch(self.progress, self.progress.add_task(label, total=rounds, completed=done, state=""), self.lines)


class Watch:
    """Moves a bar along with each round."""

    def __init__(self, progress: Progress, task: TaskID, lines: bool) -> None:
        self.progress, self.task, self.lines = progress, task, lines
        self.accuracy = ""
        self.written = time.monotonic()

    def __call__(self, played: Round) -> None:
        """Show a round."""
        record = played.record
        if record.accuracy is not None:
            self.accuracy = f"accuracy {record.accuracy:6.1%}"
        critical = record.trace.get("critical")
        period = "" if critical is None else "  critical" if critical else "  by history"
        self.progress.update(self.task, completed=record.round, state=f"{self.accuracy}{period}")
        if self.lines and time.monotonic() - self.written >= SECONDS_BETWEEN_LINES:
            self.written = time.monotonic()
            task = self.progress.tasks[self.task]
            done = f"round {record.round}/{int(task.total or 0)}"
            print_safe(f"{task.description} {done} {self.accuracy}{period}", file=sys.stderr, flush=True)
