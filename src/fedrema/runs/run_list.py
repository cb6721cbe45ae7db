"""Several runs that one command started, listed so that all of them can be resumed.

`runs.json` in their common folder lists every run with its method and settings, also those that have not started. It
is deleted when all of them have finished.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from torch import nn

from fedrema.base.files import write_text
from fedrema.config.presets import PlainValue
from fedrema.config.settings import Settings
from fedrema.data import Federation
from fedrema.errors import BadInput, Diverged
from fedrema.runs.callbacks import CallbackFor
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.checksums import checksum_of, verified, with_checksum
from fedrema.runs.directory import FEDERATION_FILE, RUN_LIST_FILE, RunDirectory, find_runs
from fedrema.runs.execute import ObserverFactory
from fedrema.runs.execute_many import Outcome, check_all, execute_all
from fedrema.runs.manifest import read_object
from fedrema.runs.provenance import method_name
from fedrema.runs.run import Run, is_finished
from fedrema.runs.saved_settings import Changes, changed_settings, default_folder, saved_settings
from fedrema.runs.trust import Trust, check_code, marks_of, named_code

IF_DAMAGED = "remove it; fedrema resume then resumes the runs that had been started"


@dataclasses.dataclass(frozen=True)
class ListedRun:
    """A run in runs.json."""

    folder: str
    """Relative to the list."""
    method: str
    settings: dict[str, PlainValue]
    marks: dict[str, str] = dataclasses.field(default_factory=dict)
    """What shows that this user has given the code that the settings name."""

    @property
    def identity(self) -> str:
        """A digest of the method and the settings, which the marks are for."""
        return checksum_of(json.dumps([self.folder, self.method, self.settings]))

    @property
    def code(self) -> dict[str, str]:
        """The code that the settings name, by kind."""
        return named_code(self.method, self.settings)


@dataclasses.dataclass(frozen=True)
class RunList:
    """The content of runs.json."""

    runs: list[ListedRun]
    federation: bool = False
    """Whether a federation that was given in Python is saved next to the list."""

    @classmethod
    def read(cls, file: Path) -> "RunList":
        """Read a list; runs outside its own folder are ignored."""
        content = verified(read_object(file, "cannot be read", IF_DAMAGED), file, remedy=IF_DAMAGED)
        try:
            found = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise BadInput(f"{file} does not list runs: {IF_DAMAGED}.") from error
        places = [Path(run.folder) for run in found.runs]
        inside = [not place.is_absolute() and ".." not in place.parts for place in places]
        return dataclasses.replace(found, runs=list(itertools.compress(found.runs, inside)))


def write_run_list(folder: Path, wanted: Sequence[Settings], federation: Federation | None = None) -> None:
    """List runs before the first of them starts; a federation that was given in Python is saved with the list.

    A list of other runs that have not finished is not replaced: without it they could not all be resumed.
    """
    file, mine = folder / RUN_LIST_FILE, {settings.output.folder for settings in wanted}
    if file.exists() and not all(run in mine or is_finished(run) for run in _folders(file)):
        raise BadInput(
            f"{file} lists runs of an earlier command that are unfinished: resume them with fedrema resume {folder},"
            " choose another folder, or remove the list."
        )
    runs = [
        ListedRun(
            settings.output.folder.relative_to(folder).as_posix(),
            method_name(settings.method),
            dataclasses.replace(
                settings, output=dataclasses.replace(settings.output, out=None, config=None, paper=None, tuned=None)
            ).flat(),
        )
        for settings in wanted
    ]
    if federation is not None:
        federation.save(folder / FEDERATION_FILE)
    runs = [dataclasses.replace(run, marks=marks_of(run.identity, run.code)) for run in runs]
    content: dict[str, object] = msgspec.to_builtins(RunList(runs, federation is not None))
    write_text(file, json.dumps(with_checksum(content), indent=2) + "\n")


def runs_in(
    folder: Path, changes: Changes | None = None, own_module: bool = False, trust: Trust = False
) -> list[Settings]:
    """Return the settings of the run in a folder, or of all runs below it, including those that have not started.

    `changes` replace saved settings of all of them; `own_module`: the network is given in Python; `trust`: which code
    may be imported without a mark of this user.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} does not exist: name the folder of a run, or one that holds runs.")
    itself = RunDirectory(folder)
    if itself.config_file.exists() or itself.looks_like_run():
        return [saved_settings(RunDirectory.open(folder), changes, own_module, trust, resuming=True)]
    wanted: dict[Path, Settings] = {}
    for file in sorted(folder.rglob(RUN_LIST_FILE)):
        wanted |= _listed(file, changes, trust)
    started = [place for place in wanted if RunDirectory(place).config_file.exists()] if wanted else find_runs([folder])
    for place in started:
        wanted[place] = saved_settings(RunDirectory.open(place), changes, own_module, trust, resuming=True)
    return [settings.placed(place) for place, settings in sorted(wanted.items())]


