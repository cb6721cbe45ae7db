"""Second models: the tensors of a copy of the network have the same names after a prefix and a dot."""

from torch import Tensor

from fedrema.models.body_and_head import Net, Tensors


def copied(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors under the names of a copy: with a prefix and a dot."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def copy_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors of a copy under their original names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def network_tensors(net: Net, tensors: Tensors) -> Tensors:
    """Return the tensors that belong to the network itself, without copies and additional tensors."""
    return {name: tensors[name] for name in net.initial}


def squared_distance(net: Net, first: Tensors, second: Tensors) -> Tensor:
    """Return ‖w − v‖² over the network's trainable tensors that `first` has; batch-norm statistics do not count."""
    names = [name for name in net.initial if name in net.trainable and name in first]
    distances = [(first[name] - second[name]).square().sum() for name in names]
    return sum(distances[1:], start=distances[0])
