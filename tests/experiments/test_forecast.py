"""Forecasts of time and memory, from made-up runs whose numbers can be checked by hand, or from estimates."""

import math

import pytest
import torch

from fedrema.engine.costs import client_bytes
from fedrema.experiments.finished_run import planned_epochs
from fedrema.experiments.forecast import Forecast, Forecaster, duration, operations_per_sample
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import Task
from fedrema.models.networks import Network, build_net
from tests.experiments.made_runs import keep, made_run, made_summary

FILE = """
[settings]
rounds = 10
clients = 4
samples = 40
hidden = 4
epochs = 1
batch = 10
[rows.fedavg]
[rows.fedper]
[rows.fedrema]
"""
OWN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.frozen = nn.Linear(inputs, 3).requires_grad_(False)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 5), nn.ReLU())
        self.head = nn.Linear(5, classes)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


def small(shape, classes):
    return Net(64, classes)
"""


class Known:
    """An experiment, and a store of made-up runs."""

    def __init__(self, folder, text=FILE):
        self.store = Store(folder / "runs")
        (folder / "some.toml").write_text(text)
        self.experiment = read_experiment(folder / "some.toml")

    def task(self, row, *seeds):
        return Task(self.experiment.cell(row, ""), seeds or (0,))

    def keep(self, row, seed, seconds, rounds=10, device="cpu", failed="", curve=(), **changes):
        settings = self.experiment.cell(row, "").settings(seed)
        parts = {"settings": settings.flat() | changes, "epochs": planned_epochs(settings), "failed": failed}
        if not failed:
            parts |= {"ran_on": {"device": device}, "curves": {"seconds": list(curve)}}
            parts["summary"] = made_summary(rounds, seconds)
        keep(self.store, made_run(f"{key_of(settings)}-{len(self.store.keys())}", row, seed, **parts))

    def forecaster(self, workers=1):
        return Forecaster(self.store, "cpu", workers)


@pytest.fixture
def known(tmp_path):
    return Known(tmp_path)


def test_without_finished_runs_the_time_is_estimated(known):
    task = known.task("fedavg", 0, 1)
    assert known.forecaster().known_seconds(task) is None
    guess = known.forecaster().seconds(task)
    assert 0 < guess < math.inf
    assert known.forecaster().seconds(known.task("fedavg")) == pytest.approx(guess / 2)
    found = known.forecaster(workers=4).of([task, known.task("fedper", 0)])
    assert (found.runs, found.guessed) == (3, True)
    assert found.seconds == pytest.approx(1.5 * guess / 4)


def test_the_estimate_grows_with_the_work(known, tmp_path):
    guess = known.forecaster().seconds(known.task("fedavg"))
    changed = {"epochs = 1": "epochs = 3", "clients = 4": "clients = 12", "rounds = 10": "rounds = 30"}
    for before, after in changed.items():
        other = Known(tmp_path, FILE.replace(before, after))
        assert other.forecaster().seconds(other.task("fedavg")) == pytest.approx(3 * guess)


def test_without_finished_runs_nothing_is_estimated_for_own_data(tmp_path):
    known = Known(tmp_path, FILE.replace("clients = 4", "federation = 'mine.npz'"))
    found = known.forecaster().of([known.task("fedavg"), known.task("fedper", 0, 1)])
    assert found == Forecast(3, None, True, None)
    known.keep("fedper", 0, {"train": 20.0})  # a finished run on the same data: the time is known
    assert known.forecaster().of([known.task("fedavg", 0, 1)]) == Forecast(2, 40.0, False, None)


def test_operations_equal_a_count_by_hand():
    # Forward 2·64·4 + 2·4·10, the same for the weights' gradients, and the gradient of the second layer's input.
    network = Network(net="mlp", hidden=4)
    assert operations_per_sample(network, (1, 8, 8)) == 2 * (64 * 4 + 4 * 10) + 2 * (64 * 4 + 4 * 10) + 2 * 4 * 10


def test_own_networks_may_have_layers_that_are_not_trained_or_not_used(tmp_path, monkeypatch):
    (tmp_path / "own_for_forecast.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    known = Known(tmp_path, FILE.replace("hidden = 4", "net = 'own_for_forecast:small'"))
    found = known.forecaster().of([known.task("fedavg")])
    assert 0 < found.seconds < math.inf
    assert operations_per_sample(Network(net="own_for_forecast:small"), (1, 8, 8)) == 2 * 2 * (64 * 5 + 50) + 2 * 50


def test_the_time_from_runs_of_the_method_equals_a_calculation_by_hand(known):
    known.keep("fedavg", 0, {"train": 3.0, "evaluate": 2.0})  # 0.5 seconds per round
    known.keep("fedavg", 1, {"train": 14.0, "other": 1.0}, rounds=20)  # 0.75
    known.keep("fedper", 0, {"train": 100.0})
    known.keep("fedavg", 2, {}, failed="Training diverged.")
    task = known.task("fedavg", 3, 4, 5)  # 30 rounds of 0.625 seconds
    assert known.forecaster().known_seconds(task) == pytest.approx(18.75)
    found = known.forecaster(workers=2).of([task, known.task("fedper", 1)])  # and 10 of 10
    assert (found.runs, found.seconds, found.guessed) == (4, pytest.approx(118.75 / 2), False)


def test_slow_first_rounds_are_ignored(known):
    known.keep("fedavg", 0, {"train": 33.0}, rounds=6, curve=[9, 9, 9, 1, 2, 3])  # as if each had taken 2
    assert known.forecaster().known_seconds(known.task("fedavg", 1)) == pytest.approx(20)


def test_times_of_other_methods_are_used_for_a_method_without_runs(known):
    known.keep("fedavg", 0, {"train": 10.0})
    known.keep("fedper", 0, {"train": 30.0})
    assert known.forecaster().known_seconds(known.task("fedrema")) == pytest.approx(20)


def test_runs_with_the_same_number_of_epochs_are_preferred(known, tmp_path):
    alternating = Known(tmp_path, FILE.replace("[rows.fedrema]", "[rows.fedrema]\nalternate = true"))
    known.keep("fedrema", 0, {"train": 10.0})
    alternating.keep("fedrema", 1, {"train": 50.0})  # two phases with that number of epochs
    assert known.forecaster().known_seconds(known.task("fedrema", 2)) == pytest.approx(10)
    assert alternating.forecaster().known_seconds(alternating.task("fedrema", 2)) == pytest.approx(50)
    (known.store.folder / f"{key_of(known.task('fedrema', 0).runs[0])}-0.json").unlink()
    assert known.forecaster().known_seconds(known.task("fedrema", 2)) == pytest.approx(50)


@pytest.mark.parametrize(
    "changes",
    [{"device": "NVIDIA H200"}, {"clients": 5}, {"samples": 41}, {"epochs": 2}, {"batch": 7}, {"dataset": "mnist"}],
)
def test_runs_on_other_devices_or_with_other_work_are_not_used(changes, known):
    known.keep("fedavg", 0, {"train": 10.0}, **changes)
    assert known.forecaster().known_seconds(known.task("fedavg", 1)) is None
    known.keep("fedavg", 0, {"train": 10.0})
    assert known.forecaster().known_seconds(known.task("fedavg", 1)) == pytest.approx(10)


def test_a_forecast_with_estimated_parts_is_an_estimate(known):
    known.keep("fedavg", 0, {"train": 10.0})
    longer = Known(known.store.folder.parent, FILE.replace("samples = 40", "samples = 50"))
    found = known.forecaster().of([known.task("fedavg", 1), longer.task("fedavg")])
    assert found.guessed
    assert found.seconds > 10


def test_memory_equals_a_calculation_by_hand(known, tmp_path):
    # An mlp of 64·4 + 4 + 4·10 + 10 numbers of four bytes, six times: on a CPU, clients train one at a time.
    found = known.forecaster().of([known.task("fedavg", 0, 1)])
    assert found.gigabytes == pytest.approx(4 * 6 * 4 * (64 * 4 + 4 + 4 * 10 + 10) / 1e9)
    larger = Known(tmp_path, FILE.replace("hidden = 4", "hidden = 40"))
    both = known.forecaster().of([known.task("fedavg"), larger.task("fedavg"), known.task("fedper")])
    assert both.gigabytes == larger.forecaster().of([larger.task("fedavg")]).gigabytes > found.gigabytes


def test_memory_on_a_gpu_includes_all_seeds_that_train_jointly(known):
    forecaster = known.forecaster()
    forecaster.device = "cuda"  # activations are measured on the available device
    net = build_net(Network(hidden=4), (1, 8, 8), 10, seed=0)
    each = client_bytes(net, torch.zeros(10, 1, 8, 8), stacked=True, with_graphs=True)
    known.keep("fedavg", 9, {"train": 10.0}, device="NVIDIA H200")
    assert forecaster.of([known.task("fedavg", 0, 1, 2)]).gigabytes == pytest.approx(3 * 4 * each / 1e9)


@pytest.mark.parametrize(
    ("forecast", "sentence"),
    [
        (Forecast(0, 0.0, False, None), "All runs have finished already."),
        (Forecast(8, 60.4, False, 1.25), "8 runs to do: about 60 seconds, up to 1.2 GB for one cell."),
        (Forecast(8, 0.3, False, 1e-6), "8 runs to do: about a second, up to 0.1 GB for one cell."),
        (
            Forecast(8, 7200.0, True, None),
            "8 runs to do: about 2.0 hours (a rough estimate until the first have finished).",
        ),
        (Forecast(3, None, True, None), "3 runs to do; the time is known after the first."),
        (
            Forecast(3, None, True, 20.0),
            "3 runs to do, up to 20.0 GB for one cell; the time is known after the first.",
        ),
    ],
)
def test_a_forecast_is_printed_as_a_sentence(forecast, sentence):
    assert str(forecast) == sentence


def test_a_forecast_without_tasks_is_empty(known):
    assert known.forecaster().of([]) == Forecast(0, 0, False, None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "a second"), (1.6, "2 seconds"), (89.4, "89 seconds"), (150, "2 minutes"), (151, "3 minutes"),
        (5399, "90 minutes"), (5400, "1.5 hours"), (36000, "10.0 hours"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words