def _folders(file: Path) -> list[Path]:
    return [file.parent / run.folder for run in RunList.read(file).runs]


def _listed(file: Path, changes: Changes | None, trust: Trust) -> dict[Path, Settings]:
    series = RunList.read(file)
    for run in series.runs:
        check_code(file, run.identity, run.code, run.marks, {}, trust)
    saved = {"federation": str(file.parent / FEDERATION_FILE)} if series.federation else {}
    return {
        file.parent / run.folder: changed_settings(run.method, {**run.settings, **saved}, changes)
        for run in series.runs
    }


def remove_finished_lists(folder: Path, runs: Sequence[Path]) -> None:
    """Delete the lists that name some of these runs, in a folder or below it, if all runs they name have finished."""
    for parent in {parent for run in runs for parent in run.parents if parent.is_relative_to(folder)}:
        file = parent / RUN_LIST_FILE
        if file.exists() and all(is_finished(run) for run in _folders(file)):
            if RunList.read(file).federation:
                (parent / FEDERATION_FILE).unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def reached_round(folder: Path) -> int:
    """Return the round of a run's checkpoint; 0 where there is none yet."""
    file = RunDirectory(folder).checkpoint_file
    return int(read_checkpoint(file, wanted=())[0]["round"]) if file.parent.exists() else 0


def seeds_of(settings: Settings) -> list[Settings]:
    """Return one set of settings per training seed; several seeds get a folder each inside --out."""
    out = settings.output.folder
    first, count = settings.simulation.seed, settings.output.seeds
    if count == 1:
        return [settings]
    return [settings.seeded(seed).placed(out / f"seed-{seed}") for seed in range(first, first + count)]


def check_folders(wanted: Sequence[Settings]) -> None:
    """Refuse folders that are taken or in use before the first run starts."""
    for settings in wanted:
        directory = RunDirectory(settings.output.folder)
        directory.check_free(settings.output.overwrite)
        directory.lock().check()


def execute_seeds(
    settings: Settings,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watching: CallbackFor | None = None,
    observers: Sequence[ObserverFactory] = (),
) -> list[Run]:
    """Execute new runs with all training seeds of the settings, to the last round."""
    out = settings.output.out or default_folder(settings)
    wanted = seeds_of(settings.placed(out))
    check_folders(wanted)
    built = check_all(wanted, federation, module)
    if len(wanted) > 1:
        write_run_list(out, wanted, federation)
    outcomes = execute_all(wanted, watching, federation=federation, module=module, observers=observers, built=built)
    return _collect(outcomes, wanted, out)


def resume_listed(
    folder: Path,
    changes: Changes | None = None,
    module: nn.Module | None = None,
    watching: CallbackFor | None = None,
    observers: Sequence[ObserverFactory] = (),
    trust: Trust = False,
) -> list[Run]:
    """Continue all runs in a folder, and start those of its list that have not started."""
    wanted = runs_in(folder, changes, module is not None, trust)
    outcomes = execute_all(wanted, watching, resume=True, changes=changes, module=module, observers=observers)
    return _collect(outcomes, wanted, folder)


def _collect(outcomes: Iterator[tuple[Settings, Outcome]], wanted: Sequence[Settings], folder: Path) -> list[Run]:
    """Return the runs in the order of their settings; where one diverged, raise after all others have finished."""
    found = [outcome for _, outcome in outcomes]
    remove_finished_lists(folder, [settings.output.folder for settings in wanted])
    for outcome in found:
        if isinstance(outcome, Diverged):
            raise outcome
    return [Run(settings.output.folder) for settings in wanted]
