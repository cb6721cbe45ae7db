"""The folder of a run: its files, and how they are read while the run may still be training."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fedrema.base.files import atomic_file, make_folder, sync, write_text
from fedrema.core.reports import Reports
from fedrema.data.federation import Federation
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.runs.arrays import Relations, read_arrays, read_owned, relation_arrays, relations_of, write_arrays
from fedrema.runs.checkpoint import load_state, read_checkpoint, required_rounds, save_state
from fedrema.runs.checksums import BELONGS, FOREIGN, REMEDY, verified, with_checksum
from fedrema.runs.lock import LOCK_FILE, WRITER_FILE, RunLock, Writer
from fedrema.runs.manifest import Manifest, is_config, read_object, verified_config
from fedrema.runs.records import RecordChain, read_bytes, read_lines
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.records import RoundRecord, Summary
from fedrema.simulation.scoring import summarise
from fedrema.simulation.state import SimulationState

FEDERATION_FILE = "federation.npz"
"""The file, next to config.json, to which a federation that was given in Python is saved."""
RUN_LIST_FILE = "runs.json"
"""The file, in a common folder, that lists the runs of one command."""
MODELS = "models"
"""Folder of exported models."""
EXPORT_INDEX = "index.json"
MODEL_CARD = "MODEL_CARD.md"
OWN_FILES = (
    *("config.json", "rounds.jsonl", "relations.npz", "summary.json", "clients.npz", "checkpoint/state.safetensors"),
    *("predictions.npz", "simple-models.npz", "report.html", "curves.png", "tracking.json"),
)
"""Files that fedrema may write into a run's folder."""
MOST_PREDICTIONS = 200_000_000
"""Bytes above which predictions.npz is not written."""
OWN_PATTERNS = ("newcomers/*.safetensors", "tensorboard/events.out.tfevents.*")


