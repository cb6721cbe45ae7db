"""Training on a node: one client on its own machine, which replies to the requests of the server.

A node runs the simulator with a federation of one client. Its own state (private parameters, memory, momentum) after a
round becomes final only when the server confirms that the reply was used, so a lost reply has no effect.
"""

import functools
from dataclasses import replace
from pathlib import Path

import torch

from fedrema.config.settings import Settings
from fedrema.core import Client, Role
from fedrema.data import Federation
from fedrema.deploy.limits import quoted
from fedrema.deploy.messages import Reply, Request
from fedrema.deploy.refusals import Refusal, Refused
from fedrema.deploy.scores import Score
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.networks import Network, build_net
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.provenance import check_unchanged, identity_of, inputs_of, revisions_of
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import COMMON_ROLES, Clock, RoundUploads, SimulationState

ROW = torch.zeros(1, dtype=torch.long)
"""The row of the only client."""


class Node:
    """A client with its samples, and its state between rounds in memory or in a folder.

    Parameters
    ----------
    settings
        The settings of the run.
    federation
        The samples of one client.
    folder
        Where the states are saved; None: only in memory.
    kept_rounds
        How many states after used replies are kept in the folder. The server can be restored from a checkpoint as long
        as the state that belongs to it is among them.
    accept_lost_state
        Whether to continue from the nearest state if the state that the server names is lost.
    """

    def __init__(
        self,
        settings: Settings,
        federation: Federation,
        folder: Path | None = None,
        kept_rounds: int = 1,
        accept_lost_state: bool = False,
    ) -> None:
        if len(federation) != 1:
            raise BadInput(f"A node holds the samples of one client, but its data has {len(federation)}.")
        settings, self.simulator = make_simulator(settings, federation)
        self.name = federation.names[0]
        self.folder, self.kept_rounds, self.accept_lost_state = folder, kept_rounds, accept_lost_state
        self.settings = settings
        self.identity = identity_of(settings, federation, own_module=False)
        self.provenance = {
            "revisions": revisions_of(settings, self.simulator.device.type),
            "inputs": inputs_of(settings),
        }
        """Saved with the state: another revision of fedrema or another method file cannot resume from it."""
        self.initial = self.simulator.start()
        self.states: dict[int, SimulationState] = {0: self.initial}
        """The state after a round, in memory: the last round whose reply was used, and the one that is not yet
        confirmed. Older states are in the folder only."""
        local, initial = settings.local, self.initial
        self.has_state = bool(initial.params.own or initial.memory or (local.keep_momentum and local.momentum))
        """Whether the method keeps anything on a client between rounds."""
        self.client: Client | None = None
        """The client as it predicts with the last received model; the `received` score is measured with it."""
        self.note = ""
        """A message for the node's owner about the last request; empty if there is nothing to report."""
        for number in self._saved_rounds()[-2:]:
            self._load(number)

    def reply_to(self, request: Request) -> Reply:
        """Score the received model, train from it, and return the reply."""
        self.note = ""
        state = self._start_state(request)
        simulator, count = self.simulator, int(self.simulator.train.counts[0])
        tested = int(simulator.test.counts[0])
        cohort, before = simulator.cohort(state, ROW), simulator.moment(request.round - 1)
        adapted = simulator.adapted(simulator.method, cohort, before)
        received = Score.of(simulator.score_cohort(simulator.method, adapted), tested)
        self.client = adapted.one(0)
        if not request.train:
            return Reply(request.round, count, received=received)
        collected = RoundUploads(ROW, simulator.counts, simulator.storage, keep_heads=False)
        simulator.train_chunk(state, ROW, simulator.moment(request.round), collected, Clock(simulator.device))
        self._store(request, state, collected)
        # The mean over one client is its own model.
        params = {**collected.mean.total, **_first_row(collected.visible.tensors)}
        return Reply(
            request.round,
            count,
            {name: value.cpu() for name, value in params.items()},
            {name: value.cpu() for name, value in _first_row(collected.extras.tensors).items()},
            float(collected.client_losses()[0]),
            received,
            Score.of(collected.scores[0], tested) if collected.scores else None,
        )

    def start_params(self, request: Request) -> Tensors:
        """Return all parameters as they are before training."""
        params = self._start_state(request).params
        return {**params.common, **_first_row(params.own)}

    def _start_state(self, request: Request) -> SimulationState:
        """Return the state at the start of the round: the one after its last used reply, with the received tensors."""
        state = self._state_after(request.last_used_round)
        self._check_names(request)
        check_request(request)
        device = self.simulator.device

        def on_device(tensors: Tensors, *, row: bool = False) -> Tensors:
            return {name: (value[None] if row else value).to(device) for name, value in tensors.items()}

        params = ClientTensors({**state.params.own, **on_device(request.own, row=True)}, on_device(request.common))
        inbox = ClientTensors(on_device(request.inbox_own, row=True), on_device(request.inbox_common))
        state = replace(state, round=request.round - 1, params=params, inbox=inbox)
        if request.late:  # its own state starts from the received model
            initial = self.simulator.start_clients(self.simulator.cohort(state, ROW))
            state = replace(state, params=initial.params, memory=initial.memory.own)
        return state

    def _check_names(self, request: Request) -> None:
        """Refuse parameters that the method does not send to clients: the server cannot replace private ones."""
        roles = self.simulator.roles(self.initial.params)
        for name, role in roles.items():
            if role in COMMON_ROLES and name not in request.common:
                raise Refused(Refusal.TENSOR_MISSING, name=name)
        for tensors, allowed in ((request.common, COMMON_ROLES), (request.own, (Role.PERSONAL,))):
            for name in tensors:
                if roles.get(name) not in allowed:
                    raise Refused(Refusal.TENSOR, name=name)

    def _state_after(self, number: int) -> SimulationState:
        """Return the state after a round in which a reply was used; 0: the initial state."""
        if not self.has_state or number == 0:
            return self.initial
        saved = self._saved_rounds()
        if number not in self.states and number in saved:
            self._load(number)
        if number not in self.states:
            held = ", ".join(map(str, sorted({*self.states, *saved})))
            if not self.accept_lost_state:
                why = (
                    f"The state after round {number} is lost (there is round {held}): restore the folder, let the node"
                    " join under another name, or set accept-lost-state in its node.toml."
                )
                raise Refused(Refusal.STATE, why, number=number)
            rounds = sorted({*self.states, *saved} - {0})
            nearest = max((each for each in rounds if each < number), default=rounds[0] if rounds else 0)
            self.note = (
                f"the state after round {number} is lost; it continues from "
                + (f"the state after round {nearest}" if nearest else "the initial state")
                + " (accept-lost-state)"
            )
            self.states[number] = self._state_after(nearest)
        return self.states[number]

    def _saved_rounds(self) -> list[int]:
        """Return the rounds whose states are in the folder."""
        if self.folder is None:
            return []
        names = [file.stem.removeprefix("round-") for file in self.folder.glob("round-*.safetensors")]
        return sorted(int(name) for name in names if name.isdigit())

    def _load(self, number: int) -> None:
        """Read a state from the folder; refuses one of another revision, method file, setting or data."""
        file = self._file(number)
        facts, _ = read_checkpoint(file)
        provenance = facts.get("more") or {}
        check_unchanged(file, provenance.get("revisions", {}), provenance.get("inputs", {}), self.settings)
        self.states[number] = self.simulator.adopt(load_state(file, self.identity))

    def _store(self, request: Request, state: SimulationState, collected: RoundUploads) -> None:
        """Store the state after this round next to the confirmed ones.

        Deleted are the states of replies that were not used, and the oldest ones beyond `kept_rounds`. After the server
        was restored from an older checkpoint, this includes all states that are newer than this round.
        """
        if not self.has_state:
            return
        private = {
            name: collected.private.tensors.get(name, value)
            for name, value in state.params.own.items()
            if self.simulator.method.role(self.simulator.net, name) in (Role.PRIVATE, Role.PERSONAL)
        }
        memory = {**state.memory, **collected.memory.tensors}
        velocity = {**state.velocity, **collected.velocity.tensors}
        trained = SimulationState(1, request.round, ClientTensors(private), memory, ClientTensors(), velocity, {})
        confirmed = request.last_used_round
        self.states = {confirmed: self._state_after(confirmed), request.round: trained}
        if self.folder is not None:
            save_state(trained, self._file(request.round), self.identity, self.provenance)
            saved = self._saved_rounds()
            kept = {request.round, *[number for number in saved if number <= confirmed][-self.kept_rounds :]}
            for number in saved:
                if number not in kept:
                    self._file(number).unlink()

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round-{number:06}.safetensors"


def check_request(request: Request) -> None:
    """Refuse a received model that is not finite: with it, training could turn the node's own clipping off."""
    groups = (request.common, request.own, request.inbox_common, request.inbox_own)
    for name, value in ((name, value) for tensors in groups for name, value in tensors.items()):
        if not torch.isfinite(value).all():
            why = f"The server sent {quoted(name)!r} with values that are not finite."
            raise Refused(Refusal.REQUEST, why)


def make_simulator(settings: Settings, federation: Federation) -> tuple[Settings, Simulator]:
    """Return the settings fitted to a federation of one client, and its simulator."""
    settings = settings.for_columns(federation)
    net = _network(settings.network, federation.sample_shape, federation.task.outputs, settings.simulation.seed)
    fitted = settings.fitted(federation, net.integers)
    return fitted, Simulator(fitted.method, net, federation, fitted.local, fitted.simulation)


@functools.lru_cache(maxsize=1)  # Flower's simulation engine runs many nodes in one process
def _network(network: Network, shape: tuple[int, ...], classes: int, seed: int) -> Net:
    return build_net(network, shape, classes, seed)


def _first_row(tensors: Tensors) -> Tensors:
    return {name: value[0] for name, value in tensors.items()}
