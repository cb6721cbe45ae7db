"""Every client's model as safetensors, for plain PyTorch: whoever uses one needs neither fedrema nor the data."""

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from fedrema.base.files import atomic_file
from fedrema.core import Client, Method, overrides
from fedrema.data import build_federation
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.runs.checkpoint import load_state
from fedrema.runs.deployed import depends_on_nodes
from fedrema.runs.directory import EXPORT_INDEX, MODELS, exported_files, is_deployed
from fedrema.runs.execute import prepare
from fedrema.runs.manifest import GIVEN, saved_settings
from fedrema.runs.plain_model import PlainModel, plain_model
from fedrema.runs.run import Run
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.state import SimulationState

# Names that Windows keeps for devices, whatever follows them.
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
LONGEST_NAME = 100


def export_models(
    run: Run,
    out: Path | None = None,
    clients: Sequence[str] | None = None,
    overwrite: bool = False,
    module: nn.Module | None = None,
    adapt: bool = True,
) -> list[Path]:
    """Write clients' models as of the last checkpoint; the folder is written whole or not at all.

    Parameters
    ----------
    run
        A run that has a checkpoint. Its data is not needed, unless its method adapts models before they are used.
    out
        The new folder; default: `models` in the run's folder.
    clients
        Names of clients; default: all.
    overwrite
        Replace an earlier export.
    module
        The network, where the run got it in Python and config.json cannot name it.
    adapt
        Where the method trains clients a little more before they are used (FedBABU, Per-FedAvg), do so, on the run's
        own data; otherwise models are written as the server left them.

    Returns
    -------
    list[Path]
        A file per client; of a deployed run, per client whose model the server holds. Beside them lie index.json
        (which file is whose, with accuracy and sample count) and README.md (three lines of plain PyTorch that load
        one).
    """
    folder = Path(out) if out is not None else run.path / MODELS
    _check_free(folder, overwrite)
    with writing_to(run, folder):
        return _export(run, folder, clients, overwrite, module, adapt)


def _export(
    run: Run, folder: Path, clients: Sequence[str] | None, overwrite: bool, module: nn.Module | None, adapt: bool
) -> list[Path]:
    names = list(dict.fromkeys(run.names if clients is None else clients))
    rows = [_row(run, name) for name in names]
    if is_deployed(run.config):
        return _export_server(run, folder, rows, overwrite, module, adapt)
    files = file_names(run.names)
    state = run.state()
    model = plain_model(run.config, module)
    kind = _kind(run)
    used = parameters_in_use(run, state, rows, kind, adapt, module)
    scored = _last_scored(run, state.round)
    entries: list[dict[str, Any]] = []
    with _folder_written_whole(folder, overwrite) as temporary:
        for name, row, params in zip(names, rows, used, strict=True):
            client = trained_client(run, state, params, row)
            accuracy = scored.quantity("client_accuracy")[row] if scored else None
            entries.append(_write_client(temporary, files[row], name, model, kind, client, accuracy))
        index = _index(run.method, state.round, scored.round if scored else None, _class_names(run), entries)
        _write_index(temporary, index, _readme(run.method, model, entries, _left_out(kind, adapt), _class_names(run)))
    return [folder / entry["file"] for entry in entries]


