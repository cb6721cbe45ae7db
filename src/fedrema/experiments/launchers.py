"""Launchers run tasks: in this process, or in several worker processes of this machine."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from fedrema.config.settings import Settings
from fedrema.errors import FedremaError
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import Runner, Task, can_run_together
from fedrema.runs.callbacks import CallbackFor, RoundCallback
from fedrema.runs.execute import Interrupted
from fedrema.runs.signals import graceful_stop
from fedrema.runs.worker_pool import WorkerPool
from fedrema.simulation.state import Round

MIN_SECONDS_BETWEEN_REPORTS = 0.5
"""The rounds of a run are reported at most this often."""

EventKind = Literal["started", "round", "finished", "failed", "stopped", "lost"]


@dataclass(frozen=True)
class Event:
    """An event of a task: it started, finished a round, finished or failed; on Ray it can also be stopped or lost."""

    kind: EventKind
    task: Task
    seed: int = 0
    round: int = 0
    score: float | None = None
    """The primary metric after the round."""
    metric: str = "accuracy"
    """Name of the primary metric."""
    failed: tuple[str, ...] = ()
    """Why the task, or runs of it, did not finish."""

    @property
    def is_last(self) -> bool:
        """Whether no other event of the task follows."""
        return self.kind in ("finished", "failed")

    def encoded(self) -> str:
        """Return the event as JSON, without the task, which the receiver knows."""
        sent = _Sent(self.kind, self.seed, self.round, self.score, self.metric, self.failed)
        return msgspec.json.encode(sent).decode()

    @classmethod
    def decoded(cls, text: str, task: Task) -> "Event":
        """Return the event that `encoded` described."""
        sent = msgspec.json.decode(text, type=_Sent)
        return cls(sent.kind, task, sent.seed, sent.round, sent.score, sent.metric, sent.failed)


class _Sent(msgspec.Struct, frozen=True):
    kind: EventKind
    seed: int
    round: int
    score: float | None
    metric: str
    failed: tuple[str, ...]


EventCallback = Callable[[Event], None]


class Fits(Protocol):
    """Returns whether tasks that are run together are expected to finish in the remaining time."""

    def __call__(self, *tasks: Task) -> bool: ...


class Launcher(Protocol):
    """Runs tasks somewhere, in their order as far as possible."""

    at_once: int
    """How many it runs at the same time."""

    def run(self, tasks: Sequence[Task], fits: Fits, report: EventCallback) -> Iterator[Event]:
        """Yield each task's last event and report the others; raises `Interrupted` when a stop was requested."""


class InProcess:
    """Runs tasks in this process: one after the other; on a GPU, neighbours whose runs have one shape together."""

    def __init__(self, store: Store, work: Path, runs_together: int = 1) -> None:
        self.store, self.work, self.runs_together = store, work, runs_together
        self.at_once = 1

    def run(self, tasks: Sequence[Task], fits: Fits, report: EventCallback) -> Iterator[Event]:
        """Run them."""
        waiting = deque(tasks)
        with graceful_stop() as request:
            while waiting:
                if not (together := self._next(waiting, fits)):
                    continue
                for task in together:
                    report(Event("started", task))
                runner = Runner(self.store, self.work, reporting(report, together))
                yield from run_tasks(runner, together)
                if request.made:
                    raise Interrupted("Stopped.")

    def _next(self, waiting: deque[Task], fits: Fits) -> list[Task]:
        """Remove the tasks to run next; none if the first does not fit."""
        chosen = [waiting.popleft()]
        if not fits(*chosen):
            return []
        while waiting and can_run_together(chosen[0], waiting[0]):
            more = [*chosen, waiting[0]]
            if sum(len(task.seeds) for task in more) > self.runs_together or not fits(*more):
                break
            chosen.append(waiting.popleft())
        return chosen


class Workers:
    """Runs tasks in worker processes, one or more for each device."""

    def __init__(self, store: Store, work: Path, devices: Sequence[str], per_device: int) -> None:
        slots = [device for _ in range(per_device) for device in devices]
        self.at_once = len(slots)
        arguments = (str(store.folder), str(work), str(per_device - 1))
        self.pool: WorkerPool[Task] = WorkerPool("fedrema.experiments.launchers:run_encoded_task", arguments, slots)

    def run(self, tasks: Sequence[Task], fits: Fits, report: EventCallback) -> Iterator[Event]:
        """Run the tasks; a free worker runs the next one."""
        fitting = filter(fits, tasks)
        for reply in self.pool.run(lambda: next(fitting, None), Task.encoded):
            task = reply.job
            if reply.kind == "started":
                report(Event("started", task))
            elif reply.kind == "report":
                report(Event.decoded(reply.text, task))
            elif reply.kind == "finished":
                yield Event.decoded(reply.text, task)
            else:
                why = f"{task.cell.title}: its process ended with code {reply.code}; its last checkpoint is kept."
                yield Event("failed", task, failed=(why,))


def run_encoded_task(encoded: str, report: Callable[[str], None], store: str, work: str, concurrent: str) -> str:
    """Run a task in a worker process, and return its last event."""
    task = Task.decoded(encoded)
    callback_for = reporting(lambda event: report(event.encoded()), [task])
    return run_task(Runner(Store(Path(store)), Path(work), callback_for, int(concurrent)), task).encoded()


def run_task(runner: Runner, task: Task) -> Event:
    """Run a task and return its last event."""
    return next(run_tasks(runner, [task]))


def run_tasks(runner: Runner, tasks: Sequence[Task]) -> Iterator[Event]:
    """Run tasks together and yield the last event of each."""
    try:
        failed = runner.run_together(tasks)
    except FedremaError as error:
        if len(tasks) == 1:  # the other tasks continue
            yield Event("failed", tasks[0], failed=(f"{tasks[0].cell.title}: {error}",))
        else:  # alone, each shows whether it is the cause
            for task in tasks:
                yield from run_tasks(runner, [task])
    else:
        for task, sentences in zip(tasks, failed, strict=True):
            yield Event("finished", task, failed=tuple(sentences))


def reporting(report: EventCallback, tasks: Sequence[Task]) -> CallbackFor:
    """Return a function that makes the callback of a task's run, which reports its rounds at most twice a second."""
    owners = {key: task for task in tasks for key in task.keys}

    def callback_for(settings: Settings) -> RoundCallback:
        task, reported = owners[settings.output.folder.name], -MIN_SECONDS_BETWEEN_REPORTS

        def callback(finished: Round) -> None:
            nonlocal reported
            if time.monotonic() - reported >= MIN_SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                record, seed = finished.record, settings.simulation.seed
                score = None if record.primary is None else record.primary.value
                metric = next(iter(record.metrics), "accuracy")
                report(Event("round", task, seed, record.round, score, metric))

        return callback

    return callback_for
