"""fedrema bench: measurements, their report, and invalid arguments. No test depends on the speed of the machine."""

import copy
import dataclasses
import io
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import fedrema
from fedrema.bench import Ceilings, Measured, Report, Row, Workload, ceilings, measure, textbook
from fedrema.bench.textbook import Textbook, train_client
from fedrema.bench.work import Work, generated, operations_counter, trimmed
from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.cli.bench import Bench
from fedrema.core import Method
from fedrema.data import DataSettings, Federation
from fedrema.models.networks import NETWORKS
from fedrema.runs.execute import Interrupted

CPU = torch.device("cpu")
BF16_RATE_ON_A_CPU = ceilings.bf16_rate_on_a_cpu
TINY = ("--clients", "2", "--samples", "20", "--batch", "5", "--epochs", "1", "--rounds", "1")
FIELDS = {field.name for field in dataclasses.fields(Row)}


@pytest.fixture(autouse=True)
def small_and_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setitem(ceilings.MATRIX, "cpu", 32)
    monkeypatch.setitem(ceilings.COPIED, "cpu", 1024)
    monkeypatch.setattr(ceilings, "bf16_rate_on_a_cpu", lambda: 5e9)  # without starting a process in every test
    return tmp_path


def settings_of(network: str, *arguments: str, method: str = "fedavg"):
    return parse_settings(method, ["--net", network, *TINY, *arguments], plain=True)


def workload(network: str, *arguments: str) -> Workload:
    settings = settings_of(network, *arguments)
    return Workload(network, {"fedavg": settings}, generated(network, settings.data))


