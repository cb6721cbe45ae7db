"""The round loop: who takes part, what they train, what the server makes of it, how well each is served."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedrema.clients import Clients
from fedrema.core import Answer, LocalTraining, Method, Moment, Role, Uploads, overrides
from fedrema.data.federation import Federation
from fedrema.engine import Backend, Crowd, Precision, Stacked, places
from fedrema.errors import BadInput, Diverged, at_least
from fedrema.keys import numpy_generator
from fedrema.net import Net, Tensors
from fedrema.score import accuracy_record, share
from fedrema.similarity import draw_probes, head_similarity
from fedrema.world import Clock, Round, World, size


@dataclass(frozen=True)
class Simulation:
    """How the federation is played."""

    rounds: int = 60
    """Communication rounds."""
    seed: int = 0
    """Seed of training: initial weights, batches, probes, who takes part. The data has its own, --data-seed."""
    participation: float = 1.0
    """Share of the clients that take part in a round."""
    dropout: float = 0.0
    """Chance that a client which takes part fails before its upload arrives."""
    late: float = 0.0
    """Share of the clients that join only in round --late-round."""
    late_round: int = 10
    """The round in which late clients join."""
    evaluate_every: int = 1
    """Score all clients every this many rounds, and after the last."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU where there is one."""
    precision: Precision = "auto"
    """Arithmetic: float32, float64, on a GPU also tf32, bf16; auto is float32 on a CPU and tf32 on a GPU."""
    backend: Backend = "auto"
    """Train clients one after the other (loop) or as one tensor program (stacked); auto picks the faster."""
    record: Literal["none", "relations"] = "none"
    """relations: keep the similarities S between the heads (for any method), the chosen sets and the dependency map."""
    record_every: int = 1
    """Keep relations every this many rounds, and of the last."""

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        at_least(1, self, "rounds", "evaluate_every", "record_every", "late_round")
        if not 0 < self.participation <= 1:
            raise BadInput(f"--participation must lie in (0, 1], got {self.participation}.")
        for name in ("dropout", "late"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"--{name} must lie in [0, 1), got {getattr(self, name)}.")

    def anywhere(self) -> "Simulation":
        """Return the same for whatever machine this is, with everybody there: for looking at what was trained."""
        precision: Precision = "float64" if self.precision == "float64" else "auto"
        return replace(
            self, device="auto", precision=precision, backend="auto", participation=1.0, dropout=0.0, late=0.0
        )


