"""The workload: data of a network's input shape, and the number of operations to train on it."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedrema.config.settings import Settings
from fedrema.core import Moment
from fedrema.data import DataSettings, Federation
from fedrema.engine import Backend, draw_order
from fedrema.runs.execute import build_simulator
from fedrema.simulation.simulator import Simulator

SHAPES: dict[str, tuple[int, ...]] = {"mlp": (1, 8, 8), "cnn": (1, 28, 28), "alexnet": (3, 32, 32)}
"""Input shape of each network: those of digits, MNIST and CIFAR-10."""
OWN_SHAPE = (3, 32, 32)
"""Input shape of user-defined networks, unless data is given."""
CLASSES = 10


def generated(network: str, data: DataSettings) -> Federation:
    """Return clients with random inputs of a network's shape: speed does not depend on their content."""
    generator = np.random.default_rng(0)
    shape = SHAPES.get(network, OWN_SHAPE)
    x = generator.integers(0, 256, (data.clients * data.samples, *shape), dtype=np.uint8)
    y = generator.integers(0, CLASSES, len(x))
    client = np.repeat(np.arange(data.clients), data.samples)
    info = {"generated": list(shape)}
    return Federation.from_arrays(x, y, client, classes=CLASSES, info=info, test_share=data.test_share, rare=False)


def trimmed(federation: Federation, clients: int, samples: int) -> Federation:
    """Return the first clients, each with at most the given number of training samples."""
    kept = federation.test.copy()
    for row in range(clients):
        kept[np.flatnonzero((federation.client == row) & ~federation.test)[:samples]] = True
    kept &= federation.client < clients
    parts = {name: getattr(federation, name)[kept] for name in ("x", "y", "client", "test")}
    return dataclasses.replace(federation, **parts, names=federation.names[:clients])


@dataclasses.dataclass(frozen=True)
class Work:
    """The amount of work in one round of local training."""

    steps: int
    """Largest number of steps of a client."""
    operations: float
    """Floating-point operations of all clients, forward and backward."""

    @classmethod
    def of(cls, settings: Settings, federation: Federation) -> "Work":
        """Count the steps from the drawn batches, and the operations per sample by training one client on one batch."""
        batch = settings.local.batch
        one = trimmed(federation, 1, batch)
        _, samples = _drawn(settings, one)
        steps, all_samples = _drawn(settings, federation)
        return cls(steps, _operations(settings, one) / samples * all_samples)


def _drawn(settings: Settings, federation: Federation) -> tuple[int, int]:
    """Return the steps of a round of local training, and the number of samples that all clients process in it."""
    counts: list[int] = np.bincount(federation.client[~federation.test], minlength=len(federation)).tolist()
    steps, samples = 0, 0
    moment = Moment(1, settings.simulation.rounds, settings.simulation.seed)
    for phase in settings.method.phases(settings.local, moment):
        order = draw_order(federation.names, counts, phase, settings.local, ("bench",))
        steps += int(order.steps.max())
        samples += int(order.sizes.sum())
    return steps, samples


def _operations(settings: Settings, federation: Federation) -> float:
    """Count the operations of training the only client, in plain torch: the counter cannot see into our own kernels."""

    def simulator_with(backend: Backend) -> Simulator:
        plain = dataclasses.replace(settings.simulation, device="cpu", precision="float32", backend=backend)
        return build_simulator(dataclasses.replace(settings, simulation=plain), federation)

    simulator = simulator_with("loop")
    if any(isinstance(layer, nn.RNNBase) for _, layer in simulator.net.layers()):
        # The counter does not know torch's LSTM; stacked, recurrent layers consist of matrix products.
        simulator = simulator_with("stacked")
    moment = simulator.moment(1)
    cohort = simulator.begin(simulator.cohort(simulator.start(), torch.tensor([0])), moment)
    with operations_counter() as counter:
        simulator.local_training(cohort, moment)
    return float(counter.get_total_flops())


def operations_counter() -> FlopCounterMode:
    """Return torch's counter of operations, with a formula that is also correct for grouped convolutions."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward})


def _convolution_backward(
    output_gradient: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *more: object, **_: object
) -> int:
    """Return the operations of a convolution's gradients, from the shapes of its tensors.

    Each gradient takes as many products as the convolution itself. torch's formula for the gradient of the weights
    multiplies all input channels with all output channels, as if there were one group.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = more
    positions = inputs if transposed else output_gradient
    forward = 2 * inputs[0] * math.prod(positions[2:]) * math.prod(weight)
    assert isinstance(wanted, Sequence)
    return forward * sum(map(bool, wanted[:2]))
