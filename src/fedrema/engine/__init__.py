"""Trains k clients from a method: one after the other (`loop`) or as one tensor program (`stacked`)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedrema.core import Method
from fedrema.engine.batches import Order, draw_order
from fedrema.engine.crowd import Crowd, Hook, Job, Samples, Stacked, places
from fedrema.engine.loop import Loop
from fedrema.engine.stacked import StackedEngine, why_not_stackable
from fedrema.errors import BadInput
from fedrema.net import Net, Tensors

Backend = Literal["auto", "loop", "stacked"]
Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]


class Engine(Protocol):
    """What both backends do; `fedrema.engine.loop` and `fedrema.engine.stacked` say how."""

    name: str
    net: Net

    def each(self, hook: Hook, crowd: Crowd, samples: Samples | None) -> dict[str, Tensors]: ...
    def scores(self, method: Method, crowd: Crowd, samples: Samples) -> Tensor: ...
    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]: ...


def choose_device(device: str) -> torch.device:
    """Return the device to train on; `auto` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            "--device cuda was asked for, but this machine has no usable CUDA device: use --device cpu or auto."
        )
    return torch.device(device)


def choose_precision(precision: Precision, device: torch.device) -> tuple[torch.dtype, AbstractContextManager[object]]:
    """Return the type that weights are kept in, and the context that computes in the precision asked for."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "tf32"
    if precision in ("tf32", "bf16") and device.type != "cuda":
        raise BadInput(f"--precision {precision} needs a CUDA device; on the CPU use float32 or float64.")
    torch.backends.cudnn.benchmark = True  # shapes stay the same for a whole run
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
    if precision == "bf16":
        return torch.float32, torch.autocast(device.type, torch.bfloat16)
    return torch.float64 if precision == "float64" else torch.float32, nullcontext()


def make_engine(
    backend: Backend, net: Net, sample: Tensor, autocast: AbstractContextManager[object] | None = None
) -> Engine:
    """Return the backend asked for; `auto` stacks on a GPU, and on a CPU where no convolution would suffer."""
    autocast = autocast or nullcontext()
    if backend == "loop":
        return Loop(net, autocast)
    obstacle = why_not_stackable(net, sample)
    if backend == "stacked":
        if obstacle:
            raise BadInput(f"--backend stacked cannot train this network: {obstacle}; use --backend loop.")
        return StackedEngine(net, autocast)
    convolutions = any(isinstance(layer, nn.modules.conv._ConvNd) for _, layer in net.layers())
    if obstacle or (convolutions and sample.device.type == "cpu"):
        return Loop(net, autocast)
    return StackedEngine(net, autocast)


__all__ = [
    "Backend",
    "Crowd",
    "Engine",
    "Job",
    "Loop",
    "Order",
    "Precision",
    "Samples",
    "Stacked",
    "StackedEngine",
    "choose_device",
    "choose_precision",
    "draw_order",
    "make_engine",
    "places",
]
