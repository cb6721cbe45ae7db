"""The server's data about each client, by name, and the checks of replies against it."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from fedrema.deploy.messages import Reply, Score
from fedrema.deploy.norm_bounds import NormHistory, invalid_values
from fedrema.models.body_and_head import Net

IMBALANCE = 10
"""A node may have this many times as many samples as the median node, unless --most-samples sets a limit."""
FEW_SAMPLES = 10
"""Smallest median number of samples that limits are computed from."""


@dataclass
class Registry:
    """The clients of a federation by name: their rows, which never change, and the counts that replies must match."""

    names: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)
    """The last round in which a client's reply was used."""
    founders: int = 0
    """How many of the names took part in the first round."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many training samples a client had when it joined."""
    tests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many test samples a client had when it joined, by half."""
    norms: NormHistory = field(default_factory=NormHistory)
    """Norms of accepted replies."""

    def plain(self) -> object:
        """Return the registry as JSON values, for a checkpoint."""
        return msgspec.to_builtins(self)

    @classmethod
    def read(cls, plain: object) -> "Registry":
        """Return the registry in a checkpoint; raises msgspec.ValidationError if it is malformed."""
        return msgspec.convert(plain, cls)

    def row(self, name: str) -> int:
        """Return a client's row; a new client gets the next one."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def admit(self, number: int, replies: Mapping[str, Reply]) -> None:
        """Record that replies were used in a round, and the sample counts of new clients."""
        for name, reply in replies.items():
            self.accepted[name] = number
            self.counts.setdefault(name, reply.count)
            for score in (reply.received, reply.trained):
                if score is not None:
                    self.tests.setdefault(name, score.asked)
        if number == 1:
            self.founders = len(self.names)


@dataclass(frozen=True)
class ReplyChecks:
    """Checks of replies against the registry, after their names, types and shapes have been checked."""

    registry: Registry
    net: Net
    most_samples: int = 0
    """Largest number of samples of a node; 0: `IMBALANCE` times the median."""

    def invalid(self, replies: Mapping[str, Reply], number: int) -> dict[str, str]:
        """Return the clients whose replies cannot be used in a round, and why."""
        rejected = {name: why for name, reply in replies.items() if (why := self._fault(name, reply, number))}
        rest = {name: reply for name, reply in replies.items() if name not in rejected}
        return rejected | self._too_many_samples(rest)

    def valid_scores(self, scores: Mapping[str, Score | None]) -> dict[str, Score]:
        """Return the scores that can be used."""
        known = {name: score for name, score in scores.items() if score is not None}
        known = {name: score for name, score in known.items() if not self._score_fault(name, score)}
        tests = {name: sum(score.asked) for name, score in known.items()}
        excess = self._above_limit(tests, self._known_tests() | tests, "test")
        return {name: score for name, score in known.items() if name not in excess}

    def relative_sizes(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Return by which factor each client's update may exceed the median client's: more samples mean more steps."""
        counts = {name: reply.count for name, reply in replies.items()}
        median = _median({**self.registry.counts, **counts}.values())
        return {name: min(max(1.0, count / median), float(IMBALANCE)) for name, count in counts.items()}

    def _fault(self, name: str, reply: Reply, number: int) -> str:
        """Return why a reply cannot be used; empty if it can."""
        if reply.round != number:
            return f"it is for round {reply.round}, but this is round {number}"
        if reply.count < 1:
            return f"it reports {reply.count} training samples"
        joined_with = self.registry.counts.get(name, reply.count)
        if reply.count != joined_with:
            return f"it reports {reply.count} training samples, but it joined with {joined_with}"
        scores = [score for score in (reply.received, reply.trained) if score is not None]
        for score in scores:
            if why := self._score_fault(name, score):
                return why
        if len({score.asked for score in scores}) > 1:
            return "its two scores are over different numbers of test samples"
        for tensor, value in [*reply.params.items(), *reply.extras.items()]:
            if not torch.isfinite(value).all():
                return f"{tensor!r} is not finite"
        return invalid_values(self.net, reply)

    def _score_fault(self, name: str, score: Score) -> str:
        """Return why a score cannot be used; empty if it can."""
        joined_with = self.registry.tests.get(name, score.asked)
        if score.asked != joined_with:
            return f"its score is over {sum(score.asked)} test samples, but it joined with {sum(joined_with)}"
        # Every second test sample is in the second half.
        if score.asked[0] - score.asked[1] not in (0, 1):
            return f"the halves of its score are over {score.asked[0]} and {score.asked[1]} test samples"
        return ""

    def _too_many_samples(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        """Return the clients that report far more samples than others, and would dominate every mean."""
        counts = {name: reply.count for name, reply in replies.items()}
        scores = {name: reply.received or reply.trained for name, reply in replies.items()}
        tests = {name: sum(score.asked) for name, score in scores.items() if score is not None}
        return {
            **self._above_limit(tests, {**self._known_tests(), **tests}, "test"),
            **self._above_limit(counts, {**self.registry.counts, **counts}, "training"),
        }

    def _above_limit(self, counts: Mapping[str, int], known: Mapping[str, int], kind: str) -> dict[str, str]:
        median = _median(known.values())
        most = self.most_samples or IMBALANCE * median
        limit = (
            f"--most-samples {most}"
            if self.most_samples
            else f"{IMBALANCE} times the median of {median} (--most-samples allows more)"
        )
        return {
            name: f"it reports {count} {kind} samples, more than {limit}"
            for name, count in counts.items()
            if count > most
        }

    def _known_tests(self) -> dict[str, int]:
        return {name: sum(asked) for name, asked in self.registry.tests.items()}


def _median(counts: Iterable[int]) -> int:
    """Return the lower median: of two clients, the one with fewer samples decides."""
    return max(FEW_SAMPLES, statistics.median_low(list(counts) or [FEW_SAMPLES]))
