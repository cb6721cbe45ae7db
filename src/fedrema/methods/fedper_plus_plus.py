"""FedPer++: FedPer with a regulariser against feature drift. A reconstruction."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, task_loss
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedPerPlusPlus(Method):
    """A RECONSTRUCTION: FedPer with feature regularisation, CE + λ · mean (1/d)‖h − h_g‖²; not the authors' numbers.

    We found neither the text nor the code of the original. According to two sentences in the FedReMa paper, it adds a
    feature regulariser to FedPer that limits overfitting and drift between clients; its form and its weight are ours.
    h_g are the features of the same sample computed by the received body, once per round. As in FedPer, the body is
    averaged, θ ← Σ (n_k/n) θ̂_k, and is the only part that is sent; the classifier φ_k never leaves its client. Clients
    are evaluated with the averaged θ and their own φ_k.
    """

    name: ClassVar[str] = "fedper++"
    title: ClassVar[str] = "FedPer++ (reconstruction)"
    paper: ClassVar[str] = (
        "FedPer++: Toward Improved Personalized Federated Learning on Heterogeneous and Imbalanced Data, IJCNN 2022;"
        " we had neither its text nor its code"
    )
    reports: ClassVar[Reports] = Reports(colour="#009E73", stroke=":")

    hold: float = 1.0
    """λ: strength of the regularisation towards the features of the received body (ours); 0 is FedPer."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "hold")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute h_g of every sample."""
        return client.having(inbox={**client.inbox, "h_received": net.features(client.params, data.x)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE + λ · mean (1/d)‖h − h_g‖²."""
        features = net.features(client.params, batch.x)
        distances = (features - client.inbox["h_received"][batch.index]).square().mean(dim=1)
        drift = (distances * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        return task_loss(net, net.classify(client.params, features), batch) + self.hold * drift
