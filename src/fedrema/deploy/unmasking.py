"""The server's part of secure aggregation: passes keys and shares on, and unmasks the sum of what arrived."""

import random
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from fedrema.core.fixed_point import WORDS, QuantisedSum
from fedrema.deploy.flower_secrets import KeyPair, is_seed_of, joined, mask, pair_mask
from fedrema.deploy.masking import Neighbourhood, PublicKeys, Rules
from fedrema.errors import BadInput

LONGEST_SHARES = 4096
"""Bytes of the encrypted shares of one node for another."""


class MaskedSum:
    """One sum: the nodes that have announced keys, and what they have sent since.

    Parameters
    ----------
    rules
        What the nodes have approved.
    template
        A sum without contributions.
    keys
        What the nodes have announced, by name.
    """

    def __init__(self, rules: Rules, template: QuantisedSum, keys: Mapping[str, PublicKeys]) -> None:
        self.rules, self.template, self.keys = rules, template, dict(keys)
        self.holders = neighbourhoods(list(keys), rules.holders(len(keys)))
        """The nodes that hold shares of a node's secrets, by its name: itself and its neighbours."""
        self.encrypted: dict[str, dict[str, bytes]] = {}
        """Encrypted shares by source and destination."""
        self.vectors: dict[str, np.ndarray] = {}
        """Masked contributions."""
        self.shares: dict[str, dict[str, bytes]] = {}
        """Revealed shares, by the node whose secret they belong to and by holder."""

    def neighbourhood(self, name: str) -> Neighbourhood:
        """Return what a node needs to know about the others."""
        return Neighbourhood(len(self.keys), [self.keys[each] for each in sorted(self.holders[name])])

    def add_encrypted(self, name: str, encrypted: Mapping[str, bytes]) -> None:
        """Store what a node has encrypted for its neighbours; refuses shares for any others."""
        if encrypted.keys() != self.holders[name] - {name}:
            raise BadInput("it sent shares for other nodes than its neighbours")
        if any(len(each) > LONGEST_SHARES for each in encrypted.values()):
            raise BadInput("its shares are too long")
        self.encrypted[name] = dict(encrypted)

    def encrypted_for(self, name: str) -> dict[str, bytes]:
        """Return the encrypted shares for a node, by source."""
        others = sorted(self.holders[name] - {name})
        return {other: self.encrypted[other][name] for other in others if other in self.encrypted}

    def add_vector(self, name: str, vector: np.ndarray) -> None:
        """Store a masked contribution."""
        self.vectors[name] = vector

    @property
    def survivors(self) -> list[str]:
        """The nodes whose contributions are in the sum."""
        return sorted(self.vectors)

    def add_shares(self, name: str, shares: Mapping[str, bytes]) -> None:
        """Store the shares that a node reveals, by the node whose secret they belong to."""
        if not shares.keys() <= self.holders[name]:
            raise BadInput("it revealed shares of other nodes than its neighbours")
        for owner, share in shares.items():
            self.shares.setdefault(owner, {})[name] = share

    def unmasked(self) -> QuantisedSum:
        """Return the sum; raises `BadInput` if too few shares arrived, or if the masks do not cancel."""
        word, length = WORDS[self.template.fixed_point.bits], self.template.length
        total = np.zeros(length, word)
        for name, vector in self.vectors.items():
            seed = self._joined(name, partial(is_seed_of, self.keys[name].commitment))
            total = total + vector - mask(seed, length, word)
        for name in sorted(self.encrypted.keys() - self.vectors.keys()):
            key = KeyPair.from_secret(self._joined(name, partial(KeyPair.is_secret_of, self.keys[name].mask_key)))
            for other in sorted((self.holders[name] - {name}) & self.vectors.keys()):
                common = pair_mask(key.common_key(self.keys[other].mask_key), length, word)
                total = total - common if other < name else total + common
        return self.template.read(total, len(self.vectors))

    def _joined(self, name: str, is_secret: Callable[[bytes], bool]) -> bytes:
        needed = self.rules.needed(len(self.holders[name]))
        try:
            return joined(self.shares.get(name, {}), needed, is_secret)
        except BadInput as error:
            raise BadInput(f"The contribution of node {name!r} cannot be unmasked: {error}.") from error


def neighbourhoods(names: list[str], holders: int) -> dict[str, set[str]]:
    """Return each node with its neighbours: all nodes, or those next to it in a random circle."""
    if holders >= len(names):
        return {name: set(names) for name in names}
    circle = list(names)
    random.SystemRandom().shuffle(circle)  # does not affect the sum
    reach = range(-(holders // 2), holders // 2 + 1)
    return {name: {circle[(at + step) % len(circle)] for step in reach} for at, name in enumerate(circle)}