def _export_server(
    run: Run, folder: Path, rows: Sequence[int], overwrite: bool, module: nn.Module | None, adapt: bool
) -> list[Path]:
    """Write what the server of a deployed run holds: models that are complete, and parts of the others."""
    federation, model = run.config["federation"], plain_model(run.config, module)
    settings = saved_settings(run.directory, (), module is not None)
    shared_name, *files = file_names(["shared", *run.names])
    state, counted = run.state(), [row for row in rows if federation["last_counted"][row]]
    only_on_nodes = bool(counted) and depends_on_nodes(settings, state, counted[0], run.config, module, adapt)
    scored = _last_scored(run, state.round)
    entries: list[dict[str, Any]] = []
    elsewhere: list[dict[str, Any]] = []
    with _folder_written_whole(folder, overwrite) as temporary:
        for row in counted:
            if only_on_nodes:
                entry: dict[str, Any] = {"client": run.names[row], "held_file": None}
                if own := {key: value[row] for key, value in state.params.own.items()}:
                    entry["held_file"] = f"{files[row]}.held.safetensors"
                    _save(_renamed(own, model), temporary / entry["held_file"])
                elsewhere.append(entry)
                continue
            client = trained_client(run, state, state.params.row(row), row)
            accuracy = scored.quantity("client_accuracy")[row] if scored else None
            entries.append(
                _write_client(temporary, files[row], run.names[row], model, settings.method, client, accuracy)
            )
        shared_file = None
        if state.params.common and not entries:
            shared_file = f"{shared_name}.safetensors"
            _save(_renamed(state.params.common, model), temporary / shared_file)
        index = {
            **_index(run.method, state.round, scored.round if scored else None, _class_names(run), entries),
            "only_on_nodes": elsewhere,
            "never_counted": [run.names[row] for row in rows if row not in counted],
            "shared_file": shared_file,
        }
        readme = (
            _readme(run.method, model, entries, _left_out(settings.method, adapt), _class_names(run))
            if entries
            else _readme_of_parts(run.method, model, shared_file)
        )
        _write_index(temporary, index, readme)
    return [folder / entry["file"] for entry in entries]


def _write_client(
    folder: Path,
    stem: str,
    name: str,
    model: PlainModel,
    method: Method | None,
    client: Client,
    accuracy: float | None,
) -> dict[str, Any]:
    """Write the model of a client, and what it has beside the network; returns its entry of the index."""
    added = {key: value for key, value in client.params.items() if key not in model.net.initial}
    if method and overrides(method, "predict"):  # it answers with what the server sent beside the parameters
        added |= client.inbox
    answering = method.model(model.net, client) if method else client.params
    return _write_tensors(folder, stem, name, model.tensors(answering), added, accuracy, int(client.count))


def _write_tensors(
    folder: Path, stem: str, name: str, tensors: Tensors, added: Tensors, accuracy: float | None, train_count: int
) -> dict[str, Any]:
    entry: dict[str, Any] = {"client": name, "file": f"{stem}.safetensors"}
    _save(tensors, folder / entry["file"])
    if added:
        entry["added_file"] = f"{stem}.added.safetensors"
        _save(added, folder / entry["added_file"])
    return {**entry, "accuracy": accuracy, "train_count": train_count}


def _index(
    method: str, number: int, accuracy_round: int | None, class_names: Sequence[str], entries: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "method": method,
        "round": number,
        "accuracy_round": accuracy_round,
        "class_names": list(class_names),
        "clients": entries,
    }