class Simulator(Clients):
    """Plays a method on a federation, round by round: the clients, and a server that is always there."""

    def __init__(
        self, method: Method, net: Net, federation: Federation, local: LocalTraining, settings: Simulation
    ) -> None:
        where = (settings.device, settings.precision, settings.backend)
        super().__init__(method, net, federation, local, settings.rounds, settings.seed, *where)
        self.settings = settings
        self.joins = self._joining_rounds()

    def _joining_rounds(self) -> list[int]:
        draws = [numpy_generator(self.settings.seed, name, "late").random() for name in self.federation.names]
        late = np.argsort(draws, kind="stable")[: math.floor(self.settings.late * len(draws))]
        return [self.settings.late_round if row in late else 1 for row in range(len(draws))]

    def start(self) -> World:
        """Return the world before the first round: everyone has the same initial network."""
        clients = len(self.federation)
        everyone = Stacked(common=dict(self.net.initial))
        crowd = self.gathered(torch.arange(clients), everyone, Stacked(), Stacked())
        memory: Tensors = {}
        params = everyone
        if overrides(self.method, "start"):
            moment = self.moment(0)

            def begun(client: Any, _: Any) -> dict[str, Tensors]:
                new = self.method.start(self.net, client, moment)
                added = {name: value for name, value in new.params.items() if name not in everyone.common}
                return {"added": added, "memory": new.memory}

            made = self.engine.each(begun, crowd, None)
            memory = Stacked(made.get("memory", {})).copied(clients)
            params = Stacked(made.get("added", {}), everyone.common)
        shared = {name: role is Role.SHARED for name, role in self.roles(params).items()}
        own = {name: value for name, value in params.copied(clients).items() if not shared[name]}
        common = {name: params.row(0)[name].clone() for name in shared if shared[name]}
        params = Stacked(own, common)
        keep = self.local.keep_momentum and self.local.momentum > 0
        velocity = params.zeros(clients, self.trains) if keep else {}
        server = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in self.method.server(self.net, clients).items()
        }
        return World(clients, 0, params, memory, Stacked(), velocity, server)

    def crowd(self, world: World, clients: Tensor) -> Crowd:
        """Return some clients as they now are."""
        return self.gathered(clients, world.params, Stacked(world.memory), world.inbox)

    def choose(self, number: int) -> tuple[list[int], list[int]]:
        """Return who takes part in a round and answers, and who fails on the way."""
        seed, names = self.settings.seed, self.federation.names
        there = [row for row, joins in enumerate(self.joins) if joins <= number]
        wanted = max(1, round(self.settings.participation * len(there)))
        draws = {row: numpy_generator(seed, number, names[row], "participation").random(2) for row in there}
        chosen = sorted(sorted(there, key=lambda row: (draws[row][0], names[row]))[:wanted])
        fails = [row for row in chosen if draws[row][1] < self.settings.dropout]
        return [row for row in chosen if row not in fails], fails

    def play(self, world: World) -> Iterator[Round]:
        """Play on from a world, which moves along, to the last round."""
        while world.round < self.settings.rounds:
            yield self.play_round(world)

    def play_round(self, world: World) -> Round:
        """Train, aggregate, hand out, score. A round that fails leaves the world as it was."""
        clock = Clock(self.device)
        moment = self.moment(world.round + 1)
        answering, failing = self.choose(moment.round)
        record: dict[str, Any] = {"round": moment.round, "participants": answering, "dropped": failing}
        relations: dict[str, np.ndarray] = {}
        if answering:
            relations = self._learn(world, torch.tensor(answering), moment, record, clock)
        world.round = moment.round
        if self._due(moment, self.settings.evaluate_every):
            record |= self.score(world, moment)
            clock.lap("evaluate")
        record["seconds"] = clock.laps
        return Round(record, relations)

    def _due(self, moment: Moment, every: int) -> bool:
        return moment.round % every == 0 or moment.round == self.settings.rounds

    def score(self, world: World, moment: Moment) -> dict[str, Any]:
        """Score every client that has joined with what it would really use now."""
        there = [row for row, joins in enumerate(self.joins) if joins <= moment.round]
        crowd = self.crowd(world, torch.tensor(there))
        record = accuracy_record(*self.tally_of(self.method, crowd, moment), there, len(self.federation))
        beside = {name: self.tally_of(other, crowd, moment) for name, other in self.method.beside().items()}
        if beside:
            record["beside"] = {name: share(correct.sum(), asked.sum()) for name, (correct, asked) in beside.items()}
        return record

    def _learn(
        self, world: World, clients: Tensor, moment: Moment, record: dict[str, Any], clock: Clock
    ) -> dict[str, np.ndarray]:
        """Train the clients that answer, aggregate, and hand the answer out; returns the relations asked for."""
        method = self.method
        rows = clients.to(self.device)
        crowd = self.crowd(world, clients)
        crowd = self.begin(crowd, moment)
        clock.lap("other")

        chosen = places(clients, world.clients, self.device)
        velocity = {name: value[chosen] for name, value in world.velocity.items()}
        trained, velocity, losses = self.local_training(crowd, velocity, moment)
        clock.lap("train")

        ended, extras = self.end(replace(crowd, params=Stacked(trained), received=crowd.params), moment)
        trained, memory = ended.params.own, ended.memory.own
        roles = self.roles(Stacked(trained))
        travelling = {name: value for name, value in trained.items() if roles[name] is not Role.PRIVATE}
        self._check(crowd, losses, trained, extras, moment)
        uploads = Uploads(rows, travelling, extras, crowd.counts, crowd.names)
        clock.lap("other")

        answer = Answer(shared={}, state=world.server)
        if travelling or extras:
            answer = method.aggregate(self.net, world.server, uploads, moment)
        world.check(answer, roles, memory, type(method).__name__)
        clock.lap("aggregate")

        record["loss"] = float(losses.mean())
        record["client_loss"] = losses.tolist()
        record["bytes_up"] = size(travelling) + size(extras)
        fetching = torch.tensor([*record["participants"], *record["dropped"]], device=self.device)
        record["bytes_down"] = world.download(roles, fetching)
        if self._due(moment, self.settings.evaluate_every):
            correct, asked = self.tally_as_is(method, ended)
            record["trained_accuracy"] = share(correct.sum(), asked.sum())
            record["trained_client_accuracy"] = [
                share(*pair) for pair in zip(correct.sum(1), asked.sum(1), strict=True)
            ]
            clock.lap("evaluate")

        world.hand_out(rows, trained, memory, velocity, roles, answer)
        relations = self._relations(clients, trained, answer.trace, moment)
        record["trace"] = {name: _plain(value) for name, value in answer.trace.items() if np.ndim(value) < 2}
        clock.lap("other")
        return relations

    def _check(self, crowd: Crowd, losses: Tensor, trained: Tensors, extras: Tensors, moment: Moment) -> None:
        finite = torch.isfinite(losses)
        for value in (*trained.values(), *extras.values()):
            finite = finite & torch.isfinite(value.reshape(len(value), -1).sum(dim=1))
        if not finite.all():
            names = ", ".join(name for name, fine in zip(crowd.names, finite.tolist(), strict=True) if not fine)
            raise Diverged(
                f"Training diverged in round {moment.round}: the loss or weights of client {names} are not finite;"
                " a smaller --lr, or a smaller --clip above 0, may help."
            )

    def _relations(
        self, clients: Tensor, trained: Tensors, trace: Mapping[str, Any], moment: Moment
    ) -> dict[str, np.ndarray]:
        if self.settings.record != "relations" or not self._due(moment, self.settings.record_every):
            return {}
        heads = {name: value for name, value in trained.items() if self.net.in_head(name)}
        matrices = {name: value for name, value in trace.items() if np.ndim(value) == 2}
        matrices["S"] = head_similarity(self.net, heads, draw_probes(self.net, moment, 1, 1.0), temperature=0.5)
        return {name: self._whole(value.cpu(), clients) for name, value in matrices.items()}

    def _whole(self, matrix: Tensor, clients: Tensor) -> np.ndarray:
        """Give a matrix among those present its place among all; NaN for the absent."""
        everyone = len(self.federation)
        if matrix.shape[0] == everyone:
            return matrix.float().numpy()
        whole = torch.full((everyone, everyone), float("nan"))
        whole[clients[:, None], clients] = matrix.float()
        return whole.numpy()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
