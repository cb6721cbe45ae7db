"""A node's part of secure aggregation (SecAgg+, Bell et al., 2020): it masks its contribution to one sum.

A contribution is masked with a random vector of its own, and with one that it has in common with each of its
neighbours: one of the two adds it, the other subtracts it. Shares of the secrets behind the masks are distributed among
the neighbours beforehand, so that the sum can be unmasked if some of them fail. For each of its neighbours a node later
reveals either a share of the own mask, if the neighbour's contribution arrived, or of the common masks, if it did not,
and never both.

The server is not trusted. A node counts other nodes only if they have signed their keys for this sum, and have
encrypted shares for the key that this node has announced for it. What is signed contains a digest of the received model
and a number that is used for one sum only: nodes with different models, or with keys of an earlier sum, do not mask
together.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np

from fedrema.base.files import write_text
from fedrema.core.fixed_point import WORDS, QuantisedSum
from fedrema.deploy.flower_secrets import (
    KeyPair,
    commitment,
    mask,
    new_seed,
    opened,
    pair_mask,
    sealed,
    split,
)
from fedrema.deploy.limits import AUTOMATIC_NEIGHBOURS, quoted
from fedrema.deploy.refusals import Refusal, Refused
from fedrema.deploy.tls import is_signed_by
from fedrema.errors import BadInput
from fedrema.runs.manifest import read_object

PURPOSE = "fedrema secure aggregation 2"
"""Part of what is signed, so that no other signature of a node can be used."""
SESSION_BYTES = 16


@dataclass(frozen=True)
class Rules:
    """What all nodes of a federation have approved."""

    threshold: float
    """The secrets of a node are reconstructed from more than this share of its holders: itself and its neighbours."""
    neighbours: int
    """Number of neighbours of a node; 0: `AUTOMATIC_NEIGHBOURS`."""
    least: int
    """Smallest number of nodes in a sum."""
    federation: str
    """Digest of the method and the settings."""

    def holders(self, participants: int) -> int:
        """Return how many nodes hold shares of a node's secrets, itself included."""
        return min(participants, (self.neighbours or AUTOMATIC_NEIGHBOURS) + 1)

    def needed(self, holders: int) -> int:
        """Return how many shares are needed.

        With more than half, no two separate groups of nodes have enough of them. With more than two thirds, a server
        with which fewer than a third of the holders cooperate cannot obtain both secrets of a node either (Bonawitz et
        al., 2017).
        """
        return math.floor(self.threshold * holders) + 1


@dataclass(frozen=True)
class SumId:
    """What distinguishes a sum from all others; all nodes in it sign the same."""

    number: int
    """The round."""
    session: bytes
    """A random number of the server for this attempt at the round."""
    model: bytes
    """Digest of everything that all nodes receive before they train."""


class PublicKeys(msgspec.Struct, frozen=True):
    """What a node announces for one sum; signed with its own key."""

    name: str
    mask_key: bytes
    """Public half of the key from which the common masks follow."""
    share_key: bytes
    """Public half of the key with which shares are encrypted."""
    commitment: bytes
    """Digest of the seed of its own mask."""
    signature: bytes = b""

    def signed_text(self, federation: str, sum_id: SumId) -> bytes:
        """Return what the signature is for."""
        keys = (self.name, self.mask_key, self.share_key, self.commitment)
        return msgspec.msgpack.encode([PURPOSE, federation, sum_id.number, sum_id.session, sum_id.model, *keys])


class Neighbourhood(msgspec.Struct, frozen=True):
    """What the server tells a node after all nodes have announced their keys."""

    participants: int
    """How many nodes have announced keys."""
    keys: list[PublicKeys]
    """Those of the node and its neighbours."""


class Shares(msgspec.Struct, frozen=True):
    """Shares of one node's secrets for another node; encrypted when they are sent."""

    source: str
    destination: str
    number: int
    seed: bytes
    mask_key: bytes


class Stage(IntEnum):
    """The last stage that a node has answered."""

    ANNOUNCED = 0
    SHARED = 1
    MASKED = 2
    UNMASKED = 3


