"""Federated training as in textbooks and most libraries: a model, a data loader and an optimiser per client."""

import copy
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedrema.bench.ceilings import torch_flags
from fedrema.config.settings import Settings
from fedrema.data import Federation
from fedrema.data.federation import to_float
from fedrema.engine.costs import synchronise
from fedrema.models.networks import NETWORKS, Network, Shape, own_module

MOMENTUM = 0.9
CLIP = 10.0
MOST_SAMPLES = 3
"""Largest number of times that the loop is timed."""


def plain_module(network: Network, shape: Shape, classes: int) -> nn.Module:
    """Return the network as an ordinary module."""
    if network.net not in NETWORKS:
        return own_module(network.net, shape, classes)[0]
    options = {"hidden": network.hidden} if network.net.startswith("mlp") else {}
    return NETWORKS[network.net](shape, classes, projection=network.projection, **options)


def train_client(
    model: nn.Module,
    dataset: TensorDataset,
    epochs: int,
    batch: int,
    lr: float,
    device: torch.device,
    momentum: float = MOMENTUM,
) -> tuple[nn.Module, list[float]]:
    """Return a trained copy of the model and the loss of every step."""
    model = copy.deepcopy(model).train()
    loader = DataLoader(dataset, batch_size=min(batch, len(dataset)), shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.item())
    return model, losses


class Textbook:
    """Trains all clients of a federation one after the other, in float32, and measures the time."""

    def __init__(self, settings: Settings, federation: Federation, device: torch.device) -> None:
        self.local, self.device = settings.local, device
        self.model = plain_module(settings.network, federation.sample_shape, federation.task.outputs).to(device)
        self.datasets = [TensorDataset(x, y) for x, y in _samples(federation)]
        self.steps = 0
        """Number of steps, of all clients each, that were timed."""
        self.seconds: list[float] = []
        """Seconds of one step of all clients, for each time it was measured."""
        self.error: RuntimeError | None = None
        """The reason why it cannot be timed."""

    def sample(self) -> None:
        """Time the local training of one more round, up to `MOST_SAMPLES` times."""
        if self.error or len(self.seconds) >= MOST_SAMPLES:
            return
        try:
            with torch_flags():
                if not self.seconds:
                    self._train(self.datasets[:1], epochs=1)  # warm-up: torch selects and loads its kernels
                synchronise(self.device)
                started = time.perf_counter()
                steps = self._train(self.datasets, self.local.epochs)
                synchronise(self.device)
            self.seconds.append((time.perf_counter() - started) / steps)
            self.steps += steps
        except RuntimeError as error:  # such as too little memory: the other measurements continue
            self.error = error

    def _train(self, datasets: list[TensorDataset], epochs: int) -> int:
        """Return the largest number of steps that a client took."""
        batch, lr = self.local.batch, self.local.lr
        return max(len(train_client(self.model, dataset, epochs, batch, lr, self.device)[1]) for dataset in datasets)


def _samples(federation: Federation) -> list[tuple[Tensor, Tensor]]:
    split = federation.split("train")
    x, y = to_float(torch.from_numpy(split.x)), torch.from_numpy(split.y)
    return [(x[row, :count], y[row, :count]) for row, count in enumerate(split.count)]
