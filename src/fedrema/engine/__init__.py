"""Trains k clients from a method: one after the other (`loop`) or as one tensor program (`stacked`)."""

from typing import Literal

from torch import Tensor, nn

from fedrema.engine.arithmetic import Arithmetic, Precision, choose_device, choose_precision
from fedrema.engine.batches import Order, draw_order
from fedrema.engine.crowd import Crowd, Engine, Job, Samples, Stacked, places
from fedrema.engine.loop import Loop
from fedrema.engine.stackable import why_not_stackable
from fedrema.engine.stacked import StackedEngine
from fedrema.engine.together import Party, Room
from fedrema.errors import BadInput
from fedrema.net import Net

Backend = Literal["auto", "loop", "stacked"]
REVISIONS = {"cpu": 1, "cuda": 1}
"""By kind of device; raised by one with every change of training, scoring or server arithmetic that alters results of
many methods there: older results then count as outdated."""


def make_engine(backend: Backend, net: Net, sample: Tensor, arithmetic: Arithmetic, clients: int) -> Engine:
    """Return the backend asked for; `auto` stacks on a GPU, and on a CPU where no convolution would suffer."""
    if backend == "loop":
        return Loop(net, arithmetic, clients)
    obstacle = why_not_stackable(net, sample)
    if backend == "stacked":
        if obstacle:
            raise BadInput(f"--backend stacked cannot train this network: {obstacle}; use --backend loop.")
        return StackedEngine(net, arithmetic)
    convolutions = any(isinstance(layer, nn.modules.conv._ConvNd) for _, layer in net.layers())
    if obstacle or (convolutions and sample.device.type == "cpu"):
        return Loop(net, arithmetic, clients)
    return StackedEngine(net, arithmetic)


__all__ = [
    "REVISIONS",
    "Arithmetic",
    "Backend",
    "Crowd",
    "Engine",
    "Job",
    "Loop",
    "Order",
    "Party",
    "Precision",
    "Room",
    "Samples",
    "Stacked",
    "StackedEngine",
    "choose_device",
    "choose_precision",
    "draw_order",
    "make_engine",
    "places",
]
