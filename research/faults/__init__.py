"""The cost of two faults in public code: FedPAC and FedReMa with heads aggregated as in that code.

Two faults: the weights are in the order of clients, but the heads in a new random order in every round; and
heads are overwritten one client after the other while they are still being read.
"""

import dataclasses

import torch

from fedrema.core import Answer
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedrema import FedReMa


def misplaced(heads, weights, moment):
    """Mix heads in place with weights that belong to other clients."""
    order = torch.randperm(len(weights), generator=moment.generator("fault")).to(weights.device)
    weights = weights / weights.sum(dim=1, keepdim=True)
    live = {name: value.clone() for name, value in heads.items()}
    for client in range(len(weights)):
        for value in live.values():
            value[client] = torch.tensordot(weights[client].to(value.dtype), value[order], dims=1)
    return live


def faulty(answer: Answer, net, uploads, weights, moment) -> Answer:
    """Replace the personal heads of an answer."""
    heads = {name: value for name, value in uploads.params.items() if net.in_head(name)}
    return dataclasses.replace(answer, personal=misplaced(heads, weights, moment))


@dataclasses.dataclass(frozen=True)
class FaultyFedPAC(FedPAC):
    """FedPAC with both faults."""

    def aggregate(self, net, state, uploads, moment):
        answer = super().aggregate(net, state, uploads, moment)
        return faulty(answer, net, uploads, answer.trace["weights"], moment)


@dataclasses.dataclass(frozen=True)
class FaultyFedReMa(FedReMa):
    """FedReMa with both faults."""

    def aggregate(self, net, state, uploads, moment):
        heads = {name: value for name, value in uploads.params.items() if net.in_head(name)}
        weights, _, _ = self.match(net, state, heads, uploads, moment)
        return faulty(super().aggregate(net, state, uploads, moment), net, uploads, weights, moment)
