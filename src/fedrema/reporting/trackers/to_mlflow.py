"""MLflow: one run in the experiment `fedrema`, in the store that MLFLOW_TRACKING_URI names, or MLflow's default."""

import time
from pathlib import Path
from typing import Any

from fedrema.reporting.trackers.resumed import known_id, remember_id
from fedrema.runs.directory import RunDirectory

EXPERIMENT = "fedrema"
MOST_PARAMETERS = 100
"""What a store takes at once."""


class Tracker:
    """Sends to an MLflow store."""

    def __init__(self, directory: RunDirectory, config: dict[str, Any], after: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client: Any = MlflowClient()
        known = known_id(directory, "mlflow") if after else None
        if known:
            self.run = known
            self.client.update_run(known, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self.client.create_experiment(EXPERIMENT)
        self.run = self.client.create_run(experiment, run_name=f"{config['method']} {directory.path.name}").info.run_id
        remember_id(directory, "mlflow", self.run)
        told = {"method": config["method"], **config["settings"]}
        parameters = [Param(name, str(value)) for name, value in told.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[first : first + MOST_PARAMETERS])

    def scalars(self, number: int, values: dict[str, float]) -> None:
        """Send the numbers of a round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, [Metric(name, value, now, number) for name, value in values.items()])

    def pictures(self, number: int, files: dict[str, Path]) -> None:
        """Send pictures."""
        for file in files.values():
            self.client.log_artifact(self.run, str(file), "pictures")

    def close(self, finished: bool) -> None:
        """Say how it ended."""
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")
