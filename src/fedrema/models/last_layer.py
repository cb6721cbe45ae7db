"""The last linear layer of a network: its weight and bias by name, and what it is given."""

import torch
from torch import Tensor

from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors


def last_layer(net: Net) -> tuple[str, str]:
    """Return the names of the last linear layer's weight and bias."""
    names = [name for name in net.initial if net.in_head(name) and name in net.trainable]
    if len(names) < 2 or [net.initial[name].dim() for name in names[-2:]] != [2, 1]:
        raise BadInput("This method needs a network whose last layer is linear, with a bias: this one's is not.")
    return names[-2], names[-1]


def inputs_of_last(net: Net, params: Tensors, x: Tensor) -> Tensor:
    """Return what the last linear layer is given [n, d]: with the identity in its place it hands that on."""
    weight, bias = last_layer(net)
    width = params[weight].shape[1]
    identity = torch.eye(width, device=x.device, dtype=params[weight].dtype)
    return net({**params, weight: identity, bias: identity.new_zeros(width)}, x)
