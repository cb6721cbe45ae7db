"""Finished runs as small files: a summary, a curve, what it ran on. Folders of several machines can be merged."""

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.files import write_text
from fedrema.base.options import Purpose
from fedrema.config.settings import Settings
from fedrema.engine import REVISIONS, choose_device
from fedrema.errors import BadInput
from fedrema.experiments.matching import precision_and_recall, true_groups
from fedrema.runs.manifest import Inputs, read_object
from fedrema.runs.provenance import inputs_of, is_outdated, method_name, revisions_of
from fedrema.runs.run import Run

FORMAT = 2
NOT_OURS = "is not a finished run of fedrema"
CURVES = ("accuracy", "mean_gap", "gap_ratio", "set_sizes", "seconds")
"""What is kept of every round."""
SHOWN = (0.0, 0.1, 0.2, 0.3, 1.0)
"""How far a run has come when its similarities are kept: of 500 rounds the 1st, 50th, 100th, 150th and last."""
STARTING = 3
"""Rounds at the start of a run that may take longer than others."""
NOT_DEFINING = Settings.names(Purpose.OUTPUT, Purpose.PLACE, Purpose.COMPUTATION)
"""Settings that no result depends on."""
PARTS = ("method", "settings", "summary", "curves", "clients", "relations", "ran_on")


def key_of(settings: Settings, inputs: Inputs | None = None) -> str:
    """Return a name for everything that decides a run's result: its settings and seed, and the user's files.

    `inputs` are digests of those files; default: as they are now. Revisions of fedrema stand in the file of a cell, not
    in its name: a run of a later one takes its place.
    """
    flat = settings.flat()
    what = {name: value for name, value in flat.items() if name not in NOT_DEFINING}
    inputs = inputs_of(settings) if inputs is None else inputs
    content = [method_name(settings.method), sorted(what.items()), *([inputs] if inputs else [])]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Finished:
    """What is kept of a run."""

    method: str
    settings: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, list[Any]]
    """By name, one value per round; `round` itself is among them."""
    clients: dict[str, list[Any]]
    """`names`, `accuracy` (mean of the last five scored rounds; None: never scored), `groups` where dealt in groups."""
    relations: dict[str, Any]
    """Where they were recorded: `S` {round: [K][K]} of some rounds, `G` [K][K] as it ended, and `matching` {round,
    precision, recall}, lists over all recorded rounds."""
    ran_on: dict[str, Any]
    failed: str = ""
    """Why it did not come to its end, where it did not; the rest is empty then."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Of the method, and of the engine on the kind of device it ran on."""

    @property
    def outdated(self) -> bool:
        """Whether an older revision of fedrema computed it: it is shown, but does not count as finished."""
        return is_outdated(self.method, self.revisions)

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.settings["seed"])

    @property
    def seconds(self) -> float:
        """How long it took, as if every round had been like the later ones: the first compile and record programs."""
        rounds = self.curves.get("seconds", [])
        settled = rounds[STARTING:]
        if not settled:
            return float(sum(self.summary.get("seconds", {}).values()))
        return float(sum(settled) + (len(rounds) - len(settled)) * statistics.median(settled))


