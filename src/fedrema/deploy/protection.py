"""What a node's owner asks for in node.toml before anything leaves: how much is cut off, blurred and spent."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedrema.errors import BadInput, above_zero, at_least


@dataclass(frozen=True)
class Protection:
    """Clipping, noise and budget; by default none of it."""

    privacy_clip: float = 0.0
    """Length to which a round's change is cut before it leaves; 0: none of this."""
    privacy_noise: float = 0.0
    """Gaussian noise on what leaves, as a multiple of the length."""
    privacy_delta: float = 1e-5
    """The δ at which the privacy budget is told."""
    privacy_budget: float = 0.0
    """Largest ε that may be spent; the node then takes no further part. 0: no limit."""

    def __post_init__(self) -> None:
        """Refuse what protects nothing."""
        at_least(0, self, "privacy_clip", "privacy_noise", "privacy_budget")
        above_zero(self, "privacy_delta")
        if self.privacy_delta >= 1:
            raise BadInput(f"privacy-delta must be below 1, got {self.privacy_delta}.")
        if self.privacy_noise and not self.privacy_clip:
            raise BadInput("privacy-noise needs privacy-clip: without a length to cut to, noise promises nothing.")
        if self.privacy_budget and not self.privacy_noise:
            raise BadInput("privacy-budget needs privacy-noise: without noise there is no budget.")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Protection":
        """Take it out of a node's configuration."""
        return cls(**{name.replace("-", "_"): float(config[name]) for name in PRIVACY if name in config})

    def config(self) -> dict[str, float]:
        """Return it as a node's configuration."""
        return {name: float(getattr(self, name.replace("-", "_"))) for name in PRIVACY}


PRIVACY = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Protection))
"""What these are called in node.toml."""
