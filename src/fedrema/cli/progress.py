"""The live bar of a run: round, accuracy, critical period, time left."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrema.world import Round


class RunProgress:
    """A bar per run, on the error stream, so that results can be piped; silent where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
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

    def watch(self, label: str, rounds: int, done: int = 0) -> "Watch":
        """Add the bar of a run that is ready to play."""
        self.progress.start()
        return Watch(self.progress, self.progress.add_task(label, total=rounds, completed=done, state=""))


class Watch:
    """Moves a bar along with each round."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task
        self.accuracy = ""

    def __call__(self, played: Round) -> None:
        """Show a round."""
        record = played.record
        if record.get("accuracy") is not None:
            self.accuracy = f"accuracy {record['accuracy']:6.1%}"
        critical = record.get("trace", {}).get("critical")
        period = "" if critical is None else "  critical" if critical else "  by history"
        self.progress.update(self.task, completed=record["round"], state=f"{self.accuracy}{period}")