class UnmaskedRounds:
    """For which nodes this node has unmasked each round; in a file, so that it is known after a restart.

    From two sums of one round over different nodes, the server could compute the difference: the contribution of the
    nodes that are in one of them only.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def record(self, number: int, survivors: list[str]) -> None:
        """Record the nodes of a round's sum; refuses other nodes than before."""
        known = read_object(self.file, "cannot be read") if self.file.exists() else {}
        digest = hashlib.sha256(json.dumps(sorted(survivors)).encode()).hexdigest()
        if known.get(str(number), digest) != digest:
            why = (
                f"Round {number} was unmasked before for a sum over other nodes, and the difference of both sums would"
                f" reveal single contributions: start the nodes of that sum, or delete {self.file.name} on the node."
            )
            raise Refused(Refusal.UNMASKED, why, number=number)
        write_text(self.file, json.dumps({**known, str(number): digest}, indent=0) + "\n")


class MaskingSession:
    """One contribution to one sum; every stage is answered once, and in order.

    Parameters
    ----------
    name
        The node.
    sum_id
        Which sum it is.
    rules
        What the owner has approved.
    contribution
        The quantised contribution of this node.
    sign
        Signs a text with the node's own key.
    peers
        The public keys (PEM) of the other nodes by name; no other node is counted.
    unmasked
        For which nodes each round was unmasked.
    """

    def __init__(
        self,
        name: str,
        sum_id: SumId,
        rules: Rules,
        contribution: QuantisedSum,
        sign: Callable[[bytes], bytes],
        peers: Mapping[str, bytes],
        unmasked: UnmaskedRounds,
    ) -> None:
        self.name, self.sum_id, self.rules, self.contribution = name, sum_id, rules, contribution
        self.number = sum_id.number
        self.peers, self.unmasked = peers, unmasked
        self.stage = Stage.ANNOUNCED
        self._mask_key, self._share_key, self._seed = KeyPair(), KeyPair(), new_seed()
        keys = PublicKeys(name, self._mask_key.public, self._share_key.public, commitment(self._seed))
        self.keys = msgspec.structs.replace(keys, signature=sign(keys.signed_text(rules.federation, sum_id)))
        self._neighbours: dict[str, PublicKeys] = {}
        self._holders = 0
        """How many nodes hold shares of this node's secrets, itself included."""
        self._knows_all = False
        """Whether all nodes that can be in the sum are neighbours."""
        self._shares: dict[str, Shares] = {}
        """Shares of the secrets of the neighbours and of its own, by the node whose secrets they are."""

    def share(self, given: Neighbourhood) -> dict[str, bytes]:
        """Return encrypted shares of this node's secrets for each neighbour."""
        self._begin(Stage.SHARED)
        rules, names = self.rules, [each.name for each in given.keys]
        if given.participants < rules.least:
            raise BadInput(f"{given.participants} nodes are too few for a sum: the owner has approved {rules.least}.")
        if len(set(names)) != len(names) or len(names) != rules.holders(given.participants):
            raise BadInput(
                f"The server names {len(names)} holders of shares among {given.participants} nodes, not"
                f" {rules.holders(given.participants)}."
            )
        if self.keys not in given.keys:
            raise BadInput("The server names other keys for this node than it has announced.")
        self.contribution.fixed_point.check_samples(self.contribution.samples, given.participants)
        used = [key for each in given.keys for key in (each.mask_key, each.share_key)]
        if len(set(used)) != len(used):
            raise BadInput("Two nodes announce the same key.")
        for each in given.keys:
            self._check(each)
        self._neighbours = {each.name: each for each in given.keys if each.name != self.name}
        self._holders, self._knows_all = len(names), len(names) == given.participants
        return self._distributed(sorted(names))

    def _check(self, keys: PublicKeys) -> None:
        """Refuse the keys of a node that has not signed them for this sum."""
        if keys.name == self.name:
            return
        if keys.name not in self.peers:
            raise BadInput(f"There is no key of node {quoted(keys.name)!r} in this node's folder peers.")
        text = keys.signed_text(self.rules.federation, self.sum_id)
        if not is_signed_by(self.peers[keys.name], text, keys.signature):
            raise BadInput(
                f"The keys of node {quoted(keys.name)!r} are not signed by it for this sum: they are from another sum,"
                " or it has received another model than this node."
            )

    def _distributed(self, names: list[str]) -> dict[str, bytes]:
        needed = self.rules.needed(len(names))
        seeds = split(self._seed, needed, len(names))
        keys = split(self._mask_key.secret, needed, len(names))
        encrypted = {}
        for name, seed, key in zip(names, seeds, keys, strict=True):
            shares = Shares(self.name, name, self.number, seed, key)
            if name == self.name:
                self._shares[name] = shares
                continue
            common = self._share_key.common_key(self._neighbours[name].share_key)
            encrypted[name] = sealed(common, msgspec.msgpack.encode(shares))
        return encrypted

    def mask(self, encrypted: Mapping[str, bytes]) -> np.ndarray:
        """Return the masked contribution, after storing the shares of the neighbours that are still there."""
        self._begin(Stage.MASKED)
        for name, ciphertext in encrypted.items():
            if name not in self._neighbours:
                raise BadInput(f"The server sends shares of {quoted(name)!r}, which is not a neighbour of this node.")
            common = self._share_key.common_key(self._neighbours[name].share_key)
            self._shares[name] = self._read(name, opened(common, ciphertext))
        needed = self._needed
        if len(self._shares) < needed:
            raise BadInput(f"Only {len(self._shares)} of at least {needed} holders of shares are left.")
        contribution = self.contribution
        word, length = WORDS[contribution.fixed_point.bits], contribution.length
        masked: np.ndarray = contribution.vector() + mask(self._seed, length, word)
        for name in sorted(encrypted):
            common_mask = pair_mask(self._mask_key.common_key(self._neighbours[name].mask_key), length, word)
            masked = masked + common_mask if self.name < name else masked - common_mask
        return masked

    def _read(self, name: str, text: bytes) -> Shares:
        try:
            shares = msgspec.msgpack.decode(text, type=Shares)
        except msgspec.DecodeError as error:
            raise BadInput(f"The shares of node {name!r} cannot be read.") from error
        if (shares.source, shares.destination, shares.number) != (name, self.name, self.number):
            raise BadInput(f"The shares of node {name!r} are for another node or another round.")
        return shares

    def unmask(self, survivors: list[str]) -> dict[str, bytes]:
        """Return a share for itself and each neighbour, by name.

        It belongs to the own mask of a node whose contribution is in the sum, and to the common masks of another one.
        The secrets are deleted, so that no other question about this sum can be answered.
        """
        self._begin(Stage.UNMASKED)
        # Only these count: they have signed their keys and encrypted shares for this node. A name that the server
        # invents has done neither. The contribution of such a node is in what can be unmasked, because it cancels the
        # mask that it has in common with this node.
        alive = [name for name in self._shares if name in survivors]
        needed = self._needed
        if self.name not in survivors or len(set(survivors)) != len(survivors):
            raise BadInput("The server names nodes of the sum twice, or leaves this one out.")
        strangers = sorted(set(survivors) - self._neighbours.keys() - {self.name})
        if self._knows_all and strangers:
            raise BadInput(f"The server counts {quoted(strangers[0])!r}, which has not announced keys for this sum.")
        if len(alive) < needed:
            raise BadInput(f"Only {len(alive)} of at least {needed} holders of shares are in the sum.")
        self.unmasked.record(self.number, survivors)
        shares, self._shares = self._shares, {}
        self._seed = b""
        return {name: each.seed if name in survivors else each.mask_key for name, each in shares.items()}

    @property
    def _needed(self) -> int:
        """How many nodes known to this one must be in the sum."""
        return max(self.rules.needed(self._holders), self.rules.least)

    def _begin(self, stage: Stage) -> None:
        """Enter a stage; after an error in it, the session cannot be continued."""
        if self.stage != stage - 1:
            raise BadInput(
                f"The stage {stage.name.lower()!r} of round {self.number} was answered before, or it is not its turn."
            )
        self.stage = stage
