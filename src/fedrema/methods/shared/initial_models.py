"""Initial weights of several models: the network's own, and others that are drawn from the same distribution."""

import torch

from fedrema.base.random import torch_generator
from fedrema.core import Moment
from fedrema.models.body_and_head import Net, Tensors


def initial_model(net: Net, number: int, moment: Moment, like: Tensors) -> Tensors:
    """Return the initial tensors of a model that differs from the network's own, and from those of other numbers.

    The entries of each trainable tensor are put into a random order. If they were drawn independently, as usual, the
    result is distributed like another draw, for any network. It depends on the seed and the number only. Data type and
    device are those of the tensors in `like`.
    """
    generator = torch_generator(moment.seed, "initial model", number)
    drawn = {}
    for name, value in net.initial.items():
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        value = value.flatten()[order].view_as(value) if name in net.trainable else value
        drawn[name] = value.to(like[name])
    return drawn
