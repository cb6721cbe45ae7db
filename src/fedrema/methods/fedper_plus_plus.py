"""FedPer++: FedPer whose features do not drift away. A reconstruction."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, cross_entropy
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedPerPlusPlus(Method):
    """A RECONSTRUCTION: FedPer with feature regularisation, CE + λ · mean (1/d)‖h − h_g‖²; not the authors' numbers.

    No text and no code of the original could be found. Two sentences in the FedReMa paper say that it adds to FedPer a
    regulariser of features that limits overfitting and drift between clients; form and weight of it are ours. h_g are
    the features of the same sample by the received body, which every client computes once per round. As in FedPer the
    body is averaged, θ ← Σ (n_k/n) θ̂_k, and alone travels, and the classifier φ_k never leaves its client. Clients are
    scored with the averaged θ and their own φ_k.
    """

    name: ClassVar[str] = "fedper++"
    title: ClassVar[str] = "FedPer++ (reconstruction)"
    paper: ClassVar[str] = (
        "FedPer++: Toward Improved Personalized Federated Learning on Heterogeneous and Imbalanced Data, IJCNN 2022;"
        " neither its text nor its code was at hand"
    )
    reports: ClassVar[Reports] = Reports(colour="#009E73", stroke=":")

    hold: float = 1.0
    """λ: how strongly features are held to those of the received body (ours); 0 is FedPer."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "hold")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute h_g for every sample."""
        return client.having(inbox={**client.inbox, "h_received": net.features(client.params, data.x)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """CE + λ · mean (1/d)‖h − h_g‖²."""
        features = net.features(client.params, batch.x)
        apart = (features - client.inbox["h_received"][batch.index]).square().mean(dim=1)
        drift = (apart * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        return cross_entropy(net.classify(client.params, features), batch) + self.hold * drift
