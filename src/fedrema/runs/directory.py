"""The folder of a run: what is in it, and how it is read while it may still be growing."""

import json
import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.data.archives import check_archive
from fedrema.data.atomic import write_text, written_whole
from fedrema.errors import BadInput
from fedrema.runs.player import Player


class RunDirectory:
    """Reads and writes a run's folder; every file but the growing `rounds.jsonl` is whole or not there.

    config.json, rounds.jsonl (a record per round), relations.npz (on request), summary.json (once it has ended),
    clients.npz (how many samples of each class each client holds), checkpoint/ and models/ (on request); running.json
    while it is being played.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.rounds_file = self.path / "rounds.jsonl"
        self.relations_file = self.path / "relations.npz"
        self.summary_file = self.path / "summary.json"
        self.clients_file = self.path / "clients.npz"
        self.player_file = self.path / "running.json"
        self.checkpoint_file = self.path / "checkpoint" / "world.safetensors"

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Return an existing run's folder."""
        found = cls(path)
        if found.path.is_file():
            raise BadInput(f"{path} is a file, not the folder of a run.")
        if not found.config_file.is_file():
            raise BadInput(f"{path} is not the folder of a run: it has no config.json.")
        return found

    def check_free(self, overwrite: bool) -> None:
        """Refuse a folder that is taken; --overwrite replaces a run, and only a run."""
        if self.path.is_file():
            raise BadInput(f"--out {self.path} is a file: name a folder for the run.")
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if not overwrite:
            raise BadInput(f"--out {self.path} already exists: choose another folder, or --overwrite to replace it.")
        if not self.config_file.is_file():
            raise BadInput(f"--out {self.path} holds something other than a run; --overwrite replaces runs only.")

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder, in place of a run that was there."""
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
        except OSError as error:
            raise BadInput(f"cannot make the folder {self.path}: {error.strerror}.") from error
        self.write_json(self.config_file, config)

    def write_json(self, file: Path, content: dict[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        write_text(file, json.dumps(content, indent=2) + "\n")

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return read_object(self.config_file, "cannot be read")

    def summary(self) -> dict[str, Any] | None:
        """Return summary.json; None while the run has not ended."""
        return read_object(self.summary_file, "cannot be read") if self.summary_file.is_file() else None

    def append(self, record: dict[str, Any]) -> None:
        """Add a round's record; if the disk is full, the file is as it was."""
        try:
            before = self.rounds_file.stat().st_size if self.rounds_file.exists() else 0
            try:
                with self.rounds_file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(record) + "\n")
            except OSError:
                os.truncate(self.rounds_file, before)
                raise
        except OSError as error:
            raise BadInput(f"cannot write {self.rounds_file}: {error.strerror}; earlier rounds are kept.") from error

    def rounds(self) -> list[dict[str, Any]]:
        """Return all whole records; a last line that is still being written does not count."""
        if not self.rounds_file.is_file():
            return []
        records = []
        for line in self.rounds_file.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                break
        return records

    def keep_rounds(self, last: int) -> list[dict[str, Any]]:
        """Forget records after a round, which a checkpoint does not know of; returns the others."""
        kept = [record for record in self.rounds() if record["round"] <= last]
        write_text(self.rounds_file, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def player(self) -> Player | None:
        """Return which process plays it; None where none does."""
        return Player.read(self.player_file)

    def write_label_counts(self, train: np.ndarray, test: np.ndarray) -> None:
        """Write clients.npz: how many samples of each class each client trains on, and is tested with [K, classes]."""
        with written_whole(self.clients_file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, train=train, test=test)

    def label_counts(self) -> dict[str, np.ndarray] | None:
        """Return clients.npz; None where nobody knows, as on a server that never sees samples."""
        try:
            with self.clients_file.open("rb") as stream:
                check_archive(stream, self.clients_file)
                with np.load(stream, allow_pickle=False) as file:
                    return {part: np.asarray(file[part]) for part in ("train", "test")}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(f"{self.clients_file} cannot be read: {error}.") from error

    def write_relations(self, relations: dict[int, dict[str, np.ndarray]]) -> None:
        """Write relations.npz: `rounds` [R] and a stack [R, K, K] of each matrix; NaN where there was none."""
        if not relations:
            return
        rounds = sorted(relations)
        names = sorted({name for found in relations.values() for name in found})
        shape = next(iter(relations[rounds[0]].values())).shape
        missing = np.full(shape, np.nan, np.float32)
        stacks = {name: np.stack([relations[number].get(name, missing) for number in rounds]) for name in names}
        with written_whole(self.relations_file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, rounds=np.array(rounds), **stacks)

    def relations(self, last: int | None = None) -> dict[int, dict[str, np.ndarray]]:
        """Return the kept matrices by round, up to a round."""
        if not self.relations_file.is_file():
            return {}
        try:
            with self.relations_file.open("rb") as stream:
                check_archive(stream, self.relations_file)
                with np.load(stream, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.relations_file} cannot be read: {error}.") from error
        rounds = arrays.pop("rounds").tolist()
        return {
            number: {name: stack[place] for name, stack in arrays.items() if not np.isnan(stack[place]).all()}
            for place, number in enumerate(rounds)
            if last is None or number <= last
        }


def read_object(file: Path, complaint: str) -> dict[str, Any]:
    """Read a JSON file that holds an object; where it does not, the sentence says `complaint` of it, and why."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file} {complaint}: {error}.") from error
    if not isinstance(content, dict):
        raise BadInput(f"{file} {complaint}: it should hold a JSON object.")
    return content


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among and below the given ones."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} does not exist: name the folder of a run, or one that holds runs.")
        below = sorted(file.parent for file in path.rglob("config.json")) if path.is_dir() else []
        below = [folder for folder in below if (folder / "rounds.jsonl").is_file()]
        if not below:
            raise BadInput(f"{path} holds no run: no config.json with rounds.jsonl in it or below.")
        found += below
    return list(dict.fromkeys(found))
