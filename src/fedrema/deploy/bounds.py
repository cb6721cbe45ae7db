"""Bounds on the norms of what nodes send, relative to what nodes usually send.

Every reply is divided into groups of tensors that are on one scale: the change of the shared parameters, the personal
parameters and their change, and each tensor that the method sends beside parameters. The usual norm of a group is a
median of accepted norms. A group above `CLIP` times that is scaled down to it; a reply with one above `REJECT` times is
rejected.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedrema.deploy.letters import Reply
from fedrema.models.body_and_head import Net, Tensors

CLIP = 5.0
"""A group whose norm is above this many times the usual one is scaled down to the usual one."""
REJECT = 10.0
"""A reply with a group above this many times the usual norm is rejected."""
CLIPS = 2
"""How often a node's replies are clipped within `ROUNDS` rounds before they are rejected instead."""
SINGLE_NUMBER = 100.0
"""Both factors are so many times larger for a single number: its scale can depend on a node's sample count."""
STATISTICS = 10.0
"""And so many times larger for the statistics of batch norm: variances grow with the square of the inputs' scale."""
ALONE = 10.0
"""And so many times larger for norms, not changes, of a round's only reply: features grow when training begins."""
COUNTS = ("label_counts", "held_count")
"""Numbers of samples, which are bounded by a node's sample count instead."""
ROUNDS = 20
"""How many rounds back the usual norm is computed from."""
OWN_ROUNDS = 9
"""How many of a node's own norms are kept."""
LEAST_CHANGE = 0.01
"""A change below this share of the norm of what is changed counts as usual, whatever others send."""
LARGEST = 1e12
"""No tensor's root mean square may be above this."""


@dataclass
class NormHistory:
    """Norms of accepted replies by group; a checkpoint holds it."""

    recent: dict[str, list[float]] = field(default_factory=dict)
    """The median norm of each of the last rounds."""
    first: dict[str, float] = field(default_factory=dict)
    """The median norm of the first round."""
    own: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Each node's own last norms."""
    clipped: dict[str, list[int]] = field(default_factory=dict)
    """In which of the last rounds each node's reply was clipped."""

    def usual(self, group: str, norms: Mapping[str, float], size: float, name: str, least: float) -> float:
        """Return the usual norm of a group for one node, given this round's norms by node; 0: nothing is known.

        A node that joins is compared with the first round, when all had just joined. One that has always sent more than
        the others is compared with itself, up to the norm of the first round: nodes converge at different speeds.
        """
        now = [norm for norm in norms.values() if norm > 0]
        # The lower median: of two that contradict each other, the larger can do more harm.
        of_all = max(_median(now) if len(now) > 1 else 0.0, _median(self.recent.get(group, [])))
        first = self.first.get(group, 0.0)
        own = self.own.get(name, {}).get(group, [])
        known = max(of_all, min(_median(own), first) if own else first)
        return max(known, least) * size if known else 0.0

    def learn(self, number: int, norms: Mapping[str, Mapping[str, float]], clipped: Mapping[str, str]) -> None:
        """Add the norms of the replies that were used in a round, by group and node."""
        for group, by_node in norms.items():
            known = {name: norm for name, norm in by_node.items() if norm > 0}
            if not known:
                continue
            median = _median(list(known.values()))
            self.first.setdefault(group, median)
            self.recent[group] = [*self.recent.get(group, []), median][-ROUNDS:]
            for name, norm in known.items():
                own = self.own.setdefault(name, {})
                own[group] = [*own.get(group, []), norm][-OWN_ROUNDS:]
        for name in clipped:
            self.clipped[name] = [*self.clipped.get(name, []), number]
        late = {name: [each for each in rounds if each > number - ROUNDS] for name, rounds in self.clipped.items()}
        self.clipped = {name: rounds for name, rounds in late.items() if rounds}


def _median(norms: list[float]) -> float:
    return statistics.median_low(norms) if norms else 0.0


@dataclass(frozen=True)
class Part:
    """A tensor of a reply, in the group by which it is bounded."""

    group: str
    field: str
    """`params` or `extras`."""
    name: str
    base: Tensor | None = None
    """What its change is measured from; None: its own norm is."""
    tolerance: float = 1.0
    """By how much both factors are larger."""

    def offset(self, reply: Reply) -> Tensor:
        """Return what is bounded: the tensor's change, or the tensor itself; in double precision."""
        value: Tensor = getattr(reply, self.field)[self.name].double()
        return value if self.base is None else value - self.base.double().to(value.device)


def parts_of(net: Net, common: Tensors, own: Tensors | None, reply: Reply) -> list[Part]:
    """Divide a reply into groups; `own` is what the server holds of a node that has sent personal parameters before."""
    parts = []
    for name in reply.params:
        kind = "parameters" if name in net.trainable else "statistics" if name in net.initial else name.split(".")[0]
        tolerance = STATISTICS if kind == "statistics" else 1.0
        if name in common:
            parts.append(Part(f"the change of its shared {kind}", "params", name, common[name], tolerance))
            continue
        parts.append(Part(f"the norm of its personal {kind}", "params", name, None, tolerance))
        if own is not None:
            parts.append(Part(f"the change of its personal {kind}", "params", name, own[name], tolerance))
    for name, value in reply.extras.items():
        if name not in COUNTS:
            tolerance = SINGLE_NUMBER if value.numel() == 1 else 1.0
            parts.append(Part(f"the norm of its {name!r}", "extras", name, None, tolerance))
    return parts


