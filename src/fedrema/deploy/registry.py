"""The server's data about each client, by name, and the checks of replies against it."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from fedrema.deploy.messages import Reply
from fedrema.deploy.norm_bounds import NormHistory, invalid_values
from fedrema.deploy.scores import Score
from fedrema.models.body_and_head import Net

IMBALANCE = 10
"""A node may have this many times as many samples as the median node, unless --most-samples sets a limit."""
FEW_SAMPLES = 10
"""Smallest median number of samples that limits are computed from."""


@dataclass
class Registry:
    """The clients of a federation by name: their rows, which never change, and the counts that replies must match."""

    names: list[str] = field(default_factory=list)
    """The clients in the order of their rows."""
    last_used_round: dict[str, int] = field(default_factory=dict)
    """The last round in which a client's reply was used; clients without one are missing."""
    first_round_clients: int = 0
    """How many clients had a row when round 1 was completed; all later ones joined late."""
    train_counts: dict[str, int] = field(default_factory=dict)
    """How many training samples a client had when it joined."""
    test_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many test samples a client had when it joined, by half."""
    norms: NormHistory = field(default_factory=NormHistory)
    """Norms of the replies that were used."""

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

    def record_used(self, number: int, replies: Mapping[str, Reply]) -> None:
        """Record that replies were used in a round, and the sample counts of new clients."""
        for name, reply in replies.items():
            self.last_used_round[name] = number
            self.train_counts.setdefault(name, reply.count)
            for score in (reply.received, reply.trained):
                if score is not None:
                    self.test_counts.setdefault(name, score.total)
        if number == 1:
            self.first_round_clients = len(self.names)


@dataclass(frozen=True)
class ReplyChecks:
    """Checks of replies against the registry; the names, types and shapes of their tensors were checked before."""

    registry: Registry
    net: Net
    most_samples: int = 0
    """Largest number of samples of a node; 0: `IMBALANCE` times the median."""
    counts_hidden: bool = False
    """Whether replies contain 0 instead of the number of training samples, which is then known as a sum only."""

    def rejected(self, replies: Mapping[str, Reply], number: int) -> dict[str, str]:
        """Return the clients whose replies to a round fail a check, and why."""
        rejected = {name: why for name, reply in replies.items() if (why := self._fault(name, reply, number))}
        rest = {name: reply for name, reply in replies.items() if name not in rejected}
        return rejected | self._too_many_samples(rest)

    def usable_scores(self, scores: Mapping[str, Score | None]) -> dict[str, Score]:
        """Return the scores that pass all checks."""
        reported = {name: score for name, score in scores.items() if score is not None}
        plausible = {name: score for name, score in reported.items() if not self._score_fault(name, score)}
        counts = {name: sum(score.total) for name, score in plausible.items()}
        above_limit = self._above_limit(counts, self._all_test_counts() | counts, "test")
        return {name: score for name, score in plausible.items() if name not in above_limit}

    def allowances(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Return the factor by which each client's norms may exceed the median's: more samples mean more steps."""
        counts = {name: reply.count for name, reply in replies.items()}
        median = _median({**self.registry.train_counts, **counts}.values())
        return {name: min(max(1.0, count / median), float(IMBALANCE)) for name, count in counts.items()}

    def _fault(self, name: str, reply: Reply, number: int) -> str:
        """Return why a reply is rejected; empty if it passes."""
        if reply.round != number:
            return f"it is for round {reply.round}, but this is round {number}"
        if self.counts_hidden and reply.count:
            return f"it reports {reply.count} training samples, which secure aggregation hides"
        if reply.count < 1 and not self.counts_hidden:
            return f"it reports {reply.count} training samples"
        joined_with = self.registry.train_counts.get(name, reply.count)
        if reply.count != joined_with:
            return f"it reports {reply.count} training samples, but it joined with {joined_with}"
        scores = [score for score in (reply.received, reply.trained) if score is not None]
        for score in scores:
            if why := self._score_fault(name, score):
                return why
        if len({score.total for score in scores}) > 1:
            return "its two scores are over different numbers of test samples"
        for tensor, value in [*reply.params.items(), *reply.extras.items()]:
            if not torch.isfinite(value).all():
                return f"{tensor!r} is not finite"
        return invalid_values(self.net, reply)

    def _score_fault(self, name: str, score: Score) -> str:
        """Return why a score is rejected; empty if it passes."""
        joined_with = self.registry.test_counts.get(name, score.total)
        if score.total != joined_with:
            return f"its score is over {sum(score.total)} test samples, but it joined with {sum(joined_with)}"
        # Every second test sample is in the second half.
        if score.total[0] - score.total[1] not in (0, 1):
            return f"the halves of its score are over {score.total[0]} and {score.total[1]} test samples"
        return ""

    def _too_many_samples(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        """Return the clients that report far more samples than others and would dominate every mean, and why."""
        train_counts = {name: reply.count for name, reply in replies.items()}
        scores = {name: reply.received or reply.trained for name, reply in replies.items()}
        test_counts = {name: sum(score.total) for name, score in scores.items() if score is not None}
        return {
            **self._above_limit(test_counts, {**self._all_test_counts(), **test_counts}, "test"),
            **self._above_limit(train_counts, {**self.registry.train_counts, **train_counts}, "training"),
        }

    def _above_limit(self, counts: Mapping[str, int], everyone: Mapping[str, int], kind: str) -> dict[str, str]:
        """Return the clients whose counts exceed the limit, which depends on the median of everyone's, and why."""
        median = _median(everyone.values())
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

    def _all_test_counts(self) -> dict[str, int]:
        return {name: sum(halves) for name, halves in self.registry.test_counts.items()}


def _median(counts: Iterable[int]) -> int:
    """Return the lower median: of two clients, the one with fewer samples decides."""
    return max(FEW_SAMPLES, statistics.median_low(list(counts) or [FEW_SAMPLES]))