class Store:
    """A folder of finished runs, one file each, named by what decides the result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Path, tuple[int, Finished]] = {}
        """What has been read, and when it was written: after every cell all of it is asked for again."""

    def check(self) -> None:
        """Refuse a folder that another version has written, before any work."""
        for file in sorted(self.folder.glob("*.json")):
            found = read_object(file, NOT_OURS).get("format")
            if found != FORMAT:
                raise BadInput(
                    f"{file} has format {found!r}, and this version of fedrema reads {FORMAT}: choose another folder."
                )

    def find(self, settings: Settings) -> Finished | None:
        """Return a run that has ended, outdated or not, if it is here."""
        key = key_of(settings)
        return self.at(key) if self._file(key).is_file() else None

    def has(self, key: str) -> bool:
        """Tell whether the run of this key is here and not outdated."""
        return self._file(key).is_file() and not self.at(key).outdated

    def put(self, settings: Settings, run: Run, beside: int = 0, inputs: Inputs | None = None) -> Finished:
        """Keep a finished run, and how many others were played on its device at the same time.

        `inputs` are the digests that its name is made of; default: what the run itself recorded.
        """
        recorded = run.manifest.inputs
        curves = {"round": [record.round for record in run.rounds]}
        for name in CURVES:
            values = [record.quantity(name) for record in run.rounds]
            if any(value is not None for value in values):
                curves[name] = [_brief(value) for value in values]
        content = {
            "format": FORMAT,
            "method": run.method,
            "settings": {name: value for name, value in run.settings.items() if name not in ("out", "data-dir")},
            "summary": run.summary.as_json(),
            "curves": curves,
            "clients": _clients(run),
            "relations": _relations(run),
            "ran_on": {**run.config["ran_on"], "beside": beside},
            "revisions": run.manifest.revisions,
            "inputs": recorded,
        }
        return self._write(settings, content, recorded if inputs is None else inputs)

    def put_failed(self, settings: Settings, reason: str, inputs: Inputs | None = None) -> Finished:
        """Remember that a run cannot be finished, so that it is not tried again; remove its file to try."""
        kept = {name: value for name, value in settings.described().items() if name not in ("out", "data-dir")}
        empty: dict[str, Any] = {part: {} for part in PARTS}
        inputs = inputs_of(settings) if inputs is None else inputs
        known = {
            "method": method_name(settings.method),
            "settings": kept,
            "failed": reason,
            "revisions": revisions_of(settings.method, choose_device(settings.simulation.device).type),
            "inputs": inputs,
        }
        return self._write(settings, {"format": FORMAT, **empty, **known}, inputs)

    def _write(self, settings: Settings, content: dict[str, Any], inputs: Inputs) -> Finished:
        key = key_of(settings, inputs)
        write_text(self._file(key), json.dumps(content) + "\n")
        return self.at(key)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def keys(self) -> list[str]:
        """Return the keys of all runs that are here."""
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def __iter__(self) -> Iterator[Finished]:
        return map(self.at, self.keys())

    def at(self, key: str) -> Finished:
        """Return the run of a key."""
        file = self._file(key)
        try:
            written = file.stat().st_mtime_ns  # another process may have put a newer run in its place
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}.") from error
        known = self._known.get(file)
        if known is None or known[0] != written:
            known = self._known[file] = written, _finished(read_object(file, NOT_OURS))
        return known[1]


def _brief(value: Any, digits: int = 5) -> Any:
    """Return a number with few digits; of a list its mean, of parts their sum: curves are for looking at."""
    if isinstance(value, dict):
        value = sum(value.values())
    if isinstance(value, list):
        value = sum(value) / len(value) if value else None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _clients(run: Run) -> dict[str, list[Any]]:
    last = [clients for record in run.rounds if (clients := record.client_accuracy)][-5:]
    columns = [[value for value in column if value is not None] for column in zip(*last, strict=True)]
    groups = true_groups(run.settings, len(run.names))
    return {
        "names": run.names,
        "accuracy": [_brief(column) for column in columns],
        **({"groups": groups} if groups else {}),
    }


def _relations(run: Run) -> dict[str, Any]:
    found = run.relations()
    if not found:
        return {}
    last = max(found)
    wanted = {min(found, key=lambda number: abs(number - share * last)) for share in SHOWN}
    kept: dict[str, Any] = {"S": {str(number): _matrix(found[number]["S"]) for number in sorted(wanted)}}
    if "G" in found[last]:
        kept["G"] = _matrix(found[last]["G"])
    groups = true_groups(run.settings, len(run.names))
    if groups:
        pairs = [precision_and_recall(found[number]["S"], groups) for number in sorted(found)]
        columns = zip(("precision", "recall"), zip(*pairs, strict=True), strict=True)
        kept["matching"] = {
            "round": sorted(found),
            **{name: [_brief(value) for value in values] for name, values in columns},
        }
    return kept


def _matrix(values: np.ndarray) -> list[list[float | None]]:
    """Return rows with three digits; None where a client was absent."""
    return [[None if np.isnan(value) else _brief(float(value), 3) for value in row] for row in values]


def _finished(content: dict[str, Any]) -> Finished:
    parts = {part: content[part] for part in PARTS}
    return Finished(**parts, failed=content.get("failed", ""), revisions=_recorded_revisions(content))


def _recorded_revisions(content: dict[str, Any]) -> dict[str, int]:
    """Return the revisions that the file of a cell names; 1 where it is older than they are."""
    found = content.get("revisions")
    if isinstance(found, dict) and all(isinstance(number, int) for number in found.values()):
        return {name: number for name, number in found.items() if name == "method" or name in REVISIONS}
    device = content.get("ran_on", {}).get("device")
    return {"method": 1, **({} if device is None else {"cpu" if device == "cpu" else "cuda": 1})}
