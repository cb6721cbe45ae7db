"""The central server: what it knows of each client by name, and what it makes of their replies."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedrema.config.settings import Settings
from fedrema.core import Answer, Role
from fedrema.data import Federation
from fedrema.deploy.bounds import NormHistory, Part, bounded, impossible, parts_of
from fedrema.deploy.letters import Letter, Reply, Score
from fedrema.deploy.node import Node
from fedrema.engine import ClientTensors
from fedrema.engine.devices import torch_threads
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Tensors
from fedrema.simulation.records import PRIMARY, MetricRecord, NodeReports, RoundRecord, metric_record, ratio
from fedrema.simulation.simulator import plain_trace
from fedrema.simulation.state import SimulationState, on_device
from fedrema.simulation.uploads import RoundUploads

IMBALANCE = 10
"""A node may have this many times as many samples as the median node, unless --most-samples says otherwise."""
FEW_SAMPLES = 10
"""A median below this counts as this."""


@dataclass
class Registry:
    """What the server knows of clients by name: their rows, for ever, and what their later replies must agree with."""

    names: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)
    """The round in which a client's reply last counted."""
    founders: int = 0
    """How many of the names were there in the first round."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many training samples a client had when it joined."""
    tests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many test samples it had then, in both halves."""
    norms: NormHistory = field(default_factory=NormHistory)
    """The norms of what clients sent."""

    def plain(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Registry":
        """Return what a checkpoint holds."""
        tests = {name: (first, second) for name, (first, second) in plain.get("tests", {}).items()}
        return cls(**{**plain, "tests": tests, "norms": NormHistory(**plain.get("norms", {}))})

    def row(self, name: str) -> int:
        """Return a client's row; a new one gets the next."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


