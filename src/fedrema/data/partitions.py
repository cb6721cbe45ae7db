"""Who gets what: each function deals a pool's samples to clients, none of them twice.

All return one array of pool indices per client, in mixed order, and depend on nothing but their arguments.
A request that the pool cannot satisfy fails before anything is drawn, with the numbers that clash.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from fedrema.errors import BadInput

Indices = list[NDArray[np.int64]]
_SMALLEST_CLIENT = 5

# Purposes of randomness: each draws from a stream of its own.
_ORDER, _MIX, _MEMBERS, _SIZES, _TEST = range(5)


def grouped(
    labels: NDArray[np.int64], classes: int, clients: int, samples: int, s: float, groups: int, seed: int
) -> Indices:
    """Deal as the paper does: a share `s` of IID data, the rest from a group's dominant labels.

    Clients form `groups` groups of neighbours; the dominant labels of neighbouring groups overlap by one.
    """
    counts = grouped_counts(classes, clients, samples, s, groups)
    return _deal(labels, counts, f"{clients} clients of {samples} at s={s}", seed)


def grouped_counts(classes: int, clients: int, samples: int, s: float, groups: int) -> NDArray[np.int64]:
    """Return how many samples of each class each client gets under `grouped`: [clients, classes]."""
    # Rounded first, so that 0.29 of 100 is 29 and not the 28 of binary fractions.
    spread = int(round(samples * s, 9))
    width = min(classes, classes // groups + 1)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        group = group_of(client, clients, groups)
        dominant = (group * classes // groups + np.arange(width)) % classes
        counts[client] += _evenly(spread, classes, first=client)
        counts[client, dominant] += _evenly(samples - spread, width, first=client)
    return counts


def group_of(client: int, clients: int, groups: int) -> int:
    """Return the group that a client belongs to under `grouped`."""
    return groups * client // clients


def dirichlet(labels: NDArray[np.int64], classes: int, clients: int, samples: int, alpha: float, seed: int) -> Indices:
    """Deal each client `samples` of a class mixture drawn from a Dirichlet distribution.

    Where a class runs out, the later clients take more of the others, in proportion to their mixture.
    """
    check_total(len(labels), clients * samples, f"{clients} clients of {samples}")
    left = np.bincount(labels, minlength=classes)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        generator = np.random.default_rng([seed, _MIX, client])
        mixture = _mixture(generator, classes, alpha)
        wanted = samples
        while wanted:
            share = np.where(left > 0, mixture, 0.0)
            if share.sum() == 0:  # the client's own classes are all gone
                share = left.astype(np.float64)
            taken = np.minimum(generator.multinomial(wanted, share / share.sum()), left)
            counts[client] += taken
            left -= taken
            wanted -= int(taken.sum())
    return _deal(labels, counts, f"{clients} clients of {samples}", seed)


def shards(
    labels: NDArray[np.int64], classes: int, clients: int, samples: int, classes_per_client: int, seed: int
) -> Indices:
    """Deal each client equally many samples of `classes_per_client` classes, used equally often."""
    if classes_per_client > classes:
        raise BadInput(f"--classes-per-client {classes_per_client} is more than there are; 1 to {classes} is valid.")
    generator = np.random.default_rng([seed, _MEMBERS])
    used = np.zeros(classes, np.int64)
    counts = np.zeros((clients, classes), np.int64)
    for client in range(clients):
        # The least used classes first, in random order among equals.
        chosen = np.lexsort((generator.random(classes), used))[:classes_per_client]
        used[chosen] += 1
        counts[client, chosen] = _evenly(samples, classes_per_client, first=client)
    return _deal(labels, counts, f"{clients} clients of {samples} with {classes_per_client} classes each", seed)


def iid(labels: NDArray[np.int64], clients: int, samples: int, seed: int) -> Indices:
    """Deal each client `samples` at random."""
    return _deal_sizes(len(labels), np.full(clients, samples), f"{clients} clients of {samples}", seed)


def quantity(labels: NDArray[np.int64], clients: int, samples: int, alpha: float, seed: int) -> Indices:
    """Deal at random in unequal sizes from a Dirichlet distribution; the mean size is `samples`."""
    least = min(samples, _SMALLEST_CLIENT)
    spare = clients * (samples - least)
    mixture = _mixture(np.random.default_rng([seed, _SIZES]), clients, alpha)
    sizes = np.floor(mixture * spare).astype(np.int64)
    # What rounding down left over goes to those who lost most by it.
    sizes[np.argsort(sizes - mixture * spare, kind="stable")[: spare - sizes.sum()]] += 1
    return _deal_sizes(len(labels), least + sizes, f"{clients} clients of {samples} on average", seed)


def check_total(available: int, wanted: int, who: str) -> None:
    """Raise if `who`, together, would need more samples than there are."""
    if wanted > available:
        raise BadInput(
            f"{who} would need {wanted} samples but the dataset has {available}: lower --samples or --clients."
        )


def choose_test(size: int, test_share: float, seed: int, name: str) -> NDArray[np.bool_]:
    """Mark which of a client's `size` samples are its test part.

    Drawn from the seed and the client's permanent name. Both parts get at least one sample of two or more.
    """
    test = np.zeros(size, np.bool_)
    if size >= 2:
        amount = min(max(int(round(size * test_share, 9)), 1), size - 1)
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        test[np.random.default_rng([seed, _TEST, key]).permutation(size)[:amount]] = True
    return test


def _evenly(amount: int, parts: int, first: int) -> NDArray[np.int64]:
    """Cut `amount` into equal parts; the remainder goes one by one to the parts from `first` on."""
    sizes = np.full(parts, amount // parts, np.int64)
    sizes[(first + np.arange(amount % parts)) % parts] += 1
    return sizes


def _mixture(generator: np.random.Generator, parts: int, alpha: float) -> NDArray[np.float64]:
    mixture = generator.dirichlet(np.full(parts, alpha))
    if not np.isfinite(mixture).all():  # alpha beyond what floats can do: the limit is a single part
        mixture = np.zeros(parts)
        mixture[generator.integers(parts)] = 1.0
    return mixture


def _deal(labels: NDArray[np.int64], counts: NDArray[np.int64], who: str, seed: int) -> Indices:
    clients, classes = counts.shape
    supply, demand = np.bincount(labels, minlength=classes), counts.sum(axis=0)
    check_total(len(labels), int(demand.sum()), who)
    worst = int(np.argmax(demand - supply))
    if demand[worst] > supply[worst]:
        raise BadInput(
            f"class {worst} would need {demand[worst]} samples for {who} but the dataset has "
            f"{supply[worst]}: lower --samples or --clients."
        )
    hands: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for label in range(classes):
        order = np.random.default_rng([seed, _ORDER, label]).permutation(np.flatnonzero(labels == label))
        for hand, part in zip(hands, np.split(order, np.cumsum(counts[:, label])), strict=False):
            hand.append(part)
    return [
        np.random.default_rng([seed, _ORDER, classes, client]).permutation(np.concatenate(hand))
        for client, hand in enumerate(hands)
    ]


def _deal_sizes(available: int, sizes: NDArray[np.int64], who: str, seed: int) -> Indices:
    check_total(available, int(sizes.sum()), who)
    order = np.random.default_rng([seed, _ORDER]).permutation(available)
    return np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])
