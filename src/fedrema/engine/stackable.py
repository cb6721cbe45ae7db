"""Whether a network can be trained with all clients at once."""

import copy

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedrema.batch_norm import RealSamples
from fedrema.errors import BadInput
from fedrema.net import Net


def why_not_stackable(net: Net, sample: Tensor) -> str | None:
    """Return why a network cannot be trained stacked, naming the layer; None if it can.

    Found by trying: one step of two clients, watching which layer was entered last when it fails.
    """
    for name, layer in net.layers():
        if _counts_padding(layer):
            return f"layer {name!r} ({type(layer).__name__}) takes statistics of whole batches"
    net = copy.deepcopy(net).to(torch.device("cpu"), torch.float32)  # a GPU would load whole libraries for this
    sample = sample.to("cpu", torch.float32)
    entered: list[str] = []
    labels = [(layer, f"{name!r} ({type(layer).__name__})") for name, layer in net.layers()]
    hooks = [layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)) for layer, label in labels]
    params = {name: value.detach().expand(2, *value.shape).clone() for name, value in net.initial.items()}
    leaves = {name: value.requires_grad_(name in net.trainable) for name, value in params.items()}
    net.train(True)
    try:
        with net.looking_at(torch.ones(2)):
            total = vmap(net, in_dims=(0, None))(leaves, sample.expand(2, *sample.shape[1:])).sum()
        torch.autograd.grad(total, [leaves[name] for name in net.trainable], allow_unused=True)
    except (RuntimeError, ValueError, NotImplementedError, BadInput) as error:
        reason = str(error).splitlines()[0][:120]
        return f"layer {entered[-1] if entered else 'unknown'} does not run under vmap ({reason})"
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _counts_padding(layer: nn.Module) -> bool:
    """Tell whether padded samples and clients that have finished would enter a layer's statistics.

    Ours look at real samples only; a user's own kind of batch norm, or instance norm that remembers, does not.
    """
    if isinstance(layer, RealSamples) or not isinstance(layer, _NormBase):
        return False
    return isinstance(layer, _BatchNorm) or layer.track_running_stats
