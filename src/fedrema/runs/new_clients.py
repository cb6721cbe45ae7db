"""Personalises a model for a client that did not participate in training: match its head once, fine-tune, score."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.core import LocalTraining, Moment, Role, average
from fedrema.core.similarity import draw_probes, head_similarity, maximum_difference_segmentation
from fedrema.data import DataSettings, Federation, load_user_data
from fedrema.data.natural import NATURAL
from fedrema.data.npz import read_npz
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.saved_meta import parse_meta
from fedrema.engine import ClientTensors, Cohort
from fedrema.errors import BadInput, FedremaError
from fedrema.methods import find_method
from fedrema.models.body_and_head import Tensors
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import make_net
from fedrema.runs.manifest import FederationFacts
from fedrema.runs.saved_settings import saved_settings
from fedrema.runs.trained_clients import counted_clients
from fedrema.runs.trust import Trust
from fedrema.simulation.scoring import measure, overall
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import SimulationState
from fedrema.tasks import Predictions, find_metric

LOCAL = "Local"
"""The stage of a model that was trained on the client's own samples only."""
MOST_LOCAL_EPOCHS = 50


@dataclass(frozen=True)
class NewClient:
    """The model of a new client, and how it was made."""

    params: Tensors
    """The parameters of its model."""
    peers: dict[str, float]
    """The clients over which its head was averaged, with their weights; empty if heads are not personal."""
    head_role: Role
    """The role of heads in the method."""
    scores: dict[str, float | None]
    """The primary metric on its test samples: on arrival, after matching, after fine-tuning; and of Local."""
    train: int
    test: int
    name: str
    predictions: dict[str, Predictions]
    """What the models of these stages predict for its test samples."""
    local_epochs: int
    """Epochs for which the model of the stage Local was trained."""


def personalize(
    path: Path,
    data: Path | str,
    epochs: int | None = None,
    module: nn.Module | None = None,
    data_seed: int = 0,
    trust: Trust = False,
) -> NewClient:
    """Make a model for a client that did not participate in a finished run; `data` is what --data takes.

    The client starts from the shared parameters and the mean of the uploaded heads; a second model that the method
    keeps for each client starts as a copy of the shared one. The client trains for one round. Its head is then matched
    with the others' (similarity and the largest gap, as FedReMa does), replaced by the mean of the chosen heads,
    weighted by sample counts, and fine-tuned. If heads are private, the client trains a new one. If the method adapts
    models before use, the model is adapted.

    For comparison, another model is trained on the client's own samples only (Local): from the run's initial weights,
    for as many epochs as a client of the run has trained in all rounds together, but at most `MOST_LOCAL_EPOCHS`. It is
    left out if it diverges.
    """
    directory = RunDirectory.open(path)
    settings = saved_settings(directory, None, module is not None, trust, ("method", "net"))
    manifest = directory.manifest()
    trained_on = manifest.federation
    net = make_net(settings, trained_on.sample_shape, trained_on.task.outputs, module)
    new = read_new_client(data, trained_on, settings.data, data_seed)
    if new.sample_shape != trained_on.sample_shape:
        raise BadInput(
            f"--data {data} has samples of shape {new.sample_shape}; the run was trained on {trained_on.sample_shape}."
        )
    settings = settings.fitted(new, net.integers)  # in a deployment, each node chooses its own batch size
    local = settings.local if epochs is None else replace(settings.local, epochs=epochs)
    simulator = Simulator(settings.method, net, new, local, settings.simulation.for_inspection())
    state = directory.state(simulator.device)
    state, names, train_counts = counted_clients(state, trained_on)
    counts = torch.tensor(train_counts).to(simulator.counts)

    first, second = simulator.moment(state.round + 1), simulator.moment(state.round + 2)
    arrived = _arrive(simulator, state)
    trained = _train(simulator, arrived, first)
    matched, peers = _match(simulator, state, trained, counts, names)
    tuned = simulator.adapted(settings.method, _train(simulator, matched, second) if peers else trained, second)
    stages = {"on arrival": arrived, "matched": matched, "fine-tuned": tuned}
    predictions = {
        stage: simulator.predictions(settings.method, cohort)
        for stage, cohort in stages.items()
        if peers or stage != "matched"
    }
    local_epochs = min(settings.local.epochs * state.round, MOST_LOCAL_EPOCHS)
    if (alone := _trained_alone(simulator, replace(local, epochs=local_epochs))) is not None:
        predictions[LOCAL] = alone
    metric = find_metric(simulator.task.primary)
    scores = {stage: overall(measure([metric], found))[metric.name] for stage, found in predictions.items()}
    train, test = int(simulator.train.counts[0]), int(simulator.test.counts[0])
    role = next((settings.method.role(net, name) for name in net.initial if net.in_head(name)), Role.SHARED)
    model, name = settings.method.model(net, tuned.one(0)), new.names[0]
    return NewClient(model, peers, role, scores, train, test, name, predictions, local_epochs)


