"""What is predicted: tasks with their losses and predictions, and the metrics that score them."""

from fedrema.tasks.metrics import METRICS, Metric, find_metric
from fedrema.tasks.predictions import Predictions
from fedrema.tasks.task import CLASSIFICATION, LOSSES, TASKS, LossName, Task, TaskName

__all__ = [
    "CLASSIFICATION",
    "LOSSES",
    "METRICS",
    "TASKS",
    "LossName",
    "Metric",
    "Predictions",
    "Task",
    "TaskName",
    "find_metric",
]
