"""Runs tasks on a Ray cluster; its machines need fedrema and the datasets, but no shared disk."""

import contextlib
import hashlib
import logging
import math
import os
import platform
import queue
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from fedrema import __version__
from fedrema.errors import BadInput
from fedrema.experiments.launchers import Event, EventCallback, Fits, reporting, run_task
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import Runner, Task
from fedrema.runs.execute import Interrupted
from fedrema.runs.signals import graceful_stop

try:
    import ray
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise BadInput("--launcher ray needs Ray: pip install 'fedrema[ray]'.") from missing

SECONDS_BETWEEN_CHECKS = 0.2
SECONDS_TO_ANSWER = 10.0
BYTES_FOR_OBJECTS = 100 * 2**20
"""Shared memory of a local Ray; finished runs are small."""
STEPS = 10_000
"""Ray counts resources in steps of 1/10 000."""


@dataclass(frozen=True)
class Slot:
    """The resources for one task on a machine."""

    node: str
    cpus: float
    gpus: float
    """The share of a GPU that Ray reserves; 0 on a CPU."""
    threads: int


class OnRay:
    """Runs tasks on the Ray cluster that the caller has joined, else on that of RAY_ADDRESS, else on a local one.

    It joins at once, so that problems of a cluster are reported before any work, and leaves after all tasks.
    """

    def __init__(self, store: Store, workers: int, device: str) -> None:
        self.store, self.workers, self.device = store, workers, device
        self.joined = not ray.is_initialized()
        if self.joined:
            _join(os.environ.get("RAY_ADDRESS"))
        self.at_once = self.slots().total()
        """How many tasks can run at the same time, on the present machines."""
        if not self.at_once:
            raise BadInput("The Ray cluster has neither CPUs nor GPUs: start some of its machines.")
        # Another store's tasks, perhaps with the same runs, must not share a folder with these.
        owner = f"{platform.node()}:{store.folder.resolve()}"
        self.folder = f"fedrema-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        """Folder of unfinished runs, in each machine's folder for temporary files."""

    def run(self, tasks: Sequence[Task], fits: Fits, report: EventCallback) -> Iterator[Event]:
        """Run the tasks; the next one goes to the machine with the most free slots."""
        waiting = deque(range(len(tasks)))
        lost: dict[int, str] = {}
        """The machine on which a task's process was lost."""
        running: dict[ray.ObjectRef[Any], tuple[int, Slot]] = {}
        # If its machine is lost, the queue is restarted elsewhere; rounds that were not reported do not matter.
        rounds = Queue(actor_options={"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1})
        try:
            with graceful_stop() as request:
                cancelled = False
                while running or (waiting and not request.made):
                    free = self.slots() - Counter(slot for _, slot in running.values())
                    while waiting and free and not request.made:
                        number = waiting.popleft()
                        if number not in lost:
                            if not fits(tasks[number]):
                                continue
                            report(Event("started", tasks[number]))
                        slot = max(free, key=lambda one: (one.node != lost.get(number), free[one]))
                        free -= Counter([slot])
                        running[self._begin(tasks[number], number, slot, rounds)] = number, slot
                    if request.made and not cancelled:
                        cancelled = True
                        for reference in running:
                            ray.cancel(reference)  # like Ctrl-C on that machine: the round is finished and saved
                    if not running:  # no task fits, or no machine is left: others may join
                        time.sleep(SECONDS_BETWEEN_CHECKS)
                        continue
                    ready, _ = ray.wait(list(running), timeout=SECONDS_BETWEEN_CHECKS)
                    with contextlib.suppress(queue.Empty):  # the queue has just been restarted
                        for number, line in rounds.get_nowait_batch(rounds.qsize()):
                            report(Event.decoded(line, tasks[number]))
                    for reference in ready:
                        number, slot = running.pop(reference)
                        event = self._received(reference, tasks[number])
                        if event.kind == "lost" and number not in lost:
                            # Not retried by Ray, which would request the same CPUs, and retry forever without memory.
                            lost[number] = slot.node
                            waiting.appendleft(number)
                        elif event.kind == "stopped":
                            report(event)
                        else:
                            yield replace(event, kind="failed") if event.kind == "lost" else event
                if request.made:
                    raise Interrupted("Stopped.")
        finally:
            for reference in running:
                ray.cancel(reference)
            rounds.shutdown(force=True)
            if self.joined:
                ray.shutdown()

    def slots(self) -> Counter[Slot]:
        """Count the slots: on GPUs if there are any and the device allows it, else on CPUs."""
        found = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types
        nodes = [(node["NodeID"], node["Resources"]) for node in found if node["Alive"]]
        on_gpus = self.device != "cpu" and any(resources.get("GPU") for _, resources in nodes)
        slots: Counter[Slot] = Counter()
        for node, resources in nodes:
            cpus, gpus = resources.get("CPU", 0), int(resources.get("GPU", 0))
            number = self.workers * (gpus if on_gpus else min(int(cpus), 1))
            if number:
                needs = (0.0, _share(1, self.workers)) if on_gpus else (_share(cpus, number), 0.0)
                slots[Slot(node, *needs, threads=max(1, int(cpus) // number))] = number
        return slots

    def _begin(self, task: Task, number: int, slot: Slot, rounds: Queue) -> "ray.ObjectRef[Any]":
        # A process that has used one GPU cannot change to another: there, each runs one task.
        remote = ray.remote(max_retries=0, max_calls=1 if slot.gpus else 0)(run_there)
        where = NodeAffinitySchedulingStrategy(slot.node, soft=False)
        placed = remote.options(num_cpus=slot.cpus, num_gpus=slot.gpus, scheduling_strategy=where)
        return placed.remote(task.encoded(), number, __version__, self.folder, slot.threads, self.workers - 1, rounds)

    def _received(self, reference: "ray.ObjectRef[Any]", task: Task) -> Event:
        """Keep the finished runs of a task, and return its last event; "lost" if its process or machine was lost."""
        try:
            line, cells = ray.get(reference)
        except ray.exceptions.TaskCancelledError:
            return Event("stopped", task)
        except ray.exceptions.RayTaskError as error:
            why = f"{task.cell.title}: {type(error.cause).__name__}: {_first_line(error.cause)}"
            return Event("failed", task, failed=(why,))
        except ray.exceptions.RayError as error:
            why = (
                f"{task.cell.title}: its process was lost twice ({type(error).__name__}); its last checkpoint is kept."
            )
            return Event("lost", task, failed=(why,))
        for key, text in cells.items():
            self.store.put_text(key, text)
        return Event.decoded(line, task)


def run_there(
    order: str, number: int, version: str, work: str, threads: int, concurrent_tasks: int, rounds: Queue
) -> tuple[str, dict[str, str]]:
    """Run a task on a machine of the cluster; return its last event and, by key, the files of its runs."""
    task = Task.decoded(order)
    if version != __version__:
        why = f"{task.cell.title}: {platform.node()} has fedrema {__version__}, not {version}: install the same."
        return Event("failed", task, failed=(why,)).encoded(), {}
    torch.set_num_threads(threads)
    # Always the same folder: a task that returns to this machine continues from its checkpoints.
    folder = Path(tempfile.gettempdir()) / work
    with tempfile.TemporaryDirectory() as cells:
        runner = Runner(
            Store(Path(cells)),
            folder,
            reporting(lambda event: rounds.put_nowait((number, event.encoded())), [task]),
            concurrent_tasks,
        )
        try:
            event = run_task(runner, task)
        except (Interrupted, KeyboardInterrupt):  # the latter between rounds
            event = Event("stopped", task)
        kept = {file.stem: file.read_text(encoding="utf-8") for file in Path(cells).glob("*.json")}
    for key in kept:
        shutil.rmtree(folder / key, ignore_errors=True)
    return event.encoded(), kept


def _join(address: str | None) -> None:
    """Join a cluster, or start a Ray on this machine; its logs are not shown here."""
    own = {"include_dashboard": False, "object_store_memory": BYTES_FOR_OBJECTS}
    try:
        if address:
            named = urlsplit(address if "://" in address else f"//{address}")
            if named.port:  # Ray would try for minutes
                socket.create_connection((named.hostname, named.port), SECONDS_TO_ANSWER).close()
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a future change
        # "local": else it would join any cluster that it finds on this machine, named or not.
        where: dict[str, Any] = {"address": address} if address else {"address": "local", **own}
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"RAY_ADDRESS={address} cannot be joined" if address else "Ray cannot be started"
        raise BadInput(f"{what}: {_first_line(error)}.") from error


def _share(whole: float, number: int) -> float:
    """Return a share that Ray can reserve `number` times: rounded down."""
    return math.floor(STEPS * whole / number) / STEPS


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given").rstrip(".")