def read_new_client(
    data: Path | str, trained_on: FederationFacts, settings: DataSettings, data_seed: int = 0
) -> Federation:
    """Read one client's samples, with the classes, the task and the preprocessing of the run.

    `data` is a table or a folder with images of one client, if the run was trained on such; otherwise a `.npz` file or
    `module:function` with `x`, `y` and optionally `split`.
    """
    if trained_on.preprocessing is not None and not is_function(str(data)):
        new = _read_table(str(data), trained_on.preprocessing, trained_on, settings, data_seed)
    else:
        new = _read_samples(str(data), trained_on, data_seed, settings.test_share)
    # Quantities are standardised as in the run.
    return replace(new, own_task=trained_on.own_task)


def _read_table(
    file: str, rules: Preprocessing, trained_on: FederationFacts, settings: DataSettings, data_seed: int
) -> Federation:
    natural, options = NATURAL.get(settings.dataset), settings.table_options
    if settings.federation is None and natural is not None:
        options = replace(options, target=natural.target)
    columns = None if rules.images else rules.used
    options = replace(options, client_column=None, columns=columns, task=trained_on.task.name, image_size=0)
    classes = trained_on.labels if trained_on.task.has_classes else None
    try:
        new = load_user_data(
            file,
            data_seed,
            settings.test_share,
            classes,
            options,
            rules,
            client=new_client_name(file),
            rare=trained_on.task.rare,
        )
    except BadInput as error:
        raise BadInput(f"--data {str(error).removeprefix('--federation ')}") from error
    if len(new) > 1:
        raise BadInput(f"--data {file} holds {len(new)} clients; it must hold the samples of one.")
    return new


def _read_samples(file: str, trained_on: FederationFacts, data_seed: int, test_share: float) -> Federation:
    class_names = trained_on.labels if trained_on.task.has_classes else ()
    arrays = _read_arrays(file)
    meta = parse_meta(arrays.get("meta"), Path(file))
    saved = meta.classes is not None  # by Federation.save: y holds numbers, and meta their class names
    client = np.full(len(arrays["y"]), new_client_name(file))
    try:
        return Federation.from_arrays(
            arrays["x"],
            arrays["y"],
            client,
            arrays.get("split"),
            meta.classes,
            data_seed=data_seed,
            test_share=test_share,
            class_names=meta.class_names if saved else class_names or None,
            task=None if trained_on.task.has_softmax else trained_on.task.name,
            rare=trained_on.task.rare,
        ).relabelled(class_names)
    except BadInput as error:
        raise BadInput(f"--data {file}: {error}") from error


def new_client_name(data: Path | str) -> str:
    """Return the name of a new client: that of its file, or of its function."""
    source = str(data)
    if is_function(source):
        return source.partition(":")[2]
    return Path(source).stem or "newcomer"


def is_function(source: str) -> bool:
    """Return whether data comes from `module:function`."""
    return not Path(source).exists() and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", source) is not None


