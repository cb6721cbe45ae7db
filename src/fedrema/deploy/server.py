"""The server's part of a method: makes the requests to clients, checks their replies and aggregates them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedrema.config.settings import Settings
from fedrema.core import Answer, Role
from fedrema.core.fixed_point import QuantisedSum
from fedrema.data import Federation
from fedrema.deploy.messages import Expected, Reply, Request
from fedrema.deploy.node import Node, make_simulator
from fedrema.deploy.norm_bounds import BoundedReplies, Part, bound_norms, parts_of
from fedrema.deploy.registry import Registry, ReplyChecks
from fedrema.deploy.scores import Score, ScoreChecks, joined_sums
from fedrema.engine import ClientTensors
from fedrema.engine.devices import torch_threads
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Tensors
from fedrema.simulation.records import MetricRecord, NodeReports, RoundRecord
from fedrema.simulation.scoring import MetricSums, metric_records, overall
from fedrema.simulation.secure_aggregation import sum_record
from fedrema.simulation.simulator import plain_trace
from fedrema.simulation.state import RoundUploads, SimulationState, on_device

SUM = "the sum"
"""How the sum of secure aggregation is named where other entries are about nodes; no node can have this name."""


class CentralServer:
    """Executes the server's part of a method, round by round; clients are identified by name.

    Parameters
    ----------
    settings
        Method, network and training.
    dummy
        A federation with the shape of the clients' samples and their task; see `dummy_federation`.
    capacity
        Largest number of clients.
    most_samples, most_noise
        Limits on replies; see `Plan`.
    """

    def __init__(
        self,
        settings: Settings,
        dummy: Federation,
        capacity: int,
        most_samples: int = 0,
        most_noise: float = 0.0,
    ) -> None:
        self.method, self.capacity = settings.method, capacity
        self.most_samples, self.most_noise = most_samples, most_noise
        _, self.simulator = make_simulator(settings, dummy)  # the server has no samples
        self.net, initial = self.simulator.net, self.simulator.start()
        self.roles = {
            name: role for name, role in self.simulator.roles(initial.params).items() if role is not Role.PRIVATE
        }
        own = {
            name: value.expand(capacity, *value.shape[1:]).clone()
            for name, value in initial.params.own.items()
            if name in self.roles
        }
        server = on_device(self.method.server(self.net, capacity), self.simulator.device)
        self.state = SimulationState(
            capacity, 0, ClientTensors(own, dict(initial.params.common)), {}, ClientTensors(), {}, server
        )
        self.registry = Registry()
        self.is_secure = settings.simulation.secure_aggregation
        """Whether shared parameters arrive as a sum only."""
        self.counts_hidden = self.is_secure and self.simulator.coverage(initial).hides_counts
        self.expected = expected_reply(settings, dummy)
        if self.is_secure:
            visible = {name: value for name, value in self.expected.params.items() if name not in self._shared()}
            self.expected = replace(self.expected, params=visible)

    @property
    def round(self) -> int:
        """The last completed round."""
        return self.state.round

    @property
    def checks(self) -> ReplyChecks:
        """The checks of replies against the registry."""
        return ReplyChecks(self.registry, self.net, self.most_samples, self.counts_hidden)

    def _shared(self) -> set[str]:
        return {name for name, role in self.roles.items() if role is Role.SHARED}

    def empty_sum(self) -> QuantisedSum:
        """Return the sum of the next round without contributions."""
        summed = self.simulator.empty_sum(self.state.params)
        assert summed is not None
        return summed

    def request(self, name: str, train: bool = True) -> Request:
        """Return the request to a client for the next round; a new client gets a row."""
        row = self.registry.row(name)
        if row >= self.capacity:
            raise BadInput(f"Node {name!r} cannot join: the federation already has {self.capacity} (--most-clients).")
        state, number = self.state, self.round + 1
        last_used_round = self.registry.last_used_round.get(name, 0)
        joined_late = row >= self.registry.first_round_clients
        return Request(
            number,
            last_used_round,
            common={name: value.cpu() for name, value in state.params.common.items()},
            own={name: value[row].cpu() for name, value in state.params.own.items()} if number > 1 else {},
            inbox_common={name: value.cpu() for name, value in state.inbox.common.items()},
            inbox_own={name: value[row].cpu() for name, value in state.inbox.own.items()},
            train=train,
            late=number > 1 and not last_used_round and (joined_late or Role.PERSONAL in self.roles.values()),
        )

    def complete_round(self, replies: Mapping[str, Reply], least: int = 1) -> RoundRecord:
        """Aggregate the replies of a round; the record contains whose replies were rejected or clipped, and why.

        With fewer than `least` usable replies the state does not change, and the record has no participants.
        """
        return self.complete(self.screen(replies), least)

    def screen(self, replies: Mapping[str, Reply]) -> BoundedReplies:
        """Return the usable replies of a round, and why others are rejected or clipped."""
        checks = self.checks
        rejected = checks.rejected(replies, self.round + 1)
        passed_checks = {name: reply for name, reply in replies.items() if name not in rejected}
        parts = {name: self._parts(name, reply) for name, reply in passed_checks.items()}
        allowances = checks.allowances(passed_checks)
        bounded = bound_norms(passed_checks, parts, allowances, self.registry.norms, self.most_noise)
        return replace(bounded, rejected=rejected | bounded.rejected)

    def complete(self, bounded: BoundedReplies, least: int = 1, summed: QuantisedSum | None = None) -> RoundRecord:
        """Aggregate usable replies; with secure aggregation, `summed` is the sum of exactly these nodes."""
        number, registry, rejected = self.round + 1, self.registry, dict(bounded.rejected)
        names = sorted(bounded.usable, key=registry.row)
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        highest_ratio_first = sorted(names, key=lambda name: -bounded.largest_ratio.get(name, 0.0))
        of_sum = self._bounded_sum(number, summed)
        with torch_threads(self.simulator.threads):
            names, collected, answer, failing = self._aggregate_usable(
                names, bounded.usable, number, highest_ratio_first, summed, of_sum.usable[SUM].params
            )
        rejected |= failing
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        self.state.apply(collected, self.roles, answer)
        used = {name: bounded.usable[name] for name in names}
        clipped = {name: why for name, why in bounded.clipped.items() if name in names} | of_sum.clipped
        registry.norms.add(number, bounded.norms_of(names) | of_sum.norms, clipped)
        registry.record_used(number, used)
        trained = [registry.row(name) for name in registry.last_used_round]
        untrained = torch.tensor(sorted({*range(self.capacity)} - {*trained}), dtype=torch.long)
        self.state.start_personal(untrained, self.roles)
        self.state.round = number
        return replace(self._record(number, used, answer, rejected, clipped), secure_sum=sum_record(summed))

    def _bounded_sum(self, number: int, summed: QuantisedSum | None) -> BoundedReplies:
        """Return the mean of shared parameters from a sum, with its change scaled down if it is unusually large.

        It is not rejected: nobody knows which node causes it, and the round would fail again.
        """
        mean = Reply(number, 0, {} if summed is None else summed.mean())
        parts = parts_of(self.net, self.state.params.common, None, mean)
        return bound_norms({SUM: mean}, {SUM: parts}, {SUM: 1.0}, self.registry.norms, rejects=False)

    def _aggregate_usable(
        self,
        names: list[str],
        replies: Mapping[str, Reply],
        number: int,
        highest_ratio_first: list[str],
        summed: QuantisedSum | None,
        mean: Tensors,
    ) -> tuple[list[str], RoundUploads, Answer, dict[str, str]]:
        """Aggregate; if that fails, find the replies without which it succeeds, and reject them.

        Returns the remaining clients, their uploads, the answer, and the rejected clients with the reason. Aggregation
        is retried without each reply in turn, the highest ratio first, then without the first two, three, …; if it
        always fails, the error is raised and the state is unchanged. With secure aggregation, no reply can be left out:
        `mean` is that of the sum.
        """
        collected = self._collect(names, replies, summed, mean)
        if summed is not None:
            return names, collected, self._aggregate(collected, number), {}
        try:
            return names, collected, self._aggregate(collected, number), {}
        except Exception as error:  # a method's aggregate can raise any error for a bad reply
            if len(names) == 1 and isinstance(error, Diverged):
                return [], collected, Answer({}), {names[0]: str(error)}
            why = f"aggregation fails if its reply is included: {str(error)[:200]}"
            first_error = error
        several = (highest_ratio_first[:count] for count in range(2, len(highest_ratio_first)))
        for left_out in [*([name] for name in highest_ratio_first), *several]:
            rest = [name for name in names if name not in left_out]
            if not rest:
                continue
            collected = self._collect(rest, replies)
            try:
                return rest, collected, self._aggregate(collected, number), dict.fromkeys(left_out, why)
            except Exception:  # it also fails without these replies, so they are not the only cause
                continue
        raise first_error

    def _collect(
        self,
        names: list[str],
        replies: Mapping[str, Reply],
        summed: QuantisedSum | None = None,
        mean: Tensors | None = None,
    ) -> RoundUploads:
        """Return the replies of these clients as the uploads of a round; `mean` is that of `summed`."""
        simulator, in_order = self.simulator, [replies[name] for name in names]
        rows = torch.tensor([self.registry.row(name) for name in names])
        counts = torch.tensor([reply.count for reply in in_order], device=simulator.device, dtype=simulator.dtype)

        def stacked(tensors: list[Tensors]) -> Tensors:
            return {name: torch.stack([one[name] for one in tensors]).to(counts.device) for name in tensors[0]}

        if summed is not None and self.counts_hidden:  # only their sum is known
            counts = torch.full_like(counts, summed.samples / len(counts))
        params = stacked([reply.params for reply in in_order])
        collected = RoundUploads(rows, counts, simulator.storage, keep_heads=False)
        shared = {name: value for name, value in params.items() if self.roles[name] is Role.SHARED}
        collected.mean.add(shared, collected.weights)
        collected.mean.total |= mean or {}
        collected.visible.put(0, {name: value for name, value in params.items() if name not in shared})
        collected.extras.put(0, stacked([reply.extras for reply in in_order]))
        collected.names += names
        return collected

    def _aggregate(self, collected: RoundUploads, number: int) -> Answer:
        # `everyone` is the number of clients so far; the state has rows for the whole capacity.
        uploads = replace(collected.for_server(), everyone=len(self.registry.names))
        answer = self.simulator.aggregate(uploads, self.state, self.roles, {}, self.simulator.moment(number))
        for name, value in answer.state.items():
            before = self.state.server.get(name, 0.0)
            # Infinity is a valid initial value of a minimum.
            if torch.isfinite(torch.as_tensor(before)).all() and not torch.isfinite(torch.as_tensor(value)).all():
                raise Diverged(f"Training diverged in round {number}: {name!r} of the server is not finite.")
        return answer

    def _record(
        self,
        number: int,
        replies: Mapping[str, Reply],
        answer: Answer,
        rejected: dict[str, str],
        clipped: dict[str, str],
    ) -> RoundRecord:
        """Return the record of a round without its metrics, which are computed from the scores in the next replies."""
        losses = [reply.loss for reply in replies.values() if reply.loss is not None]
        trained = [reply.trained for reply in replies.values() if reply.trained is not None]
        epsilon = {name: reply.epsilon for name, reply in replies.items() if reply.epsilon is not None}
        return RoundRecord(
            number,
            [self.registry.row(name) for name in replies],
            loss=float(np.mean(losses)) if losses else None,
            trained={name: MetricRecord(value) for name, value in overall(self._sums(trained)).items()}
            if trained
            else {},
            trace=plain_trace(answer),
            nodes=NodeReports(rejected, clipped, {**epsilon}),
        )

    def _parts(self, name: str, reply: Reply) -> list[Part]:
        params, row = self.state.params, self.registry.row(name)
        own = {each: value[row] for each, value in params.own.items()}
        return parts_of(self.net, params.common, own, reply)

    def metrics(self, scores: Mapping[str, Score | None]) -> dict[str, MetricRecord]:
        """Return a round's metrics from the scores that clients report."""
        usable = self.checks.usable_scores(scores)
        names = sorted(usable, key=self.registry.row)
        rows = [self.registry.row(name) for name in names]
        return metric_records(self._sums([usable[name] for name in names]), rows, len(self.registry.names))

    def _sums(self, scores: Sequence[Score]) -> MetricSums:
        return joined_sums(scores, self.expected.scores.names)


def expected_reply(settings: Settings, dummy: Federation) -> Expected:
    """Return what every reply to a request to train must contain.

    Names, types and shapes of tensors are those in the reply of a node with dummy samples to the first request.
    """
    node = Node(settings, dummy)
    common = node.simulator.start().params.common
    reply = node.reply_to(Request(1, 0, common, own={}, inbox_common={}, inbox_own={}))
    return Expected(ScoreChecks(node.simulator.task, node.simulator.metrics), reply.params, reply.extras)
