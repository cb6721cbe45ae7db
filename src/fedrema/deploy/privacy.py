"""Local differential privacy: clips what leaves a node, adds Gaussian noise, and keeps account of the spent budget.

A round's change of all parameters that are sent is clipped to norm C, and Gaussian noise of standard deviation z·C is
added to each entry. If all samples of the node were replaced by others, the clipped change could differ by at most 2·C:
each release is a Gaussian mechanism with noise multiplier z/2, and the account composes all releases so far.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedrema.base.tables import read_table
from fedrema.deploy.messages import Reply
from fedrema.deploy.noise import gaussian_noise
from fedrema.deploy.privacy_account import Account, last_known_round
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.models.body_and_head import Tensors
from fedrema.simulation import accounting

NOT_FINITE = "The change of its parameters is not finite, so it cannot be clipped: nothing is sent."


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


class PrivacyGuard:
    """Clips replies and adds noise before they leave the node, and records every release in an account."""

    def __init__(self, settings: PrivacySettings, file: Path) -> None:
        self.settings, self.file = settings, file
        self.account = Account.read(file) if file.exists() else Account()
        if settings.privacy_noise:
            accounting.check_available("privacy-noise")  # before training

    @property
    def multiplier(self) -> float:
        """The noise multiplier of a release."""
        return self.settings.privacy_noise / 2

    def epsilon(self, more: int = 0) -> float | None:
        """Return the ε spent after `more` further releases; None if it is unbounded, because a release has no noise."""
        releases = self.account.releases + [self.multiplier] * more
        if not releases and not self.multiplier:
            return None
        return Account(releases).epsilon(self.settings.privacy_delta)

    def begin(self, used: int, accept_loss: bool = False) -> str:
        """Create the account before the first reply; refuses to add noise if the account of earlier replies is lost.

        An account that is missing, or that ends before the last reply, would promise a smaller ε than was spent. With
        `accept_loss` the account continues nevertheless, and what is returned says so.

        Parameters
        ----------
        used
            The last round in which the server has used a reply of this node, as the server says; 0: none.
        accept_loss
            Whether the owner accepts the loss.
        """
        known = last_known_round(self.file.parent) if self.settings.privacy_noise else None
        note, exists = "", self.file.exists()
        if self.settings.privacy_noise and (
            (not exists and known is not None) or max(used, known or 0) > self.account.last_round
        ):
            what = f"ends before round {max(used, known or 0)}" if exists else "is missing"
            if not accept_loss:
                raise BadInput(
                    f"Its privacy account ({self.file.name}) {what}, although the node has replied before: restore it"
                    " from a backup, or set accept-lost-state in its node.toml; ε then leaves out what is lost."
                )
            note = f"the privacy account {what}; ε leaves out what is lost (accept-lost-state)"
        if note or not exists:
            self._write(self.account.releases, max(used, known or 0))
        return note

    def check_budget(self) -> None:
        """Raise `BadInput` if another release would exceed the budget."""
        budget = self.settings.privacy_budget
        if not budget:
            return
        spent = self.epsilon(more=1)
        if spent is None:
            raise BadInput(
                "Its privacy budget cannot be kept: the node has sent replies without noise before, so ε is infinite."
            )
        if spent > budget:
            raise BadInput(
                f"Its privacy budget is spent: after this round ε would be {spent:.3g}, more than {budget:g}."
            )

    def protect(self, reply: Reply, before: Tensors) -> Reply:
        """Return the reply that leaves the node: clipped, with noise, and without scores and loss.

        Scores and losses are removed because they can reveal single samples. `before` are the parameters before
        training. Without privacy-clip the reply is unchanged, and entered in the account as a release without noise.
        """
        if not self.settings.privacy_clip:
            self.record(reply.round)
            return reply
        without_scores = replace(reply, loss=None, received=None, trained=None, epsilon=self.epsilon())
        if not reply.params:
            self._write(self.account.releases, reply.round)
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
        params = {
            name: torch.from_numpy(value + step).to(reply.params[name].dtype)
            for name, value, step in zip(names, start, released, strict=True)
        }
        if not all(bool(torch.isfinite(value).all()) for value in params.values()):
            raise BadInput(NOT_FINITE)
        self.record(reply.round)
        return replace(without_scores, params=params, epsilon=self.epsilon())

    def record(self, number: int) -> None:
        """Enter a release in the account; it is on disk before the reply leaves."""
        self._write([*self.account.releases, self.multiplier], number)

    def _write(self, releases: list[float], number: int) -> None:
        self.account = Account(releases, max(number, self.account.last_round))
        self.account.write(self.file)

    def _released(self, change: list[np.ndarray]) -> list[np.ndarray]:
        """Return a change, clipped as a whole, with noise on every entry; refuses one that is not finite."""
        clip, noise = self.settings.privacy_clip, self.settings.privacy_noise
        largest = max((float(np.abs(part).max(initial=0.0)) for part in change), default=0.0)
        if not math.isfinite(largest):  # min(1, clip / NaN) would be 1
            raise BadInput(NOT_FINITE)
        # Relative to the largest entry, so that no square overflows.
        norm = largest * math.sqrt(sum(float(np.square(part / largest).sum()) for part in change)) if largest else 0.0
        factor = min(1.0, clip / norm) if norm else 1.0
        clipped = [part * factor for part in change]
        return [part + noise * clip * gaussian_noise(part.shape) for part in clipped] if noise else clipped
