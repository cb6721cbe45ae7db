"""Several runs that one command started: which ones they are, so that all of them can be resumed.

`runs.json` in their common folder lists every run with its method and settings, also those that have not begun. It is
deleted when all of them have finished.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedrema.base.files import write_text
from fedrema.config.settings import Settings, as_arguments, parse_settings
from fedrema.data import Federation
from fedrema.errors import BadInput, Diverged
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.checksums import sealed, unsealed
from fedrema.runs.directory import FEDERATION_FILE, RunDirectory, find_runs, read_object
from fedrema.runs.execute import Prepared, Watcher, begin_on, take_up
from fedrema.runs.joint import Outcome, Watching, play_seeds, seeds_apart
from fedrema.runs.manifest import default_folder, method_name, saved_settings
from fedrema.runs.run import Run, is_finished

SERIES_FILE = "runs.json"
DAMAGE = "remove it; fedrema resume then continues the runs that had begun"


def write_series(folder: Path, wanted: Sequence[Settings], federation: Federation | None = None) -> None:
    """List runs before the first of them begins; a federation that came from Python is saved with the list.

    A list of other runs that have not finished is not replaced: without it they could not all be resumed.
    """
    file, mine = folder / SERIES_FILE, {settings.output.folder for settings in wanted}
    if file.exists() and not all(run in mine or is_finished(run) for run in _folders(file)):
        raise BadInput(
            f"{file} lists runs of an earlier command that are unfinished: continue them with fedrema resume {folder},"
            " choose another folder, or remove the list."
        )
    runs = [
        {
            "folder": settings.output.folder.relative_to(folder).as_posix(),
            "method": method_name(settings.method),
            "settings": dataclasses.replace(
                settings, output=dataclasses.replace(settings.output, out=None, config=None, paper=None, tuned=None)
            ).flat(),
        }
        for settings in wanted
    ]
    if federation is not None:
        federation.save(folder / FEDERATION_FILE)
    content = {"runs": runs, "federation": federation is not None}
    write_text(file, json.dumps(sealed(content), indent=2) + "\n")


def runs_in(folder: Path, arguments: tuple[str, ...] = (), own_module: bool = False) -> list[Settings]:
    """Return the settings of the run in a folder, or of all runs below it, also of those that have not begun.

    `arguments` change settings of all of them; `own_module` says that the network is given in Python.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not the folder of a run, nor one that holds runs: there is no such folder.")
    itself = RunDirectory(folder)
    if itself.config_file.exists() or itself.looks_like_run():
        return [saved_settings(RunDirectory.open(folder), arguments, own_module).placed(folder)]
    wanted: dict[Path, Settings] = {}
    for file in sorted(folder.rglob(SERIES_FILE)):
        wanted |= _listed(file, arguments)
    begun = [place for place in wanted if RunDirectory(place).config_file.exists()] if wanted else find_runs([folder])
    for place in begun:
        wanted[place] = saved_settings(RunDirectory.open(place), arguments, own_module)
    return [settings.placed(place) for place, settings in sorted(wanted.items())]


def _read(file: Path) -> dict[str, Any]:
    return unsealed(read_object(file, "cannot be read", DAMAGE), file, remedy=DAMAGE)


def _folders(file: Path) -> list[Path]:
    """Return the folders of the runs in a list; one that leads out of the list's own folder is left out."""
    try:
        places = [Path(run["folder"]) for run in _read(file)["runs"]]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{file} does not list runs: {DAMAGE}.") from error
    return [file.parent / place for place in places if not place.is_absolute() and ".." not in place.parts]


def _listed(file: Path, arguments: Sequence[str]) -> dict[Path, Settings]:
    content, inside = _read(file), set(_folders(file))
    saved = ("--federation", str(file.parent / FEDERATION_FILE)) if content.get("federation") else ()
    try:
        return {
            folder: parse_settings(run["method"], [*as_arguments(run["settings"]), *saved, *arguments])
            for run in content["runs"]
            if (folder := file.parent / run["folder"]) in inside
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} does not list runs: {DAMAGE}.") from error


def end_series(folder: Path, runs: Sequence[Path]) -> None:
    """Delete the lists that name some of these runs, in a folder or below it, if all runs they name have finished."""
    for parent in {parent for run in runs for parent in run.parents if parent.is_relative_to(folder)}:
        file = parent / SERIES_FILE
        if file.exists() and all(is_finished(run) for run in _folders(file)):
            if _read(file).get("federation"):
                (parent / FEDERATION_FILE).unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def resume_series(
    wanted: Sequence[Settings],
    watching: Watching,
    arguments: tuple[str, ...] = (),
    module: nn.Module | None = None,
) -> Iterator[tuple[Settings, Outcome]]:
    """Resume the runs that have begun and start the others; seeds of one setting train jointly where possible.

    Raises
    ------
    Interrupted
        When someone asked to stop; every run that was going on has been saved.
    """

    def prepare(settings: Settings, federation: Federation) -> Prepared:
        folder, own = settings.output.folder, copy.deepcopy(module)
        if RunDirectory(folder).is_run():
            return take_up(folder, arguments, own, federation)
        # A federation that was given in Python lies beside the list only as long as the list does.
        file = Path(settings.data.federation or "")
        given = file.name == FEDERATION_FILE and (file.parent / SERIES_FILE).exists()
        return begin_on(settings, federation, own, save_federation=given)

    for group in seeds_apart(wanted):
        yield from play_seeds(group, watching, prepare)


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
    """Refuse folders that are taken or in use before the first run begins."""
    for settings in wanted:
        directory = RunDirectory(settings.output.folder)
        directory.check_free(settings.output.overwrite)
        directory.lock().check()


def execute_seeds(
    settings: Settings, federation: Federation | None, module: nn.Module | None, watch: Watcher | None
) -> list[Run]:
    """Run all training seeds of some settings."""
    out = settings.output.out or default_folder(settings)
    wanted = seeds_of(settings.placed(out))
    check_folders(wanted)
    if len(wanted) > 1:
        write_series(out, wanted, federation)

    def prepare(each: Settings, data: Federation) -> Prepared:
        return begin_on(each, data, copy.deepcopy(module), save_federation=federation is not None)

    return _collect(play_seeds(wanted, _with(watch), prepare, federation), wanted, out)


def resume_runs(folder: Path, arguments: tuple[str, ...], module: nn.Module | None, watch: Watcher | None) -> list[Run]:
    """Resume all runs in a folder."""
    wanted = runs_in(folder, arguments, module is not None)
    return _collect(resume_series(wanted, _with(watch), arguments, module), wanted, folder)


def _with(watch: Watcher | None) -> Watching:
    def watching(settings: Settings) -> Watcher:
        return watch or (lambda finished: None)

    return watching


def _collect(outcomes: Iterator[tuple[Settings, Outcome]], wanted: Sequence[Settings], folder: Path) -> list[Run]:
    """Return the runs in the order of their settings; where one diverged, raise after all others have finished."""
    found = [outcome for _, outcome in outcomes]
    end_series(folder, [settings.output.folder for settings in wanted])
    for outcome in found:
        if isinstance(outcome, Diverged):
            raise outcome
    return [Run(settings.output.folder) for settings in wanted]
