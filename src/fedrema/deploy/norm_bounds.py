"""Bounds on the norms of what nodes send, relative to the usual norms.

The tensors of a reply are divided into groups of one scale: the change of the shared parameters, the personal
parameters and their change, and each tensor that the method sends in addition. The usual norm of a group is a
median of the norms in usable replies. The reference norm is the usual norm times the factors below where they apply:
the node's allowance for its sample count, `SINGLE_NUMBER`, `STATISTICS` and `ALONE`. A group above `CLIP` times the
reference norm is scaled down to the reference norm; a reply with a group above `REJECT` times is rejected.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedrema.deploy.messages import Reply
from fedrema.models.body_and_head import Net, Tensors

CLIP = 5.0
"""A group whose norm is above this many times its reference norm is scaled down to the reference norm."""
REJECT = 10.0
"""A reply with a group above this many times its reference norm is rejected."""
MOST_CLIPS = 2
"""How often a node's replies are clipped within `ROUNDS` rounds before they are rejected instead."""
SINGLE_NUMBER = 100.0
"""Factor on the usual norm for a single number, whose scale can depend on a node's sample count."""
STATISTICS = 10.0
"""Factor on the usual norm for batch-norm statistics: variances grow with the square of the inputs' scale."""
ALONE = 10.0
"""Factor on the usual norm of groups that are not changes, in a round's only reply: features grow in early rounds."""
COUNTS = ("label_counts", "held_count")
"""Tensors of sample counts, which are bounded by the node's own sample count instead."""
ROUNDS = 20
"""How many previous rounds the usual norm is computed from, and clipped replies are counted over."""
OWN_ROUNDS = 9
"""How many of a node's own norms are stored."""
LEAST_CHANGE = 0.01
"""The usual norm of a change is at least this fraction of the norm of the tensors before the change."""
LARGEST = 1e12
"""No tensor's root mean square may be above this."""


@dataclass
class NormHistory:
    """Norms of the replies that were used, by group; part of the server's checkpoint."""

    recent: dict[str, list[float]] = field(default_factory=dict)
    """The median norm of each of the last rounds."""
    first: dict[str, float] = field(default_factory=dict)
    """The median norm of the first round."""
    own: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """The last norms of each node, by node and group."""
    clipped: dict[str, list[int]] = field(default_factory=dict)
    """The recent rounds in which each node's reply was clipped."""

    def usual(self, group: str, norms: Mapping[str, float], name: str, least: float) -> float:
        """Return the usual norm of a group for one node, given this round's norms by node; 0 if it is unknown.

        If it is known, it is at least `least`. A new node is compared with the first round, when all nodes were new. A
        node whose norms have always been larger than the others' is compared with itself, up to the norm of the first
        round: nodes converge at different speeds.
        """
        this_round = [norm for norm in norms.values() if norm > 0]
        # The lower median: of two values that disagree, the larger one can do more harm.
        of_all = max(_median(this_round) if len(this_round) > 1 else 0.0, _median(self.recent.get(group, [])))
        first = self.first.get(group, 0.0)
        own = self.own.get(name, {}).get(group, [])
        usual = max(of_all, min(_median(own), first) if own else first)
        return max(usual, least) if usual else 0.0

    def add(self, number: int, norms: Mapping[str, Mapping[str, float]], clipped: Mapping[str, str]) -> None:
        """Add the norms, by group and node, of the replies that were used in a round, and the clipped nodes."""
        for group, by_node in norms.items():
            positive = {name: norm for name, norm in by_node.items() if norm > 0}
            if not positive:
                continue
            median = _median(list(positive.values()))
            self.first.setdefault(group, median)
            self.recent[group] = [*self.recent.get(group, []), median][-ROUNDS:]
            for name, norm in positive.items():
                own = self.own.setdefault(name, {})
                own[group] = [*own.get(group, []), norm][-OWN_ROUNDS:]
        for name in clipped:
            self.clipped[name] = [*self.clipped.get(name, []), number]
        recent = {name: [each for each in rounds if each > number - ROUNDS] for name, rounds in self.clipped.items()}
        self.clipped = {name: rounds for name, rounds in recent.items() if rounds}


