"""Peak rates of a machine: matrix products in each precision, and memory copies."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedrema.engine.costs import MATRIX, product_rate, seconds_of

COPIED = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of the block that is copied."""
CEILING_OF = {"float32": "sgemm", "float64": "dgemm", "tf32": "tf32", "bf16": "bf16"}
"""The peak rate with which training in each precision is compared."""
MEANING = {
    "sgemm": "float32 matrix product",
    "dgemm": "float64 matrix product",
    "tf32": "TF32 matrix product",
    "bf16": "bf16 matrix product",
    "copy": "copy, read + write",
}

# In a separate process: on some CPUs a bf16 product crashes with an illegal instruction.
_BF16_ON_A_CPU = (
    "import torch; from fedrema.bench.ceilings import affordable_size, product_rate; torch.set_num_threads({threads});"
    "cpu = torch.device('cpu'); print(product_rate(cpu, torch.bfloat16, affordable_size(cpu, torch.bfloat16, {size})))"
)


class Ceilings:
    """The peak rates of one device: medians of the samples taken between measurements."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device = device
        self.load: float | None = None
        """The highest one-minute load average of the machine at any of the measurements."""
        self._samples: dict[str, list[float]] = {"sgemm": [], "bf16": [], "copy": []}
        if device.type == "cuda":
            self._samples["tf32"] = []
        self._samples.setdefault(CEILING_OF[precision], [])
        if device.type == "cpu" and (rate := bf16_rate_on_a_cpu()) is not None:
            self._samples["bf16"].append(rate)

    def sample(self) -> None:
        """Take another sample; the speed of a shared machine varies."""
        if hasattr(os, "getloadavg"):  # not on Windows
            self.load = max(self.load or 0.0, os.getloadavg()[0])
        size = MATRIX[self.device.type]
        for name, samples in self._samples.items():
            if name == "copy":
                samples.append(copy_rate(self.device, COPIED[self.device.type]))
            elif name != "bf16" or self.device.type == "cuda":
                dtype = {"bf16": torch.bfloat16, "dgemm": torch.float64}.get(name, torch.float32)
                with torch_flags(products_in_tf32=name == "tf32"):
                    samples.append(product_rate(self.device, dtype, size))

    def values(self) -> dict[str, float | None]:
        """Return operations (`copy`: bytes) per second; None where the machine does not support it."""
        return {name: statistics.median(samples) if samples else None for name, samples in self._samples.items()}


def affordable_size(device: torch.device, dtype: torch.dtype, largest: int, seconds: float = 0.5) -> int:
    """Return a matrix size, at most the largest, whose product takes less than the given seconds.

    A processor without bf16 instructions needs a minute for a bf16 product of 2048 rows.
    """
    size = 128
    while size < largest and (2 * (2 * size) ** 3) / product_rate(device, dtype, size) < seconds:
        size *= 2
    return size


def copy_rate(device: torch.device, size: int) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def bf16_rate_on_a_cpu() -> float | None:
    """Return the operations per second of a bf16 product, or None where the processor does not support it."""
    code = _BF16_ON_A_CPU.format(threads=torch.get_num_threads(), size=MATRIX["cpu"])
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return float(ended.stdout) if ended.returncode == 0 else None


@contextmanager
def torch_flags(products_in_tf32: bool = False) -> Iterator[None]:
    """Temporarily set torch's default precision flags, with float32 products in float32 or TF32; a run sets its own."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark
    products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark = products_in_tf32, True, False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark = before
