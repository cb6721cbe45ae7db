"""Whether a network can be trained with all clients at once."""

import copy

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedrema.net import Net


def why_not_stackable(net: Net, sample: Tensor) -> str | None:
    """Return why a network cannot be trained stacked, naming the layer; None if it can.

    Found by trying: one step of two clients, watching which layer was entered last when it fails.
    """
    for name, layer in net.layers():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            # Padded samples and clients that have finished would enter its statistics.
            return f"layer {name!r} ({type(layer).__name__}) mixes the samples of a batch"
    net = copy.deepcopy(net).to(torch.device("cpu"), torch.float32)  # a GPU would load whole libraries for this
    sample = sample.to("cpu", torch.float32)
    entered: list[str] = []
    labels = [(layer, f"{name!r} ({type(layer).__name__})") for name, layer in net.layers()]
    hooks = [layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)) for layer, label in labels]
    params = {name: value.detach().expand(2, *value.shape).clone() for name, value in net.initial.items()}
    leaves = {name: value.requires_grad_(name in net.trainable) for name, value in params.items()}
    net.train(True)
    try:
        total = vmap(net, in_dims=(0, None))(leaves, sample.expand(2, *sample.shape[1:])).sum()
        torch.autograd.grad(total, [leaves[name] for name in net.trainable], allow_unused=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        return f"layer {entered[-1] if entered else 'unknown'} does not run under vmap ({reason})"
    finally:
        for hook in hooks:
            hook.remove()
    return None