def _median(norms: list[float]) -> float:
    return statistics.median_low(norms) if norms else 0.0


@dataclass(frozen=True)
class Part:
    """A tensor of a reply, and the group in which its norm is bounded."""

    group: str
    field: str
    """`params` or `extras`."""
    name: str
    base: Tensor | None = None
    """The value before training, from which its change is measured; None: the norm of the tensor itself is bounded."""
    tolerance: float = 1.0
    """Factor on the usual norm of the group."""

    @property
    def is_change(self) -> bool:
        """Whether the norm of the tensor's change is bounded."""
        return self.base is not None

    def offset(self, reply: Reply) -> Tensor:
        """Return the tensor's change, or the tensor itself without a base, in double precision."""
        value: Tensor = getattr(reply, self.field)[self.name].double()
        return value if self.base is None else value - self.base.double().to(value.device)


def parts_of(net: Net, common: Tensors, own: Tensors | None, reply: Reply) -> list[Part]:
    """Divide a reply into groups; `own` are the node's personal parameters on the server, None if it has none yet."""
    parts = []
    for name in reply.params:
        kind = "parameters" if name in net.trainable else "statistics" if name in net.initial else name.split(".")[0]
        tolerance = STATISTICS if kind == "statistics" else 1.0
        if name in common:
            parts.append(Part(f"the change of its shared {kind}", "params", name, common[name], tolerance))
            continue
        parts.append(Part(f"its personal {kind}", "params", name, None, tolerance))
        if own is not None:
            parts.append(Part(f"the change of its personal {kind}", "params", name, own[name], tolerance))
    for name, value in reply.extras.items():
        if name not in COUNTS:
            tolerance = SINGLE_NUMBER if value.numel() == 1 else 1.0
            parts.append(Part(f"its {name!r}", "extras", name, None, tolerance))
    return parts


def invalid_values(net: Net, reply: Reply) -> str:
    """Return why a reply's values cannot result from training; empty if they are plausible."""
    for name, value in [*reply.params.items(), *reply.extras.items()]:
        if value.numel() and _norm([value.double()]) > LARGEST * math.sqrt(value.numel()):
            return f"the numbers in {name!r} are implausibly large"
        if name in net.batch_norm and name.endswith("running_var") and bool((value < 0).any()):
            return f"the variances in {name!r} are below 0"
    for name in COUNTS:
        counts = reply.extras.get(name, torch.zeros(0))
        if bool((counts < 0).any()) or float(counts.double().sum()) > reply.count:
            return f"the numbers of samples in {name!r} are below 0 or more than {reply.count}"
    return ""


@dataclass
class BoundedReplies:
    """A round's replies after their norms have been bounded."""

    usable: dict[str, Reply] = field(default_factory=dict)
    """The replies that were not rejected, by node, after clipping."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why a reply was rejected, by node."""
    clipped: dict[str, str] = field(default_factory=dict)
    """Why a usable reply was clipped, by node."""
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """The norm of every group by node, after clipping."""
    largest_ratio: dict[str, float] = field(default_factory=dict)
    """The largest ratio of a norm to its reference norm, by node.

    If aggregation fails, it is retried without the replies with the highest ratios first.
    """

    def only(self, names: list[str]) -> "BoundedReplies":
        """Return the same with the usable replies of these nodes only."""
        return replace(self, usable={name: self.usable[name] for name in names})

    def norms_of(self, names: list[str]) -> dict[str, dict[str, float]]:
        """Return the norms of these nodes, by group and node."""
        return {group: {name: norms[name] for name in names if name in norms} for group, norms in self.norms.items()}


@dataclass(frozen=True)
class GroupNorm:
    """A group of tensors in a reply, and its norm."""

    norm: float
    least: float
    """Lower bound of the usual norm of a change; 0 for groups that are not changes."""
    numel: int
    """Number of values in the group."""
    tolerance: float
    is_change: bool


