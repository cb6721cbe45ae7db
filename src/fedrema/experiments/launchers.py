"""Where tasks are played: in this process, or in several others of this machine."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedrema.config.settings import Settings
from fedrema.errors import FedremaError
from fedrema.experiments.runner import Runner
from fedrema.experiments.store import Store
from fedrema.experiments.work import Task
from fedrema.runs.execute import Interrupted, Watcher
from fedrema.runs.signals import stopping_gently
from fedrema.simulation.state import Round

SECONDS_BETWEEN_ROUNDS = 0.5
"""How often a run tells of its rounds."""

Fits = Callable[[Task], bool]
"""Whether a task should be finished in the time that is left."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a task: it began, a round was played, it ended, was refused or stopped."""

    kind: str
    task: Task | None = None
    seed: int = 0
    round: int = 0
    accuracy: float | None = None
    failed: tuple[str, ...] = ()
    """Why it, or runs of it, did not come to their end."""

    @property
    def is_last(self) -> bool:
        """Whether nothing more will be heard of the task."""
        return self.kind in ("ended", "refused")

    def line(self) -> str:
        """Return it as JSON, without the task, which the receiver knows."""
        return json.dumps(asdict(replace(self, task=None)))

    @classmethod
    def told(cls, line: str, task: Task) -> "Event":
        """Return the event that a line tells of."""
        content: dict[str, Any] = json.loads(line)
        return cls(**{**content, "task": task, "failed": tuple(content.get("failed", ()))})


Report = Callable[[Event], None]


class Launcher(Protocol):
    """Plays tasks somewhere, in their order as far as possible."""

    at_once: int
    """How many it plays at the same time."""

    def play(self, tasks: Sequence[Task], fits: Fits, report: Report) -> Iterator[Event]:
        """Yield each task's last event and report the others; raises `Interrupted` when someone asked to stop."""


class Here:
    """Plays one task after the other in this process."""

    def __init__(self, store: Store, work: Path) -> None:
        self.store, self.work = store, work
        self.at_once = 1

    def play(self, tasks: Sequence[Task], fits: Fits, report: Report) -> Iterator[Event]:
        """Play them."""
        with stopping_gently() as request:
            for task in filter(fits, tasks):
                report(Event("began", task))
                yield outcome(Runner(self.store, self.work, telling(report)), task)
                if request.asked:
                    raise Interrupted("Stopped.")


def outcome(runner: Runner, task: Task) -> Event:
    """Play a task and return its last event."""
    try:
        return Event("ended", task, failed=tuple(runner.play(task)))
    except FedremaError as error:  # no reason to leave out the others
        return Event("refused", task, failed=(f"{task.cell.title}: {error}",))


def telling(report: Report) -> Callable[[Settings], Watcher]:
    """Return what makes watchers that report a run's rounds now and then."""

    def watching(settings: Settings) -> Watcher:
        told = -SECONDS_BETWEEN_ROUNDS

        def watch(played: Round) -> None:
            nonlocal told
            if time.monotonic() - told >= SECONDS_BETWEEN_ROUNDS:
                told = time.monotonic()
                record, seed = played.record, settings.simulation.seed
                report(Event("round", seed=seed, round=record.round, accuracy=record.accuracy))

        return watch

    return watching


class Workers:
    """Plays tasks in processes of their own, one or more for each GPU."""

    def __init__(self, store: Store, work: Path, devices: Sequence[str], per_device: int) -> None:
        self.store, self.work = store, work
        self.slots = [device for _ in range(per_device) for device in devices]
        self.at_once = len(self.slots)
        self.beside = per_device - 1

    def play(self, tasks: Sequence[Task], fits: Fits, report: Report) -> Iterator[Event]:
        """Play them; the next goes to whichever process is free."""
        waiting = list(reversed(tasks))
        choosing = threading.Lock()
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        processes: list[subprocess.Popen[str]] = []

        def next_task() -> Task | None:
            with choosing:
                while waiting and not request.asked:
                    if fits(task := waiting.pop()):
                        return task
            return None

        def serve(device: str) -> None:
            process = None
            try:
                while (task := next_task()) is not None:
                    if process is None or process.poll() is not None:  # the first, or the last one died
                        process = self._process(device)
                        processes.append(process)
                    events.put(Event("began", task))
                    _follow(process, task, events.put)
            finally:
                if process is not None:
                    process.communicate()  # nothing more comes: it ends
                events.put(None)

        with stopping_gently() as request:
            threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in self.slots]
            for thread in threads:
                thread.start()
            working, told = len(threads), 0
            while working:
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=0.2)
                    if event is None:
                        working -= 1
                    elif event.is_last:
                        yield event
                    else:
                        report(event)
                if request.asked:  # also those that were being started just then
                    for process in processes[told:]:
                        process.send_signal(signal.SIGTERM)
                        told += 1
            if request.asked:
                raise Interrupted("Stopped.")

    def _process(self, device: str) -> "subprocess.Popen[str]":
        where = (str(self.store.folder), str(self.work), str(self.beside))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        if not device:  # several on a CPU share its cores
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(self.slots))))
        # In a session of its own, so that Ctrl-C comes once, from here.
        return subprocess.Popen(
            [sys.executable, "-m", "fedrema.experiments.worker", *where],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def _follow(process: "subprocess.Popen[str]", task: Task, pass_on: Report) -> None:
    """Have a task played by a process, and pass on what it tells until the task or the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(task.order()) + "\n")
        process.stdin.flush()
    for line in process.stdout:
        event = Event.told(line, task)
        pass_on(event)
        if event.is_last:
            return
    process.communicate()
    why = f"{task.cell.title}: its process ended with code {process.returncode}; what it had saved is kept."
    pass_on(Event("refused", task, failed=(why,)))
