"""TensorBoard: event files in the run's own folder; `tensorboard --logdir runs` finds all of them."""

from pathlib import Path
from typing import Any

import numpy as np

from fedrema.runs.directory import RunDirectory

FOLDER = "tensorboard"


class Tracker:
    """Writes event files."""

    def __init__(self, directory: RunDirectory, config: dict[str, Any], after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was written after the checkpoint that a run goes on from is hidden.
        purged = after + 1 if after else None
        self.writer: Any = SummaryWriter(str(directory.path / FOLDER), purge_step=purged)
        if not after:
            rows = "\n".join(f"| {name} | {value} |" for name, value in config["settings"].items())
            self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Write the numbers of a round."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)

    def pictures(self, number: int, files: dict[str, Path]) -> None:
        """Write pictures."""
        from matplotlib.image import imread

        for name, file in files.items():
            self.writer.add_image(name, np.asarray(imread(file))[..., :3], number, dataformats="HWC")

    def close(self, finished: bool) -> None:
        """Write out everything."""
        self.writer.close()
