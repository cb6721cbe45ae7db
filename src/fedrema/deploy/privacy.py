"""Local differential privacy: clips what leaves a node, adds Gaussian noise, and keeps account of the spent budget.

A round's change of all parameters that are sent is clipped to norm C, and Gaussian noise of standard deviation z·C is
added to each entry. If all samples of the node were replaced by others, the clipped change could differ by at most 2·C:
each release is a Gaussian mechanism with noise multiplier z/2, and Opacus's accountant composes all releases so far.
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from fedrema.base.files import write_text
from fedrema.base.tables import read_table
from fedrema.deploy.messages import Reply
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.models.body_and_head import Tensors
from fedrema.runs.checksums import verified, with_checksum
from fedrema.runs.manifest import read_object

if TYPE_CHECKING:
    from opacus.accountants import RDPAccountant

ACCOUNT = "privacy account"
"""Part of the checksum: another file of fedrema cannot be used as an account."""
FORMAT = 1
"""Version of the account's file."""
RESTORE = "restore it from a backup: without it, the budget that this node has spent is unknown"


@dataclass(frozen=True)
class PrivacySettings:
    """The privacy settings in node.toml; by default there is no protection."""

    privacy_clip: float = 0.0
    """Norm to which a round's change is clipped before it leaves the node; 0: no protection."""
    privacy_noise: float = 0.0
    """Standard deviation of the Gaussian noise on what leaves the node, as a multiple of privacy-clip."""
    privacy_delta: float = 1e-5
    """The δ for which the spent ε is computed."""
    privacy_budget: float = 0.0
    """Largest ε that may be spent; a node that would exceed it no longer participates. 0: no limit."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "privacy_clip", "privacy_noise", "privacy_budget")
        above_zero(self, "privacy_delta")
        if self.privacy_delta >= 1:
            raise BadInput(f"privacy-delta must be below 1, got {self.privacy_delta}.")
        if self.privacy_noise and not self.privacy_clip:
            raise BadInput("privacy-noise needs privacy-clip: noise without clipping gives no guarantee.")
        if self.privacy_budget and not self.privacy_noise:
            raise BadInput("privacy-budget needs privacy-noise: without noise there is no budget.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of these settings in node.toml."""
        return tuple(field.name.replace("_", "-") for field in dataclasses.fields(cls))

    @classmethod
    def read(cls, config: Mapping[str, object]) -> "PrivacySettings":
        """Return the privacy settings in a node's configuration; its other settings are ignored."""
        privacy = {name: value for name, value in config.items() if name in cls.names()}
        return read_table(cls, privacy, "node configuration")

    def values(self) -> dict[str, float]:
        """Return the settings by their names in a node's configuration."""
        return {name: float(getattr(self, name.replace("-", "_"))) for name in self.names()}


@dataclass(frozen=True)
class Account:
    """The content of privacy.json."""

    releases: list[float] = field(default_factory=list)
    """The noise multiplier of every release so far."""
    format: int = FORMAT

    @classmethod
    def read(cls, file: Path) -> "Account":
        """Read the account; refuses one that was altered or damaged."""
        content = read_object(file, "cannot be read", RESTORE)
        # Accounts of older versions have no checksum, but remain valid.
        plain = content if content.keys() == {"releases"} else verified(content, file, ACCOUNT, RESTORE)
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


class PrivacyGuard:
    """Clips replies and adds noise before they leave the node, and records every release in an account."""

    def __init__(self, settings: PrivacySettings, file: Path) -> None:
        self.settings, self.file = settings, file
        self.account = Account.read(file) if file.exists() else Account()
        if settings.privacy_noise:
            _accountant()  # report a missing package before training

    @property
    def multiplier(self) -> float:
        """The noise multiplier of a release."""
        return self.settings.privacy_noise / 2

    def epsilon(self, more: int = 0) -> float | None:
        """Return the ε spent after `more` further releases; None if it is unbounded, because a release has no noise."""
        releases = self.account.releases + [self.multiplier] * more
        if not releases:
            return 0.0 if self.multiplier else None
        if min(releases) == 0:
            return None
        accountant = _accountant()
        for multiplier in releases:
            accountant.step(noise_multiplier=multiplier, sample_rate=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a larger range of orders would give a slightly smaller bound
            return float(accountant.get_epsilon(self.settings.privacy_delta))

    def check_budget(self) -> None:
        """Raise `BadInput` if another release would exceed the budget."""
        budget = self.settings.privacy_budget
        if budget and (spent := self.epsilon(more=1)) is not None and spent > budget:
            raise BadInput(
                f"Its privacy budget is spent: after this round ε would be {spent:.3g}, more than {budget:g}."
            )

    def protect(self, reply: Reply, before: Tensors) -> Reply:
        """Return the reply that leaves the node: clipped, with noise, and without scores and loss.

        Scores and losses are removed because they can reveal single samples. `before` are the parameters before
        training.
        """
        without_scores = replace(reply, loss=None, received=None, trained=None, epsilon=self.epsilon())
        if not reply.params:
            return without_scores
        if reply.extras:
            raise BadInput(
                f"The method sends {', '.join(sorted(reply.extras))} in addition to parameters, which privacy-clip"
                " does not cover: choose a method that sends parameters only."
            )
        names = sorted(reply.params)
        # In double precision, so that rounding does not increase the norm of the clipped change.
        start = [before[name].cpu().double().numpy() for name in names]
        change = [reply.params[name].double().numpy() - value for name, value in zip(names, start, strict=True)]
        released = self._released(change)
        self.account = Account([*self.account.releases, self.multiplier])
        self.account.write(self.file)  # before the reply leaves
        params = {
            name: torch.from_numpy(value + step).to(reply.params[name].dtype)
            for name, value, step in zip(names, start, released, strict=True)
        }
        return replace(without_scores, params=params, epsilon=self.epsilon())

    def _released(self, change: list[np.ndarray]) -> list[np.ndarray]:
        """Return a change, clipped as a whole, with noise on every entry."""
        clip, noise = self.settings.privacy_clip, self.settings.privacy_noise
        norm = float(np.sqrt(sum(float(np.square(part).sum()) for part in change)))
        factor = min(1.0, clip / norm) if norm else 1.0
        generator = np.random.default_rng()  # from the operating system's entropy: the noise must not be predictable
        return [part * factor + generator.normal(0.0, noise * clip, part.shape) for part in change]


def _accountant() -> "RDPAccountant":
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise BadInput("privacy-noise needs an accountant: pip install 'fedrema[privacy]'.") from error
    return RDPAccountant()
