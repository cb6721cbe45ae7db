"""How fast this machine trains, against the fastest it could: its own matrix multiplication."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedrema.core import Batch, Phase
from fedrema.data import Federation, build_federation
from fedrema.data.datasets import dataset_status
from fedrema.engine import choose_device, choose_precision, draw_order
from fedrema.errors import BadInput
from fedrema.runs.execute import execute, prepare
from fedrema.settings import Settings
from fedrema.simulate import Simulator

MATRIX = 2048


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was measured; seconds are per round, medians."""

    data: str
    loading: float
    """Seconds to read, verify and deal the data, once."""
    round: float
    parts: dict[str, float]
    """Seconds of a round by part; `logging` is what lies between rounds."""
    training_rate: float
    """Floating-point operations per second of local training."""
    matrix_rate: float
    """The same of a matrix product in the same precision, in the same run."""

    @property
    def around(self) -> float:
        """Share of a round that is not training."""
        return 1 - self.parts["train"] / self.round

    @property
    def share(self) -> float:
        """Training speed as a share of the matrix product's."""
        return self.training_rate / self.matrix_rate


def measure(settings: Settings) -> Speed:
    """Play a few rounds as `fedrema run` would, with records and checkpoints; the first only warms up."""
    if settings.simulation.rounds < 2:
        raise BadInput(f"--rounds must be at least 2 to measure, got {settings.simulation.rounds}: the first warms up.")
    device = choose_device(settings.simulation.device)
    dtype, _ = choose_precision(settings.simulation.precision, device)
    begun = time.perf_counter()
    federation, data = _federation(settings)
    loading = time.perf_counter() - begun
    before = matrix_rate(device, dtype)
    ends = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        output = dataclasses.replace(settings.output, out=Path(folder) / "run")
        run = execute(
            dataclasses.replace(settings, output=output), federation, watch=lambda _: ends.append(time.perf_counter())
        )
        rounds = run.rounds[1:]
    walls = np.diff(ends)[1:]
    # A machine that others use too is not equally fast all the time: the reference is measured before and after.
    reference = statistics.mean([before, matrix_rate(device, dtype)])
    parts = {part: statistics.median(record["seconds"][part] for record in rounds) for part in rounds[0]["seconds"]}
    wall = statistics.median(walls)
    parts["logging"] = max(wall - sum(parts.values()), 0.0)
    operations = round_operations(settings, federation)
    return Speed(data, loading, wall, parts, operations / parts["train"], reference)


def _federation(settings: Settings) -> tuple[Federation, str]:
    data = settings.data
    status = {each.name: each for each in dataset_status(data.data_dir)}.get(data.dataset)
    if data.federation is not None or status is None or status.found is not None or status.address is None:
        return build_federation(data), data.federation or data.dataset
    # Speed does not depend on what the pictures show.
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (data.clients * data.samples, *status.shape), dtype=np.uint8)
    y = generator.integers(0, status.classes, len(x))
    client = np.repeat(np.arange(data.clients), data.samples)
    made = Federation.from_arrays(x, y, client, classes=status.classes, test_share=data.test_share)
    return made, f"generated in the shape of {data.dataset}, which is not here"


def round_operations(settings: Settings, federation: Federation) -> float:
    """Count the floating-point operations that one round of local training needs, forward and backward."""
    simulator = prepare(settings, federation)
    counts: list[int] = simulator.train.counts.tolist()
    batch = min(settings.local.batch, counts[0])
    total = 0.0
    for phase in settings.method.phases(settings.local, simulator.moment(1)):
        order = draw_order(federation.names, counts, phase, settings.local, ("bench",))
        total += _gradient_operations(simulator, phase, batch) / batch * int(order.sizes.sum())
    return total


def _gradient_operations(simulator: Simulator, phase: Phase, batch: int) -> float:
    net, data = simulator.net, simulator.train.of(0)
    crowd = simulator.begin(simulator.crowd(simulator.start(), torch.tensor([0])), simulator.moment(1))
    client = crowd.one(0)
    trained = [name for name in client.params if simulator.trains(name) and phase.trains(name)]
    leaves = {name: client.params[name].detach().requires_grad_() for name in trained}
    loss = phase.loss or simulator.method.loss
    with FlopCounterMode(display=False) as counter:
        samples = Batch(data.x[:batch], data.y[:batch], data.mask[:batch], data.index[:batch])
        value = loss(net, client.having(params={**client.params, **leaves}), samples)
        torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a square matrix product: the median of several."""
    left, right = (torch.rand(MATRIX, MATRIX, device=device, dtype=dtype) for _ in range(2))
    seconds = statistics.median([_timed(lambda: left @ right, device) for _ in range(12)])
    return float(2 * MATRIX**3 / seconds)


def _timed(action: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
