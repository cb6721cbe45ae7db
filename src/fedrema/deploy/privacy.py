"""What leaves a node, clipped and blurred: Flower's mechanisms, Opacus's accountant.

A round's change of all parameters that travel is cut to length C, and Gaussian noise of standard deviation z·C is added
to each entry. Were all the node's samples replaced by others, the cut change could differ by at most 2·C: each release
is a Gaussian mechanism with noise multiplier z/2, and the accountant composes all releases there ever were.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, compute_clip_model_update

from fedrema.base.files import write_text
from fedrema.deploy.letters import Reply
from fedrema.deploy.protection import Protection
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.runs.checksums import sealed, unsealed
from fedrema.runs.manifest import read_object

ACCOUNT = "privacy account"
RESTORE = "restore it from a backup: without it nobody knows what this node has given away"


class Guard:
    """Covers replies before they leave, and keeps the account of what has been given away."""

    def __init__(self, protection: Protection, file: Path) -> None:
        self.protection, self.file = protection, file
        self.releases: list[float] = []
        """The noise multiplier of every release."""
        if file.exists():
            self.releases = read_account(file)
        if protection.privacy_noise:
            self._accountant()  # a missing package is found out now, not after training

    @property
    def multiplier(self) -> float:
        """The noise multiplier of a release."""
        return self.protection.privacy_noise / 2

    def spent(self, more: int = 0) -> float | None:
        """Return the ε that has been spent, and so many releases more; None without noise, when there is no bound."""
        releases = self.releases + [self.multiplier] * more
        if not releases:
            return 0.0 if self.multiplier else None
        if min(releases) == 0:
            return None
        accountant = self._accountant()
        for multiplier in releases:
            accountant.step(noise_multiplier=multiplier, sample_rate=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a finer search for the order would give a slightly smaller bound
            return float(accountant.get_epsilon(self.protection.privacy_delta))

    def check(self) -> None:
        """Refuse a round that would give away more than the budget."""
        budget = self.protection.privacy_budget
        if budget and (spent := self.spent(more=1)) is not None and spent > budget:
            raise BadInput(f"Its privacy budget is spent: this round would make ε = {spent:.3g}, more than {budget:g}.")

    def cover(self, reply: Reply, begun: Tensors) -> Reply:
        """Return a reply as it may leave; scores and losses, which say something of single samples, stay here."""
        silent = replace(reply, loss=None, received=None, trained=None, epsilon=self.spent())
        if not reply.params:
            return silent
        if reply.extras:
            raise BadInput(
                f"The method sends {', '.join(sorted(reply.extras))} beside parameters, which privacy-clip does not"
                " cover: choose a method that sends parameters only."
            )
        names = sorted(reply.params)
        # In double precision, so that clipping does not fall short of its length by rounding.
        changed = [reply.params[name].double().numpy() for name in names]
        before = [begun[name].cpu().double().numpy() for name in names]
        if any((one != other).any() for one, other in zip(changed, before, strict=True)):
            compute_clip_model_update(changed, before, self.protection.privacy_clip)
        add_gaussian_noise_inplace(changed, self.protection.privacy_noise * self.protection.privacy_clip)
        self.releases.append(self.multiplier)
        account = sealed({"releases": self.releases}, ACCOUNT)
        write_text(self.file, json.dumps(account) + "\n")  # on the disk before anything has left
        params = {
            name: torch.from_numpy(value).to(reply.params[name].dtype)
            for name, value in zip(names, changed, strict=True)
        }
        return replace(silent, params=params, epsilon=self.spent())

    def _accountant(self) -> Any:
        try:
            from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise BadInput("privacy-noise needs an accountant: pip install 'fedrema[privacy]'.") from error
        return RDPAccountant()


def read_account(file: Path) -> list[float]:
    """Return the noise multiplier of every release so far; refuses an account that was altered or damaged."""
    content = read_object(file, "cannot be read", RESTORE)
    # Accounts of older versions have no checksum, and must not be lost for that.
    found = (content if content.keys() == {"releases"} else unsealed(content, file, ACCOUNT, RESTORE)).get("releases")
    valid = isinstance(found, list) and all(isinstance(number, (int, float)) and number >= 0 for number in found)
    if not isinstance(found, list) or not valid:
        raise BadInput(f"{file} is not an account of releases: {RESTORE}.")
    return [float(number) for number in found]
