"""Trains cohorts of clients: one client after another (`loop`) or all as one tensor program (`stacked`)."""

from fedrema.core.options import Backend, Precision
from fedrema.engine.backends import Engine, make_engine
from fedrema.engine.batches import Order, Samples, TrainingPlan, draw_order
from fedrema.engine.cohort import ClientTensors, Cohort, RoundHook, row_index
from fedrema.engine.devices import Arithmetic, choose_device, choose_precision
from fedrema.engine.joint import JointEngine, JointTraining
from fedrema.engine.loop import LoopEngine
from fedrema.engine.stacked import StackedEngine
from fedrema.engine.turns import run_in_turns

REVISIONS = {"cpu": 1, "cuda": 2}
"""Revision by type of device: increased by one with every change of training, scoring or server arithmetic that alters
results of many methods there; older results are then outdated. cuda 2: servers compute in float32 instead of TF32."""

__all__ = [
    "REVISIONS",
    "Arithmetic",
    "Backend",
    "ClientTensors",
    "Cohort",
    "Engine",
    "JointEngine",
    "JointTraining",
    "LoopEngine",
    "Order",
    "Precision",
    "RoundHook",
    "Samples",
    "StackedEngine",
    "TrainingPlan",
    "choose_device",
    "choose_precision",
    "draw_order",
    "make_engine",
    "row_index",
    "run_in_turns",
]