def _read_arrays(source: str) -> dict[str, Any]:
    if not is_function(source):
        if not Path(source).is_file():
            raise BadInput(
                f"--data {source} is not a file: name a .npz with x, y and optionally split, or module:function."
            )
        return dict(read_npz(Path(source), required=("x", "y"), optional=("split", "client", "meta")))
    function = load_object(source, "data")
    with working_folder_importable():
        try:
            returned = function()
        except FedremaError:
            raise
        except (Exception, SystemExit) as error:  # any error of the user's function is reported in one sentence
            raise BadInput(f"--data {source} failed: {raised_at(error)}.") from error
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        returned = dict(zip(("x", "y", "split"), returned, strict=False))
    if not isinstance(returned, Mapping) or not {"x", "y"} <= set(returned) <= {"x", "y", "split"}:
        kind = type(returned).__name__
        raise BadInput(f"--data {source} returned {kind}; valid are (x, y), (x, y, split), or a dict of these.")
    return dict(returned)


def _arrive(simulator: Simulator, state: SimulationState) -> Cohort:
    """Return the new client with the parameters that the server can send to a client that it does not know."""
    new = simulator.start()
    params = new.params.row(0)
    for name in params:
        if name in state.params.common:
            params[name] = state.params.common[name]
        elif simulator.method.role(simulator.net, name) is Role.PERSONAL:
            params[name] = state.params.own[name].mean(dim=0)
    cohort = simulator.cohort(new, torch.zeros(1, dtype=torch.long))
    return simulator.start_clients(
        replace(cohort, params=ClientTensors(_row(params)), inbox=ClientTensors(common=state.inbox.common))
    )


def _train(simulator: Simulator, cohort: Cohort, moment: Moment) -> Cohort:
    """Train a client for one round."""
    trained, losses = simulator.local_training(simulator.begin(cohort, moment), moment)
    if not torch.isfinite(losses).all():
        raise BadInput("Fine-tuning on --data diverged: its loss is not finite; fewer --epochs may help.")
    ended, _ = simulator.end(trained, moment)
    return replace(ended, inbox=cohort.inbox, velocity={}, received=None)


def _row(params: Tensors) -> Tensors:
    return {name: value[None] for name, value in params.items()}


def _match(
    simulator: Simulator, state: SimulationState, cohort: Cohort, counts: torch.Tensor, names: list[str]
) -> tuple[Cohort, dict[str, float]]:
    """Replace a client's head by the mean of similar heads; returns the client and the weights of these heads."""
    net, trained = simulator.net, cohort.params.own
    heads = {
        name: value for name, value in state.params.own.items()
        if net.in_head(name) and simulator.method.role(net, name) is Role.PERSONAL
    }  # fmt: skip
    if not heads:
        return cohort, {}
    all_heads = {name: torch.cat([value, trained[name]]) for name, value in heads.items()}
    probes = draw_probes(net, simulator.moment(state.round + 1), count=1, high=1.0)
    similarity = head_similarity(net, all_heads, probes, temperature=0.5)
    chosen = maximum_difference_segmentation(similarity)[0][-1]
    weights = chosen * torch.cat([counts, simulator.counts])
    matched = ClientTensors({**trained, **_row(average(all_heads, weights))})
    shares = weights / weights.sum()
    peers = {name: float(weight) for name, weight in zip([*names, "itself"], shares, strict=True) if weight > 0}
    return replace(cohort, params=matched), peers


def _trained_alone(simulator: Simulator, local: LocalTraining) -> Predictions | None:
    """Return the predictions of a model that was trained on the client's own samples only; None if it diverged."""
    alone = Simulator(find_method("local")(), simulator.net, simulator.federation, local, simulator.settings)
    cohort = alone.cohort(alone.start(), torch.zeros(1, dtype=torch.long))
    trained, losses = alone.local_training(cohort, alone.moment(1))
    return alone.predictions(alone.method, trained) if torch.isfinite(losses).all() else None
