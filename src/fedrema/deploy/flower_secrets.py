"""The cryptography of secure aggregation: Flower's key agreement, encryption and secret sharing, and AES for masks.

Masks are the key stream of AES-256 in counter mode. Flower's own generator is not used: it reduces every key to 32
bits, all of which can be tried.
"""

import base64
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs, public_key_to_bytes

from fedrema.errors import BadInput

SECRET_BYTES = 48
"""Size of a private key on Flower's curve, P-384."""
SEED_BYTES = 32
LONGEST_KEY = 1000
MOST_ATTEMPTS = 200
"""How many random choices of shares are tried if several of them are wrong."""


class KeyPair:
    """A key that is used in one round only."""

    def __init__(self, private: ec.EllipticCurvePrivateKey | None = None) -> None:
        self._private = generate_key_pairs()[0] if private is None else private

    @property
    def public(self) -> bytes:
        """The public half, in PEM."""
        return public_key_to_bytes(self._private.public_key())

    @property
    def secret(self) -> bytes:
        """The private half, as bytes that can be shared."""
        return self._private.private_numbers().private_value.to_bytes(SECRET_BYTES, "big")

    @classmethod
    def from_secret(cls, secret: bytes) -> "KeyPair":
        """Return the key with this private half."""
        return cls(ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP384R1()))

    @classmethod
    def is_secret_of(cls, public: bytes, secret: bytes) -> bool:
        """Whether a secret is the private half that belongs to a public half."""
        try:
            return len(secret) == SECRET_BYTES and cls.from_secret(secret).public == public
        except ValueError:
            return False

    def common_key(self, public: bytes) -> bytes:
        """Return the key that this private half and another public half have in common."""
        return generate_shared_key(self._private, _public_key(public))


def _public_key(public: bytes) -> ec.EllipticCurvePublicKey:
    try:
        if len(public) > LONGEST_KEY:
            raise ValueError
        key = bytes_to_public_key(public)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput("it sent a public key that cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadInput("it sent a public key that is not on the curve P-384")
    return key


def new_seed() -> bytes:
    """Return the seed of a mask, from the operating system's entropy."""
    return os.urandom(SEED_BYTES)


def commitment(seed: bytes) -> bytes:
    """Return a digest by which a reconstructed seed is recognised; it reveals nothing about a random seed."""
    return hashlib.sha256(b"fedrema seed" + seed).digest()


def is_seed_of(digest: bytes, seed: bytes) -> bool:
    """Whether a seed is the one that a node has committed to."""
    return len(seed) == SEED_BYTES and commitment(seed) == digest


def mask(key: bytes, length: int, word: "np.dtype[Any]") -> np.ndarray:
    """Return uniform random numbers modulo 2^32 or 2^64; a key must be used for one mask only."""
    encryptor = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(length * word.itemsize)), dtype=word)


def pair_mask(common: bytes, length: int, word: "np.dtype[Any]") -> np.ndarray:
    """Return the mask that two nodes have in common, from their common key."""
    return mask(base64.urlsafe_b64decode(common), length, word)


def sealed(common: bytes, plaintext: bytes) -> bytes:
    """Encrypt and authenticate a text with the common key of two nodes."""
    return encrypt(common, plaintext)


def opened(common: bytes, ciphertext: bytes) -> bytes:
    """Decrypt what `sealed` returned; refuses everything else."""
    try:
        return decrypt(common, ciphertext)
    except (InvalidToken, TypeError, ValueError) as error:
        raise BadInput("its shares are not encrypted for this node") from error


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares of a secret, of which `threshold` are needed to reconstruct it."""
    return create_shares(secret, threshold, count)


def joined(shares: Mapping[str, bytes], threshold: int, is_secret: Callable[[bytes], bool]) -> bytes:
    """Reconstruct a secret from shares by holder; some of them may be wrong, so `is_secret` decides."""
    longest = max(map(len, shares.values()), default=0)
    usable = [share for _, share in sorted(shares.items()) if len(share) == longest]
    for chosen in _choices(usable, threshold):
        try:
            secret = combine_shares(chosen)
        except ValueError:  # a share is wrong, or two have the same number
            continue
        if is_secret(secret):
            return secret
    raise BadInput(f"too few correct shares of its secret arrived ({len(shares)}, and {threshold} are needed)")


def _choices(shares: list[bytes], threshold: int) -> Iterator[list[bytes]]:
    """Yield different choices of shares: neighbours in a circle, which suffice if one is wrong, then random ones."""
    if len(shares) < threshold:
        return
    for first in range(len(shares) if len(shares) > threshold else 1):
        yield [shares[(first + step) % len(shares)] for step in range(threshold)]
    for _ in range(MOST_ATTEMPTS if len(shares) > threshold else 0):
        yield random.SystemRandom().sample(shares, threshold)  # does not affect the secret