def test_several_networks_and_methods_are_measured(capsys, small_and_here):
    command = ["bench", "--network", "mlp,cnn", "--method", "fedrema,fedpac", *TINY, "--json", "speed.json"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for words in (
        "sgemm",
        "bf16",
        "copy",
        "textbook",
        "×textbook",
        "of ceiling",
        "Peak memory",
        "is fastest",
        "none of our kernels",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 100
    found = json.loads((small_and_here / "speed.json").read_text())
    assert set(found) == {"machine", "ceilings", "rows", "peak_memory_bytes", "command"}
    assert found["command"] == "fedrema " + " ".join(command)
    assert set(found["machine"]) == {
        "cpu", "threads", "device", "torch", "python", "fedrema", "platform", "cores", "highest_load"
    }  # fmt: skip
    assert found["machine"]["highest_load"] >= 0
    assert found["machine"]["fedrema"] == fedrema.__version__
    assert found["ceilings"]["bf16"] == {"meaning": "bf16 matrix product", "unit": "GFLOP/s", "value": 5.0}
    assert found["ceilings"]["copy"]["unit"] == "GB/s"
    assert found["peak_memory_bytes"]["process"] > 2**20
    assert [(row["network"], row["method"], row["backend"]) for row in found["rows"]] == [
        (network, method, backend)
        for network in ("mlp", "cnn")
        for method, backend in [
            *((method, backend) for method in ("fedrema", "fedpac") for backend in ("loop", "stacked")),
            ("plain", "textbook"),
        ]
    ]
    for row in found["rows"]:
        assert set(row) == FIELDS
        assert (row["clients"], row["batch"], row["device"], row["precision"]) == (2, 5, "cpu", "float32")
        assert row["ceiling"] == "sgemm"
        assert row["gflops_per_second"] == pytest.approx(row["gflop_per_step"] / row["ms_per_step"] * 1e3)
        assert row["share_of_ceiling"] == pytest.approx(row["gflops_per_second"] / found["ceilings"]["sgemm"]["value"])
        plain = next(r for r in found["rows"] if r["network"] == row["network"] and r["backend"] == "textbook")
        assert row["ratio_to_textbook"] == pytest.approx(plain["ms_per_step"] / row["ms_per_step"])
        brief = row["network"] == "cnn" and row["backend"] == "stacked"
        # 16 of 20 samples to train on: 3 batches of 5; FedPAC has an epoch for the head before those of the body.
        epochs = {"fedrema": 1, "fedpac": 2, "plain": textbook.MOST_SAMPLES}[row["method"]]
        assert row["steps"] == epochs * (1 if brief else 3)
        assert ("slow with convolutions" in row["note"]) == brief
        assert (row["profile"] is None) == (row["backend"] == "textbook")
        if not brief and row["backend"] != "textbook":
            assert set(row["seconds_by_part"]) >= {"train", "aggregate", "evaluate", "other", "logging"}
            around = 1 - row["seconds_by_part"]["train"] / row["seconds_per_round"]
            assert row["share_around_training"] == pytest.approx(around)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_is_accepted(network):
    assert Bench(network=network).networks() == (network,)
    workload(network).check()


@pytest.mark.slow
def test_every_method_can_be_measured(capsys):
    less = ("--retrain-epochs", "1", "--match-steps", "1")  # of CReFF, whose server step is slow with the defaults
    assert main(["bench", "--network", "mlp", "--method", "all", *TINY, *less]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in fedrema.registry())
    assert "–  " in shown  # the plain training loop has no rounds
    assert "Note" not in shown


def test_data_backend_and_settings_of_a_method_are_used(capsys, small_and_here):
    (small_and_here / "mine.toml").write_text('dataset = "digits"\nsamples = 20\n')
    command = ["bench", "--network=mlp", "--method", "fedprox,fedavg", "--mu", "0.5", "--backend", "loop"]
    assert main([*command, "--config", "mine.toml", "--clients", "2", "--rounds", "1", "--json", "speed.json"]) == 0
    rows = json.loads((small_and_here / "speed.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["loop", "loop", "textbook"]
    assert [row["batch"] for row in rows] == [10, 10, 10]  # the default of digits
    assert "Written: speed.json" in capsys.readouterr().out


def test_own_networks_are_measured_and_a_failing_one_is_reported(capsys, small_and_here):
    (small_and_here / "own_nets.py").write_text(
        "from torch import nn\n"
        "from fedrema.models.body_and_head import BodyAndHead\n"
        "def slopes(shape, classes):\n"
        "    assert shape == (3, 32, 32)\n"
        "    body = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.RReLU())\n"
        "    return BodyAndHead(body, nn.Linear(4, classes))\n"
        "class Fussy(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            raise RuntimeError('no more memory\\nand so on')\n"
        "        return x\n"
        "def fussy(shape, classes):\n"
        "    return BodyAndHead(nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), Fussy()), nn.Linear(4, classes))\n"
    )
    networks = "own_nets:fussy,own_nets:slopes,mlp"
    assert main(["bench", "--network", networks, *TINY, "--json", "speed.json"]) == 2
    shown = capsys.readouterr().out
    assert "own_nets:fussy: none of our backends could be measured." in shown
    rows = json.loads((small_and_here / "speed.json").read_text())["rows"]
    notes = {(row["network"].removeprefix("own_nets:"), row["backend"]): row["note"] for row in rows}
    assert notes["fussy", "loop"] == notes["fussy", "textbook"] == "no more memory"
    assert "cannot train this network" in notes["slopes", "stacked"]
    measured = {(row["network"].removeprefix("own_nets:"), row["backend"]) for row in rows if row["ms_per_step"]}
    assert measured == {
        ("slopes", "loop"), ("slopes", "textbook"), ("mlp", "loop"), ("mlp", "stacked"), ("mlp", "textbook")
    }  # fmt: skip
    failed = next(row for row in rows if row["network"] == "own_nets:fussy")
    assert failed["share_of_ceiling"] is failed["ratio_to_textbook"] is failed["seconds_per_round"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--network", "resnet"],
            "--network 'resnet' is unknown; valid are mlp, cnn, alexnet, mlp-bn, cnn-bn",
        ),
        (["--network", "nowhere:net"], "nowhere"),
        (["--network"], "--network"),
        (["--network="], "--network '' is unknown"),
        (["--method", "fedmagic"], "Method 'fedmagic' is unknown"),
        (["fedavg"], "fedavg"),
        (["--net", "cnn"], "--net cnn is not valid here: use --network"),
        (["--out", "run"], "--out is not valid here"),
        (["--json", "nowhere/speed.json"], "--json nowhere/speed.json cannot be written"),
        (["--json", "."], "--json . cannot be written"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--participation", "0.5"], "--participation 0.5 is not valid here: all clients participate in every step"),
        (["--speed", "9"], "fedrema bench has no option --speed"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'."),
        (["--precision", "bf16", "--device", "cpu"], "--precision bf16 needs a CUDA device"),
        (["--device", "cuda"], "--device cuda: this machine has no usable CUDA device"),
        (["--dataset", "digits", "--network", "cnn"], "cannot take samples of shape (1, 8, 8)"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_invalid_requests_are_refused_before_any_measurement(arguments, words, capsys, small_and_here, monkeypatch):
    monkeypatch.setattr("fedrema.bench.measure", lambda *_: pytest.fail("began to measure"))
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fedrema: ")
    assert words in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert not list(small_and_here.iterdir())


def test_an_older_file_is_replaced_but_not_by_an_interrupted_run(small_and_here, monkeypatch):
    file = small_and_here / "speed.json"
    file.write_text("old")

    def stopped(*_, **__):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("fedrema.bench.timing.execute", stopped)
        assert main(["bench", "--network", "mlp", *TINY, "--json", "speed.json"]) == 130
    assert file.read_text() == "old"
    assert main(["bench", "--network", "mlp", *TINY, "--json", "speed.json"]) == 0
    assert json.loads(file.read_text())["rows"]


def reference(model: nn.Module, x, y, steps: int, lr: float) -> list[float]:
    """Train on all of x in every step, with momentum and clipping written out."""
    velocity = [torch.zeros_like(value) for value in model.parameters()]
    losses = []
    for _ in range(steps):
        logits = model(x)
        loss = (torch.logsumexp(logits, 1) - logits[torch.arange(len(y)), y]).mean()
        losses.append(loss.item())
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum((value**2).sum() for value in gradient))
        with torch.no_grad():
            for value, speed, slope in zip(model.parameters(), velocity, gradient, strict=True):
                speed.mul_(0.9).add_(slope * min(1, 10 / (float(norm) + 1e-6)))
                value.sub_(lr * speed)
    return losses


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_plain_loop_is_sgd(scale):
    generator = torch.Generator().manual_seed(0)
    x, y = scale * torch.rand(12, 6, generator=generator, dtype=torch.float64), torch.arange(12) % 3
    model = nn.Linear(6, 3).double()
    before = copy.deepcopy(model.state_dict())
    trained, losses = train_client(
        model, TensorDataset(x, y), 4, 12, 0.01, CPU
    )  # one batch of all samples: their order does not matter
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    again = copy.deepcopy(model)
    assert losses == pytest.approx(reference(again, x, y, 4, 0.01))
    for one, other in zip(trained.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    if scale == 1:
        assert losses[-1] < losses[0]
    _, losses = train_client(model, TensorDataset(x, y), 3, 5, 0.01, CPU)
    assert len(losses) == 3 * 2  # the incomplete batch is dropped
    assert len(train_client(model, TensorDataset(x, y), 3, 100, 0.01, CPU)[1]) == 3


def test_the_plain_loop_is_timed_several_times(monkeypatch):
    monkeypatch.setattr(textbook, "MOST_SAMPLES", 2)
    settings = settings_of("mlp", "--epochs", "2")
    loop = Textbook(settings, generated("mlp", settings.data), CPU)
    for _ in range(4):
        loop.sample()
    assert len(loop.seconds) == 2
    assert loop.steps == 2 * 2 * 3  # samples × epochs × batches


def test_operations_equal_a_count_by_hand():
    settings = settings_of("mlp", "--hidden", "7", "--epochs", "2")
    work = Work.of(settings, generated("mlp", settings.data))
    forward = 2 * (64 * 7 + 7 * 10)
    backward = 2 * (64 * 7 + 7 * 10 * 2)  # the first layer's input needs no gradient
    assert work == Work(steps=6, operations=2 * 2 * 15 * (forward + backward))  # clients × epochs × samples
    torch.set_num_threads(2)  # clients may then train in threads, where operations are not counted
    assert Work.of(settings, generated("mlp", settings.data)) == work


@pytest.mark.parametrize(
    ("layer", "size", "products"),
    [
        (nn.Conv2d(4, 8, 3, padding=1), (5, 6), 5 * 6 * 8 * 4 * 9),  # positions × outputs × inputs × filter
        (nn.Conv2d(8, 8, 3, stride=2, groups=8), (7, 7), 3 * 3 * 8 * 9),  # depthwise: one input per output
        (nn.Conv2d(8, 12, 3, groups=4), (7, 7), 5 * 5 * 12 * 2 * 9),
        (nn.Conv1d(4, 8, 3, groups=2), (9,), 7 * 8 * 2 * 3),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (5, 5), 5 * 5 * 4 * 3 * 9),  # positions of the input
    ],
    ids=str,
)
def test_operations_of_grouped_convolutions_equal_a_count_by_hand(layer, size, products):
    for needs_gradient, passes in ((True, 3), (False, 2)):  # forward, gradient of the weights, gradient of the input
        with operations_counter() as counter:
            layer(torch.rand(2, layer.in_channels, *size, requires_grad=needs_gradient)).sum().backward()
        assert counter.get_total_flops() == passes * 2 * 2 * products  # two samples; a product and a sum


def test_operations_of_unequal_clients():
    settings = settings_of("mlp", "--hidden", "7")
    x, y = np.zeros((19, 1, 8, 8), np.uint8), np.zeros(19, np.int64)
    uneven = Federation.from_arrays(x, y, np.repeat([0, 1], [14, 5]), classes=10, test_share=0.2)
    per_sample = Work.of(settings, generated("mlp", settings.data)).operations / 30
    assert Work.of(settings, uneven) == Work(steps=2, operations=(10 + 4) * per_sample)


def test_trimming_keeps_test_samples_and_the_first_training_samples():
    federation = generated("mlp", DataSettings(clients=3, samples=10))
    small = trimmed(federation, 2, 3)
    assert small.names == federation.names[:2]
    assert small.split("train").count.tolist() == [3, 3]
    assert small.split("test").count.tolist() == [2, 2]
    whole = federation.split("train")
    assert np.array_equal(small.split("train").x, whole.x[:2, :3])


def test_ceilings_are_medians_and_flags_are_restored(monkeypatch):
    rates = iter([3.0, 1.0, 2.0])
    seen = []

    def product_rate(device, dtype, size):
        seen.append((dtype, size, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark))
        return next(rates) * 1e9

    monkeypatch.setattr(ceilings, "product_rate", product_rate)
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.benchmark
    products.allow_tf32 = convolutions.benchmark = True
    try:
        found = Ceilings(CPU, "float32")
        for _ in range(3):
            found.sample()
        assert products.allow_tf32
        assert convolutions.benchmark
    finally:
        products.allow_tf32, convolutions.benchmark = before
    assert found.values()["sgemm"] == 2e9
    assert found.values()["bf16"] == 5e9
    assert seen == [(torch.float32, 32, False, False)] * 3
    assert "dgemm" in Ceilings(CPU, "float64").values()


@pytest.mark.parametrize(("rate", "size"), [(1e6, 128), (2e8, 256), (1e15, 2048)])
def test_a_processor_without_bf16_is_measured_with_small_matrices(monkeypatch, rate, size):
    monkeypatch.setattr(ceilings, "product_rate", lambda device, dtype, size: rate)
    assert ceilings.affordable_size(CPU, torch.bfloat16, 2048) == size


def test_bf16_is_tried_in_a_separate_process(monkeypatch):
    monkeypatch.setattr(ceilings, "_BF16_ON_A_CPU", "print({size} * {threads})")
    assert BF16_RATE_ON_A_CPU() == 32.0 * torch.get_num_threads()
    monkeypatch.setattr(ceilings, "_BF16_ON_A_CPU", "import os; os.kill(os.getpid(), 4)  # {size} {threads}")
    assert BF16_RATE_ON_A_CPU() is None
    monkeypatch.setattr(ceilings, "bf16_rate_on_a_cpu", lambda: None)
    assert Ceilings(CPU, "float32").values()["bf16"] is None


def test_help_shows_the_defaults_of_this_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert not stop.value.code
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("--network", "--method", "--json", "--backend", "--samples", "(default: 600)", "(default: cnn)"):
        assert words in shown


def test_the_summary_equals_a_calculation_by_hand(monkeypatch):
    base = Row("cnn", "plain", "textbook", "cpu", "float32", 20, 100).timed(0.6, Work(4, 200e9), 8)
    assert (base.ms_per_step, base.gflop_per_step) == (600, 50)
    assert base.gflops_per_second == pytest.approx(50 / 0.6)
    ours = dataclasses.replace(base, method="fedrema", backend="loop").timed(0.4, Work(4, 200e9), 8)
    limits = {"sgemm": 250e9, "bf16": None, "copy": 30e9}
    compared = ours.compared(limits, base)
    assert compared.share_of_ceiling == pytest.approx(0.5)
    assert compared.ratio_to_textbook == pytest.approx(1.5)
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    report = Report.of(Measured([compared, base.compared(limits, base)], limits), "fedrema bench")
    assert report.conclusions() == [
        "cnn: loop (fedrema) is fastest, 400 ms per step, 1.50 × the speed of the textbook loop, 50% of sgemm."
    ]
    assert report.peak_memory == {"process": None, "gpu": None}
    assert report.machine["highest_load"] is None
    assert report.as_json()["ceilings"]["bf16"]["value"] is None
    cheaper = dataclasses.replace(compared, method="fedpac", ms_per_step=1.0)  # a different method: not compared
    assert Report.of(Measured([compared, cheaper], limits), "").conclusions() == report.conclusions()
    alone = ours.compared({}, dataclasses.replace(base, ms_per_step=None))
    assert Report.of(Measured([alone], {}), "").conclusions() == ["cnn: loop (fedrema) is fastest, 400 ms per step."]


@pytest.mark.parametrize(("load", "warned"), [(None, False), (1.5, False), (1e6, True)])
def test_a_busy_machine_causes_a_warning(load, warned):
    row = Row("mlp", "fedavg", "loop", "cpu", "float32", 2, 5, note="late")
    console = Console(width=200, file=io.StringIO())
    console.print(Report.of(Measured([row], {"bf16": None}, load), "").show())
    shown = console.file.getvalue()
    assert ("Warning: other programs were running" in shown) == warned
    assert "not available" in shown
    assert "Note: mlp, fedavg, loop: late" in shown


def test_other_methods_are_measured_when_one_diverges():
    load = workload("mlp")
    hot = settings_of("mlp", "--lr", "1e20", "--clip", "0", "--epochs", "20")
    both = Workload("mlp", {"fedavg": load.methods["fedavg"], "hot": hot}, load.federation)
    rows = measure([both], lambda _: None).rows
    assert [bool(row.ms_per_step) for row in rows] == [True, True, False, False, True]
    assert "diverged" in rows[2].note


def test_the_name_of_a_cpu_that_the_system_does_not_list(monkeypatch):
    from fedrema.bench import report

    monkeypatch.setattr(report.Path, "is_file", lambda _: False)
    assert report._cpu()


def test_an_own_method_is_measured(small_and_here, capsys):
    assert issubclass(fedrema.registry()["fedavg"], Method)
    (small_and_here / "bench_method.py").write_text(
        "from dataclasses import dataclass\nfrom fedrema.core import Method\n"
        "@dataclass(frozen=True)\nclass Mine(Method):\n    name = 'mine'\n    title = 'Mine'\n    paper = 'none'\n"
    )
    assert main(["bench", "--network", "mlp", "--method", "bench_method:Mine", *TINY]) == 0
    assert "bench_method:Mine" in capsys.readouterr().out
