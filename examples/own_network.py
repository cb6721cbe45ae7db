"""Train your own network: any nn.Module whose last layer is the classifier."""

from torch import Tensor, nn

import fedrema


class Residual(nn.Module):
    """A small network with a skip connection; `classifier` is the head, which FedReMa personalises."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 48)
        self.second = nn.Linear(48, 48)
        self.classifier = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)).relu()
        return self.classifier(hidden + self.second(hidden).relu())


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network; `fedrema run fedrema --net own_network:build` calls this function."""
    return Residual(shape[0] * shape[1] * shape[2], classes)


if __name__ == "__main__":
    run = fedrema.run("fedrema", net="own_network:build", rounds=20, out="runs/own-network", overwrite=True)
    print(run)
