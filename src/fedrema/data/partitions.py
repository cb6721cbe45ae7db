"""Partitions: assign the samples of a pool to clients, each sample at most once.

Every function returns one array of pool indices per client, in random order, that depends only on its arguments. A
request that the pool cannot satisfy is refused before anything is drawn.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from fedrema.errors import BadInput

Indices = list[NDArray[np.int64]]
_SMALLEST_CLIENT = 5

# Purposes of random draws; each has its own random stream.
_ORDER, _MIX, _MEMBERS, _SIZES, _TEST = range(5)


def grouped(
    labels: NDArray[np.int64], classes: int, clients: int, samples: int, s: float, groups: int, seed: int
) -> Indices:
    """Partition as in the paper: a share `s` of IID data, the rest from the dominant labels of the client's group.

    Consecutive clients form `groups` groups; the dominant labels of neighbouring groups overlap by one.
    """
    counts = grouped_counts(classes, clients, samples, s, groups)
    return _assign_by_class(labels, counts, f"{describe_request(clients, samples)} at s={s}", seed)


def grouped_counts(classes: int, clients: int, samples: int, s: float, groups: int) -> NDArray[np.int64]:
    """Return the number of samples of each class that each client gets with `grouped`: [clients, classes]."""
    # Rounded to 9 decimals before truncation, because 100 * 0.29 is 28.999… in binary.
    iid_samples = int(round(samples * s, 9))
    width = min(classes, classes // groups + 1)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        group = group_of(client, clients, groups)
        dominant = (group * classes // groups + np.arange(width)) % classes
        counts[client] += _evenly(iid_samples, classes, first=client)
        counts[client, dominant] += _evenly(samples - iid_samples, width, first=client)
    return counts


def group_of(client: int, clients: int, groups: int) -> int:
    """Return the group of a client with `grouped`."""
    return groups * client // clients


def dirichlet(labels: NDArray[np.int64], classes: int, clients: int, samples: int, alpha: float, seed: int) -> Indices:
    """Assign `samples` to each client, with class proportions drawn from a Dirichlet distribution.

    When a class is used up, later clients get more of the other classes, in proportion to their shares.
    """
    requested = describe_request(clients, samples)
    check_total(len(labels), clients * samples, requested)
    left = np.bincount(labels, minlength=classes)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        generator = np.random.default_rng([seed, _MIX, client])
        proportions = _dirichlet_shares(generator, classes, alpha)
        missing = samples
        while missing:
            share = np.where(left > 0, proportions, 0.0)
            if share.sum() == 0:  # all classes of this client are used up
                share = left.astype(np.float64)
            taken = np.minimum(generator.multinomial(missing, share / share.sum()), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return _assign_by_class(labels, counts, requested, seed)


def shards(
    labels: NDArray[np.int64], classes: int, clients: int, samples: int, classes_per_client: int, seed: int
) -> Indices:
    """Assign equally many samples of `classes_per_client` classes to each client; classes are used equally often."""
    if classes_per_client > classes:
        raise BadInput(
            f"--classes-per-client {classes_per_client} is more than the {classes} classes of the dataset;"
            f" 1 to {classes} is valid."
        )
    generator = np.random.default_rng([seed, _MEMBERS])
    used = np.zeros(classes, np.int64)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        # The least used classes first; ties in random order.
        chosen = np.lexsort((generator.random(classes), used))[:classes_per_client]
        used[chosen] += 1
        counts[client, chosen] = _evenly(samples, classes_per_client, first=client)
    requested = f"{describe_request(clients, samples)} from {classes_per_client} classes"
    return _assign_by_class(labels, counts, requested, seed)


def iid(labels: NDArray[np.int64], clients: int, samples: int, seed: int) -> Indices:
    """Assign `samples` random samples to each client."""
    return _assign_by_size(len(labels), np.full(clients, samples), describe_request(clients, samples), seed)


def quantity(labels: NDArray[np.int64], clients: int, samples: int, alpha: float, seed: int) -> Indices:
    """Assign random samples in unequal numbers, drawn from a Dirichlet distribution with the mean `samples`."""
    least = min(samples, _SMALLEST_CLIENT)
    spare = clients * (samples - least)
    shares = _dirichlet_shares(np.random.default_rng([seed, _SIZES]), clients, alpha)
    sizes = np.floor(shares * spare).astype(np.int64)
    # The remainder of rounding down goes to the clients with the largest rounding errors.
    sizes[np.argsort(sizes - shares * spare, kind="stable")[: spare - sizes.sum()]] += 1
    return _assign_by_size(len(labels), least + sizes, f"{clients} clients with {samples} samples on average", seed)


def describe_request(clients: int, samples: int) -> str:
    """Return the subject of an error message about a partition."""
    return f"{clients} clients with {samples} samples each"


def check_total(available: int, needed: int, requested: str) -> None:
    """Raise `BadInput` if more samples are needed than available; `requested` describes what needs them."""
    if needed > available:
        raise BadInput(
            f"{requested} need {needed} samples, but the dataset has {available}: lower --samples or --clients."
        )


def draw_test_mask(
    size: int, test_share: float, seed: int, name: str, classes: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Return which of a client's `size` samples are test samples.

    The draw depends on the seed and the client's permanent name. With two or more samples, both splits get at least
    one. With the class of each sample, this holds for each class, and a class with one sample is in the training split.
    """
    test = np.zeros(size, np.bool_)
    if size < 2:
        return test
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    order = np.random.default_rng([seed, _TEST, key]).permutation(size)
    if classes is None:
        test[order[: min(max(int(round(size * test_share, 9)), 1), size - 1)]] = True
        return test
    for found in np.unique(classes):
        members = order[classes[order] == found]
        if len(members) >= 2:
            test[members[: min(max(round(len(members) * test_share), 1), len(members) - 1)]] = True
    return test


