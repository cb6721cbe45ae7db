"""What every client's final model predicts for the client's own test samples, as arrays without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrema.tasks import Predictions, Task


@dataclass(frozen=True)
class FinalPredictions:
    """Outputs of clients' networks on their test samples; the samples of all clients are concatenated."""

    task: Task
    rows: tuple[int, ...]
    """Rows of the clients in the federation, ascending; clients that never joined are left out."""
    offsets: np.ndarray
    """[k + 1] where each client's samples begin, and where the last one's end."""
    outputs: np.ndarray
    """[N, outputs], in the precision of the run: float32 or float64."""
    targets: np.ndarray
    """[N], or [N, L] for labels."""

    @classmethod
    def of_parts(
        cls, task: Task, rows: Sequence[int], parts: Sequence[Predictions], dtype: torch.dtype
    ) -> "FinalPredictions":
        """Return the predictions of several groups of clients, in the order of `rows`."""
        counts = np.concatenate([part.mask.sum(1).numpy() for part in parts])
        outputs = torch.cat([part.outputs[part.mask].to(dtype) for part in parts]).numpy()
        targets = torch.cat([part.target[part.mask] for part in parts]).numpy()
        return cls(task, tuple(rows), np.concatenate([[0], counts.cumsum()]).astype(np.int64), outputs, targets)

    @classmethod
    def from_arrays(cls, task: Task, arrays: Mapping[str, np.ndarray]) -> "FinalPredictions":
        """Return what `as_arrays` returned."""
        rows = tuple(int(row) for row in arrays["rows"])
        return cls(task, rows, arrays["offsets"], arrays["outputs"], arrays["targets"])

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of predictions.npz."""
        rows = np.array(self.rows, np.int64)
        return {"rows": rows, "offsets": self.offsets, "outputs": self.outputs, "targets": self.targets}

    def of(self, row: int) -> Predictions:
        """Return the predictions of the client in a row of the federation [1, n, ...]."""
        place = self.rows.index(row)
        samples = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        outputs, target = torch.from_numpy(self.outputs[samples]).double(), torch.from_numpy(self.targets[samples])
        return Predictions(self.task, outputs[None], target[None], torch.ones(1, len(outputs), dtype=torch.bool))

    def padded(self, length: int) -> Predictions:
        """Return the predictions of all clients, padded to a number of samples, as they were scored in training."""
        counts = torch.from_numpy(np.diff(self.offsets))
        mask = torch.arange(length) < counts[:, None]

        def spread(values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
            found = torch.from_numpy(values).to(dtype)
            whole = found.new_zeros(*mask.shape, *found.shape[1:])
            whole[mask] = found
            return whole

        return Predictions(self.task, spread(self.outputs, torch.float64), spread(self.targets), mask)
