"""Several runs on one GPU that take turns: while one waits for the GPU, another one uses the CPU.

Each run has a thread and a CUDA stream of its own. Only one thread runs at a time, because parts of PyTorch's state,
such as the permission to use TF32, belong to the whole process. It passes its turn on where it waits for the GPU
(`wait`). Every run computes exactly what it would compute alone.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

_thread = threading.local()


class Turns:
    """A lock that threads receive in the order in which they asked for it; `threading.Lock` promises no order."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """A held lock of each waiting thread; releasing it gives that thread the turn."""
        self._taken = False

    def __enter__(self) -> None:
        """Wait for the turn."""
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        """Pass the turn to the thread that has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


def wait(device: torch.device) -> None:
    """Wait until a GPU has computed what this thread requested; let other runs use the CPU meanwhile."""
    turns: Turns | None = getattr(_thread, "turns", None)
    done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    if turns is not None:
        turns.__exit__()
    try:
        if done is not None:
            done.synchronize()
    finally:
        if turns is not None:
            turns.__enter__()


def run_in_turns(jobs: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Call functions that take turns; return their results, or the errors they raised."""
    turns = Turns()
    results: list[Any] = [None] * len(jobs)

    def run_job(number: int) -> None:
        with turns, _own_stream(device):
            _thread.turns = turns
            try:
                results[number] = jobs[number]()
            except BaseException as error:  # raised again in the caller's thread
                results[number] = error

    _finish(device)  # what the caller has prepared, in its own stream
    run_threads([partial(run_job, number) for number in range(len(jobs))])
    _finish(device)
    return results


def run_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Call functions in a thread each, and wait for all."""
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # with a timeout, because a join without one blocks Ctrl-C
            thread.join(0.2)


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # not annotated in torch


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
