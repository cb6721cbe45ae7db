"""fedrema resume."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.cli.arguments import parse_arguments, positional

if TYPE_CHECKING:
    from fedrema.config.settings import Settings
    from fedrema.reporting.progress import RunProgress
    from fedrema.runs.callbacks import CallbackFor
    from fedrema.runs.execute_many import Outcome


@dataclasses.dataclass(frozen=True)
class Resume:
    """Resume a run from its last checkpoint, or extend a finished one with --rounds.

    On a CPU, the results are bit-identical to those of an uninterrupted run.

    In a folder that contains several runs all of them are resumed, and those that had not started yet are run.
    """

    dir: Path = positional()
    """The folder of a run, or one that contains runs."""
    rounds: int | None = None
    """Train up to this round instead of the original number of rounds."""
    data_dir: Path | None = None
    """Folder of the datasets, if they have moved."""
    device: str | None = None
    """Where to train, if not on the same device as before: auto, cpu or cuda."""
    trust_code: bool = False
    """Import your own method, network or data function that the run names, although it comes from another user or
    machine. Read that code first."""
    quiet: bool = False
    """Show no progress and no results, and write no report."""
    open: bool = False
    """Open the report in the browser at the end."""


def resume(arguments: list[str]) -> int:
    """Resume a run, or all runs in a folder."""
    args = parse_arguments(Resume, arguments, "fedrema resume")
    from fedrema.cli.run import follow
    from fedrema.reporting.trackers import open_trackers
    from fedrema.runs.directory import RunDirectory
    from fedrema.runs.execute_many import execute_all
    from fedrema.runs.run_list import runs_in

    changes = {name: getattr(args, name) for name in ("rounds", "data_dir", "device")}
    wanted = runs_in(args.dir, changes, trust=args.trust_code)
    for settings in wanted:
        RunDirectory(settings.output.folder).lock().check()

    def outcomes(watching: "CallbackFor", progress: "RunProgress") -> Iterator[tuple["Settings", "Outcome"]]:
        return execute_all(wanted, watching, resume=True, changes=changes, observers=[open_trackers])

    return follow(outcomes, wanted, args.dir, args.quiet, args.open, resumed=True)
