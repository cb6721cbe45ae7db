"""Layers that methods add to a network."""

import math

import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.models.body_and_head import Tensors


def linear_layer(name: str, inputs: int, outputs: int, moment: Moment, like: Tensor) -> Tensors:
    """Return weight and bias of a linear layer, initialised as torch does; identical for all clients."""
    bound, generator = 1 / math.sqrt(inputs), moment.generator(name)

    def uniform(*shape: int) -> Tensor:
        return (bound * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)).to(like)

    return {f"{name}.weight": uniform(outputs, inputs), f"{name}.bias": uniform(outputs)}
