"""`fedrema run` on several GPUs: each GPU has a worker process that runs one group of seeds after the other."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedrema.base.terminal import print_safe
from fedrema.config.settings import Settings, make_settings
from fedrema.errors import Diverged, FedremaError
from fedrema.runs.execute import Interrupted
from fedrema.runs.execute_many import split_groups
from fedrema.runs.provenance import method_name
from fedrema.runs.run import Run, is_finished
from fedrema.runs.worker_pool import WorkerPool, gpu_names

Group = list[Settings]
"""Runs that differ only in their seed."""


class GroupMessage(msgspec.Struct, frozen=True):
    """A group as it is sent to a worker."""

    method: str
    values: dict[str, Any]
    """The settings by name, as JSON has them."""
    seeds: list[int]
    folders: list[str]


def devices_for(settings: Settings) -> list[str]:
    """Return the names of the GPUs over which runs can be distributed; empty on a CPU."""
    return gpu_names(settings.simulation.device)


def run_on_gpus(groups: Sequence[Group], devices: Sequence[str]) -> tuple[list[Run], list[str], bool]:
    """Run groups on devices; return the finished runs, error messages, and whether a stop was requested."""
    waiting = iter(split_groups(groups, len(devices)))
    pool: WorkerPool[Group] = WorkerPool("fedrema.cli.multi_gpu:run_group", (), devices)
    failed: list[str] = []
    stopped = False
    try:
        for reply in pool.run(lambda: next(waiting, None), encoded):
            if reply.kind == "finished":
                failed += msgspec.json.decode(reply.text, type=list[str])
            elif reply.kind == "lost":
                folder = reply.job[0].output.folder
                failed.append(f"{folder}: its process ended with code {reply.code}; its last checkpoint is kept.")
    except Interrupted:
        failed, stopped = [], True
    for sentence in failed:
        print_safe(f"fedrema: {sentence}", file=sys.stderr, flush=True)
    folders = [settings.output.folder for group in groups for settings in group]
    return [Run(folder) for folder in folders if is_finished(folder)], failed, stopped


def encoded(group: Group) -> str:
    """Return a group as JSON."""
    values = {name: value for name, value in group[0].flat().items() if name not in ("config", "paper", "tuned")}
    seeds, folders = zip(*((each.simulation.seed, str(each.output.folder)) for each in group), strict=True)
    return msgspec.json.encode(GroupMessage(method_name(group[0].method), values, list(seeds), list(folders))).decode()


def decoded(message: str) -> Group:
    """Return the group that `encoded` described."""
    found = msgspec.json.decode(message, type=GroupMessage)
    settings = make_settings(found.method, found.values, plain=True)
    pairs = zip(found.seeds, found.folders, strict=True)
    return [settings.seeded(seed).placed(Path(folder)) for seed, folder in pairs]


def run_group(message: str, report: Callable[[str], None]) -> str:
    """Run a group in a worker process; return a JSON list of sentences about the runs that failed."""
    from fedrema.cli.run import execute_group
    from fedrema.reporting.progress import RunProgress, Watch, label_of

    group = decoded(message)
    failed = []
    with RunProgress(group[0].output.quiet) as progress:

        def callback_for(settings: Settings) -> Watch:
            return progress.watch(label_of(settings), settings.simulation.rounds, settings.method.reports.period)

        try:
            for settings, outcome in execute_group(group, callback_for, progress):
                if isinstance(outcome, Diverged):
                    failed.append(f"{label_of(settings)}: {outcome}")
        except FedremaError as error:
            failed.append(f"{label_of(group[0])}: {error}")
    return msgspec.json.encode(failed).decode()
