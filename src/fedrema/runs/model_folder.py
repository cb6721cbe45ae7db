"""A folder of exported models: safetensors files, index.json and a README, written completely or not at all."""

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file

from fedrema.base.digests import file_digest
from fedrema.data.preprocessing import Preprocessing
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.models.networks import Network
from fedrema.runs.checksums import with_checksum
from fedrema.runs.directory import EXPORT_INDEX, MODEL_CARD, exported_files
from fedrema.runs.manifest import Inputs
from fedrema.runs.plain_model import PlainModel
from fedrema.runs.trust import code_digests, marks_of, named_code
from fedrema.tasks import Task

# Names that Windows reserves for devices, with any file extension.
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
LONGEST_NAME = 100
OWN_PREDICTION = "computes its predictions in its own way"


@dataclass(frozen=True)
class ExportedClient:
    """A client's entry in index.json."""

    client: str
    file: str
    added_file: str | None = None
    """Tensors that the method keeps for the client in addition to the network's."""
    accuracy: float | None = None
    train_count: int = 0
    digest: str = ""
    """SHA-256 of the file."""


@dataclass(frozen=True)
class HeldPart:
    """The entry of a client whose complete model exists only on its node."""

    client: str
    held_file: str | None = None
    """The file with those of its parameters that the server has."""


@dataclass(frozen=True)
class ServerParts:
    """The entries of index.json for a deployed run, in addition to complete models."""

    only_on_nodes: list[HeldPart] = field(default_factory=list)
    never_counted: list[str] = field(default_factory=list)
    """Clients that never contributed to a round."""
    shared_file: str | None = None


@dataclass(frozen=True)
class PredictionFacts:
    """What is needed to predict from raw samples with exported models."""

    task: Task
    network: Network
    sample_shape: tuple[int, ...]
    dtype: str
    preprocessing: Preprocessing | None = None
    client_column: str | None = None
    own_prediction: bool = False
    """Whether the method computes predictions in its own way, so that the files are not sufficient."""


@dataclass(frozen=True)
class ExportIndex:
    """The content of index.json."""

    method: str
    round: int
    accuracy_round: int | None
    """The round in which the accuracies were measured."""
    class_names: list[str]
    """The class of each output of a model."""
    clients: list[ExportedClient] = field(default_factory=list)
    belongs_to: str = ""
    """The run, the round and the records of the models (`RunDirectory.mark`); empty on a node, which has no records."""
    prediction: PredictionFacts | None = None
    """None: the export was written by an older version."""
    inputs: Inputs = field(default_factory=dict)
    """Digests of the files of the user's own network."""
    marks: dict[str, str] = field(default_factory=dict)
    """What shows that this user has given the network (`runs.trust`)."""

    @property
    def code(self) -> dict[str, str]:
        """The code that predictions import, by kind."""
        return named_code("", {"net": self.prediction.network.net}) if self.prediction is not None else {}

    @property
    def run(self) -> str:
        """The identity of the run; empty on a node."""
        return self.belongs_to.partition(" ")[0]

    def as_json(self, parts: ServerParts | None = None) -> dict[str, object]:
        """Return the content of the file."""
        content = dict(msgspec.to_builtins(self))
        for entry in content["clients"]:
            if entry["added_file"] is None:
                del entry["added_file"]
        return content | (msgspec.to_builtins(parts) if parts is not None else {})


class ModelFolder:
    """A folder of models that is being written."""

    def __init__(self, path: Path, model: PlainModel, index: ExportIndex) -> None:
        self.path, self.model, self.index = path, model, index

    def add(self, stem: str, name: str, tensors: Tensors, added: Tensors, accuracy: float | None, count: int) -> None:
        """Write the model of a client, and the tensors that the method added to it."""
        file = self.path / f"{stem}.safetensors"
        save_tensors(tensors, file)
        entry = ExportedClient(name, file.name, None, accuracy, count, file_digest(file))
        if added:
            entry = replace(entry, added_file=f"{stem}.added.safetensors")
            save_tensors(added, self.path / f"{stem}.added.safetensors")
        self.index.clients.append(entry)

    def add_part(self, file: str, params: Tensors) -> str:
        """Write parameters under the names of the plain network; parameters that the method added keep their names."""
        names = self.model.names
        save_tensors({names.get(name, name): value.detach().cpu() for name, value in params.items()}, self.path / file)
        return file

    def finish(self, left_out: Sequence[str], parts: ServerParts | None = None, card: str = "") -> None:
        """Write index.json, README.md and, if there is one, the model card.

        `left_out` describes what clients do in addition to using their models.
        """
        code = self.index.code
        inputs = {kind: code_digests(kind, reference) for kind, reference in code.items()}
        self.index = replace(self.index, inputs=inputs, marks=marks_of(self.index.run, code))
        if self.index.clients:
            readme = _readme(self.index, self.model, left_out)
        else:
            readme = _readme_of_parts(self.index.method, self.model, parts.shared_file if parts else None)
        index = json.dumps(with_checksum(self.index.as_json(parts)), indent=2) + "\n"
        (self.path / EXPORT_INDEX).write_text(index, encoding="utf-8")
        (self.path / "README.md").write_text(readme, encoding="utf-8")
        if card:
            (self.path / MODEL_CARD).write_text(card, encoding="utf-8")