def _write_index(folder: Path, index: Mapping[str, Any], readme: str) -> None:
    (folder / EXPORT_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _renamed(params: Tensors, model: PlainModel) -> Tensors:
    """Return parameters under the network's own names, others as they are."""
    return {model.names.get(name, name): value.detach().cpu() for name, value in params.items()}


def write_node_model(
    folder: Path,
    overwrite: bool,
    model: PlainModel,
    known: Mapping[str, Any],
    number: int,
    params: Tensors,
    added: Tensors,
) -> Path:
    """Write the one model that a node keeps as a folder like that of `export_models`; returns the model's file.

    `known` names the client and the method, and says how many samples it trained on, how accurate it is, and whether
    the method `predicts_otherwise` than by the network alone.
    """
    _check_free(folder, overwrite)
    method, name, classes = known["method"], str(known["client"]), known["class_names"]
    (stem,) = file_names([name])
    left_out = [PREDICTS_OTHERWISE] if known["predicts_otherwise"] else []
    with _folder_written_whole(folder, overwrite) as temporary:
        entry = _write_tensors(
            temporary, stem, name, model.tensors(params), added, known["accuracy"], known["train_count"]
        )
        index = _index(method, number, number, classes, [entry])
        _write_index(temporary, index, _readme(method, model, [entry], left_out, classes))
    return folder / f"{stem}.safetensors"


def writing_to(run: Run, place: Path) -> AbstractContextManager[object]:
    """Return the run's lock where `place` lies inside the run's folder; elsewhere nothing needs to be locked."""
    inside = place.resolve().is_relative_to(run.path.resolve())
    return run.directory.lock() if inside else nullcontext()


def trained_client(run: Run, state: SimulationState, params: Tensors, row: int) -> Client:
    """Return the client in a row of the last checkpoint, on the CPU, with the parameters it uses."""
    groups = (params, ClientTensors(state.memory).row(row), state.inbox.row(row))
    used, memory, inbox = ({key: value.detach().cpu() for key, value in group.items()} for group in groups)
    count = run.config["federation"]["train_counts"][row]
    return Client(used, used, memory, inbox, torch.tensor(float(count)))


def write_model(run: Run, params: Tensors, name: str, out: Path | None = None, overwrite: bool = False) -> Path:
    """Write one more model of a run's network, whole or not at all; returns its file."""
    file = Path(out) if out is not None else run.path / "newcomers" / f"{file_names([name])[0]}.safetensors"
    if file.is_dir():
        raise BadInput(f"--out {file} is a folder: name a file for the model.")
    if file.exists() and not overwrite:
        raise BadInput(f"{file} already exists: choose another with --out, or --overwrite to replace it.")
    model = plain_model(run.config)
    with writing_to(run, file), atomic_file(file) as temporary:
        _save(model.tensors({key: value.detach().cpu() for key, value in params.items()}), temporary)
    return file


def file_names(names: Sequence[str]) -> list[str]:
    """Return a name for each client that every file system takes, different also where case does not count."""
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name).lstrip("-")[:LONGEST_NAME] or "client"
        plain = f"client-{plain}" if plain.casefold() in RESERVED else plain
        different, number = plain, 1
        while different.casefold() in taken:
            number += 1
            different = f"{plain}-{number}"
        taken.add(different.casefold())
        found.append(different)
    return found


def _class_names(run: Run) -> list[str]:
    """Return what each output of a model stands for."""
    federation = run.config["federation"]
    return list(federation.get("class_names") or map(str, range(int(federation["classes"]))))


def _row(run: Run, client: str) -> int:
    if client not in run.names:
        some = ", ".join(run.names[:10]) + (" …" if len(run.names) > 10 else "")
        raise BadInput(f"--clients {client!r} is not in {run.path}; it has {some}.")
    return run.names.index(client)


def _shown(names: Sequence[str], most: int = 10) -> str:
    pairs = [f"{number} is `{name}`" for number, name in enumerate(names[:most])]
    return ", ".join(pairs) + (" and so on" if len(names) > most else "")


def _last_scored(run: Run, last: int) -> RoundRecord | None:
    scored = [record for record in run.rounds if record.metrics and record.round <= last]
    return scored[-1] if scored else None


def _check_free(folder: Path, overwrite: bool) -> None:
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


