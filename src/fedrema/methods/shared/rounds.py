"""What clients compute again before they are evaluated if they did not participate in the round."""

import torch

from fedrema.models.body_and_head import Tensors


def newer(stored: Tensors, computed: Tensors) -> Tensors:
    """Return the computed memory if its `round` is later than that of the stored one, else the stored memory."""
    is_newer = computed["round"] > stored["round"]
    return {name: torch.where(is_newer, computed[name], value) for name, value in stored.items()}
