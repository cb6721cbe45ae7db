"""Measures a deployment from outside: CPU time and memory of its processes, and the parts of its rounds.

The times of a round come from the audit logs of the server and the nodes, which have a resolution of a millisecond.
"""

import collections
import itertools
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from fedrema.deploy.audit import Event, verify

SECONDS_BETWEEN_SAMPLES = 0.1
KINDS = {
    "flower_superlink": "SuperLink",
    "flwr-serverapp": "server's app",
    "flower-superexec": "SuperExec",
    "deploy server": "server's command",
    "flower_supernode": "SuperNodes",
    "flower_executor": "executors",
    "deploy client": "nodes' commands",
}
"""Names of processes, by words of their command lines; the first match counts."""


class Usage:
    """Samples the CPU time and the memory of all descendants of a process, by kind, until the block ends."""

    def __init__(self, pid: int, kinds: Mapping[str, str] = KINDS) -> None:
        self.root, self.kinds = psutil.Process(pid), kinds
        self.known: dict[psutil.Process, str] = {}
        self.used: dict[psutil.Process, float] = {}
        self.samples: list[tuple[float, dict[str, float]]] = []
        """Wall-clock time, and CPU seconds since the start by kind."""
        self.memory: dict[str, int] = collections.defaultdict(int)
        """Largest memory of all processes of a kind together, in bytes."""
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Usage":
        self.thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(SECONDS_BETWEEN_SAMPLES):
            self._sample()

    def _sample(self) -> None:
        try:
            processes = self.root.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        memory: dict[str, int] = collections.defaultdict(int)
        for process in processes:
            try:
                # Not only once: a process has the command line of its parent until it starts its program.
                kind = self._kind(process) or self.known.get(process)
                if kind:
                    self.known[process] = kind
                    times = process.cpu_times()
                    self.used[process] = times.user + times.system
                    memory[kind] += process.memory_info().rss
            except psutil.Error:
                continue
        total: dict[str, float] = collections.defaultdict(float)
        for process, seconds in self.used.items():
            total[self.known[process]] += seconds
        self.samples.append((time.time(), dict(total)))
        for kind, size in memory.items():
            self.memory[kind] = max(self.memory[kind], size)

    def _kind(self, process: psutil.Process) -> str:
        line = " ".join(process.cmdline())
        return next((kind for words, kind in self.kinds.items() if words in line), "")

    def between(self, start: float, end: float) -> dict[str, float]:
        """Return the CPU seconds of each kind between two times."""
        first = [used for moment, used in self.samples if moment <= start][-1:] or [{}]
        last = [used for moment, used in self.samples if moment <= end][-1:] or [{}]
        return {kind: last[0].get(kind, 0.0) - first[0].get(kind, 0.0) for kind in last[0]}


@dataclass(frozen=True)
class Round:
    """The times of a round: when its requests were sent, and how long its parts took."""

    start: float
    delivery: float
    """Until the last node has received its request."""
    training: float
    """Longest time from a node's request to its reply."""
    collection: float
    """From the last reply of a node until the server has all of them."""
    aggregation: float
    """From then until the requests of the next round are sent, with the stages of secure aggregation."""
    total: float

    @property
    def overhead(self) -> float:
        """Everything except for training."""
        return self.total - self.training


def rounds_of(federation: Path) -> list[Round]:
    """Return the rounds of a federation between the first and the last one, from the audit logs of this machine."""
    server = _times(federation / "server")
    nodes = [_times(folder) for folder in sorted((federation / "nodes").iterdir())]
    numbers = sorted({number for what, number in server if what == Event.REQUEST_SENT})
    found = []
    for number, following in itertools.pairwise(numbers):
        start, end = server[Event.REQUEST_SENT, number][0], server[Event.REQUEST_SENT, following][0]
        asked_nodes = [times for times in nodes if times[Event.REQUEST_RECEIVED, number]]
        arrived = server[Event.REPLY_RECEIVED, number]
        if not arrived or not all(times[Event.REPLY_SENT, number] for times in asked_nodes):
            continue
        sent = [times[Event.REPLY_SENT, number][-1] for times in asked_nodes]
        # The requests after a node's reply belong to secure aggregation.
        asked = [
            max(time for time in times[Event.REQUEST_RECEIVED, number] if time <= reply)
            for times, reply in zip(asked_nodes, sent, strict=True)
        ]
        training = max(reply - request for request, reply in zip(asked, sent, strict=True))
        found.append(
            Round(start, max(asked) - start, training, arrived[-1] - max(sent), end - arrived[-1], end - start)
        )
    return found[1:]


def _times(folder: Path) -> dict[tuple[Event, int], list[float]]:
    times: dict[tuple[Event, int], list[float]] = collections.defaultdict(list)
    for line in verify(folder)[0]:
        if line.entry.round is not None:
            times[line.entry.what, line.entry.round].append(datetime.fromisoformat(line.time).timestamp())
    return times


def described(rounds: Sequence[Round], usage: Usage) -> str:
    """Return the median times of rounds and the CPU time of each kind of process, as lines of text."""
    if not rounds:
        return "no complete round"
    median = {
        name: statistics.median(getattr(each, name) for each in rounds)
        for name in ("total", "overhead", "delivery", "training", "collection", "aggregation")
    }
    longest = max(each.total for each in rounds)
    used = usage.between(rounds[0].start, rounds[-1].start + rounds[-1].total)
    cpu = {kind: seconds / len(rounds) for kind, seconds in used.items()}
    lines = [
        f"{len(rounds)} rounds: median {median['total']:.2f} s, longest {longest:.2f} s;"
        f" beyond training {median['overhead']:.2f} s",
        ", ".join(f"{name} {median[name]:.2f} s" for name in ("delivery", "training", "collection", "aggregation")),
        f"CPU seconds per round: {sum(cpu.values()):.2f}"
        f" ({', '.join(f'{kind} {seconds:.2f}' for kind, seconds in cpu.items())})",
        f"largest memory in MB: {', '.join(f'{kind} {size / 1e6:.0f}' for kind, size in usage.memory.items())}",
    ]
    return "\n".join(lines)
