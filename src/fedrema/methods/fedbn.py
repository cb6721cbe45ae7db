"""FedBN: batch-norm layers stay on their client."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg except for batch norm: its scales, shifts and statistics stay on the client; everything else is averaged.

    A client whose inputs are distributed differently (another camera, another handwriting) keeps its own normalisation.
    Averages are weighted by sample counts (the authors': equal weights). Clients are evaluated with the averaged
    weights and their own batch norm. Batch-norm layers are found by their type, not by their name. For a network
    without batch norm this is FedAvg. Networks with `-bn` in their names, such as `--net mlp-bn`, have batch norm and
    work with every method, which allows a fair comparison.
    """

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedBN"
    paper: ClassVar[str] = (
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    )
    reports: ClassVar[Reports] = Reports(colour="#0072B2", stroke=":")

    def role(self, net: Net, name: str) -> Role:
        """Share everything except batch norm."""
        return Role.PRIVATE if name in net.batch_norm else Role.SHARED
