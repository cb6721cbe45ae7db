"""The server's part of a method: requests to clients, and the aggregation of their replies."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedrema.config.settings import Settings
from fedrema.core import Answer, Role
from fedrema.deploy.messages import Reply, Request, Score
from fedrema.deploy.node import Node
from fedrema.deploy.norm_bounds import Part, bound_norms, parts_of
from fedrema.deploy.registry import Registry, ReplyChecks
from fedrema.engine import ClientTensors
from fedrema.engine.devices import torch_threads
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Tensors
from fedrema.runs.trained_clients import dummy_federation
from fedrema.simulation.records import PRIMARY, MetricRecord, NodeReports, RoundRecord
from fedrema.simulation.scoring import metric_record, ratio
from fedrema.simulation.simulator import plain_trace
from fedrema.simulation.state import RoundUploads, SimulationState, on_device


class CentralServer:
    """Executes the server's part of a method, round by round; clients are identified by name.

    Parameters
    ----------
    settings
        Method, network and training.
    shape, classes
        Shape of a sample, and the number of classes.
    capacity
        Largest number of clients.
    most_samples, most_noise
        Limits on what clients may send; see `Plan`.
    """

    def __init__(
        self,
        settings: Settings,
        shape: tuple[int, ...],
        classes: int,
        capacity: int,
        most_samples: int = 0,
        most_noise: float = 0.0,
    ) -> None:
        self.method, self.capacity = settings.method, capacity
        self.most_samples, self.most_noise = most_samples, most_noise
        dummy = Node(settings, dummy_federation(shape, classes))  # used for its names and shapes only
        self.simulator = dummy.simulator
        self.net, initial = self.simulator.net, dummy.states[0]
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
        self.expected = dummy.reply_to(self._request(0, 0, 1))
        """A reply with the names, types and shapes of every reply to a request to train."""

    @property
    def round(self) -> int:
        """The last completed round."""
        return self.state.round

    @property
    def checks(self) -> ReplyChecks:
        """The checks of replies against what the registry knows about clients."""
        return ReplyChecks(self.registry, self.net, self.most_samples)

    def request(self, name: str, train: bool = True) -> Request:
        """Return the message that requests the next round from a client."""
        row = self.registry.row(name)
        if row >= self.capacity:
            raise BadInput(f"Client {name!r} cannot join: the federation has --most-clients {self.capacity} already.")
        return self._request(row, self.registry.accepted.get(name, 0), self.round + 1, train)

    def _request(self, row: int, accepted: int, number: int, train: bool = True) -> Request:
        state = self.state
        return Request(
            number,
            accepted,
            common={name: value.cpu() for name, value in state.params.common.items()},
            own={name: value[row].cpu() for name, value in state.params.own.items()} if accepted else {},
            inbox_common={name: value.cpu() for name, value in state.inbox.common.items()},
            inbox_own={name: value[row].cpu() for name, value in state.inbox.own.items()},
            train=train,
            late=number > 1 and not accepted and row >= self.registry.founders,
        )

    def complete_round(self, replies: Mapping[str, Reply], least: int = 1) -> RoundRecord:
        """Aggregate the replies of a round; the record names the clients that were rejected or clipped, and why.

        With fewer than `least` usable replies the state does not change, and the record has no participants.
        """
        number, registry, checks = self.round + 1, self.registry, self.checks
        rejected = checks.invalid(replies, number)
        valid = {name: reply for name, reply in replies.items() if name not in rejected}
        parts = {name: self._parts(name, reply) for name, reply in valid.items()}
        bounded = bound_norms(valid, parts, checks.relative_sizes(valid), registry.norms, self.most_noise)
        rejected |= bounded.rejected
        names = sorted(bounded.accepted, key=registry.row)
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        suspects = sorted(names, key=lambda name: -bounded.excess.get(name, 0.0))
        with torch_threads(self.simulator.threads):
            names, collected, answer, failing = self._aggregate_valid(names, bounded.accepted, number, suspects)
        rejected |= failing
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        self.state.apply(collected, self.roles, answer)
        used = {name: bounded.accepted[name] for name in names}
        clipped = {name: why for name, why in bounded.clipped.items() if name in names}
        registry.norms.learn(number, bounded.norms_of(names), clipped)
        registry.admit(number, used)
        self.state.round = number
        return self._record(number, used, answer, rejected, clipped)

    def _aggregate_valid(
        self, names: list[str], replies: Mapping[str, Reply], number: int, suspects: list[str]
    ) -> tuple[list[str], RoundUploads, Answer, dict[str, str]]:
        """Aggregate; if that fails, find the replies without which it succeeds, and reject them.

        Returns the remaining clients, their uploads, the answer, and the clients that were rejected. Suspects are left
        out one at a time, in their order, then the first two, three, …; if aggregation always fails, the error is
        raised and the state is unchanged.
        """
        collected = self._collect(names, replies)
        try:
            return names, collected, self._aggregate(collected, number), {}
        except Exception as error:  # a method's aggregate can raise any error for a bad reply
            if len(names) == 1 and isinstance(error, Diverged):
                return [], collected, Answer({}), {names[0]: str(error)}
            why = f"with its reply the aggregation fails: {str(error)[:200]}"
            failed = error
        several = (suspects[:count] for count in range(2, len(suspects)))
        for left_out in [*([name] for name in suspects), *several]:
            rest = [name for name in names if name not in left_out]
            if not rest:
                continue
            collected = self._collect(rest, replies)
            try:
                return rest, collected, self._aggregate(collected, number), dict.fromkeys(left_out, why)
            except Exception:  # it also fails without these replies, so they are not the cause
                continue
        raise failed

    def _collect(self, names: list[str], replies: Mapping[str, Reply]) -> RoundUploads:
        simulator, chosen = self.simulator, [replies[name] for name in names]
        rows = torch.tensor([self.registry.row(name) for name in names])
        counts = torch.tensor([reply.count for reply in chosen], device=simulator.device, dtype=simulator.dtype)

        def stacked(tensors: list[Tensors]) -> Tensors:
            return {name: torch.stack([one[name] for one in tensors]).to(counts.device) for name in tensors[0]}

        params = stacked([reply.params for reply in chosen])
        collected = RoundUploads(rows, counts, simulator.storage, keep_heads=False)
        shared = {name: value for name, value in params.items() if self.roles[name] is Role.SHARED}
        collected.mean.add(shared, collected.weights)
        collected.visible.put(0, {name: value for name, value in params.items() if name not in shared})
        collected.extras.put(0, stacked([reply.extras for reply in chosen]))
        collected.names += names
        return collected

    def _aggregate(self, collected: RoundUploads, number: int) -> Answer:
        # The number of clients so far, not the capacity.
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
        """Return the record of a round, without its metrics, which clients send with their next replies."""
        losses = [reply.loss for reply in replies.values() if reply.loss is not None]
        trained = [reply.trained for reply in replies.values() if reply.trained is not None]
        correct, samples = sum(sum(score.correct) for score in trained), sum(sum(score.asked) for score in trained)
        epsilon = {name: reply.epsilon for name, reply in replies.items() if reply.epsilon is not None}
        return RoundRecord(
            number,
            [self.registry.row(name) for name in replies],
            loss=float(np.mean(losses)) if losses else None,
            trained={PRIMARY: MetricRecord(ratio(correct, samples))} if trained else {},
            trace=plain_trace(answer),
            nodes=NodeReports(rejected, clipped, {**epsilon}),
        )

    def _parts(self, name: str, reply: Reply) -> list[Part]:
        params, row = self.state.params, self.registry.row(name)
        # Before a client's first reply, the server knows its personal parameters only in the first round.
        known = name in self.registry.accepted or self.round == 0
        own = {each: value[row] for each, value in params.own.items()} if known else None
        return parts_of(self.net, params.common, own, reply)

    def metrics(self, scores: Mapping[str, Score | None]) -> dict[str, MetricRecord]:
        """Return a round's metrics from the scores that clients report."""
        valid = self.checks.valid_scores(scores)
        names = sorted(valid, key=self.registry.row)
        correct = np.array([valid[name].correct for name in names]).reshape(-1, 2)
        samples = np.array([valid[name].asked for name in names]).reshape(-1, 2)
        rows = [self.registry.row(name) for name in names]
        return {PRIMARY: metric_record(correct, samples, rows, len(self.registry.names))}
