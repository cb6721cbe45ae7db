"""W&B: one run in the project `fedrema`; with WANDB_MODE=offline it stays in the run's own folder."""

from pathlib import Path
from typing import Any

from fedrema.reporting.trackers.resumed import known_id, remember_id
from fedrema.runs.directory import RunDirectory

PROJECT = "fedrema"


class Tracker:
    """Sends to W&B."""

    def __init__(self, directory: RunDirectory, config: dict[str, Any], after: int) -> None:
        import wandb

        self.wandb: Any = wandb
        self.run: Any = wandb.init(
            project=PROJECT,
            name=f"{config['method']} {directory.path.name}",
            dir=str(directory.path),
            config={"method": config["method"], **config["settings"]},
            id=known_id(directory, "wandb") if after else None,
            resume="allow",
            reinit="create_new",
        )
        remember_id(directory, "wandb", self.run.id)

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Send the numbers of a round."""
        self.run.log(values, step=number)

    def pictures(self, number: int, files: dict[str, Path]) -> None:
        """Send pictures."""
        self.run.log({name: self.wandb.Image(str(file)) for name, file in files.items()}, step=number)

    def close(self, finished: bool) -> None:
        """Say how it ended."""
        self.run.finish(exit_code=0 if finished else 1)
