"""The round loop: choose participants, train them, aggregate their uploads, update the state, score every client."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.base.memory import amount
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
from fedrema.core.checks import calling, check_answer, check_client, check_traces
from fedrema.core.defences import assumed_attackers, robust_mean
from fedrema.core.fixed_point import QuantisedSum
from fedrema.core.similarity import draw_probes, head_similarity
from fedrema.data.federation import Federation
from fedrema.engine import ClientTensors, Cohort, row_index
from fedrema.engine.batches import sampling_rates
from fedrema.engine.costs import GIGABYTE, clients_at_once, free_bytes
from fedrema.engine.devices import with_own_threads
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors, size
from fedrema.simulation.attacks import Attackers
from fedrema.simulation.clients import Clients
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.participation import Participation
from fedrema.simulation.privacy import Privacy
from fedrema.simulation.records import RECORDED, Evaluation, PrivacyRecord, RoundRecord, TraceValue
from fedrema.simulation.scoring import MetricSums, concatenate_sums, metric_records, overall, trained_metrics
from fedrema.simulation.secure_aggregation import (
    Coverage,
    coverage_of,
    empty_sum,
    sum_record,
    with_equal_counts,
)
from fedrema.simulation.state import (
    COMMON_ROLES,
    Clock,
    Round,
    RoundUploads,
    Rows,
    RowStorage,
    SimulationState,
    assign,
    check_finite,
    on_device,
)

FIRST = torch.tensor([0])
"""The row of the first client."""


class Simulator(Clients):
    """Simulates a federation: executes the clients' and the server's part of a method, round by round."""

    def __init__(
        self, method: Method, net: Net, federation: Federation, local: LocalTraining, settings: Simulation
    ) -> None:
        execution = (settings.device, settings.precision, settings.backend, settings.threads)
        self.privacy = Privacy(settings, len(federation)) if settings.dp != "none" else None
        noise = self.privacy.sample_noise if self.privacy else None
        super().__init__(
            method, net, federation, local, settings.rounds, settings.seed, *execution, settings.added_metrics, noise
        )
        period = () if method.reports.period is None else (method.reports.period.name,)
        check_traces(method, [*(trace.name for trace in method.reports.traces), *period], RECORDED)
        self.settings = settings
        self.participation = Participation(federation.names, settings)
        self.attackers = Attackers.drawn(federation.names, settings)
        if not self.attackers.honest(self.participation.joined(1)):
            raise BadInput(
                "All clients of the first round are attackers, and only honest ones are scored: add clients."
            )
        self.train = self.attackers.samples(self.train, self.task)
        self.storage = RowStorage(self.device)
        self._coverage: Coverage | None = None
        self.runs_together = 1
        """How many runs are executed together; each records its share of the time."""
        self.chunk = Mean.BLOCK * math.ceil(settings.chunk / Mean.BLOCK) or self._default_chunk()
        """How many clients are trained or scored at once: a multiple of `Mean.BLOCK`."""

    def run(self, state: SimulationState) -> Iterator[Round]:
        """Run all remaining rounds; `state` is updated in place."""
        while state.round < self.settings.rounds:
            yield self.run_round(state)

    @with_own_threads
    def run_round(self, state: SimulationState) -> Round:
        """Run one round. If it fails, the state is unchanged."""
        clock = Clock(self.device, self.runs_together)
        moment = self.moment(state.round + 1)
        participants, failed = self.participation.choose(moment.round)
        record = RoundRecord(moment.round, participants, failed)
        relations: dict[str, np.ndarray] = {}
        clients = torch.tensor(participants, dtype=torch.long)
        if participants:
            uploads = self._train_all(state, clients, moment, clock)
            roles = self.roles(state.params)
            received = self._received(uploads, state, moment)
            answer = self.aggregate(received, state, roles, uploads.memory.tensors, moment)
            clock.lap("aggregate")
        waiting = self._waiting_clients(state, moment.round + 1)
        with state.unchanged_on_error(clients, waiting, self.storage):
            if participants:
                bytes_down = state.download(roles, [*participants, *failed])
                state.apply(uploads, roles, answer)
                if self.privacy is not None:
                    sampled = (len(participants) + len(failed)) / received.everyone
                    record = replace(record, privacy=self._account(self.privacy, uploads, state, sampled, moment))
                self.storage.release()
                relations = self._relations(uploads, answer.trace, moment)
                record = self._with_training(record, uploads, answer, bytes_down)
                clock.lap("other")
            self._update_waiting_clients(state, waiting)
            state.round = moment.round
            if self._due(moment, self.settings.evaluate_every):
                evaluation = self.score(state, moment)
                record = replace(record, metrics=evaluation.metrics, alternatives=evaluation.alternatives)
                clock.lap("evaluate")
        return Round(replace(record, seconds=clock.seconds), relations)

    def _received(self, uploads: RoundUploads, state: SimulationState, moment: Moment) -> Uploads:
        """Return what the method's server step receives."""
        received = replace(uploads.for_server(), everyone=self.participation.joined_count(moment.round))
        if uploads.shared is not None:
            chosen, rows = self.settings, uploads.shared.tensors
            assumed = (chosen.defence_share, chosen.defence_bound)
            mean = robust_mean(chosen.defence, rows, state.params.common, uploads.weights, *assumed)
            received = replace(received, mean=mean)
        if uploads.summed is not None and self.coverage(state).hides_counts:
            received = with_equal_counts(received, uploads.summed.samples)
        if self.privacy is not None:
            mean = self.privacy.noised_mean(received.mean, state.privacy, moment, len(uploads.clients))
            received = replace(received, mean=mean)
        return received

    def _account(
        self, privacy: Privacy, uploads: RoundUploads, state: SimulationState, sampled: float, moment: Moment
    ) -> PrivacyRecord:
        """Add a round's releases to the privacy state, and return their record."""
        releases = torch.zeros(state.clients, dtype=torch.int64)
        releases[uploads.clients] = self.steps[uploads.clients] if privacy.mode == "sample" else 1
        norms = torch.cat(uploads.norms) if uploads.norms else None
        before, state.privacy = state.privacy, privacy.after_round(state.privacy, releases, norms, sampled, moment)
        rates = sampling_rates(self.train.counts, self.local.batch)
        return privacy.record(before, state.privacy, self.roles(state.params), rates)

    def _due(self, moment: Moment, every: int) -> bool:
        return moment.round % every == 0 or moment.round == self.settings.rounds

    def chunks(self, clients: Tensor) -> Iterator[Tensor]:
        """Split clients into chunks that fit into memory and are trained or scored at once."""
        for chunk in torch.split(clients, self.chunk):
            yield chunk
            self.storage.release()

    def cohort(self, state: SimulationState, clients: Tensor, with_velocity: bool = False) -> Cohort:
        """Return some clients in their current state; momentum is needed only for training."""
        velocity = state.velocity if with_velocity else {}
        return self.gather(clients, state.params, ClientTensors(state.memory), state.inbox, velocity)

    def _train_all(self, state: SimulationState, clients: Tensor, moment: Moment, clock: Clock) -> RoundUploads:
        """Train the participants of a round, chunk by chunk."""
        relations_due = self.settings.record == "relations" and (
            moment.round == 1 or self._due(moment, self.settings.record_every)
        )
        counts = self.counts[row_index(clients, self.device)]
        if self.privacy is not None and not self.privacy.sends_counts:
            counts = torch.ones_like(counts)
        counts = self.attackers.counts(clients, counts)
        keep_shared = self.settings.defence != "none"
        summed = self.empty_sum(state.params)
        if summed is not None:
            summed.fixed_point.check_samples(int(counts.max()), len(clients))
        uploads = RoundUploads(clients, counts, self.storage, relations_due, keep_shared, summed)
        for chunk in self.chunks(clients):
            self.train_chunk(state, chunk, moment, uploads, clock)
        return uploads

    @with_own_threads
    def train_chunk(
        self,
        state: SimulationState,
        clients: Tensor,
        moment: Moment,
        uploads: RoundUploads,
        clock: Clock,
    ) -> None:
        """Train some clients and add their uploads to the round's."""
        cohort = self.cohort(state, clients, with_velocity=True)
        before = cohort.params
        cohort = self.begin(cohort, moment)
        clock.lap("other")
        trained, losses = self.local_training(cohort, moment)
        is_last = len(uploads.names) + len(clients) == len(uploads.clients)
        if is_last and self.device.type == "cuda" and moment.round < self.settings.rounds:
            self._draw_next_round(self.moment(moment.round + 1))
        clock.lap("train")
        ended, extras = self.end(trained, moment)
        check_finite(ended, losses, extras, moment.round)
        if not state.velocity:  # momentum is not kept between rounds
            ended = replace(ended, velocity={})
        uploads.add(self._sent(ended, extras, before, state, moment, uploads), extras, losses, self.roles(ended.params))
        clock.lap("other")
        if self._due(moment, self.settings.evaluate_every):
            uploads.scores.append(self.score_cohort(self.method, ended))
            clock.lap("evaluate")

    def _sent(
        self,
        cohort: Cohort,
        extras: Tensors,
        before: ClientTensors,
        state: SimulationState,
        moment: Moment,
        uploads: RoundUploads,
    ) -> Cohort:
        """Return clients as they send their parameters; `before` are those that the server sent."""
        roles, updates = self.roles(cohort.params), len(uploads.clients)
        cohort = self.attackers.tampered(cohort, before, roles, moment)
        if self.privacy is None or self.privacy.mode == "sample":
            return cohort
        self.privacy.check_extras(extras)
        exempt = self.attackers.among(cohort.clients).to(self.device)
        cohort, norms = self.privacy.protected(cohort, before, roles, state.privacy, moment, updates, exempt)
        uploads.norms.append(norms)
        return cohort

    def _check_defence(self, state: SimulationState) -> None:
        """Raise `BadInput` if the server's defence has nothing to act on, too few clients, or too little memory."""
        defence, roles = self.settings.defence, self.roles(state.params)
        shared = {name: value for name, value in state.params.common.items() if roles[name] is Role.SHARED}
        if not shared:
            raise BadInput(f"--defence {defence} acts on shared parameters, but {self.method.called()} has none.")
        chosen, failed = self.participation.choose(1)
        clients = len(chosen) + len(failed)
        attackers = assumed_attackers(self.settings.defence_share, clients)
        if defence == "krum" and clients <= 2 * attackers + 2:
            raise BadInput(
                f"--defence krum needs more than 2 f + 2 participants to tolerate f attackers, but {clients} clients"
                f" participate and --defence-share {self.settings.defence_share:g} of them are {attackers}."
            )
        needed = 3 * clients * size(shared)  # the updates, and copies while they are sorted
        if needed > self.free_memory():
            raise BadInput(
                f"--defence {defence} stores the updates of all participants and needs {amount(needed)} of memory, but"
                f" only {amount(int(self.free_memory()))} may be used: use a smaller --participation."
            )

    def _check_privacy(self, privacy: Privacy, state: SimulationState) -> None:
        """Raise `BadInput` if --dp does not cover what clients send; one client takes one step of each phase."""
        privacy.check(self.net, self.roles(state.params))
        if privacy.mode == "sample":
            self.check_independent_samples(self.cohort(state, FIRST), self.moment(1))
        privacy.check_extras(self.example_extras(self.cohort(state, FIRST), self.moment(1)))

    def empty_sum(self, params: ClientTensors) -> QuantisedSum | None:
        """Return a round's sum of shared parameters without contributions; None without --secure-aggregation."""
        fixed_point = self.settings.fixed_point
        return None if fixed_point is None else empty_sum(fixed_point, self.net, params.common, self.roles(params))

    def coverage(self, state: SimulationState) -> Coverage:
        """Return what the server would learn of each client with --secure-aggregation."""
        if self._coverage is None:
            self._coverage = coverage_of(self, state)
        return self._coverage

    def _draw_next_round(self, moment: Moment) -> None:
        """Draw the batches of the next round's first chunk while the GPU trains."""
        participants, _ = self.participation.choose(moment.round)
        if participants:
            self.draw_ahead(torch.tensor(participants[: self.chunk]), moment)

    @with_own_threads
    def aggregate(
        self, uploads: Uploads, state: SimulationState, roles: Mapping[str, Role], memory: Tensors, moment: Moment
    ) -> Answer:
        """Return the method's answer to the uploads, after checking that it can be applied to the state."""
        answer = Answer(shared={}, state=state.server)
        if uploads.mean or uploads.params or uploads.extras:
            uploads = replace(uploads, before=state.params.common, everyone=uploads.everyone or state.clients)
            self.net.train(False)  # a server that calls the network needs it in evaluation mode
            with calling(self.method, "aggregate"):
                returned = self.method.aggregate(self.net, state.server, uploads, moment)
            answer = check_answer(self.method, returned, uploads, roles, state.params.merged())
            check_traces(self.method, answer.trace, RECORDED)
        state.check(answer, roles, memory, type(self.method).__name__)
        return answer

    def score(self, state: SimulationState, moment: Moment) -> Evaluation:
        """Evaluate every client that has joined, except attackers, with the model that it would now use."""
        joined = self.attackers.honest(self.participation.joined(moment.round))
        methods = {"": self.method, **self.method.beside()}
        scored: dict[str, list[MetricSums]] = {name: [] for name in methods}
        for chunk in self.chunks(torch.tensor(joined)):
            cohort = self.cohort(state, chunk)
            for name, method in methods.items():
                scored[name].append(self.score_adapted(method, cohort, moment))
        sums = {name: concatenate_sums(parts) for name, parts in scored.items()}
        metrics = metric_records(sums.pop(""), joined, len(self.federation))
        return Evaluation(metrics, {name: overall(found) for name, found in sums.items()})

    @with_own_threads
    def predict_tests(self, state: SimulationState) -> FinalPredictions:
        """Return what every scored client predicts for its test samples with the model it would now use."""
        moment = self.moment(state.round)
        joined = self.attackers.honest(self.participation.joined(moment.round))
        parts = []
        for chunk in self.chunks(torch.tensor(joined)):  # the same chunks as in `score`
            cohort = self.adapted(self.method, self.cohort(state, chunk), moment)
            parts.append(self.predictions(self.method, cohort))
        return FinalPredictions.of_parts(self.task, joined, parts, self.dtype)

    def prediction_bytes(self) -> int:
        """Return the size of what `predict_tests` returns if all clients have joined."""
        per_target = self.test.y[0, 0].nbytes if self.test.y.shape[1] else 0
        return int(self.test.counts.sum()) * (self.task.outputs * self.dtype.itemsize + per_target)

    def _with_training(
        self, record: RoundRecord, uploads: RoundUploads, answer: Answer, bytes_down: int
    ) -> RoundRecord:
        """Return a record with the training and aggregation of its round."""
        attacking = self.attackers.among(uploads.clients)
        losses = uploads.client_losses()
        honest = losses[~attacking.to(losses.device)] if attacking.any() else losses
        return replace(
            record,
            loss=float(honest.mean()) if len(honest) else None,
            client_loss=losses.tolist(),
            trained=trained_metrics(uploads.scores, ~attacking),
            trace=plain_trace(answer),
            bytes_up=uploads.bytes_up,
            bytes_down=bytes_down,
            secure_sum=sum_record(uploads.summed),
            attackers=uploads.clients[attacking].tolist(),
        )

    def _relations(self, uploads: RoundUploads, trace: Mapping[str, Any], moment: Moment) -> dict[str, np.ndarray]:
        """Return the matrices between clients: the method's traces and the similarity of heads; empty if not due."""
        if uploads.heads is None:
            return {}
        matrices = {name: value for name, value in trace.items() if np.ndim(value) == 2}
        if self.net.head_name:
            probes = draw_probes(self.net, moment, 1, 1.0)
            matrices["S"] = head_similarity(self.net, uploads.heads.tensors, probes, temperature=0.5)
        return {name: self._of_all_clients(value.cpu(), uploads.clients) for name, value in matrices.items()}

    def _of_all_clients(self, matrix: Tensor, clients: Tensor) -> np.ndarray:
        """Expand a matrix between some clients to all clients; NaN where it has no entry."""
        total = len(self.federation)
        if matrix.shape[0] == total:
            return matrix.float().numpy()
        whole = torch.full((total, total), float("nan"))
        whole[clients[:, None], clients] = matrix.float()
        return whole.numpy()

    # The state before the first round, and of clients that join later

    @with_own_threads
    def start(self) -> SimulationState:
        """Return the state before the first round: all clients have the same initial network."""
        clients = len(self.federation)
        initial = ClientTensors(common=dict(self.net.initial))
        added, memory = self._added(initial) if overrides(self.method, "start") else ({}, {})
        example = {**initial.common, **{name: value[0] for name, value in added.items()}}
        common = {name for name, role in self.roles(ClientTensors(common=example)).items() if role in COMMON_ROLES}
        keep_momentum = self.local.keep_momentum and self.local.momentum > 0
        momentum = {name: value for name, value in example.items() if keep_momentum and self.trains(name)}
        own = {name: value for name, value in example.items() if name not in common}
        self._make_storage(clients * (size(own) + size(momentum)) + size(memory))
        params = {name: self.storage.zeros(clients, value) for name, value in own.items()}
        for name, rows in params.items():
            rows[:] = added.get(name, own[name]).to(rows.device)
        state = SimulationState(
            clients,
            0,
            ClientTensors(params, {name: example[name].clone() for name in example if name in common}),
            {name: self.storage.keep(value) for name, value in memory.items()},
            ClientTensors(),
            {name: self.storage.zeros(clients, value) for name, value in momentum.items()},
            on_device(self._server_state(clients), self.device),
        )
        if self.settings.defence != "none":
            self._check_defence(state)
        if self.settings.secure_aggregation:
            self.coverage(state).check(self.method)
        if self.privacy is not None:
            self._check_privacy(self.privacy, state)
            state.privacy = self.privacy.start()
        return state

    def adopt(self, state: SimulationState) -> SimulationState:
        """Return a saved state, moved to this simulation's storage and device."""
        self._make_storage(sum(map(size, (state.params.own, state.velocity, state.memory))))
        return state.placed(self.storage, self.device)

    def start_clients(self, cohort: Cohort) -> Cohort:
        """Apply the method's `start` to clients that receive their first model.

        What `start` adds is derived from that model. Otherwise a personal model would begin with untrained weights.
        """
        if not overrides(self.method, "start"):
            return cohort
        with calling(self.method, "start"):
            started = self.engine.apply_hook(self._start_client, cohort, None)
        roles = self.roles(cohort.params)
        added = {name: value for name, value in started["added"].items() if roles[name] not in COMMON_ROLES}
        params = ClientTensors({**cohort.params.own, **added}, cohort.params.common)
        return replace(cohort, params=params, memory=ClientTensors(started["memory"]))

    def _waiting_clients(self, state: SimulationState, number: int) -> Tensor:
        """Return the clients that have not participated before a round, and whose state follows from current models."""
        if Role.PERSONAL in self.roles(state.params).values():
            return self.participation.untrained_clients(number)
        if overrides(self.method, "start"):
            return self.participation.waiting_clients(number)
        return torch.empty(0, dtype=torch.long)

    def _update_waiting_clients(self, state: SimulationState, new: Tensor) -> None:
        """Derive the state of clients that have not participated yet from the current models.

        Personal parameters start from the mean of the other clients'. Without any, the clients of the first round keep
        their initial state, and late ones start from the current shared model.
        """
        state.start_personal(new, self.roles(state.params))
        if not overrides(self.method, "start"):
            return
        for chunk in self.chunks(new) if len(new) else ():
            started = self.start_clients(self.cohort(state, chunk))
            for stored, values in ((state.params.own, started.params.own), (state.memory, started.memory.own)):
                for name, value in values.items():
                    assign(stored[name], row_index(chunk, stored[name].device), value)

    def _added(self, initial: ClientTensors) -> tuple[Tensors, Tensors]:
        """Return the tensors that `start` adds to the parameters and the memory of all clients [K, ...]."""
        clients = len(self.federation)
        groups = {group: Rows(clients, RowStorage(self.device)) for group in ("added", "memory")}
        for chunk in self.chunks(torch.arange(clients)):
            cohort = self.gather(chunk, initial, ClientTensors(), ClientTensors())
            with calling(self.method, "start"):
                started = self.engine.apply_hook(self._start_client, cohort, None)
            for group, rows in groups.items():
                rows.put(int(chunk[0]), started.get(group, {}))
        # A hook may return one tensor for all clients; from now on each client changes its own.
        added, memory = ({name: value.contiguous() for name, value in rows.tensors.items()} for rows in groups.values())
        return added, memory

    def _start_client(self, client: Client, _: Any) -> dict[str, Tensors]:
        """Return the tensors that `start` adds to a client that has only the network's parameters."""
        params = {name: client.params[name] for name in self.net.initial}
        bare = client.having(params=params, received=params, memory={}, inbox={})
        new = check_client(self.method, "start", self.method.start(self.net, bare, self.moment(0)))
        added = {name: value for name, value in new.params.items() if name not in params}
        return {"added": added, "memory": new.memory}

    def _server_state(self, clients: int) -> State:
        with calling(self.method, "server"):
            return self.method.server(self.net, clients)

    # Memory

    def clients_in_memory(self) -> int:
        """Return how many clients fit into memory while they train."""
        return clients_at_once(self.free_memory() / 4, self.bytes_of_a_client())

    def free_memory(self) -> float:
        """Return how many bytes of memory may be used."""
        return self.settings.memory * GIGABYTE if self.settings.memory else free_bytes(self.device) / 2

    def _default_chunk(self) -> int:
        return Mean.BLOCK if len(self.federation) <= Mean.BLOCK else self.clients_in_memory()

    def _make_storage(self, state_bytes: int) -> None:
        # The state, what the clients have trained, and the previous rows, which are kept until the round has succeeded.
        self.storage = RowStorage(
            self.device, on_disk=3 * state_bytes > self.free_memory(), folder=self.settings.scratch
        )


def plain_trace(answer: Answer) -> dict[str, TraceValue]:
    """Return the trace as numbers and lists for the record, without its matrices."""
    shown = {name: value for name, value in answer.trace.items() if np.ndim(value) < 2}
    return {
        name: value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        for name, value in shown.items()
    }
