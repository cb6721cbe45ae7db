"""FedDBE: a private shift of the features, and mean features that are held near a common mean."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import (
    Alternative,
    Answer,
    Batch,
    Client,
    Method,
    Moment,
    Reports,
    Role,
    State,
    Uploads,
    average,
    task_loss,
)
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedDBE(Method):
    """FedAvg with a domain bias eliminator: outputs are φ(h + b_k), and the mean of h is regularised.

    The shift b_k [d] of the features h is private, trained with the network, and starts at 0: it represents what is
    special about a client, so that h need not. To keep h similar on all clients, the mean feature h̄ of each batch is
    drawn to a constant ḡ: F_k + κ · mean ½(h̄ − ḡ)², a mean over the features. The server averages θ and φ by sample
    counts. Clients are evaluated with the averaged network and their own b_k; the accuracy without b_k is recorded too.

    The first round determines ḡ: its participants train without b_k and regularisation, and send the mean of their
    features, which the server averages by sample counts. What they trained is discarded, as in the authors' code, so
    that the network starts again from its initial weights. If no upload arrives in that round, the next one takes its
    place.

    The authors track h̄ over batches with a momentum µ, but publish µ = 1, which is the mean of the batch; other values
    are not implemented. Their ḡ consists of the means of last batches during the first round; here it follows from one
    pass over all samples after it.
    """

    name: ClassVar[str] = "feddbe"
    title: ClassVar[str] = "FedDBE"
    paper: ClassVar[str] = (
        "Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#117733", stroke="--", alternatives=(Alternative("unshifted", "without its own shift"),)
    )

    mean_strength: float = 1.0
    """κ: strength of the regularisation of mean features (authors: 50, without momentum); 0 disables it."""
    predict_by: Literal["shifted", "unshifted"] = "shifted"
    """Predict with or without the client's own shift b_k."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "mean_strength")

    def role(self, net: Net, name: str) -> Role:
        """Share everything except b_k."""
        return Role.PRIVATE if name == "shift" else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add b_k = 0."""
        shift = client.count.new_zeros(net.features_count)
        return client.having(params={**client.params, "shift": shift})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k + κ · mean ½(h̄ − ḡ)²; before ḡ is known, F_k without b_k, which then remains 0."""
        features = net.features(client.params, batch.x)
        if "global_mean" not in client.inbox:
            return task_loss(net, net.classify(client.params, features), batch)
        distance = (mean_feature(features, batch) - client.inbox["global_mean"]).square().mean() / 2
        loss = task_loss(net, net.classify(client.params, features + client.params["shift"]), batch)
        return loss + self.mean_strength * distance

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the mean feature; the server uses it once only, but replies have the same form in all rounds."""
        return client, {"mean_feature": mean_feature(net.features(client.params, data.x), data)}

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return φ(h + b_k), or φ(h) with `predict_by="unshifted"`."""
        features = net.features(client.params, x)
        shifted = features + client.params["shift"] if self.predict_by == "shifted" else features
        return net.classify(client.params, shifted)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy without b_k."""
        return {} if self.predict_by == "unshifted" else {"unshifted": replace(self, predict_by="unshifted")}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial state: ḡ is not known yet."""
        return {"knows_mean": False}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average the network; in the first round with uploads, send ḡ and the initial network."""
        if state["knows_mean"]:
            return Answer(uploads.mean, state=state)
        means = average({"global_mean": uploads.extras["mean_feature"]}, uploads.counts)
        return Answer({**uploads.before, **means}, state={"knows_mean": True})


def mean_feature(features: Tensor, batch: Batch) -> Tensor:
    """Return the mean [d] of the features [n, d] of real samples."""
    real = torch.where(batch.mask[:, None] > 0, features, 0.0)
    return real.sum(dim=0) / batch.mask.sum().clamp(min=1)