def _evenly(amount: int, parts: int, first: int) -> NDArray[np.int64]:
    """Split `amount` into equal parts; the remainder is distributed one by one, starting with part `first`."""
    sizes = np.full(parts, amount // parts, np.int64)
    sizes[(first + np.arange(amount % parts)) % parts] += 1
    return sizes


def _dirichlet_shares(generator: np.random.Generator, parts: int, alpha: float) -> NDArray[np.float64]:
    shares = generator.dirichlet(np.full(parts, alpha))
    if not np.isfinite(shares).all():  # alpha is too small for floats; in the limit, one part has everything
        shares = np.zeros(parts)
        shares[generator.integers(parts)] = 1.0
    return shares


def _assign_by_class(labels: NDArray[np.int64], counts: NDArray[np.int64], requested: str, seed: int) -> Indices:
    """Draw `counts` [clients, classes] samples of each class for each client."""
    clients, classes = counts.shape
    supply, demand = np.bincount(labels, minlength=classes), counts.sum(axis=0)
    check_total(len(labels), int(demand.sum()), requested)
    worst = int(np.argmax(demand - supply))
    if demand[worst] > supply[worst]:
        raise BadInput(
            f"{requested} need {demand[worst]} samples of class {worst}, but the dataset has {supply[worst]}:"
            " lower --samples or --clients."
        )
    assigned: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for label in range(classes):
        order = np.random.default_rng([seed, _ORDER, label]).permutation(np.flatnonzero(labels == label))
        for client_parts, part in zip(assigned, np.split(order, np.cumsum(counts[:, label])), strict=False):
            client_parts.append(part)
    return [
        np.random.default_rng([seed, _ORDER, classes, client]).permutation(np.concatenate(client_parts))
        for client, client_parts in enumerate(assigned)
    ]


def _assign_by_size(available: int, sizes: NDArray[np.int64], requested: str, seed: int) -> Indices:
    """Draw `sizes` [clients] samples of any class."""
    check_total(available, int(sizes.sum()), requested)
    order = np.random.default_rng([seed, _ORDER]).permutation(available)
    return np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])
