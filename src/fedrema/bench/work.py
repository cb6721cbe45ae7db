"""What there is to do: data of a network's shape, and the operations that training on it takes."""

import dataclasses

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedrema.config.settings import Settings
from fedrema.core import Moment
from fedrema.data import DataSettings, Federation
from fedrema.engine import draw_order
from fedrema.runs.execute import prepare

SHAPES: dict[str, tuple[int, ...]] = {"mlp": (1, 8, 8), "cnn": (1, 28, 28), "alexnet": (3, 32, 32)}
"""What each network is used for: digits, MNIST, CIFAR-10."""
OWN_SHAPE = (3, 32, 32)
"""What one's own network is given, unless there is data for it."""
CLASSES = 10


def generated(network: str, data: DataSettings) -> Federation:
    """Return clients with noise in the shape of a network's data: speed does not depend on what pictures show."""
    generator = np.random.default_rng(0)
    shape = SHAPES.get(network, OWN_SHAPE)
    x = generator.integers(0, 256, (data.clients * data.samples, *shape), dtype=np.uint8)
    y = generator.integers(0, CLASSES, len(x))
    client = np.repeat(np.arange(data.clients), data.samples)
    info = {"generated": list(shape)}
    return Federation.from_arrays(x, y, client, classes=CLASSES, info=info, test_share=data.test_share)


def trimmed(federation: Federation, clients: int, samples: int) -> Federation:
    """Return the first clients, each with at most so many samples to train on."""
    kept = federation.test.copy()
    for row in range(clients):
        kept[np.flatnonzero((federation.client == row) & ~federation.test)[:samples]] = True
    kept &= federation.client < clients
    parts = {name: getattr(federation, name)[kept] for name in ("x", "y", "client", "test")}
    return dataclasses.replace(federation, **parts, names=federation.names[:clients])


@dataclasses.dataclass(frozen=True)
class Work:
    """What one round of local training takes."""

    steps: int
    """Steps of the client that takes most."""
    operations: float
    """Floating-point operations, forward and backward, of all clients."""

    @classmethod
    def of(cls, settings: Settings, federation: Federation) -> "Work":
        """Count the steps by drawing them, and the operations of a sample by training one client on one batch."""
        batch = settings.local.batch
        one = trimmed(federation, 1, batch)
        _, samples = _drawn(settings, one)
        steps, all_samples = _drawn(settings, federation)
        return cls(steps, _operations(settings, one) / samples * all_samples)


def _drawn(settings: Settings, federation: Federation) -> tuple[int, int]:
    """Return the steps of a round's local training, and how many samples all clients together see in it."""
    counts: list[int] = np.bincount(federation.client[~federation.test], minlength=len(federation)).tolist()
    steps, samples = 0, 0
    moment = Moment(1, settings.simulation.rounds, settings.simulation.seed)
    for phase in settings.method.phases(settings.local, moment):
        order = draw_order(federation.names, counts, phase, settings.local, ("bench",))
        steps += int(order.steps.max())
        samples += int(order.sizes.sum())
    return steps, samples


def _operations(settings: Settings, federation: Federation) -> float:
    """Count what training the only client takes, in plain torch: the counter does not see into kernels of our own."""
    plain = dataclasses.replace(settings.simulation, device="cpu", precision="float32", backend="loop")
    simulator = prepare(dataclasses.replace(settings, simulation=plain), federation)
    moment = simulator.moment(1)
    cohort = simulator.begin(simulator.cohort(simulator.start(), torch.tensor([0])), moment)
    with FlopCounterMode(display=False) as counter:
        simulator.local_training(cohort, moment)
    return float(counter.get_total_flops())
