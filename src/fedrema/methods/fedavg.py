"""FedAvg: one global model, the average of the clients' models."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports


@dataclass(frozen=True)
class FedAvg(Method):
    """One global model: w ← Σ (n_k/n) ŵ_k after E local epochs (Algorithm 1 of the paper).

    Every client is evaluated with the global model, without fine-tuning. These are the defaults of all hooks of
    `Method`.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    )
    reports: ClassVar[Reports] = Reports(colour="#0072B2")
