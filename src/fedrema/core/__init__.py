"""What a method consists of: its hooks, and the types that they receive and return."""

from fedrema.core.aggregation import Mean, average, mix
from fedrema.core.method import Method, cross_entropy, overrides, task_loss
from fedrema.core.options import Backend, LocalTraining, Precision, Simulation
from fedrema.core.reports import Alternative, Matrix, Period, Reports, Trace
from fedrema.core.types import (
    Answer,
    Batch,
    Client,
    Gradient,
    Loss,
    Moment,
    Move,
    Number,
    Phase,
    Role,
    State,
    Step,
    Uploads,
    everything,
    gradient_step,
)

__all__ = [
    "Alternative",
    "Answer",
    "Backend",
    "Batch",
    "Client",
    "Gradient",
    "LocalTraining",
    "Loss",
    "Matrix",
    "Mean",
    "Method",
    "Moment",
    "Move",
    "Number",
    "Period",
    "Phase",
    "Precision",
    "Reports",
    "Role",
    "Simulation",
    "State",
    "Step",
    "Trace",
    "Uploads",
    "average",
    "cross_entropy",
    "everything",
    "gradient_step",
    "mix",
    "overrides",
    "task_loss",
]
