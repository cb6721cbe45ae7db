"""The samples of each step, gathered where they lie: all clients' orders travel to the device at once."""

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.engine.batches import Order
from fedrema.engine.cohort import Samples


def packed(order: Order, device: torch.device) -> Tensor:
    """Return [steps, k, batches per step, batch + 2]: samples' places, how many are real, whether the client is active.

    One tensor, so that a recorded step needs a single copy to be told what to do.
    """
    k, steps, per_step, _ = order.index.shape
    active = np.broadcast_to(np.arange(steps) < order.steps[:, None], (k, steps))
    columns = [order.index, order.sizes[..., None], np.broadcast_to(active[..., None, None], (k, steps, per_step, 1))]
    return torch.from_numpy(np.concatenate(columns, axis=-1).swapaxes(0, 1).copy()).to(device)


def batches_of(now: Tensor, samples: Samples, rows: Tensor) -> tuple[tuple[Batch, ...], Tensor]:
    """Return one step's batches [k, batch, ...], and which clients are active [k]."""
    index, sizes, active = now[..., :-2], now[..., -2], now[:, 0, -1]
    mask = (torch.arange(index.shape[-1], device=now.device) < sizes[..., None]).to(samples.mask_dtype)
    which = rows[:, None]
    batches = [
        Batch(samples.x[which, index[:, place]], samples.y[which, index[:, place]], mask[:, place], index[:, place])
        for place in range(now.shape[1])
    ]
    return tuple(batches), active.to(samples.mask_dtype)
