"""Check the Triton kernels for stacked clients on a CUDA machine, and time them.

PYTHONPATH=src python benchmarks/check_kernels.py

Exits with 1 if an error exceeds its limit. Needs only torch and Triton, not the other dependencies of fedrema.
"""

import importlib.util
import statistics
import sys
import time
import types
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import conv2d, cross_entropy

if (
    importlib.util.find_spec("clarabel") is None
):  # fedrema's dependencies are missing: import the kernels without the rest of the package
    for name in ("fedrema", "fedrema.engine"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(__file__).parents[1] / "src" / name.replace(".", "/"))]
        sys.modules[name] = package

from fedrema.engine.kernels import Operators, client_norms, momentum_steps, pooling, products
from fedrema.engine.kernels.pooling import Window
from fedrema.engine.kernels.products import Geometry

CLIENTS, BATCH = 20, 100
LIMITS = {"float32": 1e-5, "tf32": 2e-3, "bf16": 1e-2}
CONVOLUTIONS = {  # channels, outputs, size, kernel, padding
    "alexnet conv1": (3, 32, 32, 3, 1),
    "alexnet conv2": (32, 64, 16, 3, 1),
    "alexnet conv3": (64, 128, 8, 3, 1),
    "alexnet conv4": (128, 256, 8, 3, 1),
    "alexnet conv5": (256, 256, 8, 3, 1),
    "cnn conv1": (1, 32, 28, 5, 0),
    "cnn conv2": (32, 64, 12, 5, 0),
}
LINEAR = {
    "alexnet fc1": (2304, 1024),
    "alexnet fc2": (1024, 512),
    "alexnet fc3": (512, 10),
    "cnn fc1": (1024, 512),
}
POOLS = {  # channels, size, window
    "alexnet pool1": (32, 32, Window((2, 2), (2, 2), (0, 0))),
    "alexnet pool2": (64, 16, Window((2, 2), (2, 2), (0, 0))),
    "alexnet pool3": (256, 8, Window((3, 3), (2, 2), (0, 0))),
    "cnn pool1": (32, 24, Window((2, 2), (2, 2), (0, 0))),
}
DEVICE = torch.device("cuda")


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers [k, n, channels, height, width] with channels last in memory."""
    k, n, channels, height, width = shape
    return torch.randn(k, n, height, width, channels, device=DEVICE).to(dtype).permute(0, 1, 4, 2, 3)


def milliseconds(function, repeats: int = 10, rounds: int = 5) -> float:
    """Return the median time of a call, captured in a graph so that launches do not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return statistics.median(times)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def accuracy(cases: int = 12) -> bool:
    """Compare random shapes with float64, and print the largest errors."""
    worst: dict[tuple[str, str], float] = {}
    generator = torch.Generator().manual_seed(int(time.time()))

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    for _ in range(cases):
        k, n = pick(1, 2, 5), pick(1, 3, 33)
        channels, outputs = pick(1, 3, 5, 16, 17, 33, 64, 128, 256), pick(1, 7, 16, 32, 65, 128, 256)
        kernel = pick(1, 2, 3, 5), pick(1, 3, 4)
        stride, padding = (pick(1, 2), pick(1, 2)), (pick(0, 1, 2), pick(0, 1, 2))
        size = pick(6, 8, 11), pick(5, 8, 9)
        for precision in LIMITS:
            geometry = Geometry(stride, padding, precision)
            dtype = geometry.result
            x, weight = channels_last(k, n, channels, *size, dtype=dtype), channels_last(k, outputs, channels, *kernel)
            bias = torch.randn(k, outputs, device=DEVICE)
            narrow = products.narrowed(weight, geometry)
            y = products.forward(x, narrow, bias, geometry)
            g = channels_last(k, n, outputs, *y.shape[3:], dtype=dtype)
            dx = products.input_gradient(g, narrow, size, dtype, geometry)
            dw, db = products.weight_gradient(x, g, kernel, geometry)
            for c in range(k):
                leaves = [value[c].double().requires_grad_() for value in (x, weight, bias)]
                expected = conv2d(*leaves, stride=stride, padding=padding)
                wanted = torch.autograd.grad(expected, leaves, g[c].double())
                pairs = {"forward": (y[c], expected.detach()), "input": (dx[c], wanted[0])}
                pairs |= {"weight": (dw[c], wanted[1]), "bias": (db[c], wanted[2])}
                for part, (found, right) in pairs.items():
                    error = relative(found, right)
                    worst[precision, part] = max(worst.get((precision, part), 0.0), error if error == error else 9e9)
    for precision, limit in LIMITS.items():
        errors = {part: worst[precision, part] for part in ("forward", "input", "weight", "bias")}
        print(f"error {precision:8} limit {limit:.0e} " + " ".join(f"{p} {e:.1e}" for p, e in errors.items()))
    return all(error < LIMITS[precision] for (precision, _), error in worst.items())


