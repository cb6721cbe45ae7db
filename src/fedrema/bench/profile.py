"""Where the time of a training step goes: our own kernels, torch's operators, and waiting."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from fedrema.bench.work import trimmed
from fedrema.config.settings import Settings
from fedrema.data import Federation
from fedrema.engine import choose_device, kernels
from fedrema.engine.devices import torch_threads
from fedrema.runs.execute import build_simulator

STEPS = {"cpu": 1, "cuda": 4}
"""Steps of each client that are profiled. On a GPU the second captures a CUDA graph, which the others replay."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """How the time of a training step is divided."""

    share_outside_kernels: float
    """Share of the time that is not spent in our own kernels."""
    share_waiting: float
    """Share of the time in which the GPU computes nothing; 0 on a CPU."""
    torch_shares: dict[str, float]
    """Share of each of torch's operators (on a GPU: kernels), the largest first. On a CPU: of the time of all
    operators, summed over threads."""
    routed: list[str]
    """Functions that our kernels computed."""
    fell_back: list[str]
    """Functions that were left to torch although our kernels were in use."""

    @property
    def kernels_in_use(self) -> bool:
        """Whether any of our kernels ran."""
        return self.share_outside_kernels < 1


def profiled(settings: Settings, federation: Federation) -> Profile | None:
    """Profile a few steps of local training, after the same number for warm-up; None if the profiler sees nothing."""
    few = dataclasses.replace(settings, local=dataclasses.replace(settings.local, epochs=1))
    on_gpu = choose_device(settings.simulation.device).type == "cuda"
    steps = STEPS["cuda" if on_gpu else "cpu"]
    simulator = build_simulator(few, trimmed(federation, len(federation), steps * settings.local.batch))
    moment, clients = simulator.moment(1), torch.arange(min(len(federation), simulator.chunk))
    cohort = simulator.begin(simulator.cohort(simulator.start(), clients, with_velocity=True), moment)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints lines
    # Without this, clients that train in threads of their own would not be seen.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_threads(simulator.threads):
        with kernels.recording() as routed:
            simulator.local_training(cohort, moment)
        with profile(activities=activities, acc_events=True, experimental_config=every_thread) as profiler:
            simulator.local_training(cohort, moment)
            if on_gpu:
                torch.cuda.synchronize()
    if on_gpu:
        events: Iterable[FunctionEvent] = profiler.events() or ()
        found = gpu_times([event for event in events if event.device_type.name == "CUDA"])
    else:
        found = cpu_times({entry.key: entry.self_cpu_time_total for entry in profiler.key_averages()})
    return found and dataclasses.replace(found, routed=sorted(routed.to_kernels), fell_back=sorted(routed.to_torch))


def cpu_times(times: Mapping[str, float]) -> Profile | None:
    """Return the profile of a CPU, where our kernels do not run, from the time of each operator."""
    operators = {name.removeprefix("aten::"): time for name, time in times.items() if name.startswith("aten::")}
    return Profile(1.0, 0.0, _shares(operators, sum(operators.values())), [], []) if any(operators.values()) else None


def gpu_times(events: list[FunctionEvent]) -> Profile | None:
    """Return the profile of a GPU from the kernels and copies that ran there, which are recognised by their names."""
    events = [event for event in events if not event.is_user_annotation]
    if not events:
        return None
    ours, times = kernels.program_names(), Counter[str]()
    for event in events:
        times[event.name] += event.time_range.end - event.time_range.start
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    other = {name: time for name, time in times.items() if name not in ours}
    # Kernels on several streams may overlap.
    span = max(span, sum(times.values()))
    inside = (sum(times.values()) - sum(other.values())) / span
    return Profile(1 - inside, 1 - sum(times.values()) / span, _shares(other, span), [], [])


def _shares(times: Mapping[str, float], total: float) -> dict[str, float]:
    return {name: time / total for name, time in sorted(times.items(), key=lambda item: -item[1])}
