"""IFCA: several models; each client trains the one that fits its samples best."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedrema.core import (
    Answer,
    Batch,
    Client,
    Matrix,
    Method,
    Moment,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    average,
    task_loss,
)
from fedrema.errors import at_least
from fedrema.methods.shared.initial_models import initial_model
from fedrema.methods.shared.rounds import newer
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class IFCA(Method):
    """The iterative federated clustering algorithm: M models w_m, of which client k trains m_k = argmin_m F_k(w_m).

    A client receives all models, computes the loss of each on its training samples, trains the best one for E epochs
    and sends it with its number. The server averages the models of each cluster by sample counts, w_m ← Σ_{k: m_k=m}
    n_k ŵ_k / Σ_{k: m_k=m} n_k; a model that no client has trained does not change. Clients are evaluated with the
    current model of the cluster that they chose before training; those that did not participate in the round choose
    anew. The M models start from different random weights.

    With `--layers head`, only the heads are clustered and the body is averaged over all clients (the paper's weight
    sharing). The paper's variant that averages gradients is a single local step: `--epochs 1` and a batch of all
    samples. The authors' code chooses the model for testing by its loss on the test samples, with their labels; here,
    test samples are never used.
    """

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "IFCA"
    paper: ClassVar[str] = "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020"
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#AA4499",
        traces=(
            Trace(
                "clusters",
                "cluster",
                per_client=True,
                description="The number of the model that each client chose, counted from 0.",
            ),
            Trace("used_clusters", "clusters in use", description="How many of the models at least one client chose."),
        ),
        matrices=(
            Matrix(
                "peers",
                "Clients in the same cluster",
                "selection",
                description="True where the clients of row and column trained the same model.",
            ),
        ),
    )

    clusters: int = 4
    """M: the number of models (authors: 4 on MNIST, 2 on CIFAR-10); 1 is FedAvg."""
    layers: Literal["all", "head"] = "all"
    """Which part of the network differs between clusters; the rest is averaged over all clients."""

    def needs_head(self) -> bool:
        return self.layers == "head"

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "clusters")

    def role(self, net: Net, name: str) -> Role:
        """Send the trained model; of the clustered part, the server gets each client's.

        The common copy of the clustered part is the model of cluster 0. The others are sent to the clients' inboxes.
        """
        return Role.COLLECTED if self._is_clustered(net, name) else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise the number of the client's cluster, and the round in which it was chosen."""
        return client.having(memory={"cluster": client.count.new_zeros(()), "round": client.count.new_zeros(())})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Choose the model with the smallest loss."""
        client = self._choose(net, client, data, moment)
        params = self.model(net, client)
        return client.having(params=params, inbox={**client.inbox, "training": torch.ones_like(client.count)})

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Choose anew if the client did not participate in the round."""
        found = self._choose(net, client, data, moment)
        return found.having(memory=newer(client.memory, found.memory))

    def _choose(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Choose the current model with the smallest loss."""
        if not self._has_models(client):
            client = client.having(inbox={**client.inbox, **self._initial(net, moment, client.params)})
        losses = [task_loss(net, net(model, data.x), data) for model in self._models(net, client)]
        cluster = torch.stack(losses).argmin().to(client.count.dtype)
        number = torch.full_like(client.count, moment.round)
        return client.having(memory={"cluster": cluster, "round": number})

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the number of the cluster."""
        return client, {"cluster": client.memory["cluster"]}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the current model of the client's cluster; during training, the one that it trains."""
        chosen, *others = self._models(net, client)
        if "training" not in client.inbox and self._has_models(client):
            for number, model in enumerate(others, start=1):
                is_chosen = client.memory["cluster"] == number
                chosen = {name: torch.where(is_chosen, model[name], value) for name, value in chosen.items()}
        return chosen

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average the models within each cluster."""
        chosen = uploads.extras["cluster"].round().long()
        others = {name: torch.as_tensor(value) for name, value in state.items()}
        others = others or self._initial(net, moment, uploads.before)
        shared = {**uploads.mean}
        for number in range(self.clusters):
            weights = uploads.counts * (chosen == number)
            before = copy_of(others, f"cluster{number}") if number else uploads.before
            model = {name: before[name] for name in uploads.params}
            if weights.sum() > 0:
                model = average(uploads.params, weights)
            shared |= copied(model, f"cluster{number}") if number else model
        kept: State = {name: shared[name] for name in others}
        trace = {"clusters": chosen, "used_clusters": len(set(chosen.tolist())), "peers": chosen[:, None] == chosen}
        return Answer(shared, state=kept, trace=trace)

    def _is_clustered(self, net: Net, name: str) -> bool:
        return self.layers == "all" or net.in_head(name)

    def _initial(self, net: Net, moment: Moment, like: Tensors) -> Tensors:
        """Return the initial models of the clusters from 1 on."""
        found: Tensors = {}
        for number in range(1, self.clusters):
            model = initial_model(net, number, moment, like)
            clustered = {name: value for name, value in model.items() if self._is_clustered(net, name)}
            found |= copied(clustered, f"cluster{number}")
        return found

    def _has_models(self, client: Client) -> bool:
        """Return whether the models of the clusters from 1 on are known; the server sends them after a round."""
        return self.clusters == 1 or any(name.startswith("cluster1.") for name in client.inbox)

    def _models(self, net: Net, client: Client) -> list[Tensors]:
        """Return the models of all clusters."""
        first = network_tensors(net, client.params)
        others = [copy_of(client.inbox, f"cluster{number}") for number in range(1, self.clusters)]
        return [first, *({**first, **other} for other in others)]
