"""Exports clients' models as safetensors for plain PyTorch; using them requires neither fedrema nor the data."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from fedrema.base.files import atomic_file
from fedrema.core import Client, Method, overrides
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.runs.checksums import BELONGS
from fedrema.runs.directory import MODELS
from fedrema.runs.model_card import model_card
from fedrema.runs.model_folder import (
    OWN_PREDICTION,
    ExportedClient,
    ExportIndex,
    HeldPart,
    ModelFolder,
    PredictionFacts,
    ServerParts,
    check_free,
    file_names,
    model_folder,
    save_tensors,
)
from fedrema.runs.new_samples import client_column
from fedrema.runs.plain_model import PlainModel, model_of_run, network_of
from fedrema.runs.run import Run
from fedrema.runs.saved_settings import check_code_of_run
from fedrema.runs.trained_clients import TrainedClients
from fedrema.simulation.records import RoundRecord


def export_models(
    run: Run,
    out: Path | None = None,
    clients: Sequence[str] | None = None,
    overwrite: bool = False,
    module: nn.Module | None = None,
    adapt: bool = True,
) -> list[Path]:
    """Write clients' models as of the last checkpoint; the folder is written completely or not at all.

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
        The network, if it was given in Python, because config.json cannot name it.
    adapt
        If the method adapts models before use (FedBABU, Per-FedAvg), adapt them on the run's own data; otherwise models
        are written without adapting.

    Returns
    -------
    list[Path]
        A file per client; of a deployed run, per client whose model the server has. The folder also has index.json
        (client, file, accuracy and sample count of each model, and the preprocessing), README.md (lines of plain
        PyTorch that load a model) and MODEL_CARD.md.
    """
    folder = Path(out) if out is not None else run.path / MODELS
    check_free(folder, overwrite)
    with writing_to(run, folder):
        return _export(run, folder, clients, overwrite, module, adapt)


def _export(
    run: Run, folder: Path, names: Sequence[str] | None, overwrite: bool, module: nn.Module | None, adapt: bool
) -> list[Path]:
    rows = [_row(run, name) for name in dict.fromkeys(run.names if names is None else names)]
    clients, facts = TrainedClients(run, module), run.manifest.federation
    number, method = clients.state.round, clients.method
    scored = _last_scored(run, number)
    index = ExportIndex(
        run.method,
        number,
        scored.round if scored else None,
        facts.labels,
        belongs_to=checkpoint_mark(run),
        prediction=PredictionFacts(
            facts.task,
            network_of(run.manifest),
            tuple(facts.sample_shape),
            run.manifest.ran_on.dtype,
            facts.preprocessing,
            client_column(run.manifest),
            method is None or overrides(method, "predict"),
        ),
    )
    with model_folder(folder, overwrite, clients.plain, index) as writing:
        if facts.is_deployed:
            _write_server(writing, clients, rows, adapt, scored)
        else:
            _write_clients(writing, clients, rows, file_names(run.names), adapt, scored)
            writing.finish(_left_out(method, adapt), card=model_card(run, rows))
    return [folder / entry.file for entry in index.clients]


def _write_clients(
    writing: ModelFolder,
    clients: TrainedClients,
    rows: Sequence[int],
    files: Sequence[str],
    adapt: bool,
    scored: RoundRecord | None,
) -> None:
    """Write the models of clients in some rows."""
    names, accuracies = clients.run.names, scored.client_accuracy if scored else None
    for row, client in zip(rows, clients.clients(rows, adapt), strict=True):
        tensors, added = _tensors(clients.plain, clients.method, client)
        accuracy = accuracies[row] if accuracies else None
        writing.add(files[row], names[row], tensors, added, accuracy, int(client.count))


def _write_server(
    writing: ModelFolder, clients: TrainedClients, rows: Sequence[int], adapt: bool, scored: RoundRecord | None
) -> None:
    """Write what the server of a deployed run has: complete models, or the parameters that clients share with it."""
    names, state = clients.run.names, clients.state
    counted = [row for row in rows if (clients.manifest.federation.last_counted or [])[row]]
    shared_name, *files = file_names(["shared", *names])
    held: list[HeldPart] = []
    if counted and clients.only_on_node(counted[0], adapt):
        for row in counted:
            own = {key: value[row] for key, value in state.params.own.items()}
            file = writing.add_part(f"{files[row]}.held.safetensors", own) if own else None
            held.append(HeldPart(names[row], file))
    else:
        _write_clients(writing, clients, counted, files, False, scored)
    shared_file = None
    if state.params.common and not writing.index.clients:
        shared_file = writing.add_part(f"{shared_name}.safetensors", state.params.common)
    never_counted = [names[row] for row in rows if row not in counted]
    parts = ServerParts(held, never_counted, shared_file)
    writing.finish(_left_out(clients.settings.method, adapt), parts, model_card(clients.run, counted))


def _tensors(model: PlainModel, method: Method | None, client: Client) -> tuple[Tensors, Tensors]:
    """Return the network's parameters with which a client predicts, and its other tensors."""
    added = {key: value for key, value in client.params.items() if key not in model.net.initial}
    if method and overrides(method, "predict"):  # it may also predict with tensors that the server sent
        added |= client.inbox
    predicting = method.model(model.net, client) if method else client.params
    return model.tensors(predicting), added


