"""pFedFDA: the classifier follows from Gaussians over features, which each client adapts to its own samples."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Trace, Uploads
from fedrema.errors import at_least
from fedrema.methods.shared.gaussians import Gaussians, choose_weights, estimate
from fedrema.methods.shared.prototypes import class_membership
from fedrema.models.body_and_head import Net, Tensors, last_layer, last_layer_inputs
from fedrema.tasks import Task

RARE = 1e-4
"""Added to every class frequency of a client, so that a class it has not seen is rare, not impossible."""
STATISTICS = ("means", "covariance")
"""Names of µ_g and Σ_g among the parameters."""


@dataclass(frozen=True)
class PFedFDA(Method):
    """Feature distribution adaptation: the last layer is the best classifier of Gaussian features, and never trained.

    The features h of class c have the mean µ_c, and all classes the covariance Σ. With a client's class frequencies
    π_k, the logits are z_c = hᵀΣ⁻¹µ_c − ½ µ_cᵀΣ⁻¹µ_c + log π_kc. A client trains all other layers on the cross-entropy
    of this classifier with the received µ_g and Σ_g. With the trained layers it then estimates µ̂_k and Σ̂_k from its
    samples, and sends µ_k = β_µ µ̂_k + (1 − β_µ) µ_g and Σ_k = β_Σ Σ̂_k + (1 − β_Σ) Σ_g with its layers; the server
    averages everything by sample counts. β_µ and β_Σ in [0, 1] minimise the cross-entropy in a cross-validation with
    two folds on the client. For a class that the client does not have, µ̂_kc is µ_gc.

    Before a client is evaluated, it estimates µ̂_k, Σ̂_k and β again with the received layers, and predicts with µ_k,
    Σ_k and π_k. Its model is a plain network. h are the inputs of the last layer; the payload grows with their number
    squared. µ_g starts with random numbers in [0, 1], Σ_g with the identity.

    The authors estimate from the features that they saw while the layers were trained; here one pass follows training.
    They search β with ten steps of L-BFGS from ½; here these are 20 Newton steps. They add 1 to the diagonal of Σ̂_k
    (`--ridge`), and 10⁻⁴ to all of its entries, which is omitted here.
    """

    name: ClassVar[str] = "pfedfda"
    title: ClassVar[str] = "pFedFDA"
    paper: ClassVar[str] = (
        "McLaughlin and Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#332288",
        stroke="--",
        traces=(
            Trace(
                "own_means",
                "weight of own means",
                percent=True,
                per_client=True,
                description="β_µ: weight of each client's own class means in those it sends.",
            ),
            Trace(
                "own_covariance",
                "weight of own covariance",
                percent=True,
                per_client=True,
                description="β_Σ: weight of each client's own covariance in the one it sends.",
            ),
        ),
    )

    single_beta: bool = False
    """Use one β for means and covariance instead of two."""
    ridge: float = 1.0
    """Added to the diagonal of a client's own covariance (authors' code: 1)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "ridge")

    def supports(self, task: Task) -> bool:
        """Support classes only: each has its distribution of features."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Share everything except the last layer, which follows from the rest."""
        return Role.PRIVATE if name in last_layer(net) else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude the last layer and the statistics."""
        return net.trains(name) and name not in (*last_layer(net), *STATISTICS)

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add µ_g and Σ_g, identical for all clients."""
        weight = client.params[last_layer(net)[0]]
        means = torch.rand(tuple(weight.shape), generator=moment.generator("means"), dtype=torch.float64).to(weight)
        covariance = torch.eye(weight.shape[1]).to(weight)
        return client.having(params={**client.params, **dict(zip(STATISTICS, (means, covariance), strict=True))})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Set the last layer to the classifier of µ_g, Σ_g and π_k."""
        return with_classifier(net, client, received_statistics(client), log_frequencies(net, data))

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Set µ_k, Σ_k and the last layer; send β too, which the server only records."""
        adapted, beta = self.adapted_statistics(net, client, data)
        values = {name: getattr(adapted, name).to(client.params[name]) for name in STATISTICS}
        client = with_classifier(net, client, adapted, log_frequencies(net, data))
        return client.having(params={**client.params, **values}), {"beta": beta.to(client.count)}

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Set the last layer to the classifier of µ_k, Σ_k and π_k, estimated with the received layers."""
        adapted, _ = self.adapted_statistics(net, client, data)
        return with_classifier(net, client, adapted, log_frequencies(net, data))

    def adapted_statistics(self, net: Net, client: Client, data: Batch) -> tuple[Gaussians, Tensor]:
        """Return µ_k and Σ_k for the client's current layers, and β [2]."""
        features = last_layer_inputs(net, client.params, data.x).double()
        # What the network computes for padding need not be finite.
        features = torch.where(data.mask[:, None] > 0, features, 0.0)
        received, log_prior = received_statistics(client), log_frequencies(net, data)
        beta = choose_weights(features, data, received, log_prior, self.ridge, separate=not self.single_beta)
        return estimate(features, data, received.means, self.ridge).mixed(received, beta), beta

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average everything, and record β."""
        beta = uploads.extras["beta"]
        return Answer(uploads.mean, state=state, trace={"own_means": beta[:, 0], "own_covariance": beta[:, 1]})


def received_statistics(client: Client) -> Gaussians:
    """Return µ_g and Σ_g."""
    return Gaussians(*(client.params[name].double() for name in STATISTICS))


def log_frequencies(net: Net, data: Batch) -> Tensor:
    """Return log π_k [C]."""
    counts = class_membership(data, net.classes, torch.float64).sum(dim=0)
    frequencies = counts / counts.sum().clamp(min=1) + RARE
    return (frequencies / frequencies.sum()).log()


def with_classifier(net: Net, client: Client, statistics: Gaussians, log_prior: Tensor) -> Client:
    """Return the client with the last layer that follows from Gaussians and class frequencies."""
    layer = zip(last_layer(net), statistics.classifier(log_prior), strict=True)
    return client.having(params={**client.params, **{name: value.to(client.params[name]) for name, value in layer}})
