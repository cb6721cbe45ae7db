"""FedPrior: one model says what the samples show, everyone's own class frequencies what is usual there."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, State, Uploads
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.prototypes import (
    aligned_loss,
    class_members,
    global_prototypes,
    no_prototypes,
    own_prototypes,
)
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.last_layer import last_layer

SMOOTHINGS = 2.0 ** torch.arange(-4, 11, 0.5, dtype=torch.float64)
"""The values of a that are tried, from a sixteenth to over a thousand; the differences are too small for float32."""
TEMPERATURES = 2.0 ** torch.arange(-2, 6.5, 0.5)
"""The values of T that are tried, from a quarter to 64."""
TRUSTS = torch.linspace(0, 1, 5)
"""The values of b that are tried."""
REMEMBERED = 0.8
"""How much of the losses by which T, b and z are chosen is kept from one round to the next: they waver."""
BEST = "best"
"""What the copy is called under which the best z so far travels."""
NEITHER = {"temperature": 1.0, "trust": 1.0}
"""T and b before anything is known."""
SENT = ("held_losses", "held_count")
"""What clients send beside their parameters."""


@dataclass(frozen=True)
class FedPrior(Method):
    """FedAvg of a model in which every client has its own, known class frequencies: p_k(y) ∝ π_ky^b e^{z_y/T}.

    log π_k is added to the logits z, in training (with T = b = 1) as in use, where π_kc = (n_kc + a) / (n_k + a C) and
    n_kc are client k's numbers of samples by class. So z need not learn how frequent classes are at whom, and what is
    averaged has one meaning everywhere: how much a sample speaks for a class (balanced softmax, or logit adjustment,
    with each client's own frequencies). A client whose numbers are no more unequal than by chance has a large a, and so
    equal frequencies: where all clients are such, this is FedAvg.

    The longer z is trained, the surer it is of samples it has not seen, until frequencies no longer matter beside it:
    T takes that back. And how far frequencies can be trusted, b, is found out rather than believed: where they do not
    help, b = 0 leaves the global model. Both are one number for all. Clients keep some samples from training and send
    what these lose under each pair (T, b); the server sums that up and hands out the pair that loses least. By the same
    losses it knows when z gets worse: training goes on, but everyone answers with the z that lost least.

    Where samples are few, z learns them by heart. Feature alignment, as in FedPAC and FedReMa+F, works against that:
    λ · mean (1/d)‖h − c̄_y‖² is added to the loss, c̄ being the prototypes of all clients' features by class.

    z, these losses, T, b, the best z, and the means and numbers of features by class travel. A client's model is a
    plain network, with W/T and bias/T + b log π_k as its last layer.

    It knows of no difference between clients but their class frequencies. Where a class looks different from client to
    client, alignment costs more than it gains (docs/beyond.md).
    """

    name: ClassVar[str] = "fedprior"
    title: ClassVar[str] = "FedPrior"
    paper: ClassVar[str] = (
        "ours (docs/beyond.md), after Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021, and Guo et al.,"
        " On Calibration of Modern Neural Networks, ICML 2017"
    )
    reports: ClassVar[Reports] = Reports(colour="#D55E00", stroke="--")

    smooth: float = 0.0
    """a: added to the number of samples of every class, so that what a client has not met is rare, not impossible;
    0: each client's own, under which its numbers are likeliest."""
    align: float = 1.0
    """λ: how strongly features are drawn to their class's prototype; 0 switches it off, and π_k stays at its client."""
    held_out: float = 0.1
    """Share of a client's samples that is kept from training and chooses T, b and z; 0: none, T = b = 1, the last z."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "smooth", "align")
        if not 0 <= self.held_out <= 0.5:
            raise BadInput(f"--held-out must lie in [0, 0.5], got {self.held_out}.")

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Begin with no preference, for those who are scored before they first train."""
        _, bias = last_layer(net)
        return client.having(memory={**client.memory, "log_prior": client.params[bias] * 0})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute log π_k, and what the samples that are not trained on lose under each (T, b)."""
        dtype = client.memory["log_prior"].dtype
        counts = class_members(self._trained(data), net.classes, dtype).sum(dim=0)
        counts = counts + (self.smooth or likeliest_smoothing(counts))
        log_prior = (counts / counts.sum()).log()
        client = client.having(memory={**client.memory, "log_prior": log_prior})
        if not self.held_out:
            return client
        few = data.rows(slice(self._every - 1, None, self._every))
        evidence = net(client.params, few.x) / TEMPERATURES.to(log_prior)[:, None, None, None]  # [T, 1, n, C]
        usual = TRUSTS.to(log_prior)[:, None, None] * log_prior  # [b, 1, C]
        chances = functional.log_softmax(evidence + usual, dim=-1)
        held = class_members(few, net.classes, dtype)
        losses = -torch.einsum("tbnc,nc->tb", chances, held)
        return client.having(inbox={**client.inbox, "held_losses": losses, "held_count": held.sum()})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """−log[π_ky e^{z_y} / Σ_c π_kc e^{z_c}] + λ · (1/d)‖h − c̄_y‖², on average."""
        return aligned_loss(net, self._knowing(net, client), self._trained(batch), self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send prototypes, the losses under each (T, b), and of how many samples they are."""
        client, sent = super().end(net, client, data, moment)
        prototypes = own_prototypes(net, client, self._trained(data)) if self.align else {}
        losses = {name: client.inbox[name] for name in SENT} if self.held_out else {}
        return client, {**sent, **prototypes, **losses}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with z/T + b log π_k, z being the best so far."""
        weight, bias = last_layer(net)
        own = client.memory["log_prior"]
        if "temperature" not in client.inbox:
            return {**client.params, bias: client.params[bias] + own}
        best = copy_of(client.inbox, BEST)
        cooled = {name: best[name] / client.inbox["temperature"] for name in (weight, bias)}
        return {**best, **cooled, bias: cooled[bias] + client.inbox["trust"] * own}

    def server(self, net: Net, clients: int) -> State:
        """Remember prototypes, what each (T, b) has lost, and the best z with its T and b."""
        prototypes = no_prototypes(net.classes, net.features_count) if self.align else {}
        state = {**super().server(net, clients), **prototypes}
        if not self.held_out:
            return state
        losses = torch.zeros(len(TEMPERATURES), len(TRUSTS))
        return {
            **state,
            **copied(net.initial, BEST),
            "held_losses": losses,
            "held_count": 0.0,
            "least": math.inf,
            **NEITHER,
        }

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average models and prototypes; choose T, b and z."""
        answer = super().aggregate(net, state, uploads, moment)
        prototypes = global_prototypes(state, uploads, "samples") if self.align else {}
        chosen, known, trace = self._choose(state, uploads, answer.shared) if self.held_out else ({}, {}, {})
        return replace(
            answer,
            shared={**answer.shared, **prototypes, **chosen},
            state={**answer.state, **prototypes, **known},
            trace={**answer.trace, **trace},
        )

    def _choose(self, state: State, uploads: Uploads, newest: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Return the z, T and b to answer with, what to remember for the next choice, and what to show of it."""
        before = {name: torch.as_tensor(value).to(uploads.counts.device) for name, value in state.items()}
        sums = {name: REMEMBERED * before[name] + uploads.extras[name].sum(dim=0) for name in SENT}
        losses, count = sums["held_losses"], sums["held_count"]
        place, loss = losses.argmin(), losses.min() / count.clamp(min=1)
        # The losses are those of the z that this round began with. While it is better than any before, so may the new
        # one be, and is used; where nobody has samples to spare nothing is lost, and nothing chosen.
        better = loss <= before["least"]
        best = {name: torch.where(better, uploads.before[name], value) for name, value in copy_of(before, BEST).items()}
        used = {name: torch.where(better, newest[name], value) for name, value in best.items()}
        likeliest = TEMPERATURES.to(losses)[place // len(TRUSTS)], TRUSTS.to(losses)[place % len(TRUSTS)]
        pair = {
            name: torch.where(better & (count > 0), value, before[name])
            for name, value in zip(NEITHER, likeliest, strict=True)
        }
        known = {**sums, **copied(best, BEST), **pair, "least": torch.where(better, loss, before["least"])}
        return {**copied(used, BEST), **pair}, known, pair

    def _knowing(self, net: Net, client: Client) -> Client:
        """Return the client with log π_k in its last layer's bias."""
        _, bias = last_layer(net)
        known = client.params[bias] + client.memory["log_prior"]
        return client.having(params={**client.params, bias: known})

    @property
    def _every(self) -> int:
        """Every so many samples one is kept from training: the tenth, say, so that of nine there is none."""
        return round(1 / self.held_out)

    def _trained(self, batch: Batch) -> Batch:
        """Return the samples with those masked that are kept from training."""
        if not self.held_out:
            return batch
        return replace(batch, mask=batch.mask * (batch.index % self._every != self._every - 1))


def likeliest_smoothing(counts: Tensor) -> Tensor:
    """Return the a under which numbers n_c [C] are likeliest, if class frequencies are drawn from Dirichlet(a, …, a).

    The likelihood is Γ(aC)/Γ(n + aC) · Π_c Γ(n_c + a)/Γ(a). Numbers that chance alone would make as unequal as they
    are have the largest a: then they say nothing, and all classes count alike.
    """
    tried = SMOOTHINGS.to(counts.device)
    classes, total = len(counts), counts.sum()
    of_classes = (torch.lgamma(counts.double() + tried[:, None]) - torch.lgamma(tried)[:, None]).sum(dim=1)
    likelihood = torch.lgamma(tried * classes) - torch.lgamma(total + tried * classes) + of_classes
    return tried[likelihood.argmax()].to(counts)
