"""TensorBoard, MLflow and Weights & Biases; each package is imported only when its tracker starts."""

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedrema.config.presets import PlainValue
from fedrema.runs.directory import RunDirectory

PROJECT = "fedrema"
"""Experiment in MLflow, project in Weights & Biases."""
IDS_FILE = "tracking.json"
"""Where a run's identifiers in MLflow and Weights & Biases are kept, so that resuming it continues there."""
MOST_PARAMETERS = 100
"""Parameters that an MLflow store accepts in one request."""


class Tracker(Protocol):
    """A service that receives the numbers and figures of one run."""

    name: str

    def __init__(self, directory: RunDirectory, after: int) -> None:
        """Start, or continue after round `after`."""

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Receive the numbers of a round."""

    def figures(self, number: int, files: dict[str, Path]) -> None:
        """Receive figures as PNG files, by name."""

    def close(self, finished: bool) -> None:
        """Flush everything; `finished`: whether all rounds were run."""


class TensorBoard:
    """Writes event files into the run's folder; `tensorboard --logdir runs` finds all of them."""

    name = "tensorboard"

    def __init__(self, directory: RunDirectory, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what was written after the checkpoint from which the run is resumed.
        purged = after + 1 if after else None
        self.writer: Any = SummaryWriter(str(directory.path / self.name), purge_step=purged)
        if not after:
            rows = "\n".join(f"| {name} | {value} |" for name, value in directory.manifest().settings.items())
            self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Write the numbers of a round."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)

    def figures(self, number: int, files: dict[str, Path]) -> None:
        """Write figures."""
        from matplotlib.image import imread

        for name, file in files.items():
            self.writer.add_image(name, np.asarray(imread(file))[..., :3], number, dataformats="HWC")

    def close(self, finished: bool) -> None:
        """Flush everything."""
        self.writer.close()


class MLflow:
    """Sends to the store that MLFLOW_TRACKING_URI names, or to MLflow's default."""

    name = "mlflow"

    def __init__(self, directory: RunDirectory, after: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client: Any = MlflowClient()
        known = _read_id(directory, self.name) if after else None
        if known:
            self.run = known
            self.client.update_run(known, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self.client.create_experiment(PROJECT)
        self.run = self.client.create_run(experiment, run_name=_title(directory)).info.run_id
        _write_id(directory, self.name, self.run)
        parameters = [Param(name, str(value)) for name, value in _settings(directory).items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[first : first + MOST_PARAMETERS])

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Send the numbers of a round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, [Metric(name, value, now, number) for name, value in values.items()])

    def figures(self, number: int, files: dict[str, Path]) -> None:
        """Send figures."""
        for file in files.values():
            self.client.log_artifact(self.run, str(file), "pictures")

    def close(self, finished: bool) -> None:
        """Set the status of the run."""
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


class WandB:
    """Sends to Weights & Biases; with WANDB_MODE=offline everything stays in the run's folder."""

    name = "wandb"

    def __init__(self, directory: RunDirectory, after: int) -> None:
        import wandb

        self.wandb: Any = wandb
        self.run: Any = wandb.init(
            project=PROJECT,
            name=_title(directory),
            dir=str(directory.path),
            config=_settings(directory),
            id=_read_id(directory, self.name) if after else None,
            resume="allow",
            reinit="create_new",
        )
        _write_id(directory, self.name, self.run.id)

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Send the numbers of a round."""
        self.run.log(values, step=number)

    def figures(self, number: int, files: dict[str, Path]) -> None:
        """Send figures."""
        self.run.log({name: self.wandb.Image(str(file)) for name, file in files.items()}, step=number)

    def close(self, finished: bool) -> None:
        """Set the status of the run."""
        self.run.finish(exit_code=0 if finished else 1)


SERVICES: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, MLflow, WandB)}
"""By their names after --track, which are also those of the packages that they need."""


def _title(directory: RunDirectory) -> str:
    return f"{directory.manifest().method} {directory.path.name}"


def _settings(directory: RunDirectory) -> dict[str, PlainValue]:
    manifest = directory.manifest()
    return {"method": manifest.method, **manifest.settings}


def _read_id(directory: RunDirectory, tracker: str) -> str | None:
    found = _read_ids(directory).get(tracker)
    return None if found is None else str(found)


def _write_id(directory: RunDirectory, tracker: str, name: str) -> None:
    directory.write_json(directory.path / IDS_FILE, {**_read_ids(directory), tracker: name})


def _read_ids(directory: RunDirectory) -> dict[str, str]:
    file = directory.path / IDS_FILE
    return directory.read_json(file, "remove it, and trackers start a new run") if file.exists() else {}
