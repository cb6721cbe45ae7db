"""FedPrior: one global model, combined with each client's class frequencies as a prior."""

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, State, Trace, Uploads
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.prototypes import (
    aligned_loss,
    class_membership,
    client_prototypes,
    global_prototypes,
    initial_prototypes,
)
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors, last_layer
from fedrema.tasks import Task

SMOOTHINGS = 2.0 ** torch.arange(-4, 11, 0.5, dtype=torch.float64)
"""Candidate values of a, from 1/16 to over 1000; in float64, because likelihoods differ too little for float32."""
TEMPERATURES = 2.0 ** torch.arange(-2, 6.5, 0.5)
"""Candidate values of T, from 1/4 to 64."""
TRUSTS = torch.linspace(0, 1, 5)
"""Candidate values of b."""
DECAY = 0.8
"""Decay per round of the held-out losses that select T, b and z; the average over rounds reduces their noise."""
BEST_PREFIX = "best"
"""Prefix of the tensors of the best z so far."""
INITIAL_PAIR = {"temperature": 1.0, "trust": 1.0}
"""T and b before the first selection."""
HELD_OUT_STATISTICS = ("held_losses", "held_count")
"""Held-out statistics that clients send along with their parameters."""


@dataclass(frozen=True)
class FedPrior(Method):
    """FedAvg of a model in which every client has its own, known class frequencies: p_k(y) ∝ π_ky^b e^{z_y/T}.

    log π_k is added to the logits z, both in training (with T = b = 1) and in prediction, where π_kc = (n_kc + a) /
    (n_k + a C) and n_kc is the number of client k's samples of class c. z therefore need not learn the class
    frequencies of each client, and the averaged parameters have the same meaning on all clients: the evidence of a
    sample for a class (balanced softmax, or logit adjustment, with each client's own frequencies). A client whose class
    counts are no more unequal than expected by chance gets a large a, and so equal frequencies; if this holds for all
    clients, the method is FedAvg.

    The longer z is trained, the more overconfident it becomes on unseen samples, until it dominates the prior; the
    temperature T corrects this. b is the weight of the prior; b = 0 is the global model, for data where the frequencies
    do not help. Both are single numbers for all clients, selected on held-out data: each client excludes some samples
    from training and sends their loss under each pair (T, b); the server sums these losses and selects the pair with
    the smallest. The same losses show when z gets worse: training continues, but clients predict with the z that had
    the smallest loss.

    With few samples, z overfits. Feature alignment, as in FedPAC and FedReMa+F, reduces this: λ · mean (1/d)‖h − c̄_y‖²
    is added to the loss, where c̄ are the prototypes, the means of all clients' features by class.

    Clients send z, the held-out losses, and the feature means and counts by class; the server sends z, T, b, the best z
    and the prototypes. A client's model is a plain network whose last layer has the weight W/T and the bias bias/T + b
    log π_k.

    The method models no difference between clients other than class frequencies. If the same class looks different on
    different clients, alignment costs more than it gains (docs/beyond.md).
    """

    name: ClassVar[str] = "fedprior"
    title: ClassVar[str] = "FedPrior"
    paper: ClassVar[str] = (
        "ours (docs/beyond.md), after Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021, and Guo et al.,"
        " On Calibration of Modern Neural Networks, ICML 2017"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#D55E00",
        stroke="--",
        traces=(Trace("temperature", "temperature T"), Trace("trust", "weight b of the class frequencies")),
    )

    smooth: float = 0.0
    """a: added to the sample count of every class, so that a class a client has not seen is rare, not impossible; 0:
    maximum likelihood, separately for each client."""
    align: float = 1.0
    """λ: strength of the alignment of features with their class prototype; 0 disables it, and class counts are not
    sent."""
    held_out: float = 0.1
    """Share of a client's samples that is held out to select T, b and z; 0: none, T = b = 1 and the last z."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "smooth", "align")
        if not 0 <= self.held_out <= 0.5:
            raise BadInput(f"--held-out must be in [0, 0.5], got {self.held_out}.")

    def supports(self, task: Task) -> bool:
        """Support classes only: predictions use class frequencies."""
        return task.has_softmax

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise log π_k with 0, for clients that are evaluated before they first train."""
        _, bias = last_layer(net)
        return client.having(memory={**client.memory, "log_prior": client.params[bias] * 0})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute log π_k, and the loss of the held-out samples under each (T, b)."""
        dtype = client.memory["log_prior"].dtype
        counts = class_membership(self._without_held_out(data), net.classes, dtype).sum(dim=0)
        counts = counts + (self.smooth or maximum_likelihood_smoothing(counts))
        log_prior = (counts / counts.sum()).log()
        client = client.having(memory={**client.memory, "log_prior": log_prior})
        if not self.held_out:
            return client
        held_out = data.rows(slice(self._every - 1, None, self._every))
        temperatures, trusts = (on_device(values, data.x.device, dtype) for values in (TEMPERATURES, TRUSTS))
        evidence = net(client.params, held_out.x) / temperatures[:, None, None, None]  # [T, 1, n, C]
        priors = trusts[:, None, None] * log_prior  # [b, 1, C]
        log_probabilities = functional.log_softmax(evidence + priors, dim=-1)
        membership = class_membership(held_out, net.classes, dtype)
        losses = -torch.einsum("tbnc,nc->tb", log_probabilities, membership)
        return client.having(inbox={**client.inbox, "held_losses": losses, "held_count": membership.sum()})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the mean of −log[π_ky e^{z_y} / Σ_c π_kc e^{z_c}] + λ · (1/d)‖h − c̄_y‖²."""
        return aligned_loss(net, self._with_prior(net, client), self._without_held_out(batch), self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send prototypes, the held-out losses under each (T, b), and the number of held-out samples."""
        client, sent = super().end(net, client, data, moment)
        prototypes = client_prototypes(net, client, self._without_held_out(data)) if self.align else {}
        losses = {name: client.inbox[name] for name in HELD_OUT_STATISTICS} if self.held_out else {}
        return client, {**sent, **prototypes, **losses}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the network for z/T + b log π_k with the best z so far."""
        weight, bias = last_layer(net)
        log_prior = client.memory["log_prior"]
        if "temperature" not in client.inbox:
            return {**client.params, bias: client.params[bias] + log_prior}
        best = copy_of(client.inbox, BEST_PREFIX)
        scaled = {name: best[name] / client.inbox["temperature"] for name in (weight, bias)}
        return {**best, **scaled, bias: scaled[bias] + client.inbox["trust"] * log_prior}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial state: prototypes, the loss of each (T, b), and the best z with its T and b."""
        prototypes = initial_prototypes(net.classes, net.features_count) if self.align else {}
        state = {**super().server(net, clients), **prototypes}
        if not self.held_out:
            return state
        losses = torch.zeros(len(TEMPERATURES), len(TRUSTS))
        return {
            **state,
            **copied(net.initial, BEST_PREFIX),
            "held_losses": losses,
            "held_count": 0.0,
            "least": math.inf,
            **INITIAL_PAIR,
        }

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average models and prototypes; select T, b and z."""
        answer = super().aggregate(net, state, uploads, moment)
        prototypes = global_prototypes(state, uploads, "samples") if self.align else {}
        chosen, known, trace = self._select(state, uploads, answer.shared) if self.held_out else ({}, {}, {})
        return replace(
            answer,
            shared={**answer.shared, **prototypes, **chosen},
            state={**answer.state, **prototypes, **known},
            trace={**answer.trace, **trace},
        )

    def _select(self, state: State, uploads: Uploads, newest: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Return the z, T and b to predict with, the state for the next selection, and the trace."""
        before = {name: torch.as_tensor(value).to(uploads.counts.device) for name, value in state.items()}
        sums = {name: DECAY * before[name] + uploads.extras[name].sum(dim=0) for name in HELD_OUT_STATISTICS}
        losses, count = sums["held_losses"], sums["held_count"]
        place, loss = losses.argmin(), losses.min() / count.clamp(min=1)
        # The losses are those of the z at the start of this round. If it is the best so far, the new z is expected to
        # be at least as good, and is used. Without held-out samples, nothing is selected.
        better = loss <= before["least"]
        best = {
            name: torch.where(better, uploads.before[name], value)
            for name, value in copy_of(before, BEST_PREFIX).items()
        }
        used = {name: torch.where(better, newest[name], value) for name, value in best.items()}
        temperatures, trusts = (on_device(values, losses.device, losses.dtype) for values in (TEMPERATURES, TRUSTS))
        selected = temperatures.take(place // len(TRUSTS)), trusts.take(place % len(TRUSTS))  # waits for no value
        pair = {
            name: torch.where(better & (count > 0), value, before[name])
            for name, value in zip(INITIAL_PAIR, selected, strict=True)
        }
        known = {**sums, **copied(best, BEST_PREFIX), **pair, "least": torch.where(better, loss, before["least"])}
        return {**copied(used, BEST_PREFIX), **pair}, known, pair

    def _with_prior(self, net: Net, client: Client) -> Client:
        """Return the client with log π_k added to the bias of its last layer."""
        _, bias = last_layer(net)
        known = client.params[bias] + client.memory["log_prior"]
        return client.having(params={**client.params, bias: known})

    @property
    def _every(self) -> int:
        """One in this many samples is held out: with 0.1 every tenth, so that a client with nine samples has none."""
        return round(1 / self.held_out)

    def _without_held_out(self, batch: Batch) -> Batch:
        """Return the batch with the held-out samples masked."""
        if not self.held_out:
            return batch
        return replace(batch, mask=batch.mask * (batch.index % self._every != self._every - 1))


@functools.cache
def on_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy of candidate values on a device.

    It is made only once: a copy from the CPU waits for the GPU, and `begin` could not be captured with it.
    """
    return values.to(device, dtype)


def maximum_likelihood_smoothing(counts: Tensor) -> Tensor:
    """Return the a under which class counts n_c [C], with frequencies drawn from Dirichlet(a, …, a), are most likely.

    The likelihood is Γ(aC)/Γ(n + aC) · Π_c Γ(n_c + a)/Γ(a). Counts that are no more unequal than expected by chance
    give the largest a: they carry no information, and all classes get equal frequencies.
    """
    candidates = on_device(SMOOTHINGS, counts.device, SMOOTHINGS.dtype)
    classes, total = len(counts), counts.sum()
    class_terms = (torch.lgamma(counts.double() + candidates[:, None]) - torch.lgamma(candidates)[:, None]).sum(dim=1)
    likelihood = torch.lgamma(candidates * classes) - torch.lgamma(total + candidates * classes) + class_terms
    return candidates[likelihood.argmax()].to(counts)
