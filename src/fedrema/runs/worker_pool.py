"""Runs jobs in worker processes of this machine, one or more for each device, for grids and runs on several GPUs."""

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from fedrema.base.processes import SupervisedProcess
from fedrema.base.terminal import print_safe
from fedrema.runs.execute import Interrupted
from fedrema.runs.signals import graceful_stop

SECONDS_BETWEEN_CHECKS = 0.2

Job = TypeVar("Job")


@dataclass(frozen=True)
class Reply(Generic[Job]):
    """A message of a worker about a job, or that the worker has exited."""

    job: Job
    kind: Literal["started", "report", "finished", "lost"]
    text: str = ""
    """What the handler reported (report) or returned (finished)."""
    code: int = 0
    """Exit code of a worker that was lost."""


class WorkerPool(Generic[Job]):
    """Distributes jobs over worker processes; a worker that exits is replaced for the next job.

    Parameters
    ----------
    handler
        `module:function` that a worker calls for each job as `function(job, report, *arguments)`; it returns a text.
    arguments
        More arguments of the handler, as text.
    devices
        Names of GPUs as CUDA_VISIBLE_DEVICES accepts them, one for each worker; "" for a CPU.
    """

    def __init__(self, handler: str, arguments: Sequence[str], devices: Sequence[str]) -> None:
        self.handler, self.arguments, self.devices = handler, list(arguments), list(devices)

    def run(self, next_job: Callable[[], Job | None], encoded: Callable[[Job], str]) -> Iterator[Reply[Job]]:
        """Run jobs until `next_job` returns None, and yield what happens to them.

        On SIGTERM and Ctrl-C the workers save and exit.

        Raises
        ------
        Interrupted
            When a stop was requested, after all workers have exited.
        """
        choosing = threading.Lock()
        replies: queue.SimpleQueue[Reply[Job] | None] = queue.SimpleQueue()
        started: list[SupervisedProcess] = []

        def choose() -> Job | None:
            with choosing:
                return None if request.made else next_job()

        def serve(device: str) -> None:
            worker = None
            try:
                while (job := choose()) is not None:
                    if worker is None:
                        worker = self._start(device)
                        started.append(worker)
                    replies.put(Reply(job, "started"))
                    if not _follow(worker, job, encoded(job), replies.put):
                        worker = None
            finally:
                if worker is not None:
                    worker.finish()
                replies.put(None)

        with graceful_stop() as request:
            threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in self.devices]
            for thread in threads:
                thread.start()
            serving, stopped = len(threads), 0
            while serving:
                with contextlib.suppress(queue.Empty):
                    reply = replies.get(timeout=SECONDS_BETWEEN_CHECKS)
                    if reply is None:
                        serving -= 1
                    else:
                        yield reply
                if request.made:
                    for worker in started[stopped:]:  # including workers that were just being started
                        worker.request_stop()
                        stopped += 1
            if request.made:
                raise Interrupted("Stopped.")

    def _start(self, device: str) -> SupervisedProcess:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        if not device:  # several workers on a CPU share its cores
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(self.devices))))
        command = [sys.executable, "-m", "fedrema.runs.worker", self.handler, *self.arguments]
        worker = SupervisedProcess("worker", command, environment, forward=_forward, pipes=True)
        worker.start()
        return worker


def _forward(line: str) -> None:
    print_safe(line, file=sys.stderr, flush=True)


def _follow(worker: SupervisedProcess, job: Job, encoded: str, put: Callable[[Reply[Job]], None]) -> bool:
    """Send a worker a job and forward its replies; return whether the worker can run another job."""
    worker.send(encoded)
    for line in worker.received():
        reply = json.loads(line)
        put(Reply(job, "finished" if reply["finished"] else "report", reply["text"]))
        if reply["finished"]:
            return True
    put(Reply(job, "lost", code=worker.finish()))
    return False


def gpu_names(device: str) -> list[str]:
    """Return the names of this machine's GPUs, as CUDA_VISIBLE_DEVICES accepts them; empty for `cpu`."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
