"""Trains k clients from a method: one after the other (`loop`) or as one tensor program (`stacked`)."""

import torch
from torch import Tensor

from fedrema.core.options import Backend, Precision
from fedrema.engine.batches import Order, draw_order
from fedrema.engine.cohort import Cohort, Engine, Job, Samples, Stacked, places
from fedrema.engine.joint import Party, Room
from fedrema.engine.loop import MOST_LANES, Loop, lanes
from fedrema.engine.precision import Arithmetic, choose_device, choose_precision
from fedrema.engine.stackable import why_not_stackable
from fedrema.engine.stacked import StackedEngine
from fedrema.engine.threads import SMALL_STEP, operations_per_step, threads_per_operation
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net

REVISIONS = {"cpu": 1, "cuda": 2}
"""By kind of device; raised by one with every change of training, scoring or server arithmetic that alters results of
many methods there: older results then count as outdated. cuda 2: servers compute in float32 instead of TF32."""


def make_engine(
    backend: Backend,
    net: Net,
    sample: Tensor,
    arithmetic: Arithmetic,
    clients: int,
    batch: int,
    threads: int = 0,
) -> Engine:
    """Return the backend asked for; `auto` stacks on a GPU, and on a CPU where a client's step is small.

    On a CPU `threads` share an operation; 0: by the work that there is to share.
    """
    on_cpu = sample.device.type == "cpu"
    operations = operations_per_step(net, sample, batch) if on_cpu else 0.0
    name = backend
    if backend != "loop":
        obstacle = why_not_stackable(net, sample)
        if obstacle and backend == "stacked":
            raise BadInput(f"--backend stacked cannot train this network: {obstacle}; use --backend loop.")
        if backend == "auto":
            name = "loop" if obstacle or operations >= SMALL_STEP else "stacked"
    if not on_cpu:
        return Loop(net, arithmetic) if name == "loop" else StackedEngine(net, arithmetic)
    stacked, available = name == "stacked", torch.get_num_threads()
    inside = threads or threads_per_operation(stacked, operations, clients, lanes(available, clients))
    if stacked:
        return StackedEngine(net, arithmetic, inside)
    beside = 1 if operations < SMALL_STEP else min(available // inside, clients, MOST_LANES)
    return Loop(net, arithmetic, inside, max(1, beside))


__all__ = [
    "REVISIONS",
    "Arithmetic",
    "Backend",
    "Cohort",
    "Engine",
    "Job",
    "Loop",
    "Order",
    "Party",
    "Precision",
    "Room",
    "Samples",
    "Stacked",
    "StackedEngine",
    "choose_device",
    "choose_precision",
    "draw_order",
    "make_engine",
    "places",
]
