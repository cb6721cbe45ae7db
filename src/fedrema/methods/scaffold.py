"""SCAFFOLD: control variates correct the client drift of local steps."""

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
from fedrema.core.aggregation import per_client
from fedrema.errors import above_zero
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Stochastic controlled averaging: local steps descend along g − c_k + c instead of the gradient g.

    The control variate c_k estimates the gradient of client k, c that of all clients; both are initialised with 0.
    After training, c_k⁺ = c_k − c + (x − y)/(S η), where S steps of size η led from the received x to y. With plain SGD
    this is exactly the mean of the gradients g of these steps; this mean is computed directly, because it remains
    correct with momentum and clipping. Server: x ← x + η_g (mean y − x), c ← c + Σ (n_k/n) (c_k⁺ − c_k) over the
    participating clients, where n is the number of samples of all clients: c is always the mean of all clients' c_k,
    which are 0 until a client first participates. The model and the control variate are sent both ways: twice the
    payload of FedAvg. Clients are evaluated with the global model. Means are weighted by sample counts, as in all
    methods here (the authors: equal weights; this is the same for clients of equal size). The server learns a client's
    n_k from its first upload; until then it uses the mean of the known ones.
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#0072B2", stroke="-.")

    server_lr: float = 1.0
    """η_g: how far the server moves towards the clients' mean (authors: 1)."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        above_zero(self, "server_lr")

    def role(self, net: Net, name: str) -> Role:
        """Share the model and c; the number of steps is private."""
        return Role.PRIVATE if name == "steps" else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude the control variates: `controlled_step` assigns them."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise c = c_k = 0."""
        zeros = {name: value.new_zeros(value.shape) for name, value in client.params.items() if name in net.trainable}
        params = {**client.params, **copied(zeros, "control"), "steps": client.count.new_zeros(())}
        return client.having(params=params, memory=copied(zeros, "control"))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Reset the number of steps."""
        return client.having(params={**client.params, "steps": client.count.new_zeros(())})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E epochs of controlled steps."""
        return (Phase(local.epochs, local.rate(moment), local.momentum, step=self.controlled_step),)

    def controlled_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Descend along g − c_k + c; during training, `control` holds the running mean of the gradients."""
        gradients = gradient(client, batches[0])
        server_control, own_control = copy_of(client.received, "control"), copy_of(client.memory, "control")
        running_means, steps = copy_of(client.params, "control"), client.params["steps"]
        along = {name: value - own_control[name] + server_control[name] for name, value in gradients.items()}
        means = {
            name: (running_means[name] * per_client(steps, value) + value) / per_client(steps + 1, value)
            for name, value in gradients.items()
        }
        return Move(along, {**copied(means, "control"), "steps": steps + 1})

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store c_k⁺, and send c + c_k⁺ − c_k in place of c."""
        new, old = copy_of(client.params, "control"), copy_of(client.memory, "control")  # c_k⁺ and c_k
        sent = {name: client.received[f"control.{name}"] + value - old[name] for name, value in new.items()}
        return client.having(params={**client.params, **copied(sent, "control")}, memory=copied(new, "control")), {}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial state: every client's n_k, and n of the last round."""
        return {"counts": torch.zeros(clients, dtype=torch.float64), "n": 0.0}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Move the model towards the clients' mean, and update c to the mean of all clients' c_k."""
        known = torch.as_tensor(state["counts"])
        counts = known.index_copy(0, uploads.clients.to(known.device), uploads.counts.double())
        n, present = float(counts[counts > 0].mean()) * uploads.everyone, float(uploads.counts.sum())
        kept = (float(state["n"]) or n) / n  # c is a mean over n samples: rescale it when n changes
        shared = {}
        for name, mean in uploads.mean.items():
            before = uploads.before[name]
            if name.startswith("control."):  # what was sent is c + c_k⁺ − c_k
                shared[name] = kept * before + present / n * (mean - before)
            else:
                shared[name] = before + (self.server_lr if name in net.trainable else 1.0) * (mean - before)
        return Answer(shared=shared, state={"counts": counts, "n": n})