@dataclass(frozen=True)
class Excess:
    """A norm above the limit for clipping."""

    ratio: float
    """Ratio of the norm to the reference norm."""
    factor: float
    """Ratio of the reference norm to the usual norm."""

    @property
    def description(self) -> str:
        """The ratio of the norm to the usual norm, and its limit."""
        implausible = "implausibly large: " if self.ratio > REJECT else ""
        limit = REJECT if self.ratio > REJECT else CLIP
        times = f"{self.ratio * self.factor:.3g} times the usual norm"
        return f"{implausible}{times} (limit: {limit * self.factor:.3g} times)"

    @property
    def reference(self) -> str:
        """The reference norm in words."""
        return "the usual norm" if self.factor == 1 else f"{self.factor:.3g} times the usual norm"


def bound_norms(
    replies: Mapping[str, Reply],
    parts: Mapping[str, list[Part]],
    allowances: Mapping[str, float],
    history: NormHistory,
    noise: float = 0.0,
    rejects: bool = True,
) -> BoundedReplies:
    """Clip or reject replies with groups whose norm is too large.

    `allowances` is the factor by which each node's norms may exceed those of the median node; `noise` is the standard
    deviation of the noise that nodes with a privacy budget may add. Without `rejects`, replies are only clipped.
    """
    result = BoundedReplies(dict(replies))
    measured = {name: _measure(reply, parts[name]) for name, reply in replies.items()}
    for name, groups in measured.items():
        for group, measurement in groups.items():
            result.norms.setdefault(group, {})[name] = measurement.norm
    received = {group: dict(norms) for group, norms in result.norms.items()}  # before clipping
    for name, reply in replies.items():
        excesses: dict[str, Excess] = {}
        for group, measurement in measured[name].items():
            usual = history.usual(group, received[group], name, measurement.least)
            alone = ALONE if len(replies) == 1 and not measurement.is_change else 1.0
            factor = allowances[name] * measurement.tolerance * alone
            reference = usual * factor
            ratio = measurement.norm / reference if reference > 0 else 0.0
            # Gaussian noise in n numbers has a norm of about √n standard deviations, and almost never five more.
            largest_noise = noise * (math.sqrt(measurement.numel) + 5)
            if ratio > CLIP and reply.epsilon is not None and measurement.norm - CLIP * reference <= largest_noise:
                del result.norms[group][name]  # noise must not change the usual norm
                continue
            result.largest_ratio[name] = max(result.largest_ratio.get(name, 0.0), ratio)
            if ratio > CLIP:
                excesses[group] = Excess(ratio, factor)
        if not excesses:
            continue
        group, worst = max(excesses.items(), key=lambda item: item[1].ratio)
        why = f"the norm of {group} is {worst.description}"
        if reply.epsilon is not None:
            why += f", more than the noise that --most-noise {noise:g} allows"
        clips = len(history.clipped.get(name, []))
        if rejects and (worst.ratio > REJECT or clips >= MOST_CLIPS):
            repeated = f", and it was clipped {clips} times in the last {ROUNDS} rounds"
            result.rejected[name] = why if worst.ratio > REJECT else why + repeated
            del result.usable[name]
            continue
        result.clipped[name] = f"{why}; it was scaled down to {worst.reference}"
        for group, excess in excesses.items():
            result.norms[group][name] /= excess.ratio
            result.usable[name] = _scaled(
                result.usable[name], [part for part in parts[name] if part.group == group], 1 / excess.ratio
            )
    return result


def _measure(reply: Reply, parts: list[Part]) -> dict[str, GroupNorm]:
    """Return the groups of a reply by name, with their norms."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    return {
        group: GroupNorm(
            _norm([part.offset(reply) for part in members]),
            LEAST_CHANGE * _norm([part.base.double() for part in members if part.base is not None]),
            sum(getattr(reply, part.field)[part.name].numel() for part in members),
            members[0].tolerance,
            members[0].is_change,
        )
        for group, members in groups.items()
    }


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors))


def _scaled(reply: Reply, parts: list[Part], factor: float) -> Reply:
    """Return the reply with these tensors, or their changes, multiplied by a factor."""
    scaled: dict[str, Tensors] = {"params": dict(reply.params), "extras": dict(reply.extras)}
    for part in parts:
        value = part.offset(reply) * factor
        if part.base is not None:
            value = value + part.base.double().to(value.device)
        scaled[part.field][part.name] = value.to(scaled[part.field][part.name].dtype)
    return replace(reply, params=scaled["params"], extras=scaled["extras"])
