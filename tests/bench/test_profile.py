"""The division of a step's time between our kernels and torch's operators, and the functions left to torch."""

import io
import os

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.func import functional_call, vmap

from fedrema.bench import Report, Row
from fedrema.bench.profile import Profile, cpu_times, gpu_times, profiled
from fedrema.bench.work import generated
from fedrema.cli.arguments import parse_settings

if os.environ.get("TRITON_INTERPRET") != "1":  # on a machine with a GPU, where benchmarks/check_kernels.py checks them
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fedrema.engine.kernels import Operators, program_names, recording


def gpu_event(name: str, start: float, end: float, **more) -> FunctionEvent:
    return FunctionEvent(0, name, 0, start, end, device_type=DeviceType.CUDA, **more)


def row(device: str, backend: str, profile: Profile | None) -> Row:
    return Row("cnn", "fedavg", backend, device, "float32", 2, 5, ms_per_step=1.0, profile=profile)


def shown(*rows: Row) -> str:
    console = Console(width=300, file=io.StringIO())
    console.print(Report(list(rows), {}, {"device": "GPU", "cpu": "CPU", "threads": 1, "torch": "", "python": "",
                                          "highest_load": None, "cores": 1}, {}, "").show())  # fmt: skip
    return console.file.getvalue()


@pytest.mark.parametrize(("network", "backend", "operator"), [
    ("cnn", "loop", "convolution_backward"), ("mlp", "loop", "addmm"), ("mlp", "stacked", "bmm"),
])  # fmt: skip
def test_a_step_on_a_cpu_consists_of_torchs_operators(network, backend, operator):
    torch.set_num_threads(2)  # clients of the CNN are then trained in two threads
    arguments = ["--net", network, "--clients", "3", "--samples", "20", "--batch", "5", "--backend", backend]
    settings = parse_settings("fedavg", arguments, plain=True)
    found = profiled(settings, generated(network, settings.data))
    assert not found.kernels_in_use
    assert operator in found.torch_shares
    assert sum(found.torch_shares.values()) == pytest.approx(1)
    assert list(found.torch_shares.values()) == sorted(found.torch_shares.values(), reverse=True)
    assert found.routed == found.fell_back == []
    text = shown(row("cpu", backend, found), row("cpu", "textbook", None))
    assert text.count("On a CPU none of our kernels is used") == 1
    assert f"cnn, fedavg, {backend}: {next(iter(found.torch_shares))} " in text


def test_kernels_on_a_gpu_are_recognised_by_their_names():
    assert {"gathered_product", "weight_gradient", "pooled", "momentum"} <= program_names()
    events = [
        gpu_event("gathered_product", 0, 40),
        gpu_event("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", 50, 70),
        gpu_event("momentum", 70, 80),
        gpu_event("Memcpy DtoD (Device -> Device)", 95, 100),
        gpu_event("a range that covers all", 0, 100, is_user_annotation=True),
    ]
    found = gpu_times(events)
    assert found.kernels_in_use
    assert found.share_outside_kernels == pytest.approx(0.5)
    assert found.share_waiting == pytest.approx(0.25)
    assert [*found.torch_shares.values()] == pytest.approx([0.2, 0.05])
    text = shown(row("cuda", "stacked", found))
    assert "50% of a step's time is outside our kernels (the GPU waits 25%; PyTorch's largest: void at::" in text
    assert "no layer runs as our kernel" in text  # as in float32, where only the optimiser does
    assert "On a CPU" not in text


def test_a_profiler_that_sees_nothing_has_no_result():
    assert gpu_times([]) is None
    assert cpu_times({"ProfilerStep": 3.0}) is None
    assert "share of the time" not in shown(row("cpu", "loop", None))


def test_functions_that_the_kernels_do_not_cover_are_named():
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    x, y = torch.rand(2, 2, 2, 6, 6), torch.tensor([0, 1])
    params = {name: torch.stack([value.detach()] * 2) for name, value in module.named_parameters()}

    def loss(own, x):
        return nn.functional.cross_entropy(functional_call(module, own, (x,)), y)

    with recording() as routed, Operators("float32"):
        vmap(loss)(params, x)
    assert routed.to_kernels == {"conv2d", "linear", "max_pool2d"}
    assert routed.to_torch == {"group_norm", "relu", "conv2d", "cross_entropy"}  # conv2d: the one with groups
    with Operators("float32"):
        torch.tanh(x)
    assert "tanh" not in routed.to_torch  # after the context
    used = Profile(0.4, 0.1, {}, sorted(routed.to_kernels), sorted(routed.to_torch))
    assert "PyTorch's largest: none); left to PyTorch: conv2d, cross_entropy, group_norm, relu." in shown(
        row("cuda", "stacked", used)
    )
