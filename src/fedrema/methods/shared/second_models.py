"""Second networks: a copy of a network's tensors has their names after a prefix and a dot."""

from torch import Tensor

from fedrema.models.body_and_head import Net, Tensors


def copied(tensors: Tensors, prefix: str) -> Tensors:
    """Return tensors under the names of a copy."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def copy_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors of a copy under their original names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def model_of(net: Net, tensors: Tensors) -> Tensors:
    """Return the network's own tensors among others."""
    return {name: tensors[name] for name in net.initial}


def squared_distance(net: Net, first: Tensors, second: Tensors) -> Tensor:
    """Return ‖w − v‖² over all that the first has of the network's trainable tensors: not batch norm's statistics."""
    names = [name for name in net.initial if name in net.trainable and name in first]
    apart = [(first[name] - second[name]).square().sum() for name in names]
    return sum(apart[1:], start=apart[0])


def per_client(values: Tensor, like: Tensor) -> Tensor:
    """Give one number, or one number per client, the shape to be multiplied with a tensor of theirs."""
    return values.reshape((*values.shape, *[1] * (like.dim() - values.dim())))
