"""What becomes of peers after the critical period."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Answer, Batch, Client, Moment, State, Uploads, average
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors

from .base import Candidate, Matched, among_everyone


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
