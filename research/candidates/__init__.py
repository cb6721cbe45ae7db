"""What was tried to be personal where it helps and global where it does not, a class each.

`fedrema run research.candidates:Significant`, or the grid files beside this folder, from the repository's root.
docs/beyond.md says what came of them.
"""

from .base import small_network
from .later import Forgetting, HeldOut, MixedAfter, ReEnter
from .layers import ClassWise, LastLayer, LayerWise
from .peers import PrototypeProbes, Prototypes, Significant, Soft, Updates
from .prior import Doubtful, PriorMatched

__all__ = [
    "ClassWise",
    "Doubtful",
    "Forgetting",
    "HeldOut",
    "LastLayer",
    "LayerWise",
    "MixedAfter",
    "PriorMatched",
    "PrototypeProbes",
    "Prototypes",
    "ReEnter",
    "Significant",
    "Soft",
    "Updates",
    "small_network",
]