def layers(precision: str) -> None:
    """Time every product of the paper's two networks."""
    print(f"{precision}: ms and TFLOP/s of forward, input gradient, weight gradient with bias")
    total = 0.0
    for label, (channels, outputs, size, kernel, padding) in CONVOLUTIONS.items():
        geometry = Geometry((1, 1), (padding, padding), precision)
        first = channels < 16
        x = channels_last(CLIENTS, BATCH, channels, size, size, dtype=torch.float32 if first else geometry.result)
        weight = channels_last(CLIENTS, outputs, channels, kernel, kernel)
        total += one_layer(label, x, weight, geometry, first)
    for label, (channels, outputs) in LINEAR.items():
        geometry = Geometry(precision=precision, linear=True)
        x, weight = channels_last(CLIENTS, BATCH, channels, 1, 1), channels_last(CLIENTS, outputs, channels, 1, 1)
        total += one_layer(label, x, weight, geometry, first=False)
    print(f"{'all of alexnet':15} {total:.3f} ms")


def one_layer(label: str, x: Tensor, weight: Tensor, geometry: Geometry, first: bool) -> float:
    bias = torch.randn(weight.shape[:2], device=DEVICE)
    narrow = products.narrowed(weight, geometry)
    y = products.forward(x, narrow, bias, geometry)
    g = channels_last(*y.shape, dtype=geometry.result)
    kernel, size = tuple(weight.shape[3:]), tuple(x.shape[3:])
    calls = {"F": lambda: products.forward(x, narrow, bias, geometry)}
    if not first:
        calls["I"] = lambda: products.input_gradient(g, narrow, size, x.dtype, geometry)
    calls["W"] = lambda: products.weight_gradient(x, g, kernel, geometry)
    if not geometry.linear:
        calls["cast"] = lambda: products.narrowed(weight, geometry)
    flops = 2 * y.numel() * weight[0, 0].numel()
    times = {part: milliseconds(call) for part, call in calls.items()}
    print(f"{label:15}", " ".join(f"{part} {t:.3f} ({flops / t / 1e9:4.0f})" for part, t in times.items()))
    return sum(times.values()) if label.startswith("alexnet") else 0.0


def pools() -> None:
    for label, (channels, size, window) in POOLS.items():
        x = channels_last(CLIENTS, BATCH, channels, size, size, dtype=torch.bfloat16)
        y, winners = pooling.forward(x, window)
        g = torch.randn_like(y)
        moved = 2 * x.numel() + 3 * y.numel()
        forward = milliseconds(partial(pooling.forward, x, window))
        backward = milliseconds(partial(pooling.backward, g, winners, (size, size), window))
        pairs = (("F", forward), ("B", backward))
        print(f"{label:15}", " ".join(f"{part} {t:.3f} ms {moved / t / 1e6:5.0f} GB/s" for part, t in pairs))


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 256, 3, padding=1),
        nn.Conv2d(256, 256, 3, padding=1), nn.MaxPool2d(3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(2304, 1024), nn.Linear(1024, 512), nn.Linear(512, 10),
    ).to(DEVICE)  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    ).to(DEVICE)  # fmt: skip


def step(label: str, net: nn.Module, shape: tuple[int, ...], precision: str) -> None:
    """Time one whole step of all clients, captured: loss, gradient, norms, update; the cold start too."""
    params = {}
    for name, value in net.named_parameters():
        stacked = value.detach().expand(CLIENTS, *value.shape)
        if value.dim() == 4:
            stacked = stacked.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        params[name] = stacked.clone().requires_grad_()
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    x = torch.randn(CLIENTS, BATCH, *shape, device=DEVICE)
    y = torch.randint(10, (CLIENTS, BATCH), device=DEVICE)
    rate = torch.full((), 0.01, device=DEVICE)

    def loss(one: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(net, one, (x,)), y)

    def gradient() -> tuple[Tensor, ...]:
        with Operators(precision):
            value = vmap(loss)(params, x, y)
        return torch.autograd.grad(value.sum(), list(params.values()))

    def update(found: tuple[Tensor, ...]) -> None:
        scale = (10.0 / (client_norms(found) + 1e-6)).clamp(max=1)
        with torch.no_grad():
            momentum_steps(
                list(params.values()), list(velocity.values()), found,
                scale=scale, rate=rate, momentum=0.9, weight_decay=1e-4, active=None,
            )  # fmt: skip

    begin = time.perf_counter()
    update(gradient())
    torch.cuda.synchronize()
    cold = time.perf_counter() - begin
    found = gradient()
    numbers = sum(value.numel() for value in found)
    parts = {
        "norms": milliseconds(lambda: client_norms(found)),
        "update": milliseconds(lambda: update(found)),
        "gradient": milliseconds(gradient, 3),
        "step": milliseconds(lambda: update(gradient()), 3),
    }
    line = " ".join(f"{part} {t:.3f}" for part, t in parts.items())
    bandwidth = 4 * numbers / parts["norms"] / 1e6, 24 * numbers / parts["update"] / 1e6
    print(f"{label} {precision:8} ms: {line}; norms {bandwidth[0]:.0f}, update with norms {bandwidth[1]:.0f} GB/s;"
          f" first step {cold:.1f} s")  # fmt: skip


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing to check.")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    step("alexnet step", alexnet(), (3, 32, 32), "bf16")
    step("cnn step    ", cnn(), (1, 28, 28), "bf16")
    layers("bf16")
    pools()
    right = accuracy()
    if "--all" in sys.argv:
        for precision in ("tf32", "float32"):
            layers(precision)
            step("alexnet step", alexnet(), (3, 32, 32), precision)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
