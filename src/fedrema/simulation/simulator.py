"""The round loop: who takes part, what they train, what the server makes of it, how well each is served."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.base.random import numpy_generator
from fedrema.core import (
    Answer,
    Client,
    LocalTraining,
    Mean,
    Method,
    Moment,
    Role,
    Simulation,
    State,
    Uploads,
    overrides,
)
from fedrema.core.checks import calling, check_answer, check_client
from fedrema.core.similarity import draw_probes, head_similarity
from fedrema.data.federation import Federation
from fedrema.engine import Cohort, Stacked, places
from fedrema.engine.memory import GIGABYTE, client_bytes, clients_at_once, free_bytes
from fedrema.engine.threads import with_its_threads
from fedrema.models.body_and_head import Net, Tensors, size
from fedrema.simulation.clients import Clients
from fedrema.simulation.records import (
    PRIMARY,
    Evaluation,
    MetricRecord,
    RoundRecord,
    TraceValue,
    metric_record,
    ratio,
)
from fedrema.simulation.row_storage import Rows, RowStorage, assign
from fedrema.simulation.scoring import concatenate_counts
from fedrema.simulation.state import COMMON, Clock, Round, SimulationState, on_device
from fedrema.simulation.uploads import RoundUploads, check_finite


class Simulator(Clients):
    """Plays a method on a federation, round by round: the clients, and a server that is always there."""

    def __init__(
        self, method: Method, net: Net, federation: Federation, local: LocalTraining, settings: Simulation
    ) -> None:
        where = (settings.device, settings.precision, settings.backend, settings.threads)
        super().__init__(method, net, federation, local, settings.rounds, settings.seed, *where)
        self.settings = settings
        self.joins = self._joining_rounds()
        self._first_rounds: dict[int, int] = {}
        """The round in which each client first took part, as far as rounds have been counted."""
        self._counted_rounds = 0
        self.storage = RowStorage(self.device)
        self.company = 1
        """How many simulations train together; each is given its share of the time."""
        self.chunk = Mean.BLOCK * math.ceil(settings.chunk / Mean.BLOCK) or self._chunk()

    def _joining_rounds(self) -> list[int]:
        draws = [numpy_generator(self.settings.seed, name, "late").random() for name in self.federation.names]
        late = np.argsort(draws, kind="stable")[: math.floor(self.settings.late * len(draws))]
        return [self.settings.late_round if row in late else 1 for row in range(len(draws))]

    def _budget(self) -> float:
        return self.settings.memory * GIGABYTE if self.settings.memory else free_bytes(self.device) / 2

    def _chunk(self) -> int:
        return Mean.BLOCK if len(self.federation) <= Mean.BLOCK else self.room_for()

    def room_for(self) -> int:
        """Return how many clients fit into memory while they train."""
        samples = min(self.local.batch, self.train.x.shape[1])
        stacked, recorded = self.engine.name == "stacked", self.device.type == "cuda"
        return clients_at_once(self._budget() / 4, client_bytes(self.net, self.train.x[0, :samples], stacked, recorded))

    def parts(self, clients: Tensor) -> Iterator[Tensor]:
        """Cut clients into groups that are trained or scored at once."""
        for part in torch.split(clients, self.chunk):
            yield part
            self.storage.release()

    @with_its_threads
    def start(self) -> SimulationState:
        """Return the state before the first round: everyone has the same initial network."""
        clients = len(self.federation)
        everyone = Stacked(common=dict(self.net.initial))
        added, memory = self._added(everyone) if overrides(self.method, "start") else ({}, {})
        example = {**everyone.common, **{name: value[0] for name, value in added.items()}}
        shared = {name for name, role in self.roles(Stacked(common=example)).items() if role in COMMON}
        keep = self.local.keep_momentum and self.local.momentum > 0
        momentum = {name: value for name, value in example.items() if keep and self.trains(name)}
        own = {name: value for name, value in example.items() if name not in shared}
        self._make_storage(clients * (size(own) + size(momentum)) + size(memory))
        params = {name: self.storage.zeros(clients, value) for name, value in own.items()}
        for name, rows in params.items():
            rows[:] = added.get(name, own[name]).to(rows.device)
        return SimulationState(
            clients,
            0,
            Stacked(params, {name: example[name].clone() for name in example if name in shared}),
            {name: self.storage.keep(value) for name, value in memory.items()},
            Stacked(),
            {name: self.storage.zeros(clients, value) for name, value in momentum.items()},
            on_device(self._server_state(clients), self.device),
        )

    def _server_state(self, clients: int) -> State:
        with calling(self.method, "server"):
            return self.method.server(self.net, clients)

    def adopt(self, state: SimulationState) -> SimulationState:
        """Return a saved state, ready to be played on."""
        self._make_storage(sum(map(size, (state.params.own, state.velocity, state.memory))))
        return state.placed(self.storage, self.device)

    def _make_storage(self, held: int) -> None:
        # Twice, because a round is written beside what was before, until it has succeeded.
        self.storage = RowStorage(self.device, on_disk=2 * held > self._budget(), folder=self.settings.scratch)

    def _added(self, everyone: Stacked) -> tuple[Tensors, Tensors]:
        """Return what the method adds to clients' parameters and memory [K, ...]."""
        clients = len(self.federation)
        groups = {group: Rows(clients, RowStorage(self.device)) for group in ("added", "memory")}
        for part in self.parts(torch.arange(clients)):
            with calling(self.method, "start"):
                made = self.engine.each(self._begun, self.gathered(part, everyone, Stacked(), Stacked()), None)
            for group, rows in groups.items():
                rows.put(int(part[0]), made.get(group, {}))
        # A hook may give all clients the very same tensor; from now on each changes its own.
        added, memory = ({name: value.contiguous() for name, value in rows.tensors.items()} for rows in groups.values())
        return added, memory

    def _begun(self, client: Client, _: Any) -> dict[str, Tensors]:
        """Return what the method adds to a new client that has these parameters of the network."""
        params = {name: client.params[name] for name in self.net.initial}
        bare = client.having(params=params, received=params, memory={}, inbox={})
        new = check_client(self.method, "start", self.method.start(self.net, bare, self.moment(0)))
        added = {name: value for name, value in new.params.items() if name not in params}
        return {"added": added, "memory": new.memory}

    def cohort(self, state: SimulationState, clients: Tensor) -> Cohort:
        """Return some clients as they now are."""
        return self.gathered(clients, state.params, Stacked(state.memory), state.inbox)

    def newly_begun(self, cohort: Cohort) -> Cohort:
        """Return clients that receive their first model: the copies that the method makes of it are copies of this one.

        Without this, a personal model would begin with the untrained weights of the first round.
        """
        if not overrides(self.method, "start"):
            return cohort
        with calling(self.method, "start"):
            made = self.engine.each(self._begun, cohort, None)
        roles = self.roles(cohort.params)
        added = {name: value for name, value in made["added"].items() if roles[name] not in COMMON}
        return replace(
            cohort, params=Stacked({**cohort.params.own, **added}, cohort.params.common), memory=Stacked(made["memory"])
        )

    def newcomers(self, number: int) -> Tensor:
        """Return the clients that join late, by a round, and have not taken part before it."""
        late = [row for row, joins in enumerate(self.joins) if 1 < joins <= number]
        if not late or not overrides(self.method, "start"):
            return torch.empty(0, dtype=torch.long)
        for earlier in range(self._counted_rounds + 1, number):
            for row in self.choose(earlier)[0]:
                self._first_rounds.setdefault(row, earlier)
            self._counted_rounds = earlier
        return torch.tensor([row for row in late if self._first_rounds.get(row, number) >= number], dtype=torch.long)

    def choose(self, number: int) -> tuple[list[int], list[int]]:
        """Return who takes part in a round and answers, and who fails on the way."""
        seed, dropout = self.settings.seed, self.settings.dropout
        there = [row for row, joins in enumerate(self.joins) if joins <= number]
        names = {self.federation.names[row]: row for row in there}
        chosen = sorted(names[name] for name in taking_part(seed, number, list(names), self.settings.participation))
        if not dropout:
            return chosen, []
        fails = [row for row in chosen if participation_draws(seed, number, self.federation.names[row])[1] < dropout]
        return [row for row in chosen if row not in fails], fails

    def play(self, state: SimulationState) -> Iterator[Round]:
        """Play on from a state, which moves along, to the last round."""
        while state.round < self.settings.rounds:
            yield self.play_round(state)

    @with_its_threads
    def play_round(self, state: SimulationState) -> Round:
        """Train, aggregate, hand out, score. A round that fails leaves the state as it was."""
        clock = Clock(self.device, self.company)
        moment = self.moment(state.round + 1)
        answering, failing = self.choose(moment.round)
        record = RoundRecord(moment.round, answering, failing)
        relations: dict[str, np.ndarray] = {}
        if answering:
            record, relations = self._learn(state, torch.tensor(answering), moment, record, clock)
        self._follow(state, moment)
        state.round = moment.round
        if self._due(moment, self.settings.evaluate_every):
            found = self.score(state, moment)
            record = replace(record, metrics=found.metrics, alternatives=found.alternatives)
            clock.lap("evaluate")
        return Round(replace(record, seconds=clock.laps), relations)

    def _follow(self, state: SimulationState, moment: Moment) -> None:
        """Let clients that joined late, but have not taken part yet, follow the shared model with their copies."""
        new = self.newcomers(moment.round + 1)
        for part in self.parts(new) if len(new) else ():
            begun = self.newly_begun(self.cohort(state, part))
            for everyone, made in ((state.params.own, begun.params.own), (state.memory, begun.memory.own)):
                for name, value in made.items():
                    assign(everyone[name], places(part, state.clients, everyone[name].device), value)

    def _due(self, moment: Moment, every: int) -> bool:
        return moment.round % every == 0 or moment.round == self.settings.rounds

    def score(self, state: SimulationState, moment: Moment) -> Evaluation:
        """Evaluate every client that has joined with the model that it would now use."""
        there = [row for row, joins in enumerate(self.joins) if joins <= moment.round]
        methods = {"": self.method, **self.method.beside()}
        counted: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in methods}
        for part in self.parts(torch.tensor(there)):
            cohort = self.cohort(state, part)
            for name, method in methods.items():
                counted[name].append(self.tally_of(method, cohort, moment))
        counts = {name: concatenate_counts(parts) for name, parts in counted.items()}
        metric = metric_record(*counts.pop(""), there, len(self.federation))
        alternatives = {name: {PRIMARY: ratio(right.sum(), of.sum())} for name, (right, of) in counts.items()}
        return Evaluation({PRIMARY: metric}, alternatives)

    def _learn(
        self, state: SimulationState, clients: Tensor, moment: Moment, record: RoundRecord, clock: Clock
    ) -> tuple[RoundRecord, dict[str, np.ndarray]]:
        """Train the participants, aggregate, and update the state; returns the record and the relations asked for."""
        relations_due = self.settings.record == "relations" and (
            moment.round == 1 or self._due(moment, self.settings.record_every)
        )
        counts = self.counts[places(clients, state.clients, self.device)]
        collected = RoundUploads(clients, counts, self.storage, keep_heads=relations_due)
        new = self.newcomers(moment.round)
        for part in self.parts(clients):
            self.train_part(state, part, moment, collected, clock, part[torch.isin(part, new)])
        roles = self.roles(state.params)
        joined = sum(joins <= moment.round for joins in self.joins)
        uploads = replace(collected.uploads(), everyone=joined)

        answer = self.answer_to(uploads, state, roles, collected.memory.tensors, moment)
        clock.lap("aggregate")

        losses = collected.client_losses()
        bytes_down = state.download(roles, [*record.participants, *record.dropped])
        state.hand_out(collected, roles, answer)
        self.storage.release()
        relations = self._relations(clients, collected.heads, answer.trace, moment)
        record = replace(
            record,
            loss=float(losses.mean()),
            client_loss=losses.tolist(),
            trained=_trained_metrics(collected),
            trace=plain_trace(answer),
            bytes_up=collected.bytes_up,
            bytes_down=bytes_down,
        )
        clock.lap("other")
        return record, relations

    @with_its_threads
    def answer_to(
        self, uploads: Uploads, state: SimulationState, roles: Mapping[str, Role], memory: Tensors, moment: Moment
    ) -> Answer:
        """Let the server make of the uploads what the method says; an answer that cannot be handed out is refused."""
        answer = Answer(shared={}, state=state.server)
        if uploads.mean or uploads.params or uploads.extras:
            uploads = replace(uploads, before=state.params.common, everyone=uploads.everyone or state.clients)
            self.net.train(False)  # a server that asks the network wants its answers in use
            with calling(self.method, "aggregate"):
                found = self.method.aggregate(self.net, state.server, uploads, moment)
            answer = check_answer(self.method, found, uploads, roles, state.params.merged())
        state.check(answer, roles, memory, type(self.method).__name__)
        return answer

    @with_its_threads
    def train_part(
        self,
        state: SimulationState,
        clients: Tensor,
        moment: Moment,
        collected: RoundUploads,
        clock: Clock,
        new: Tensor | None = None,
    ) -> None:
        """Let some clients train, and take in what they leave behind; some of them may be new."""
        cohort = self.cohort(state, clients)
        if new is not None and len(new):
            rows = torch.searchsorted(clients, new)
            cohort = _with_rows(cohort, rows.to(self.device), self.newly_begun(self.cohort(state, new)))
        cohort = self.begin(cohort, moment)
        velocity = self.rows(Stacked(state.velocity), clients).own
        clock.lap("other")
        trained, velocity, losses = self.local_training(cohort, velocity, moment)
        is_last = len(collected.names) + len(clients) == len(collected.clients)
        if is_last and self.device.type == "cuda" and moment.round < self.settings.rounds:
            self._draw_ahead(self.moment(moment.round + 1))
        clock.lap("train")
        ended, extras = self.end(replace(cohort, params=Stacked(trained), received=cohort.params), moment)
        check_finite(ended, losses, extras, moment.round)
        kept = velocity if state.velocity else {}
        collected.add(ended, extras, kept, losses, self.roles(ended.params))
        clock.lap("other")
        if self._due(moment, self.settings.evaluate_every):
            collected.tallies.append(self.tally_as_is(self.method, ended))
            clock.lap("evaluate")

    def _draw_ahead(self, moment: Moment) -> None:
        """Draw the next round's batches of the clients that come first, while the GPU trains these."""
        answering, _ = self.choose(moment.round)
        if answering:
            self.draw_ahead(torch.tensor(answering[: self.chunk]), moment)

    def _relations(
        self, clients: Tensor, heads: Rows | None, trace: Mapping[str, Any], moment: Moment
    ) -> dict[str, np.ndarray]:
        if heads is None:
            return {}
        matrices = {name: value for name, value in trace.items() if np.ndim(value) == 2}
        matrices["S"] = head_similarity(self.net, heads.tensors, draw_probes(self.net, moment, 1, 1.0), temperature=0.5)
        return {name: self._whole(value.cpu(), clients) for name, value in matrices.items()}

    def _whole(self, matrix: Tensor, clients: Tensor) -> np.ndarray:
        """Give a matrix among those present its place among all; NaN for the absent."""
        everyone = len(self.federation)
        if matrix.shape[0] == everyone:
            return matrix.float().numpy()
        whole = torch.full((everyone, everyone), float("nan"))
        whole[clients[:, None], clients] = matrix.float()
        return whole.numpy()


