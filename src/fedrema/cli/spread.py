"""Several GPUs of one machine: each plays one run after the other, in a process of its own."""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch

from fedrema.config.settings import Settings, as_arguments
from fedrema.runs.joint import split_groups
from fedrema.runs.provenance import method_name
from fedrema.runs.run import Run, is_finished
from fedrema.runs.signals import stopping_gently

Group = list[Settings]
"""Runs that differ only in their seed, which follow each other."""


def devices_for(settings: Settings) -> list[str]:
    """Return the names of the GPUs that runs can be spread over; none where they are to stay on a CPU."""
    return devices_named(settings.simulation.device)


def devices_named(device: str) -> list[str]:
    """Return the names of the GPUs that there are, as CUDA_VISIBLE_DEVICES takes them; none for a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def spread(groups: Sequence[Group], devices: Sequence[str]) -> tuple[list[Run], list[str], bool]:
    """Play groups on devices; returns finished runs, what went wrong, and whether someone asked to stop."""
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in split_groups(groups, len(devices)):
        waiting.put(group)
    running: list[subprocess.Popen[str]] = []
    complaints: list[str] = []

    with stopping_gently() as request:

        def serve(device: str) -> None:
            with contextlib.suppress(queue.Empty):
                while not request.asked:
                    group = waiting.get_nowait()
                    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
                    with subprocess.Popen(
                        command(group), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
                    ) as process:
                        running.append(process)
                        assert process.stderr is not None
                        for line in process.stderr:
                            print(line, end="", file=sys.stderr, flush=True)
                            if line.startswith("fedrema:"):
                                complaints.append(line.rstrip())

        threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in devices]
        for thread in threads:
            thread.start()
        told = False
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if request.asked and not told:  # Ctrl-C reaches all processes by itself, SIGTERM only this one
                    told = True
                    for process in running:
                        if process.poll() is None:
                            process.send_signal(signal.SIGTERM)
        stopped = request.asked
    folders = [settings.output.folder for group in groups for settings in group]
    done = [Run(folder) for folder in folders if is_finished(folder)]
    return done, [] if stopped else complaints, stopped


def command(group: Group) -> list[str]:
    """Return the command that plays a group."""
    first = group[0]
    folder = first.output.folder
    several = first.output.seeds > 1
    output = dataclasses.replace(
        first.output, seeds=len(group) if several else 1, config=None, paper=None, tuned=None, quiet=False, open=False
    )
    settings = dataclasses.replace(first, output=output).flat()
    settings["out"] = str(folder.parent if several and len(group) > 1 else folder)
    return [sys.executable, "-m", "fedrema", "run", method_name(first.method), *as_arguments(settings)]
