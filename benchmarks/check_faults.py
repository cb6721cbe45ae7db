"""The cost of two faults in public code: runs FedPAC and FedReMa with heads aggregated as in that code.

python benchmarks/check_faults.py fedpac --paper table1-cifar10 --rounds 100 --head-lr 0.01 --out runs/faults/fedpac
python benchmarks/check_faults.py fedrema --paper table1-cifar10 --rounds 100 --out runs/faults/fedrema

Two faults: the weights are in the order of clients, but the heads in a new random order in every round; and
heads are overwritten one client after the other while they are still being read.
"""

import dataclasses
import sys

import torch

from fedrema.cli.arguments import parse_settings
from fedrema.core import Answer
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedrema import FedReMa
from fedrema.runs.execute import execute


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


FAULTY = {"fedpac": FaultyFedPAC, "fedrema": FaultyFedReMa}


def main(method: str, arguments: list[str]) -> None:
    """Run a method with both faults; --quick only checks that it runs."""
    if "--quick" in arguments:
        arguments = [*(word for word in arguments if word != "--quick"), "--rounds", "2", "--net", "mlp"]
    settings = parse_settings(method, arguments)
    fields = {field.name: getattr(settings.method, field.name) for field in dataclasses.fields(settings.method)}
    run = execute(dataclasses.replace(settings, method=FAULTY[method](**fields)))
    best, honest = (100 * run.summary[f"{kind}_accuracy"] for kind in ("best", "honest"))
    print(f"{method} with both faults: best {best:.1f}, honest {honest:.1f}, {len(run.rounds)} rounds in {run.path}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