class RunDirectory:
    """Reads and writes a run's folder; every file but the growing `rounds.jsonl` is complete or absent.

    All files that are read back carry checksums and name the run; what depends on the round also names the records that
    it was computed from (`mark`). Reading a damaged or foreign file raises a `BadInput` with the file and the remedy.

    Files: config.json, rounds.jsonl (a record per round), relations.npz (on request), summary.json (once the run has
    finished), predictions.npz (what the final models predict for test samples), simple-models.npz (what constants and
    linear models of single clients predict for them; own data only), clients.npz (how many samples of each
    class each client holds), checkpoint/, models/ (after fedrema export); run.lock, and running.json while a process
    writes to the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.rounds_file = self.path / "rounds.jsonl"
        self.relations_file = self.path / "relations.npz"
        self.summary_file = self.path / "summary.json"
        self.predictions_file = self.path / "predictions.npz"
        self.simple_models_file = self.path / "simple-models.npz"
        self.clients_file = self.path / "clients.npz"
        self.checkpoint_file = self.path / "checkpoint" / "state.safetensors"
        self._end: tuple[int, RecordChain] | None = None
        """Length of rounds.jsonl after the last record that was appended, and the checksums up to there."""
        self._counts: tuple[object, dict[str, int]] | None = None
        """Stamps of summary.json and the checkpoint, and how many rounds they require."""

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Return an existing run's folder."""
        found = cls(path)
        if found.path.is_file():
            raise BadInput(f"{path} is a file, not the folder of a run.")
        if not found.config_file.exists():
            if found.looks_like_run():
                raise BadInput(f"{found.config_file} is missing: {REMEDY}.")
            raise BadInput(f"{path} is not the folder of a run: it has no config.json.")
        return found

    def looks_like_run(self) -> bool:
        """Whether there is a file that only runs have; other programs write a config.json too."""
        return any(file.exists() for file in (self.rounds_file, self.clients_file, self.checkpoint_file.parent))

    def lock(self) -> RunLock:
        """Return the lock that a process must hold to write to this folder."""
        return RunLock(self.path)

    def training_process(self) -> Writer | None:
        """Return the process that trains the run, as running.json names it; None where there is none."""
        writer = Writer.read(self.path / WRITER_FILE)
        return writer if writer and writer.first is not None else None

    def is_run(self) -> bool:
        """Whether the folder holds a run of fedrema, finished or not."""
        try:
            return is_config(read_object(self.config_file, ""))
        except BadInput:
            return False

    def check_free(self, overwrite: bool) -> None:
        """Check that a new run can use the folder; --overwrite replaces a run, and nothing else."""
        try:
            if self.path.is_symlink() and not self.path.exists():
                raise BadInput(f"--out {self.path} is a link to something that does not exist: name another folder.")
            if self.path.exists() and not self.path.is_dir():
                raise BadInput(f"--out {self.path} is a file: name a folder for the run.")
            if not self.path.exists() or {file.name for file in self.path.iterdir()} <= {LOCK_FILE, WRITER_FILE}:
                return
        except OSError as error:
            raise BadInput(f"--out {self.path} cannot be read: {error.strerror}; name another folder.") from error
        if not self.is_run():
            if overwrite:
                raise BadInput(f"--out {self.path} holds something other than a run; --overwrite replaces runs only.")
            raise BadInput(f"--out {self.path} already exists: choose another folder.")
        if not overwrite and not self.finished():
            raise BadInput(
                f"--out {self.path} already exists, unfinished: continue it with fedrema resume {self.path}, choose"
                " another folder, or --overwrite to replace it."
            )
        if not overwrite:
            raise BadInput(f"--out {self.path} already exists: choose another folder, or --overwrite to replace it.")

    def create(self, manifest: Manifest, inputs: Collection[Path] = ()) -> None:
        """Create the folder; an existing run is replaced, except for files that are `inputs` of the new run.

        Only files that fedrema wrote are deleted. config.json is replaced last and in one step, so the folder holds a
        run at every moment.
        """
        try:
            make_folder(self.path)
            kept = {file.resolve() for file in inputs}
            for file in self._written_files():
                if file != self.config_file and file.resolve() not in kept:
                    file.unlink(missing_ok=True)
                    if file.parent != self.path and not any(file.parent.iterdir()):
                        file.parent.rmdir()
        except OSError as error:
            raise BadInput(f"cannot write to the folder {self.path}: {error.strerror}.") from error
        self._end = None
        self.write_manifest(manifest)

    def _written_files(self) -> list[Path]:
        """Return the files that fedrema wrote for a run in this folder, without a user's own files."""
        if not self.is_run():
            return []
        named = [self.path / name for name in OWN_FILES]
        config = read_object(self.config_file, "")  # not as a Manifest, which accepts only the present format
        if config["federation"].get("saved"):
            named.append(self.path / FEDERATION_FILE)
        found = [file for file in named if file.is_file() or file.is_symlink()]
        found += [file for pattern in OWN_PATTERNS for file in sorted(self.path.glob(pattern)) if not file.is_dir()]
        return found + exported_files(self.path / MODELS)

    def write_json(self, file: Path, content: dict[str, Any]) -> None:
        """Write a JSON file with its checksum and what it belongs to, completely or not at all."""
        owned = content if file == self.config_file else {**content, BELONGS: self._owner_of(file, content)}
        write_text(file, json.dumps(with_checksum(owned), indent=2) + "\n")

    def read_json(self, file: Path, remedy: str = REMEDY) -> dict[str, Any]:
        """Read what `write_json` wrote."""
        content = verified(read_object(file, "cannot be read", remedy), file, remedy=remedy)
        if content.pop(BELONGS, None) != self._owner_of(file, content):
            raise BadInput(f"{file} {FOREIGN}: {remedy}.")
        return content

    def _owner_of(self, file: Path, content: dict[str, Any]) -> str:
        return self.mark(content["rounds"], file.name) if file == self.summary_file else self.identity()

    def config(self) -> dict[str, Any]:
        """Return config.json as plain values."""
        return verified_config(read_object(self.config_file, "cannot be read", REMEDY), self.config_file)

    def manifest(self) -> Manifest:
        """Return config.json."""
        return Manifest.from_json(read_object(self.config_file, "cannot be read", REMEDY), self.config_file)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write config.json."""
        self.write_json(self.config_file, manifest.as_json())

    def reports(self) -> Reports:
        """Return what the run's method declares about its reports."""
        return self.manifest().reports

    def identity(self) -> str:
        """Return the run's identity, which the checksums of its other files include."""
        return str(self.config()["identity"])

    def summary(self) -> Summary | None:
        """Return summary.json; None while the run has not finished."""
        if not self.finished():
            return None
        remedy = f"fedrema resume {self.path} writes it again"
        try:
            return Summary.from_json(self.read_json(self.summary_file, remedy))
        except (msgspec.ValidationError, KeyError) as error:
            raise BadInput(f"{self.summary_file} does not hold the summary of a run: {error}; {remedy}.") from error

    def mark(self, rounds: int, of: str = "the checkpoint") -> str:
        """Return what files of a round name: the run, the round, and the checksum of all records up to there.

        `of` is the file that is of this round, for the message if there are fewer records.
        """
        chain = self.chain()
        if self._end is not None and self._end[1].lines == rounds and self._end[0] == self.rounds_file.stat().st_size:
            chain = self._end[1]
        elif rounds and self.has_rounds():
            for line in read_bytes(chain):
                chain.verify(line)
                if chain.lines == rounds:
                    break
        if chain.lines != rounds:
            raise BadInput(
                f"{self.rounds_file} ends after line {chain.lines}, but {of} is of round {rounds}: {REMEDY}."
            )
        return chain.mark

    def summarise(self, records: Sequence[RoundRecord]) -> Summary:
        """Return the headline numbers of records of this run."""
        period = self.reports().period
        return summarise(records, period.name if period is not None else None)

    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.summary_file.exists()

    def write_summary(self, records: Sequence[RoundRecord], recorded_relations: int = 0) -> None:
        """Write summary.json, which marks the run as finished: after everything else is on the disk."""
        self.sync_rounds()
        summary = replace(self.summarise(records), recorded_relations=recorded_relations)
        self.write_json(self.summary_file, summary.as_json())

    def remove_summary(self) -> None:
        """Remove summary.json and then the files of predictions, even damaged ones, before the run continues."""
        files = (self.summary_file, self.predictions_file, self.simple_models_file)
        for file in files:
            if file.is_dir():  # checked before the first file is removed
                raise BadInput(f"cannot remove {file}: it is a folder; remove it by hand.")
        for file in files:
            try:
                if file.exists():
                    file.unlink()
                    sync(self.path)
            except OSError as error:
                raise BadInput(f"cannot remove {file}: {error.strerror}; remove it by hand.") from error

    def remove_unfinished_files(self) -> None:
        """Remove temporary files of a process that was killed while it wrote a file."""
        for folder in (self.path, self.checkpoint_file.parent):
            for left in folder.glob(".*.part"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)

    def append(self, record: RoundRecord) -> None:
        """Add a round's record; if the disk is full, the file stays as it was.

        A power failure may lose it until `sync_rounds` has returned.
        """
        try:
            begun = self.rounds_file.exists()
            before = self.rounds_file.stat().st_size if begun else 0
            if self._end is None or self._end[0] != before:
                self._end = self._verified()
                if self._end[0] < before:  # the last line is incomplete
                    os.truncate(self.rounds_file, self._end[0])
                before = self._end[0]
            chain = self._end[1]
            self._end = None
            try:
                with self.rounds_file.open("ab") as stream:
                    line = chain.seal(record)
                    stream.write(line)
            except OSError:
                os.truncate(self.rounds_file, before)
                raise
            if not begun:
                sync(self.path)
            self._end = before + len(line), chain
        except OSError as error:
            raise BadInput(f"cannot write {self.rounds_file}: {error.strerror}; earlier rounds are kept.") from error

    def sync_rounds(self) -> None:
        """Wait until all records are on the disk, before writing a checkpoint that requires them."""
        try:
            if self.rounds_file.exists():
                sync(self.rounds_file)
        except OSError as error:
            raise BadInput(f"cannot write {self.rounds_file}: {error.strerror}; earlier rounds are kept.") from error

    def chain(self) -> RecordChain:
        """Return the checksums of rounds.jsonl before its first line."""
        return RecordChain(self.rounds_file, self.identity())

    def rounds(self) -> list[RoundRecord]:
        """Return all records, without a last line that is still being written."""
        with self.check_all_read() as counts:
            records = [record for record, _ in read_lines(self.chain())] if self.has_rounds() else []
            counts["rounds"] = len(records)
        return records

    @contextmanager
    def check_all_read(self) -> Iterator[dict[str, int]]:
        """Check that the code inside the context reads all recorded data.

        Yields a dictionary in which that code puts how many `rounds` and `relations` it has read.
        """
        known = self._required_counts()
        counts: dict[str, int] = {}
        yield counts
        if known != self._required_counts():  # another process has continued the run, or replaced it
            return
        for name, file in (("rounds", self.rounds_file), ("relations", self.relations_file)):
            if counts.get(name, known[name]) < known[name]:
                raise BadInput(f"{file} ends after {counts[name]} rounds, but there were {known[name]}: {REMEDY}.")
            if self.finished() and counts.get(name, known[name]) > known[name]:
                raise BadInput(
                    f"{file} has {counts[name]} rounds, but {self.summary_file.name} is of {known[name]}: fedrema"
                    f" resume {self.path} writes it again."
                )

    def _required_counts(self) -> dict[str, int]:
        """Return how many rounds, and how many rounds with matrices, are certain to be recorded."""
        stamps = [_stamp(self.summary_file), _stamp(self.checkpoint_file)]
        if self._counts is None or self._counts[0] != stamps:  # a page that follows a run needs them twice a second
            self._counts = stamps, self._read_counts()
        return self._counts[1]

    def _read_counts(self) -> dict[str, int]:
        summary = self.summary()
        if summary is not None:
            return {"rounds": summary.rounds, "relations": summary.recorded_relations}
        try:
            facts, _ = read_checkpoint(self.checkpoint_file, wanted=())
        except BadInput:  # none yet, or damaged; damage is reported when the checkpoint is used
            return {"rounds": 0, "relations": 0}
        self._check_owner(facts)
        return required_rounds(facts)._asdict()

    def save_state(self, state: SimulationState, more: dict[str, Any], records: Sequence[str] | None = None) -> None:
        """Write the checkpoint; it belongs to the `records` with these marks, by default to those of its round."""
        marks = [self.mark(state.round)] if records is None else records
        save_state(state, self.checkpoint_file, self.identity(), more, marks)

    def state(self, device: torch.device | None = None, resuming: bool = False) -> SimulationState:
        """Return the state in the checkpoint; to resume, that of an earlier round is accepted too."""
        self.checkpoint(resuming=resuming)
        return load_state(self.checkpoint_file, self.identity(), device)

    def checkpoint(self, wanted: Sequence[str] = (), resuming: bool = False) -> tuple[dict[str, Any], Tensors]:
        """Return the facts of the checkpoint and its tensors (those wanted that it has), checked against the records.

        A finished run's checkpoint must be of its last round, unless the run is `resuming`.
        """
        facts, tensors = read_checkpoint(self.checkpoint_file, wanted)
        summary = None if resuming else self.summary()
        if summary is not None and facts["round"] > summary.rounds:
            raise BadInput(f"The checkpoint {self.checkpoint_file} {FOREIGN}: {REMEDY}.")
        self._check_owner(facts)
        if summary is not None and facts["round"] < summary.rounds:
            raise BadInput(
                f"The checkpoint {self.checkpoint_file} is of round {facts['round']}, but the run has {summary.rounds}:"
                f" fedrema resume {self.path} repeats the rounds after it."
            )
        return facts, tensors

    def _check_owner(self, facts: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run, or of other records than those of this one."""
        if facts["belongs_to"] != self.identity() or self.mark(required_rounds(facts).rounds) not in facts["records"]:
            raise BadInput(f"The checkpoint {self.checkpoint_file} {FOREIGN}: {REMEDY}.")

    def check_rounds(self, last: int) -> None:
        """Check that the records are complete and undamaged up to the checkpoint's round."""
        self._known_rounds(last)

    def has_record(self, number: int) -> bool:
        """Whether the records are complete and undamaged up to a round."""
        try:
            self._known_rounds(number)
        except BadInput:
            return False
        return True

    def truncate_rounds(self, last: int) -> list[RoundRecord]:
        """Remove the records after a round, which the checkpoint does not include; returns the others."""
        kept, end = self._known_rounds(last)
        if not self.rounds_file.exists() or self.rounds_file.stat().st_size > end:
            # A new file, so that a page which follows the run notices. The lines that are removed need not be readable.
            whole = self.rounds_file.read_bytes()[:end] if end else b""
            with atomic_file(self.rounds_file) as temporary:
                temporary.write_bytes(whole)
            self._end = None
        return kept

    def _known_rounds(self, last: int) -> tuple[list[RoundRecord], int]:
        """Return the records up to a round, and where their last line ends."""
        kept: list[RoundRecord] = []
        end = 0
        if last and self.has_rounds():
            for record, place in read_lines(self.chain()):
                if record.round > last:
                    break
                kept.append(record)
                end = place
                if len(kept) == last:  # later lines may be damaged; they are removed
                    break
        if [record.round for record in kept] != list(range(1, last + 1)):
            raise BadInput(
                f"{self.rounds_file} ends after line {len(kept)}, but the checkpoint is of round {last}: {REMEDY}."
            )
        return kept, end

    def has_rounds(self) -> bool:
        """Whether there is a rounds.jsonl; an error if it should exist but is missing."""
        if self.rounds_file.is_dir():
            raise BadInput(f"{self.rounds_file} is a folder: {REMEDY}.")
        if self.rounds_file.exists():
            return True
        if self.finished() or self.checkpoint_file.parent.exists():
            raise BadInput(f"{self.rounds_file} is missing: {REMEDY}.")
        return False

    def _verified(self) -> tuple[int, RecordChain]:
        chain = self.chain()
        ends = [end for _, end in read_lines(chain)]
        return (ends[-1] if ends else 0), chain

    def write_label_counts(self, train: np.ndarray, test: np.ndarray) -> None:
        """Write clients.npz: how many training and test samples of each class each client has [K, classes]."""
        write_arrays(self.clients_file, {"train": train, "test": test}, self.identity())

    def ensure_label_counts(self, federation: Federation) -> None:
        """Write clients.npz again if it is missing or damaged."""
        try:
            found = self.label_counts()
        except BadInput:
            found = None
        if found is None:
            self.write_label_counts(federation.label_counts("train"), federation.label_counts("test"))

    def label_counts(self) -> dict[str, np.ndarray] | None:
        """Return clients.npz; None for deployments, whose server never sees samples."""
        remedy = f"fedrema resume {self.path} writes it again"
        if not self.clients_file.exists():
            federation = self.manifest().federation
            if federation.train_counts and not federation.is_deployed:
                raise BadInput(f"{self.clients_file} is missing: {remedy}.")
            return None
        arrays = read_arrays(self.clients_file, self.identity(), remedy)
        if not {"train", "test"} <= arrays.keys():
            raise BadInput(f"{self.clients_file} lacks 'train' or 'test': {remedy}.")
        return {part: arrays[part] for part in ("train", "test")}

    def write_predictions(self, predictions: FinalPredictions, rounds: int) -> None:
        """Write predictions.npz: what the models of round `rounds` predict."""
        # Not compressed: outputs are almost incompressible, and it would take longer than to compute them.
        write_arrays(self.predictions_file, predictions.as_arrays(), self.mark(rounds), compress=False)

    def predictions(self) -> FinalPredictions:
        """Return predictions.npz of a finished run."""
        summary = self.summary()
        assert summary is not None
        remedy = f"fedrema resume {self.path} writes it again"
        if not self.predictions_file.exists():
            limit = f"unless it would exceed {MOST_PREDICTIONS / 1e6:.0f} MB"
            raise BadInput(f"{self.predictions_file} is missing: fedrema resume {self.path} writes it, {limit}.")
        arrays = read_arrays(self.predictions_file, self.mark(summary.rounds), remedy)
        if not {"rows", "offsets", "outputs", "targets"} <= arrays.keys():
            raise BadInput(f"{self.predictions_file} lacks some of its arrays: {remedy}.")
        return FinalPredictions.from_arrays(self.manifest().federation.task, arrays)

    def write_relations(self, relations: Relations, rounds: int) -> None:
        """Write relations.npz as of a round, if there are any matrices."""
        if relations:
            write_arrays(self.relations_file, relation_arrays(relations), self.mark(rounds))
        else:
            self.relations_file.unlink(missing_ok=True)

    def relations(self, last: int | None = None, least: int = 0) -> Relations:
        """Return the recorded matrices by round, up to round `last`; an error if there are fewer than `least`."""
        found: Relations = {}
        if self.relations_file.exists():
            arrays, owner = read_owned(self.relations_file, REMEDY)
            self.check_owner(self.relations_file, owner, last)
            found = relations_of(arrays, last)
        if len(found) < least:
            raise BadInput(f"{self.relations_file} ends after {len(found)} rounds, but there were {least}: {REMEDY}.")
        return found

    def check_owner(self, file: Path, owner: str, last: int | None = None, remedy: str = REMEDY) -> None:
        """Refuse a file with the mark of another run, or of records that this run does not have.

        With `last`, the file may be of a later round: when a run is resumed, records after its checkpoint are dropped,
        and need not be readable.
        """
        identity, rounds = (*owner.split(" "), "")[:2]
        number = int(rounds) if rounds.isdigit() else 0
        later = last is not None and number > last
        if identity != self.identity() or (not later and owner != self.mark(number, file.name)):
            raise BadInput(f"{file} {FOREIGN}: {remedy}.")


def _stamp(file: Path) -> object:
    """Return inode, modification time and size, which change whenever the file does; None if it does not exist."""
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def exported_files(folder: Path) -> list[Path]:
    """Return the files of an export, as its index lists them; empty if the folder has no export."""
    try:
        index = read_object(folder / EXPORT_INDEX, "")
        clients = [*index["clients"], *index.get("only_on_nodes", [])]
        names = [client.get(key) for client in clients for key in ("file", "added_file", "held_file")]
        names.append(index.get("shared_file"))
    except (BadInput, KeyError, TypeError, AttributeError):
        return []
    # The index may have been edited: only plain file names of models are accepted.
    plain = [
        name for name in names if isinstance(name, str) and re.fullmatch(r"[\w-]+(\.added|\.held)?\.safetensors", name)
    ]
    return [file for name in (*plain, "README.md", MODEL_CARD, EXPORT_INDEX) if (file := folder / name).is_file()]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among and below the given ones, including damaged ones."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} does not exist: name the folder of a run, or one that holds runs.")
        names = ("config.json", "rounds.jsonl") if path.is_dir() else ()
        folders = sorted({file.parent for name in names for file in path.rglob(name)})
        below = [folder for folder in folders if RunDirectory(folder).looks_like_run()]
        if not below:
            raise BadInput(f"{path} holds no run: no config.json with rounds.jsonl in it or below.")
        found += below
    return list(dict.fromkeys(found))
