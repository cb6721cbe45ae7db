"""FedBN: batch norm stays at home."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg without batch norm: its scales, shifts and statistics never leave their client; all else is averaged.

    A client whose samples look different (another camera, another hand) keeps what makes its features comparable.
    Averages are by sample counts (the authors': equal). Clients are scored with the averaged weights and their own
    batch norm. The layers are found by their kind, not by their names. In a network without batch norm this is FedAvg:
    `--net mlp-bn`, `cnn-bn` and `alexnet-bn` have it, for any method, so that a comparison is fair.
    """

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedBN"
    paper: ClassVar[str] = (
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    )
    reports: ClassVar[Reports] = Reports(colour="#0072B2", stroke=":")

    def role(self, net: Net, name: str) -> Role:
        """Share everything but batch norm."""
        return Role.PRIVATE if name in net.batch_norm else Role.SHARED