def _with_rows(cohort: Cohort, rows: Tensor, others: Cohort) -> Cohort:
    """Return a cohort in which some rows are those of another."""

    def put(everyone: Tensors, values: Tensors) -> Tensors:
        whole = {name: value.clone() for name, value in everyone.items()}
        for name, value in values.items():
            assign(whole[name], rows, value)
        return whole

    params = Stacked(put(cohort.params.own, others.params.own), cohort.params.common)
    return replace(cohort, params=params, memory=Stacked(put(cohort.memory.own, others.memory.own)))


def taking_part(seed: int, number: int, names: Sequence[str], share: float, least: int = 1) -> list[str]:
    """Draw which of the clients that are there take part in a round: a share of them, but at least so many."""
    wanted = max(1, least, round(share * len(names)))
    if wanted >= len(names):
        return list(names)
    return sorted(names, key=lambda name: (participation_draws(seed, number, name)[0], name))[:wanted]


def participation_draws(seed: int, number: int, name: str) -> tuple[float, float]:
    """Return what decides whether a client takes part in a round, and whether it fails in it."""
    first, second = numpy_generator(seed, number, name, "participation").random(2)
    return float(first), float(second)


def _trained_metrics(collected: RoundUploads) -> dict[str, MetricRecord]:
    """Return the metrics of the participants right after local training; empty where they were not scored."""
    if not collected.tallies:
        return {}
    correct, samples = concatenate_counts(collected.tallies)
    return {PRIMARY: metric_record(correct, samples, range(len(correct)), len(correct))}


def plain_trace(answer: Answer) -> dict[str, TraceValue]:
    """Return what a method traced as a record holds it: numbers and lists, no matrices."""
    shown = {name: value for name, value in answer.trace.items() if np.ndim(value) < 2}
    return {
        name: value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        for name, value in shown.items()
    }