class Central:
    """Plays the server's part of a method, round by round, for clients that it knows by name."""

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
        # A client of no importance: it knows the names and shapes of everything that will travel.
        nobody = Node(settings, _nobody(shape, classes))
        self.simulator = nobody.simulator
        self.net, begun = self.simulator.net, nobody.states[0]
        self.roles = {
            name: role for name, role in self.simulator.roles(begun.params).items() if role is not Role.PRIVATE
        }
        own = {
            name: value.expand(capacity, *value.shape[1:]).clone()
            for name, value in begun.params.own.items()
            if name in self.roles
        }
        server = on_device(self.method.server(self.net, capacity), self.simulator.device)
        self.state = SimulationState(
            capacity, 0, ClientTensors(own, dict(begun.params.common)), {}, ClientTensors(), {}, server
        )
        self.registry = Registry()
        self.expected = nobody.answer(self._letter(0, 0, 1))
        """A reply with the names, types and shapes that every reply to a training round has."""

    @property
    def round(self) -> int:
        """The last round that has been closed."""
        return self.state.round

    def letter(self, name: str, train: bool = True) -> Letter:
        """Return what a client needs for the next round."""
        row = self.registry.row(name)
        if row >= self.capacity:
            raise BadInput(f"Client {name!r} cannot join: --most-clients {self.capacity} are there already.")
        return self._letter(row, self.registry.accepted.get(name, 0), self.round + 1, train)

    def _letter(self, row: int, accepted: int, number: int, train: bool = True) -> Letter:
        state = self.state
        own = {name: value[row].cpu() for name, value in state.params.own.items()} if accepted else {}
        common = {name: value.cpu() for name, value in state.params.common.items()}
        mail = {name: value.cpu() for name, value in state.inbox.common.items()}
        own_mail = {name: value[row].cpu() for name, value in state.inbox.own.items()}
        late = number > 1 and not accepted and row >= self.registry.founders
        return Letter(number, accepted, common, own, mail, own_mail, train, late)

    def close(self, replies: Mapping[str, Reply], least: int = 1) -> RoundRecord:
        """Close a round with the replies that have come; returns its record, with who was rejected or clipped, and why.

        With fewer than `least` usable replies the round stays open and nothing changes.
        """
        number, registry = self.round + 1, self.registry
        rejected = {name: why for name, reply in replies.items() if (why := self._fault(name, reply, number))}
        sound = {name: reply for name, reply in replies.items() if name not in rejected}
        rejected |= self._imbalanced(sound)
        sound = {name: reply for name, reply in sound.items() if name not in rejected}
        result = bounded(
            sound,
            {name: self._parts(name, reply) for name, reply in sound.items()},
            self._sizes(sound),
            registry.norms,
            self.most_noise,
        )
        names = sorted(result.good, key=registry.row)
        rejected |= result.rejected
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        suspects = sorted(names, key=lambda name: -result.excess.get(name, 0.0))
        with torch_threads(self.simulator.threads):
            names, collected, answer, ruinous = self._agreed(names, result.good, number, suspects)
        rejected |= ruinous
        if len(names) < max(1, least):
            return RoundRecord(number, nodes=NodeReports(rejected))
        self.state.apply(collected, self.roles, answer)
        clipped = {name: why for name, why in result.clipped.items() if name in names}
        chosen = [result.good[name] for name in names]
        record = self._describe(number, names, chosen, answer, NodeReports(rejected, clipped))
        registry.norms.learn(number, result.norms_of(names), clipped)
        for name in names:
            registry.accepted[name] = number
            registry.counts.setdefault(name, result.good[name].count)
            for score in (result.good[name].received, result.good[name].trained):
                if score is not None:
                    registry.tests.setdefault(name, score.asked)
        if number == 1:
            registry.founders = len(registry.names)
        self.state.round = number
        return record

    def _agreed(
        self, names: list[str], replies: Mapping[str, Reply], number: int, suspects: list[str]
    ) -> tuple[list[str], RoundUploads, Answer, dict[str, str]]:
        """Aggregate; where that fails, find the replies without which it does not, and reject those.

        Returns who is left, the aggregate, and who was rejected. Suspects are tried one by one in their order, then
        the first two, three, …; where no reply is to blame, the error is raised and nothing has changed.
        """
        collected = self._collect(names, replies)
        try:
            return names, collected, self._aggregate(collected, number), {}
        except Exception as error:  # a method's server step can fail in any way on what a node sent
            if len(names) == 1 and isinstance(error, Diverged):
                return [], collected, Answer({}), {names[0]: str(error)}
            why = f"with its reply the aggregate fails: {str(error)[:200]}"
            failed = error
        several = (suspects[:count] for count in range(2, len(suspects)))
        for left_out in [*([name] for name in suspects), *several]:
            rest = [name for name in names if name not in left_out]
            if not rest:
                continue
            collected = self._collect(rest, replies)
            try:
                return rest, collected, self._aggregate(collected, number), dict.fromkeys(left_out, why)
            except Exception:  # it fails without these replies as well: they are not responsible
                continue
        raise failed

    def _collect(self, names: list[str], replies: Mapping[str, Reply]) -> RoundUploads:
        simulator, chosen = self.simulator, [replies[name] for name in names]
        rows = torch.tensor([self.registry.row(name) for name in names])
        counts = torch.tensor([reply.count for reply in chosen], device=simulator.device, dtype=simulator.dtype)

        def stacked(group: str) -> Tensors:
            found = getattr(chosen[0], group)
            return {
                name: torch.stack([getattr(one, group)[name] for one in chosen]).to(counts.device) for name in found
            }

        params = stacked("params")
        collected = RoundUploads(rows, counts, simulator.storage, keep_heads=False)
        shared = {name: value for name, value in params.items() if self.roles[name] is Role.SHARED}
        collected.mean.add(shared, collected.weights)
        collected.seen.put(0, {name: value for name, value in params.items() if name not in shared})
        collected.extras.put(0, stacked("extras"))
        collected.names += names
        return collected

    def _aggregate(self, collected: RoundUploads, number: int) -> Answer:
        uploads = replace(collected.for_server(), everyone=len(self.registry.names))  # there may be room for more
        answer = self.simulator.aggregate(uploads, self.state, self.roles, {}, self.simulator.moment(number))
        for name, value in answer.state.items():
            before = self.state.server.get(name, 0.0)
            # Infinity can be the honest beginning of a minimum.
            if torch.isfinite(torch.as_tensor(before)).all() and not torch.isfinite(torch.as_tensor(value)).all():
                raise Diverged(f"Training diverged in round {number}: {name!r} of the server is not finite.")
        return answer

    def _describe(
        self, number: int, names: list[str], replies: list[Reply], answer: Answer, nodes: NodeReports
    ) -> RoundRecord:
        """Return the record of a round."""
        losses = [reply.loss for reply in replies if reply.loss is not None]
        trained = [reply.trained for reply in replies if reply.trained is not None]
        asked, correct = (sum(sum(getattr(score, part)) for score in trained) for part in ("asked", "correct"))
        spent: dict[str, float | None] = {
            name: reply.epsilon for name, reply in zip(names, replies, strict=True) if reply.epsilon is not None
        }
        return RoundRecord(
            number,
            [self.registry.row(name) for name in names],
            loss=float(np.mean(losses)) if losses else None,
            trained={PRIMARY: MetricRecord(ratio(correct, asked))} if trained else {},
            trace=plain_trace(answer),
            nodes=replace(nodes, epsilon=spent),
        )

    def _fault(self, name: str, reply: Reply, number: int) -> str:
        """Say what is wrong with a reply; empty where nothing is."""
        if reply.round != number:
            return f"it is for round {reply.round}, and this is round {number}"
        if reply.count < 1:
            return f"it says that it trained on {reply.count} samples"
        joined_with = self.registry.counts.get(name, reply.count)
        if reply.count != joined_with:
            return f"it says that it trained on {reply.count} samples, but it joined with {joined_with}"
        scores = [score for score in (reply.received, reply.trained) if score is not None]
        for score in scores:
            if why := self._score_fault(name, score):
                return why
        if len({score.asked for score in scores}) > 1:
            return "its two scores are over different numbers of test samples"
        for group in ("params", "extras"):
            found, expected = getattr(reply, group), getattr(self.expected, group)
            if found.keys() != expected.keys():
                odd = sorted(found.keys() ^ expected.keys())[0]
                return f"{odd!r} is {'missing' if odd in expected else 'not expected'}"
            for name, value in found.items():
                if value.shape != expected[name].shape:
                    return f"{name!r} has shape {tuple(value.shape)} instead of {tuple(expected[name].shape)}"
                if value.dtype != expected[name].dtype:
                    return f"{name!r} holds {value.dtype} instead of {expected[name].dtype}"
                if not torch.isfinite(value).all():
                    return f"{name!r} is not finite"
        return impossible(self.net, reply)

    def _score_fault(self, name: str, score: Score) -> str:
        """Say what is wrong with a score; empty where nothing is."""
        joined_with = self.registry.tests.get(name, score.asked)
        if score.asked != joined_with:
            return f"its score is over {sum(score.asked)} test samples, but it joined with {sum(joined_with)}"
        # Every second test sample is in the second half.
        if score.asked[0] - score.asked[1] not in (0, 1):
            return f"the halves of its score are over {score.asked[0]} and {score.asked[1]} test samples"
        if not all(0 <= right <= asked for right, asked in zip(score.correct, score.asked, strict=True)):
            return f"its score is {sum(score.correct)} right of {sum(score.asked)}"
        return ""

    def _imbalanced(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        """Return who says that it has far more samples than others have; alone it would decide every mean."""
        counts = {name: reply.count for name, reply in replies.items()}
        scores = {name: reply.received or reply.trained for name, reply in replies.items()}
        tests = {name: sum(score.asked) for name, score in scores.items() if score is not None}
        known_tests = {name: sum(asked) for name, asked in self.registry.tests.items()}
        return {
            **self._above(tests, {**known_tests, **tests}, "test"),
            **self._above(counts, {**self.registry.counts, **counts}, "training"),
        }

    def _above(self, counts: Mapping[str, int], known: Mapping[str, int], what: str) -> dict[str, str]:
        median = _median(known.values())
        most = self.most_samples or IMBALANCE * median
        limit = (
            f"--most-samples {most}"
            if self.most_samples
            else f"{IMBALANCE} times the median of {median} (--most-samples allows more)"
        )
        return {
            name: f"it says that it has {count} {what} samples, more than {limit}"
            for name, count in counts.items()
            if count > most
        }

    def _sizes(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Say how much longer than the median one each client's change may be: it takes as many times more steps."""
        counts = {name: reply.count for name, reply in replies.items()}
        median = _median({**self.registry.counts, **counts}.values())
        return {name: min(max(1.0, count / median), float(IMBALANCE)) for name, count in counts.items()}

    def _parts(self, name: str, reply: Reply) -> list[Part]:
        params, row = self.state.params, self.registry.row(name)
        # Before its first reply the server does not know what a node begins with, unless nobody has trained yet.
        known = name in self.registry.accepted or self.round == 0
        own = {each: value[row] for each, value in params.own.items()} if known else None
        return parts_of(self.net, params.common, own, reply)

    def accuracies(self, scores: Mapping[str, Score | None]) -> dict[str, MetricRecord]:
        """Return a round's metrics from what clients counted."""
        known = {name: score for name, score in scores.items() if score is not None}
        faults = {name: why for name, score in known.items() if (why := self._score_fault(name, score))}
        tests = {name: sum(score.asked) for name, score in known.items() if name not in faults}
        faults |= self._above(tests, {name: sum(asked) for name, asked in self.registry.tests.items()} | tests, "test")
        known = {name: score for name, score in known.items() if name not in faults}
        names = sorted(known, key=self.registry.row)
        correct, asked = (
            np.array([getattr(known[name], part) for name in names]).reshape(-1, 2) for part in ("correct", "asked")
        )
        rows = [self.registry.row(name) for name in names]
        return {PRIMARY: metric_record(correct, asked, rows, len(self.registry.names))}


def _median(counts: Iterable[int]) -> int:
    """Return the lower median: with two, the smaller one is believed."""
    return max(FEW_SAMPLES, statistics.median_low(list(counts) or [FEW_SAMPLES]))


def _nobody(shape: tuple[int, ...], classes: int) -> Federation:
    samples = np.zeros((3, *shape), np.float32)  # two to train on: some layers refuse to look at one
    return Federation.from_arrays(samples, [0] * 3, ["nobody"] * 3, [False, False, True], classes=classes)