@contextmanager
def _folder_written_whole(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder; on success it becomes `folder`, in which only the files of an older export go."""
    folder = folder.resolve()
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.mkdir(parents=True)
        try:
            yield temporary
            _check_free(folder, overwrite)
            _put_in_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(f"cannot write {folder}: {reason}; choose a place that is writable and has room.") from error


def _put_in_place(temporary: Path, folder: Path) -> None:
    old = exported_files(folder) if folder.exists() else []
    if folder.exists() and set(folder.iterdir()) != set(old):
        # A user's own files lie there: they stay, and the new files come beside them, the index last.
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


def _save(tensors: Tensors, file: Path) -> None:
    try:
        # Rows of a stack are views, and safetensors wants tensors that own their memory.
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file)
    except SafetensorError as error:  # the library wraps a full disk in an error of its own
        raise OSError(0, str(error)) from error


def _kind(run: Run) -> Method | None:
    """Return the method as it was set; None where one's own is not at hand, which its models do not need."""
    try:
        return saved_settings(run.directory, (), run.config["settings"]["net"] == GIVEN).method
    except BadInput:
        return None


def parameters_in_use(
    run: Run, state: SimulationState, rows: Sequence[int], method: Method | None, adapt: bool, module: nn.Module | None
) -> list[Tensors]:
    """Return what clients in some rows use: where their method adapts, trained more on their own samples."""
    if not adapt or method is None or not overrides(method, "adapt"):
        return [state.params.row(row) for row in rows]
    settings = saved_settings(run.directory, (), module is not None)
    try:
        federation = build_federation(settings.data)
    except BadInput as error:
        reason = str(error).rstrip(".")
        raise BadInput(
            f"{reason}; {run.method} adapts models on the run's data: leave that out by --no-adapt (adapt=False)."
        ) from error
    if federation.fingerprint != run.config["federation"]["fingerprint"]:
        raise BadInput(
            f"The data of {run.path} has changed since: its models cannot be adapted; see --no-adapt (adapt=False)."
        )
    simulator = prepare(replace(settings, simulation=settings.simulation.for_inspection()), federation, module)
    placed = load_state(run.directory.checkpoint_file, run.config["identity"], simulator.device)
    adapted: dict[int, Tensors] = {}
    # In the groups in which they were scored: the last bits depend on who is computed together.
    for part in simulator.groups(torch.arange(placed.clients)):
        wanted = [(place, row) for place, row in enumerate(part.tolist()) if row in rows]
        if wanted:
            cohort = simulator.cohort(placed, part)
            params = simulator.adapted(simulator.method, cohort, simulator.moment(state.round)).params
            adapted |= {row: params.row(place) for place, row in wanted}
    return [adapted[row] for row in rows]


PREDICTS_OTHERWISE = "computes its answers in a way of its own"


def _left_out(kind: Method | None, adapt: bool) -> list[str]:
    """Say what a client does beside using its model; the files do not hold that."""
    told = {"predict": PREDICTS_OTHERWISE}
    if not adapt:
        told["adapt"] = "trains a little more on its own samples"
    return [words for hook, words in told.items() if kind and overrides(kind, hook)]


def _readme(
    method: str,
    model: PlainModel,
    entries: list[dict[str, Any]],
    left_out: list[str],
    class_names: Sequence[str],
) -> str:
    lines = [
        "# Models of clients",
        "",
        f"Each `.safetensors` file is one client's model, trained with {method}; `{EXPORT_INDEX}` says whose.",
        "In this folder, with PyTorch and safetensors:",
        "",
        "```python",
        *model.code(entries[0]["file"]),
        "```",
        "",
        *_inputs(model),
        "",
        f"`classes` holds numbers; `class_names` in `{EXPORT_INDEX}` says which label each one stands for: "
        f"{_shown(class_names)}.",
    ]
    if any("added_file" in entry for entry in entries):
        lines += ["", f"`….added.safetensors` holds what {method} keeps beside this network."]
    if left_out:
        otherwise = " and ".join(left_out)
        lines += ["", f"Accuracies in `{EXPORT_INDEX}` are of what the client would use: {method} {otherwise} first."]
    return "\n".join(lines) + "\n"


def _readme_of_parts(method: str, model: PlainModel, shared_file: str | None) -> str:
    lines = [
        "# What the server holds",
        "",
        f"There is no client's model here: with {method}, a client predicts with parameters that exist only on its",
        "node, or adapts its model to its own samples first. `fedrema deploy model NODE_FOLDER`, on the node, writes",
        f"the complete model. `{EXPORT_INDEX}` lists the clients. `….held.safetensors`, where there is one, holds",
        "those parameters of a client that the server knows.",
    ]
    if shared_file:
        *building, loading, _ = model.code(shared_file)
        lines += [
            "",
            f"`{shared_file}` holds the parameters that all clients share:",
            "",
            "```python",
            *building,
            f"{loading.removesuffix(')')}, strict=False)  # what is private keeps its initial value",
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
        "`(x / 255 - 0.5) / 0.5`, anything that is not uint8 as it is.",
    ]
