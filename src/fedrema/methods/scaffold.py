"""SCAFFOLD: control variates take the drift out of local steps."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedrema.core import (
    Answer,
    Batch,
    Client,
    Gradient,
    LocalTraining,
    Method,
    Moment,
    Move,
    Phase,
    Reports,
    Role,
    State,
    Uploads,
)
from fedrema.errors import above_zero
from fedrema.methods.shared.second_models import copied, copy_of, per_client
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Stochastic controlled averaging: local steps go along g − c_k + c instead of the gradient g.

    c_k estimates the gradient of client k, c that of everybody; both begin at 0. After training, c_k⁺ = c_k − c +
    (x − y)/(S η), where S steps of size η led from the received x to y: with plain SGD that is exactly the mean of the
    gradients g taken on the way, and this mean is what is computed, because it stays right with momentum and clipping.
    Server: x ← x + η_g (mean y − x), c ← c + Σ (n_k/n) (c_k⁺ − c_k) over the clients present, n being the samples of
    all clients: so c is always the mean of all clients' c_k, which are 0 before a client first takes part. Model and
    control travel both ways: twice FedAvg's payload. Clients are scored with the global model. Means are by sample
    counts, as everywhere here (the authors': equal, the same where clients are equally large). The server learns a
    client's n_k from its first upload; until then it counts with the mean of those it knows.
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#0072B2", stroke="-.")

    server_lr: float = 1.0
    """η_g: how far the server goes to the clients' mean (authors: 1)."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        above_zero(self, "server_lr")

    def role(self, net: Net, name: str) -> Role:
        """Share the model and c; the number of steps stays."""
        return Role.PRIVATE if name == "steps" else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Leave controls out: they are put in place."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Begin with c = c_k = 0."""
        zeros = {name: value.new_zeros(value.shape) for name, value in client.params.items() if name in net.trainable}
        params = {**client.params, **copied(zeros, "control"), "steps": client.count.new_zeros(())}
        return client.having(params=params, memory=copied(zeros, "control"))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Begin to count steps."""
        return client.having(params={**client.params, "steps": client.count.new_zeros(())})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """E epochs of controlled steps."""
        return (Phase(local.epochs, local.rate(moment), local.momentum, step=self.controlled_step),)

    def controlled_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Descend along g − c_k + c; what is `control` in training is the mean of the gradients so far."""
        slopes = gradient(client, batches[0])
        common, own = copy_of(client.received, "control"), copy_of(client.memory, "control")
        so_far, steps = copy_of(client.params, "control"), client.params["steps"]
        along = {name: slope - own[name] + common[name] for name, slope in slopes.items()}
        means = {
            name: (so_far[name] * per_client(steps, slope) + slope) / per_client(steps + 1, slope)
            for name, slope in slopes.items()
        }
        return Move(along, {**copied(means, "control"), "steps": steps + 1})

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep c_k⁺, and send c + c_k⁺ − c_k in the place of c."""
        found, own = copy_of(client.params, "control"), copy_of(client.memory, "control")
        sent = {name: client.received[f"control.{name}"] + value - own[name] for name, value in found.items()}
        return client.having(params={**client.params, **copied(sent, "control")}, memory=copied(found, "control")), {}

    def server(self, net: Net, clients: int) -> State:
        """Make room for everybody's n_k; n is that of the last round."""
        return {"counts": torch.zeros(clients, dtype=torch.float64), "n": 0.0}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Move the model towards the clients' mean, and keep c the mean of all clients' c_k."""
        known = torch.as_tensor(state["counts"])
        counts = known.index_copy(0, uploads.clients.to(known.device), uploads.counts.double())
        n, present = float(counts[counts > 0].mean()) * uploads.everyone, float(uploads.counts.sum())
        kept = (float(state["n"]) or n) / n  # more clients, or larger ones, make each count less
        shared = {}
        for name, mean in uploads.mean.items():
            before = uploads.before[name]
            if name.startswith("control."):  # what was sent is c + c_k⁺ − c_k
                shared[name] = kept * before + present / n * (mean - before)
            else:
                shared[name] = before + (self.server_lr if name in net.trainable else 1.0) * (mean - before)
        return Answer(shared=shared, state={"counts": counts, "n": n})
