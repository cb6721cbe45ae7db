"""What was tried to be personal where it helps and global where it does not: variants of FedReMa, a class each.

`fedrema run docs.beyond.candidates:Significant`, or the grid files beside this one, from the repository's root.
docs/beyond.md says what came of them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedrema.copies import copied, copy_of
from fedrema.core import Answer, Batch, Client, Moment, Role, State, Uploads, average, mix
from fedrema.last_layer import last_layer
from fedrema.methods.fedprior import FedPrior
from fedrema.methods.fedrema import FedReMa, maximum_difference_segmentation
from fedrema.net import Net, Tensors
from fedrema.prototypes import class_means
from fedrema.similarity import draw_probes, head_similarity

OURS = "a candidate of docs/beyond.md"
Matched = tuple[Tensor, State, dict[str, object]]


def small_network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network that a CPU trains in seconds, on images of half the size; its head has two layers."""
    body = nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
    )  # fmt: skip
    features = 32 * (shape[1] // 8) * (shape[2] // 8)
    return nn.Sequential(OrderedDict(body=body, head=nn.Sequential(nn.Linear(features, 64), nn.Linear(64, classes))))


def among_everyone(uploads: Uploads) -> Tensor:
    """Return the weights [k, k] with which everyone gets the global head."""
    return uploads.counts.expand(len(uploads.clients), -1)


def by_spread(rows: Tensor, itself: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation [k, 1] of each row's similarities to others."""
    others = rows.masked_fill(itself, 0)
    count = rows.shape[1] - 1
    mean = others.sum(dim=1, keepdim=True) / count
    square = ((rows - mean).square().masked_fill(itself, 0)).sum(dim=1, keepdim=True) / max(count - 1, 1)
    return mean, square.sqrt().clamp(min=1e-12)


def alike_in_learning(params: Tensors) -> Tensor:
    """Return the cosines [k, k] between clients' parameters, less their mean."""
    flat = torch.cat([value.flatten(1) for value in params.values()], dim=1)
    moved = functional.normalize(flat - flat.mean(dim=0), dim=1)
    return moved @ moved.T


@dataclass(frozen=True)
class Candidate(FedReMa):
    """FedReMa, of which a variant may change how similarities are found."""

    paper: ClassVar[str] = OURS

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return S [k, k]."""
        return head_similarity(net, heads, draw_probes(net, moment, self.probes, self.probe_high), self.temperature)

    def _relevant(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> tuple[Tensor, Tensor]:
        rows = self.similarity(net, heads, uploads, moment)
        return maximum_difference_segmentation(rows, self.gap_to_self, self.include_below_gap)


@dataclass(frozen=True)
class Significant(Candidate):
    """Nobody is cut off unless the largest gap among peers is wider than those of exchangeable clients."""

    name: ClassVar[str] = "significant"
    title: ClassVar[str] = "significant gap"
    probes: int = 32
    level: float = 0.05
    """How often exchangeable clients, of normal similarities, are cut all the same."""

    def widest_by_chance(self, peers: int) -> float:
        """Return the quantile of the largest gap, in deviations, of independent normal numbers."""
        draws = torch.randn(4000, peers, generator=torch.Generator().manual_seed(peers), dtype=torch.float64)
        gaps = draws.sort(dim=1).values.diff(dim=1).max(dim=1).values / draws.std(dim=1)
        return float(gaps.quantile(1 - self.level))

    def _relevant(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> tuple[Tensor, Tensor]:
        rows = self.similarity(net, heads, uploads, moment)
        relevant, gaps = maximum_difference_segmentation(rows, gap_to_self=False)
        if len(rows) < 4:
            return relevant, gaps
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        _, spread = by_spread(rows, itself)
        significant = gaps / spread[:, 0] > self.widest_by_chance(len(rows) - 1)
        return relevant | ~significant[:, None], gaps


@dataclass(frozen=True)
class Soft(Significant):
    """Every peer counts by e^{z/τ}, z being how many deviations it is more alike than the usual peer."""

    name: ClassVar[str] = "soft"
    title: ClassVar[str] = "soft weights"
    softness: float = 0.5
    """τ."""

    def match(self, net: Net, state: State, heads: Tensors, uploads: Uploads, moment: Moment) -> Matched:
        """Weigh in every round."""
        rows = self.similarity(net, heads, uploads, moment)
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        mean, spread = by_spread(rows, itself)
        z = ((rows - mean) / spread).masked_fill(itself, -torch.inf)
        z = torch.where(itself, z.max(dim=1, keepdim=True).values, z)  # oneself counts as one's nearest peer
        return torch.softmax(z / self.softness, dim=1) * uploads.counts, state, {}


@dataclass(frozen=True)
class LastLayer(Candidate):
    """Layer by layer: peers share the last layer only, everything before it is global."""

    name: ClassVar[str] = "last-layer"
    title: ClassVar[str] = "last layer only"

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average all but the last layer over all."""
        weights, state, trace = self.match(net, state, uploads.params, uploads, moment)
        own = {name: uploads.params[name] for name in last_layer(net)}
        rest = {name: value for name, value in uploads.params.items() if name not in own}
        personal = {**mix(rest, among_everyone(uploads)), **mix(own, weights)}
        return Answer(dict(uploads.mean), personal, state, trace)


@dataclass(frozen=True)
class LayerWise(Candidate):
    """Layer by layer: each, of the body too, has peers of its own, by cosines between what that layer learned."""

    name: ClassVar[str] = "layer-wise"
    title: ClassVar[str] = "layer-wise peers"

    def role(self, net: Net, name: str) -> Role:
        """Everything travels, and comes back as one's own."""
        return Role.PERSONAL

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Cut at the largest gap for every layer."""
        layers: dict[str, dict[str, Tensor]] = {}
        for name, value in uploads.params.items():
            layers.setdefault(name.rpartition(".")[0], {})[name] = value
        personal: dict[str, Tensor] = {}
        for layer in layers.values():
            relevant, _ = maximum_difference_segmentation(alike_in_learning(layer))
            personal |= mix(layer, relevant * uploads.counts)
        return Answer({}, personal, state, {})


@dataclass(frozen=True)
class ClassWise(Candidate):
    """Class by class: each row of the last layer has peers of its own, whose chances of that class are alike."""

    name: ClassVar[str] = "class-wise"
    title: ClassVar[str] = "class-wise peers"
    probes: int = 64

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Cut at the largest gap for every class; all but the last layer is averaged over all."""
        heads = uploads.params
        probes = draw_probes(net, moment, self.probes, self.probe_high)[0]
        chances = torch.softmax(net.classify_all(heads, probes) / self.temperature, dim=-1)  # [k, probes, C]
        weight, bias = last_layer(net)
        rest = {name: value for name, value in heads.items() if name not in (weight, bias)}
        personal = mix(rest, among_everyone(uploads))
        rows: list[Tensor] = []
        shifts: list[Tensor] = []
        for c in range(net.classes):
            answers = functional.normalize(chances[..., c].log().clamp(min=-30), dim=1)
            relevant, _ = maximum_difference_segmentation(answers @ answers.T)
            mixed = mix({"w": heads[weight][:, c], "b": heads[bias][:, c]}, relevant * uploads.counts)
            rows.append(mixed["w"])
            shifts.append(mixed["b"])
        personal |= {weight: torch.stack(rows, dim=1), bias: torch.stack(shifts, dim=1)}
        return Answer(dict(uploads.mean), personal, state, {})


@dataclass(frozen=True)
class Updates(Candidate):
    """Peers by what heads learned: cosines between their differences to the mean head, instead of probes."""

    name: ClassVar[str] = "updates"
    title: ClassVar[str] = "peers by updates"

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return cosines between heads, less their mean."""
        return alike_in_learning(heads)


@dataclass(frozen=True)
class Prototypes(Candidate):
    """Peers by cosines between class prototypes, each times the share of its class, instead of probes."""

    name: ClassVar[str] = "prototypes"
    title: ClassVar[str] = "peers by prototypes"

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send p_c µ_c."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        return client, {"weighted": means * (counts / client.count)[:, None]}

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return cosines between what was sent."""
        rows = functional.normalize(uploads.extras["weighted"].flatten(1), dim=1)
        return rows @ rows.T


@dataclass(frozen=True)
class PrototypeProbes(Candidate):
    """The probes are the mean features of the classes, instead of random numbers."""

    name: ClassVar[str] = "prototype-probes"
    title: ClassVar[str] = "prototypes as probes"

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send sums and numbers of the classes' features."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        return client, {"sums": means * counts[:, None], "held": counts}

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return how alike heads answer the prototypes."""
        held = uploads.extras["held"].sum(dim=0).clamp(min=1)
        probes = uploads.extras["sums"].sum(dim=0) / held[:, None]
        return head_similarity(net, heads, probes[None], self.temperature)


@dataclass(frozen=True)
class ReEnter(Candidate):
    """The critical period is entered again whenever the mean gap is above δ of its peak."""

    name: ClassVar[str] = "re-enter"
    title: ClassVar[str] = "re-entering"

    def match(self, net: Net, state: State, heads: Tensors, uploads: Uploads, moment: Moment) -> Matched:
        """Match in every round, and use the match if its gaps are wide, else G."""
        weights, after, trace = super().match(net, {**state, "critical": True}, heads, uploads, moment)
        if after["critical"]:
            return weights, after, trace
        weights, _, _ = super().match(net, {**state, "critical": False}, heads, uploads, moment)
        return weights, {**state, "peak": after["peak"]}, trace


@dataclass(frozen=True)
class Forgetting(Candidate):
    """After the critical period, clients are matched on, and G forgets: what was chosen long ago counts less."""

    name: ClassVar[str] = "forgetting"
    title: ClassVar[str] = "G forgets"
    remembered: float = 0.9
    """Of G from one round to the next."""

    def server(self, net: Net, clients: int) -> State:
        """Keep a G that forgets beside the one that counts."""
        return {**super().server(net, clients), "recent": torch.zeros(clients, clients), "over": False}

    def match(self, net: Net, state: State, heads: Tensors, uploads: Uploads, moment: Moment) -> Matched:
        """Match in every round; once the period is over, average by what was chosen lately."""
        weights, after, trace = super().match(net, {**state, "critical": True}, heads, uploads, moment)
        if "sets" not in trace:
            return weights, after, trace
        recent = self.remembered * torch.as_tensor(state["recent"]).to(uploads.counts)
        among = uploads.clients[:, None], uploads.clients
        recent[among] += torch.as_tensor(trace["sets"]).to(recent)
        used = recent[among] * uploads.counts if state["over"] else weights
        return used, {**after, "recent": recent, "over": state["over"] or not after["critical"]}, trace


@dataclass(frozen=True)
class MixedAfter(Candidate):
    """After the critical period everyone's head is drawn to the global one."""

    name: ClassVar[str] = "mixed-after"
    title: ClassVar[str] = "global head mixed in afterwards"
    share: float = 0.5
    """Of the global head."""

    def match(self, net: Net, state: State, heads: Tensors, uploads: Uploads, moment: Moment) -> Matched:
        """Mix where the period is over."""
        weights, after, trace = super().match(net, state, heads, uploads, moment)
        if state["critical"]:
            return weights, after, trace
        own = weights.to(uploads.counts) / weights.sum(dim=1, keepdim=True)
        everyone = among_everyone(uploads) / uploads.counts.sum()
        return (1 - self.share) * own + self.share * everyone, after, trace


@dataclass(frozen=True)
class HeldOut(Candidate):
    """A fifth of a client's samples is not trained on: they choose between the peers' head and the global one."""

    name: ClassVar[str] = "held-out"
    title: ClassVar[str] = "chosen on held-out samples"

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Remember how much better the peers' head has been."""
        ahead = next(iter(client.params.values())).new_zeros(())
        head = {name: value for name, value in client.params.items() if net.in_head(name)}
        return client.having(memory={**client.memory, "ahead": ahead, **copied(head, "global")})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compare the two heads that came."""
        head = copy_of(client.inbox, "everyones")
        if not head:
            return client
        left = data.mask * (data.index % 5 == 0)
        h = net.features(client.params, data.x)

        def right(params: Tensors) -> Tensor:
            return ((net.classify(params, h).argmax(dim=1) == data.y) * left).sum() / left.sum().clamp(min=1)

        ahead = 0.8 * client.memory["ahead"] + right(client.params) - right({**client.params, **head})
        return client.having(memory={**client.memory, "ahead": ahead, **copied(head, "global")})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Leave a fifth of the samples out."""
        trained = Batch(batch.x, batch.y, batch.mask * (batch.index % 5 != 0), batch.index)
        return super().loss(net, client, trained)

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with the better head."""
        own = client.memory["ahead"] >= 0
        head = copy_of(client.memory, "global")
        chosen = {name: torch.where(own, client.params[name], value) for name, value in head.items()}
        return {**client.params, **chosen}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Send the global head beside one's own."""
        answer = super().aggregate(net, state, uploads, moment)
        everyones = copied(average(uploads.params, uploads.counts), "everyones")
        return Answer({**answer.shared, **everyones}, answer.personal, answer.state, answer.trace)


@dataclass(frozen=True)
class PriorMatched(FedPrior, FedReMa):
    """FedReMa+P: FedReMa whose classifiers need not learn the frequencies; without T, b and the best round."""

    name: ClassVar[str] = "prior-matched"
    title: ClassVar[str] = "FedReMa+P"
    paper: ClassVar[str] = OURS
    align: float = 0.0
    held_out: float = 0.0


@dataclass(frozen=True)
class Doubtful(FedPrior):
    """FedPrior without a temperature, whose labels are doubted instead: (1 − ε) of each is its class, ε is π_k."""

    name: ClassVar[str] = "doubtful"
    title: ClassVar[str] = "doubted labels"
    paper: ClassVar[str] = OURS
    align: float = 0.0
    held_out: float = 0.0
    doubt: float = 0.3
    """ε."""

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy with (1 − ε) e_y + ε π."""
        chances = functional.log_softmax(net(self.model(net, client), batch.x), dim=1)
        usual = client.memory["log_prior"].exp()
        truth = (1 - self.doubt) * functional.one_hot(batch.y, net.classes).to(usual) + self.doubt * usual
        return -((chances * truth).sum(dim=1) * batch.mask).sum() / batch.mask.sum().clamp(min=1)
