"""The account of everything that a node has released: `privacy.json`, from which the spent ε follows."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from fedrema.base.files import write_text
from fedrema.deploy.audit import AuditLog, Event
from fedrema.errors import BadInput
from fedrema.runs.checksums import verified, with_checksum
from fedrema.runs.manifest import read_object
from fedrema.simulation import accounting

ACCOUNT = "privacy account"
"""Part of the checksum: another file of fedrema cannot be used as an account."""
FORMAT = 1
"""Version of the account's file."""
RESTORE = "restore it from a backup: without it, the budget that this node has spent is unknown"
STATES = ("round-*.safetensors", "unmasked.json")
"""Files next to the account that a node writes while it answers."""


@dataclass(frozen=True)
class Account:
    """The content of privacy.json."""

    releases: list[float] = field(default_factory=list)
    """The noise multiplier of every release so far; 0 for one without noise."""
    last_round: int = 0
    """The latest round in which the node has replied."""
    format: int = FORMAT

    @classmethod
    def read(cls, file: Path) -> "Account":
        """Read the account; refuses one that was altered or damaged."""
        plain = verified(read_object(file, "cannot be read", RESTORE), file, ACCOUNT, RESTORE)
        try:
            account = msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise BadInput(f"{file} is not an account of releases ({error}): {RESTORE}.") from error
        if "releases" not in plain or not all(multiplier >= 0 for multiplier in account.releases):
            raise BadInput(f"{file} is not an account of releases: {RESTORE}.")
        if account.format != FORMAT:
            raise BadInput(f"{file} has format {account.format}, but this version of fedrema reads {FORMAT}.")
        return account

    def write(self, file: Path) -> None:
        """Write the account; it is on disk when this function returns."""
        write_text(file, json.dumps(with_checksum(dataclasses.asdict(self), ACCOUNT)) + "\n")

    def epsilon(self, delta: float) -> float | None:
        """Return the ε of all releases; None if it is infinite, because one of them has no noise."""
        if not self.releases:
            return 0.0
        if min(self.releases) == 0:
            return None
        return accounting.epsilon(np.sum([accounting.gaussian(each) for each in self.releases], axis=0), delta)


def last_known_round(folder: Path) -> int | None:
    """Return the latest round of a reply that other files of the node know of; None if it has never replied.

    These are the states next to the account, and the audit log of the node's folder.
    """
    rounds = [0 for pattern in STATES for _ in folder.glob(pattern)]
    if (folder.parent / "node.toml").is_file():
        line = AuditLog(folder.parent, "").last(Event.REPLY_SENT, Event.STATISTICS_SENT)
        rounds += [] if line is None else [line.entry.round or 0]
    return max(rounds, default=None)
