"""Where to train, and in which arithmetic."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from fedrema.errors import BadInput

Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]


@dataclass(frozen=True)
class Arithmetic:
    """The type that weights are kept in, and what their products with activations are computed in."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    products: str = "float32"

    def torch_context(self) -> AbstractContextManager[object]:
        """Return the context in which torch itself computes so; a method sees features and logits as `dtype`."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.products == "bf16" else nullcontext()


def choose_device(device: str) -> torch.device:
    """Return the device to train on; `auto` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(
            f"--device {device} was asked for, but this machine has no usable CUDA device: use --device cpu or auto."
        )
    return torch.device(device)


def choose_precision(precision: Precision, device: torch.device) -> Arithmetic:
    """Return the arithmetic asked for; `auto` is the fastest that is as accurate as float32."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "bf16"
    if precision in ("tf32", "bf16") and device.type != "cuda":
        raise BadInput(f"--precision {precision} needs a CUDA device; on the CPU use float32 or float64.")
    torch.backends.cudnn.benchmark = True  # shapes stay the same for a whole run
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
    return Arithmetic(device, torch.float64 if precision == "float64" else torch.float32, precision)