def write_node_model(
    folder: Path,
    overwrite: bool,
    model: PlainModel,
    index: ExportIndex,
    client: ExportedClient,
    params: Tensors,
    added: Tensors,
    own_prediction: bool,
) -> Path:
    """Write the model of a single node to a folder like that of `export_models`; returns the model's file.

    `client` has the node's name, accuracy and number of samples; `own_prediction`: the method overrides `predict`.
    """
    check_free(folder, overwrite)
    (stem,) = file_names([client.client])
    with model_folder(folder, overwrite, model, index) as writing:
        writing.add(stem, client.client, model.tensors(params), added, client.accuracy, client.train_count)
        writing.finish([OWN_PREDICTION] if own_prediction else [])
    return folder / f"{stem}.safetensors"


def writing_to(run: Run, place: Path) -> AbstractContextManager[object]:
    """Return the run's lock where `place` is inside the run's folder; elsewhere nothing needs to be locked."""
    inside = place.resolve().is_relative_to(run.path.resolve())
    return run.directory.lock() if inside else nullcontext()


def write_model(run: Run, params: Tensors, name: str, out: Path | None = None, overwrite: bool = False) -> Path:
    """Write the model of a new client of a run, completely or not at all; returns its file."""
    file = Path(out) if out is not None else run.path / "newcomers" / f"{file_names([name])[0]}.safetensors"
    if file.is_dir():
        raise BadInput(f"--out {file} is a folder: name a file for the model.")
    if file.exists() and not overwrite:
        raise BadInput(f"{file} already exists: choose another with --out, or --overwrite to replace it.")
    check_code_of_run(run.directory, run.manifest, run.trust_code, ("net",))
    model = model_of_run(run.manifest)
    with writing_to(run, file), atomic_file(file) as temporary:
        plain = model.tensors({key: value.detach().cpu() for key, value in params.items()})
        save_tensors(plain, temporary, {"client": name, BELONGS: checkpoint_mark(run)})
    return file


def checkpoint_mark(run: Run) -> str:
    """Return the mark of a run's checkpoint: the run, the round and the records that its models belong to."""
    return str(run.directory.checkpoint()[0]["records"][-1])


def _row(run: Run, client: str) -> int:
    if client not in run.names:
        some = ", ".join(run.names[:10]) + (" …" if len(run.names) > 10 else "")
        raise BadInput(f"--clients {client!r} is not in {run.path}; it has {some}.")
    return run.names.index(client)


def _last_scored(run: Run, last: int) -> RoundRecord | None:
    scored = [record for record in run.rounds if record.metrics and record.round <= last]
    return scored[-1] if scored else None


def _left_out(method: Method | None, adapt: bool) -> list[str]:
    """Describe what a client does to predict in addition to using its model, which the files do not include."""
    hooks = {"predict": OWN_PREDICTION}
    if not adapt:
        hooks["adapt"] = "trains a little more on its own samples"
        hooks["ready"] = "computes a part of the model from its own samples"
    return [words for hook, words in hooks.items() if method and overrides(method, hook)]
