"""A model for a client that was not there: match its head once, fine-tune, score."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedrema.core import Moment, Role, average
from fedrema.data import Federation
from fedrema.data.federation import read_npz
from fedrema.engine import Crowd, Stacked
from fedrema.errors import BadInput
from fedrema.methods.fedrema import maximum_difference_segmentation
from fedrema.net import Tensors
from fedrema.runs.checkpoint import load_world
from fedrema.runs.deployed import counted_clients
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import make_net
from fedrema.runs.manifest import saved_settings
from fedrema.score import share
from fedrema.similarity import draw_probes, head_similarity
from fedrema.simulate import Simulator
from fedrema.world import World


@dataclass(frozen=True)
class Newcomer:
    """What a new client gets."""

    params: Tensors
    """Its model."""
    peers: dict[str, float]
    """Whose heads went into its own, with which weight; empty where heads are not personal."""
    head_role: Role
    """What the method does with heads."""
    accuracy: dict[str, float | None]
    """On its test samples: as it arrives, after matching, after fine-tuning."""
    train: int
    test: int


def personalize(
    path: Path, data: Path, epochs: int | None = None, module: nn.Module | None = None, data_seed: int = 0
) -> Newcomer:
    """Make a model for a client that was not there from a finished run.

    It starts from the shared parameters and the mean of the heads that travelled, trains one round, has its head
    matched with the others' (similarity and the largest gap, as FedReMa does), takes the mean of those chosen
    weighted by sample counts, and fine-tunes it. Where heads are private it trains a new one. A method that trains
    clients a little more before they are used does so here too.
    """
    directory = RunDirectory.open(path)
    settings = saved_settings(directory, (), module is not None)
    trained_on = directory.config()["federation"]
    shape = tuple(trained_on["sample_shape"])
    net = make_net(settings, shape, trained_on["classes"], module)
    newcomer = read_newcomer(data, net.classes, data_seed, settings.data.test_share)
    if newcomer.sample_shape != shape:
        raise BadInput(f"--data {data} has samples of shape {newcomer.sample_shape}; the run was trained on {shape}.")
    local = settings.local if epochs is None else replace(settings.local, epochs=epochs)
    simulator = Simulator(settings.method, net, newcomer, local, settings.simulation.anywhere())
    world = load_world(directory.checkpoint_file, directory.config()["identity"], simulator.device)
    world, names, train_counts = counted_clients(world, directory.config())
    counts = torch.tensor(train_counts).to(simulator.counts)

    first, second = simulator.moment(world.round + 1), simulator.moment(world.round + 2)
    arrived = _arrive(simulator, world)
    trained = _train(simulator, arrived, first)
    matched, peers = _match(simulator, world, trained, counts, names)
    tuned = simulator.adapted(settings.method, _train(simulator, matched, second) if peers else trained, second)
    stages = {"on arrival": arrived, "matched": matched, "fine-tuned": tuned}
    accuracy = {stage: _accuracy(simulator, crowd) for stage, crowd in stages.items() if peers or stage != "matched"}
    train, test = int(simulator.train.counts[0]), int(simulator.test.counts[0])
    role = next(settings.method.role(net, name) for name in net.initial if net.in_head(name))
    return Newcomer(settings.method.model(net, tuned.one(0)), peers, role, accuracy, train, test)


def read_newcomer(file: Path, classes: int, data_seed: int, test_share: float) -> Federation:
    """Read one client's `.npz`: `x`, `y` and perhaps `split`."""
    if not file.is_file():
        raise BadInput(f"--data {file} is not a file: name a .npz with x, y and perhaps split.")
    arrays = read_npz(file, required=("x", "y"), optional=("split", "client", "meta"))
    client = np.full(len(arrays["y"]), file.stem or "newcomer")
    try:
        return Federation.from_arrays(
            arrays["x"], arrays["y"], client, arrays.get("split"), classes, None, data_seed, test_share
        )
    except BadInput as error:
        raise BadInput(f"--data {file}: {error}") from error


def _arrive(simulator: Simulator, world: World) -> Crowd:
    """Return a client that has only what the server can give to one it does not know."""
    new = simulator.start()
    params = new.params.row(0)
    for name in params:
        if name in world.params.common:
            params[name] = world.params.common[name]
        elif simulator.method.role(simulator.net, name) is Role.PERSONAL:
            params[name] = world.params.own[name].mean(dim=0)
    crowd = simulator.crowd(new, torch.zeros(1, dtype=torch.long))
    return replace(crowd, params=Stacked(_row(params)), inbox=Stacked(common=world.inbox.common))


def _train(simulator: Simulator, crowd: Crowd, moment: Moment) -> Crowd:
    """Play a client's part of a round."""
    begun = simulator.begin(crowd, moment)
    params, _, losses = simulator.local_training(begun, {}, moment)
    if not torch.isfinite(losses).all():
        raise BadInput("Fine-tuning on --data diverged: its loss is not finite; fewer --epochs may help.")
    ended, _ = simulator.end(replace(begun, params=Stacked(params), received=begun.params), moment)
    return replace(ended, inbox=crowd.inbox, received=None)


def _row(params: Tensors) -> Tensors:
    return {name: value[None] for name, value in params.items()}


def _match(
    simulator: Simulator, world: World, crowd: Crowd, counts: torch.Tensor, names: list[str]
) -> tuple[Crowd, dict[str, float]]:
    net, trained = simulator.net, crowd.params.own
    heads = {
        name: value for name, value in world.params.own.items()
        if net.in_head(name) and simulator.method.role(net, name) is Role.PERSONAL
    }  # fmt: skip
    if not heads:
        return crowd, {}
    together = {name: torch.cat([value, trained[name]]) for name, value in heads.items()}
    probes = draw_probes(net, simulator.moment(world.round + 1), count=1, high=1.0)
    similarity = head_similarity(net, together, probes, temperature=0.5)
    chosen = maximum_difference_segmentation(similarity)[0][-1]
    weights = chosen * torch.cat([counts, simulator.counts])
    matched = Stacked({**trained, **_row(average(together, weights))})
    shares = weights / weights.sum()
    peers = {name: float(weight) for name, weight in zip([*names, "itself"], shares, strict=True) if weight > 0}
    return replace(crowd, params=matched), peers


def _accuracy(simulator: Simulator, crowd: Crowd) -> float | None:
    correct, asked = simulator.tally_as_is(simulator.method, crowd)
    return share(correct.sum(), asked.sum())