@contextmanager
def model_folder(folder: Path, overwrite: bool, model: PlainModel, index: ExportIndex) -> Iterator[ModelFolder]:
    """Yield a temporary folder that becomes `folder` on success, replacing the files of an earlier export only."""
    folder = folder.resolve()
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.mkdir(parents=True)
        try:
            yield ModelFolder(temporary, model, index)
            check_free(folder, overwrite)
            _put_in_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(f"cannot write {folder}: {reason}; choose a writable place with enough free space.") from error


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds anything; --overwrite replaces an earlier export, and only that."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: name a folder for the models.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    is_export = bool(exported_files(folder))
    if not overwrite:
        remedy = ", or --overwrite to replace it" if is_export else ""
        raise BadInput(f"{folder} already exists: choose another with --out{remedy}.")
    if not is_export:
        raise BadInput(f"{folder} holds something other than exported models; --overwrite replaces only those.")


def _put_in_place(temporary: Path, folder: Path) -> None:
    old = exported_files(folder) if folder.exists() else []
    if folder.exists() and set(folder.iterdir()) != set(old):
        # The user's own files stay; the new files are added, the index last.
        new = sorted(temporary.iterdir(), key=lambda file: file.name == EXPORT_INDEX)
        for file in new:
            file.replace(folder / file.name)
        for file in old:
            if file.name not in {each.name for each in new}:
                file.unlink()
        return
    replaced = temporary.with_name(f"{temporary.name}.old")
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def save_tensors(tensors: Tensors, file: Path, facts: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with facts about it in its header."""
    # One entry: the library writes several in a random order.
    header = None if facts is None else {"fedrema": json.dumps(facts)}
    try:
        # Rows of a stack are views, and safetensors requires tensors that own their memory.
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file, header)
    except SafetensorError as error:  # the library wraps a full disk in its own error
        raise OSError(0, str(error)) from error


def file_names(names: Sequence[str]) -> list[str]:
    """Return a file name for each client, valid on every file system and unique even where case is ignored."""
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name).lstrip("-")[:LONGEST_NAME] or "client"
        plain = f"client-{plain}" if plain.casefold() in RESERVED else plain
        unique, number = plain, 1
        while unique.casefold() in taken:
            number += 1
            unique = f"{plain}-{number}"
        taken.add(unique.casefold())
        found.append(unique)
    return found


def _readme(index: ExportIndex, model: PlainModel, left_out: Sequence[str]) -> str:
    method = index.method
    prediction, meaning = _prediction(index)
    lines = [
        "# Models of clients",
        "",
        f"Each `.safetensors` file is a client's model, trained with {method}; `{EXPORT_INDEX}` lists the clients.",
        "In this folder, with PyTorch and safetensors:",
        "",
        "```python",
        *model.code(index.clients[0].file, prediction),
        "```",
        "",
        *_inputs(model),
        "",
        meaning,
    ]
    facts = index.prediction
    if facts is not None and facts.preprocessing is not None:
        lines += [
            "",
            "The model was trained on preprocessed columns of a table or on resized images. With the raw ones, use",
            f"`fedrema predict FOLDER DATA --out FILE`, which reads the preprocessing from `{EXPORT_INDEX}`.",
        ]
    if any(entry.added_file for entry in index.clients):
        lines += ["", f"`….added.safetensors` holds tensors that {method} keeps in addition to this network's."]
    if left_out:
        steps = " and ".join(left_out)
        lines += ["", f"Accuracies in `{EXPORT_INDEX}` were measured as clients predict: {method} {steps} first."]
    return "\n".join(lines) + "\n"


def _prediction(index: ExportIndex) -> tuple[str, str]:
    """Return Python that computes predictions from a model's outputs, and what they mean."""
    task = index.prediction.task if index.prediction is not None else Task("multiclass")
    named = f"`class_names` in `{EXPORT_INDEX}` lists the label of each: {_shown(index.class_names)}."
    match task.name:
        case "multilabel":
            return "labels = outputs > 0", f"`labels` says for each label whether it applies; {named}"
        case "ordinal":
            return (
                "levels = (outputs.sigmoid().cumprod(dim=1) > 0.5).sum(dim=1)",
                f"`levels` holds numbers; {named}",
            )
        case "regression":
            return f"values = outputs[:, 0] * {task.scale!r} + {task.centre!r}", "`values` are in the target's units."
        case "count":
            return f"rates = outputs[:, 0].exp() * {task.centre!r}", "`rates` are expected counts."
    return "classes = outputs.argmax(dim=1)", f"`classes` holds numbers; {named}"


def _readme_of_parts(method: str, model: PlainModel, shared_file: str | None) -> str:
    lines = [
        "# Parameters on the server",
        "",
        f"This folder has no complete model: with {method}, a client predicts with parameters that exist only on its",
        "node, or adapts its model to its own samples first. `fedrema deploy model NODE_FOLDER`, on the node, writes",
        f"the complete model. `{EXPORT_INDEX}` lists the clients. A `….held.safetensors` file holds those",
        "parameters of a client that the server has.",
    ]
    if shared_file:
        *building, loading, _ = model.code(shared_file)
        lines += [
            "",
            f"`{shared_file}` holds the parameters that all clients share:",
            "",
            "```python",
            *building,
            f"{loading.removesuffix(')')}, strict=False)  # private parameters keep their initial values",
            "```",
            "",
            *_inputs(model),
        ]
    return "\n".join(lines) + "\n"


def _inputs(model: PlainModel) -> list[str]:
    shape = ", ".join(str(size) for size in model.shape)
    if model.net.integers:
        return [f"`x` is a batch [n, {shape}] of int64 numbers, as in training."]
    return [
        f"`x` is a batch [n, {shape}] of {model.dtype} numbers, as in training: pixels 0 to 255 (uint8) as",
        "`(x / 255 - 0.5) / 0.5`, anything that is not uint8 unchanged.",
    ]


def _shown(names: Sequence[str], most: int = 10) -> str:
    pairs = [f"{number} is `{name}`" for number, name in enumerate(names[:most])]
    return ", ".join(pairs) + (" and so on" if len(names) > most else "")