def impossible(net: Net, reply: Reply) -> str:
    """Name a tensor whose numbers no training explains; empty where there is none."""
    for name, value in [*reply.params.items(), *reply.extras.items()]:
        if value.numel() and _norm([value.double()]) > LARGEST * math.sqrt(value.numel()):
            return f"the numbers in {name!r} are absurdly large"
        if name in net.batch_norm and name.endswith("running_var") and bool((value < 0).any()):
            return f"the variances in {name!r} are below 0"
    for name in COUNTS:
        counts = reply.extras.get(name, torch.zeros(0))
        if bool((counts < 0).any()) or float(counts.double().sum()) > reply.count:
            return f"the numbers of samples in {name!r} are below 0 or more than {reply.count}"
    return ""


@dataclass
class Bounded:
    """A round's replies after their norms have been bounded."""

    good: dict[str, Reply] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    clipped: dict[str, str] = field(default_factory=dict)
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """The norm of every group by node, after clipping."""
    excess: dict[str, float] = field(default_factory=dict)
    """By node, the largest ratio of a norm to its usual one: who comes first when something goes wrong."""

    def norms_of(self, names: list[str]) -> dict[str, dict[str, float]]:
        """Return the norms of some nodes."""
        return {group: {name: norms[name] for name in names if name in norms} for group, norms in self.norms.items()}


def bounded(
    replies: Mapping[str, Reply],
    parts: Mapping[str, list[Part]],
    sizes: Mapping[str, float],
    history: NormHistory,
    noise: float = 0.0,
) -> Bounded:
    """Clip or reject replies whose groups are too large.

    `sizes` says how much more than the median node each may send; `noise` is the standard deviation of the noise that
    nodes with a privacy budget may add.
    """
    result = Bounded(dict(replies))
    measured = {name: _measure(reply, parts[name]) for name, reply in replies.items()}
    for name, groups in measured.items():
        for group, (norm, *_) in groups.items():
            result.norms.setdefault(group, {})[name] = norm
    found = {group: dict(norms) for group, norms in result.norms.items()}  # as they were sent
    for name, reply in replies.items():
        over = {}
        for group, (norm, least, numel, tolerance) in measured[name].items():
            usual = history.usual(group, found[group], sizes[name], name, least) * tolerance
            usual *= ALONE if len(replies) == 1 and not group.startswith("the change") else 1.0
            ratio = norm / usual if usual > 0 else 0.0
            # Noise in n numbers has a norm of about √n standard deviations, and hardly ever five more.
            if ratio > CLIP and reply.epsilon is not None and norm - CLIP * usual <= noise * (math.sqrt(numel) + 5):
                del result.norms[group][name]  # says nothing of what is usual
                continue
            result.excess[name] = max(result.excess.get(name, 0.0), ratio)
            if ratio > CLIP:
                over[group] = ratio
        if not over:
            continue
        worst = max(over, key=lambda group: over[group])
        why = f"{worst} is {'absurdly large: ' if over[worst] > REJECT else ''}{over[worst]:.3g} times the usual one"
        if reply.epsilon is not None:
            why += f", more than noise as --most-noise {noise:g} allows explains"
        often = len(history.clipped.get(name, []))
        if over[worst] > REJECT or often >= CLIPS:
            result.rejected[name] = why if over[worst] > REJECT else f"{why}, and it was clipped {often} times lately"
            del result.good[name]
            continue
        result.clipped[name] = f"{why}, and was scaled down to that"
        for group, ratio in over.items():
            result.norms[group][name] /= ratio
            result.good[name] = _scaled(result.good[name], [p for p in parts[name] if p.group == group], 1 / ratio)
    return result


def _measure(reply: Reply, parts: list[Part]) -> dict[str, tuple[float, float, int, float]]:
    """Return each group's norm, the least norm that counts as usual, how many numbers it has, and its tolerance."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    return {
        group: (
            _norm([part.offset(reply) for part in members]),
            LEAST_CHANGE * _norm([part.base.double() for part in members if part.base is not None]),
            sum(getattr(reply, part.field)[part.name].numel() for part in members),
            members[0].tolerance,
        )
        for group, members in groups.items()
    }


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors))


def _scaled(reply: Reply, parts: list[Part], factor: float) -> Reply:
    """Return the reply with the offsets of some tensors scaled."""
    changed: dict[str, Tensors] = {"params": dict(reply.params), "extras": dict(reply.extras)}
    for part in parts:
        value = part.offset(reply) * factor
        if part.base is not None:
            value = value + part.base.double().to(value.device)
        changed[part.field][part.name] = value.to(changed[part.field][part.name].dtype)
    return replace(reply, params=changed["params"], extras=changed["extras"])
