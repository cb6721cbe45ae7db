"""Local: training without communication."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class Local(Method):
    """Each client trains alone on its own samples: the baseline that federated training has to outperform."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    paper: ClassVar[str] = "no communication; the baseline of every comparison"
    reports: ClassVar[Reports] = Reports(colour="#999999")

    def role(self, net: Net, name: str) -> Role:
        """Keep all parameters private."""
        return Role.PRIVATE
