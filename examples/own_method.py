"""Add a method in one file: the server takes the median of every weight instead of the mean.

fedrema run own_method:FedMedian --keep 0.5
"""

from dataclasses import dataclass
from typing import ClassVar

import fedrema
from fedrema import Answer, Method, Moment, Net, Role, Uploads, average


@dataclass(frozen=True)
class FedMedian(Method):
    """One global model that is robust to a faulty client: each weight is the median over clients."""

    name: ClassVar[str] = "fedmedian"
    title: ClassVar[str] = "FedMedian"
    paper: ClassVar[str] = "an example of how to add a method"

    keep: float = 0.0
    """Share of the plain average in the result, from 0 (median only) to 1 (FedAvg)."""

    def role(self, net: Net, name: str) -> Role:
        """Send every client's parameters to the server: a median cannot be computed from the mean."""
        return Role.COLLECTED

    def aggregate(self, net: Net, state: dict, uploads: Uploads, moment: Moment) -> Answer:
        """Replace the server step of FedAvg; everything else is inherited."""
        mean = average(uploads.params, uploads.counts)
        median = {name: value.median(dim=0).values for name, value in uploads.params.items()}
        shared = {name: self.keep * mean[name] + (1 - self.keep) * median[name] for name in mean}
        return Answer(shared=shared, state=state)


if __name__ == "__main__":
    for method in (FedMedian(), FedMedian(keep=0.5)):
        print(method, fedrema.run(method, rounds=20, out=f"runs/median-{method.keep}", overwrite=True))
