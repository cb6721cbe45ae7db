"""One client on a machine of its own: a letter comes in, a round of local training goes out.

It is the simulator with a federation of one. What it keeps for itself (private parameters, memory, momentum) counts
only once the server says that the reply did: a round that is lost on the way leaves no trace.
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedrema.config.settings import Settings
from fedrema.core import Client, Role
from fedrema.data import Federation
from fedrema.deploy.letters import Letter, Reply, Score
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.networks import Network, build_net
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.provenance import check_unchanged, identity_of, inputs_of, revisions_of
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import COMMON, Clock, SimulationState
from fedrema.simulation.uploads import RoundUploads

ME = torch.zeros(1, dtype=torch.long)
"""The only row there is."""


class Node:
    """A client with its samples and with what it keeps between rounds, in memory or in a folder."""

    def __init__(self, settings: Settings, federation: Federation, folder: Path | None = None) -> None:
        if len(federation) != 1:
            raise BadInput(f"A node holds the samples of one client, but its data has {len(federation)}.")
        net = _network(settings.network, federation.sample_shape, federation.classes, settings.simulation.seed)
        settings = settings.fitted(federation, net.integers)
        self.simulator = Simulator(settings.method, net, federation, settings.local, settings.simulation)
        self.name = federation.names[0]
        self.folder = folder
        self.identity = identity_of(settings, federation, own_module=False)
        self.made_by = {
            "revisions": revisions_of(settings.method, self.simulator.device.type),
            "inputs": inputs_of(settings),
        }
        """Kept with what it keeps: another revision of fedrema or another method file cannot go on from it."""
        self.states: dict[int, SimulationState] = {0: self.simulator.start()}
        """What it has kept after a round: the last that counted, and the one that is not yet known to."""
        begun, local = self.states[0], settings.local
        self.keeps = bool(begun.params.own or begun.memory or (local.keep_momentum and local.momentum))
        """Whether there is anything to keep: some methods leave nothing at a client."""
        self.in_use: Client | None = None
        """This client as it predicts with what came last: what its `received` score is of."""
        if folder is not None:
            files = sorted(folder.glob("round-*.safetensors"))
            for file in files:
                facts, _ = read_checkpoint(file)
                made_by = facts.get("more") or {}
                check_unchanged(file, made_by.get("revisions", {}), made_by.get("inputs", {}), settings)
                state = self.simulator.adopt(load_state(file, self.identity))
                self.states[state.round] = state

    def answer(self, letter: Letter) -> Reply:
        """Train from what came and return what the server is to know."""
        state = self._standing(letter)
        simulator, count = self.simulator, int(self.simulator.train.counts[0])
        used = simulator.adapted(simulator.method, simulator.cohort(state, ME), simulator.moment(letter.round - 1))
        received = _score(*simulator.tally_as_is(simulator.method, used))
        self.in_use = used.one(0)
        if not letter.train:
            return Reply(letter.round, count, received=received)
        collected = RoundUploads(ME, simulator.counts, simulator.storage, keep_heads=False)
        simulator.train_group(state, ME, simulator.moment(letter.round), collected, Clock(simulator.device))
        self._keep(letter, state, collected)
        return Reply(
            letter.round,
            count,
            # One client's mean is what it trained.
            {
                name: value.cpu()
                for name, value in (*collected.mean.total.items(), *_only(collected.seen.tensors).items())
            },
            {name: value.cpu() for name, value in _only(collected.extras.tensors).items()},
            float(collected.client_losses()[0]),
            received,
            _score(*collected.tallies[0]) if collected.tallies else None,
        )

    def begins_with(self, letter: Letter) -> Tensors:
        """Return all parameters as they are before training."""
        params = self._standing(letter).params
        return {**params.common, **_only(params.own)}

    def _standing(self, letter: Letter) -> SimulationState:
        """Return this client at the start of the round: what it kept when it last counted, and what has come since."""
        if not self.keeps:
            self.states = {letter.accepted: self.states[0]} | self.states
        if letter.accepted not in self.states:
            known = ", ".join(map(str, sorted(self.states)))
            raise BadInput(
                f"Client {self.name!r} has lost what it kept after round {letter.accepted} (it has round {known}): "
                "restore its folder, or let it join under another name."
            )
        state, roles = self.states[letter.accepted], self.simulator.roles(self.states[letter.accepted].params)
        for name, role in roles.items():
            if role in COMMON and name not in letter.common:
                raise BadInput(f"The server did not send {name!r}: it runs another method or network.")
        device = self.simulator.device

        def here(tensors: Tensors, *, row: bool = False) -> Tensors:
            return {name: (value[None] if row else value).to(device) for name, value in tensors.items()}

        params = ClientTensors({**state.params.own, **here(letter.own, row=True)}, here(letter.common))
        inbox = ClientTensors(here(letter.own_mail, row=True), here(letter.mail))
        state = replace(state, round=letter.round - 1, params=params, inbox=inbox)
        if letter.late:  # what it keeps begins with what has come
            begun = self.simulator.start_new_clients(self.simulator.cohort(state, ME))
            state = replace(state, params=begun.params, memory=begun.memory.own)
        return state

    def _keep(self, letter: Letter, state: SimulationState, collected: RoundUploads) -> None:
        """Remember what does not travel, beside what counted last."""
        if not self.keeps:
            return
        private = {
            name: collected.kept.tensors.get(name, value)
            for name, value in state.params.own.items()
            if self.simulator.method.role(self.simulator.net, name) in (Role.PRIVATE, Role.PERSONAL)
        }
        memory = {**state.memory, **collected.memory.tensors}
        velocity = {**state.velocity, **collected.velocity.tensors}
        kept = SimulationState(1, letter.round, ClientTensors(private), memory, ClientTensors(), velocity, {})
        self.states = {letter.accepted: self.states[letter.accepted], letter.round: kept}
        if self.folder is not None:
            save_state(kept, self._file(letter.round), self.identity, self.made_by)
            for file in self.folder.glob("round-*.safetensors"):
                if file not in {self._file(number) for number in self.states}:
                    file.unlink()

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round-{number:06}.safetensors"


@functools.lru_cache(maxsize=1)  # Flower's simulation engine plays many nodes in one process
def _network(network: Network, shape: tuple[int, ...], classes: int, seed: int) -> Net:
    return build_net(network, shape, classes, seed)


def _only(tensors: Tensors) -> Tensors:
    return {name: value[0] for name, value in tensors.items()}


def _score(correct: np.ndarray, asked: np.ndarray) -> Score | None:
    if not asked.sum():
        return None
    return Score((int(correct[0, 0]), int(correct[0, 1])), (int(asked[0, 0]), int(asked[0, 1])))
