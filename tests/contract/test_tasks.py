"""Properties that every registered method must have in every task that it supports."""

import functools
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from fedrema.core import LocalTraining, Method
from fedrema.data import Federation
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.fedrep import FedRep
from fedrema.runs.checkpoint import load_state, save_state
from fedrema.simulation.records import RoundRecord
from fedrema.tasks import TASKS, Task, TaskName
from tests.fixtures import label, make_simulator, snapshot
from tests.quick import quick

METHODS = [*(quick(name) for name in registry()), FedReMa(alternate=True, probe_per_client=True)]
FEW = ("fedavg", "fedrema", "ditto", "fedala", "fedbabu", "scaffold")
"""Methods that are tested in every task; the others only in a regression."""
NEED_CLASSES = {
    "creff",
    "cwfedavg",
    "fedas",
    "fedclassavg",
    "feddistill",
    "fedem",
    "fedfa",
    "fedkd",
    "fedpac",
    "fedprior",
    "fedproto",
    "fedrod",
    "gpfl",
    "knn-per",
    "pfedfda",
}
LOCAL = LocalTraining(epochs=1, batch=5, lr=0.05, weight_decay=0.01, clip=0.5)
ROUNDS = 2


@functools.cache
def federation_for(task: TaskName) -> Federation:
    """Return clients of unequal size with targets that depend on the inputs."""
    generator = np.random.default_rng(0)
    counts = (14, 6, 19, 9)
    x = generator.normal(size=(sum(counts), 5)).astype(np.float32)
    client = np.repeat(np.arange(len(counts)), counts)
    score = x @ generator.normal(size=(5, 3)) + 0.3 * client[:, None]
    targets = {
        "multiclass": score.argmax(1),
        "binary": (score[:, 0] > 0).astype(int),
        "multilabel": (score > 0).astype(int),
        "ordinal": np.digitize(score[:, 0], [-2.0, 0.0, 2.0]),
        "regression": 50 + 9 * score[:, 0],
        "count": generator.poisson(np.exp(0.3 * score[:, 0])),
    }
    return Federation.from_arrays(x, targets[task], client, task=task)


CASES = [
    pytest.param(method, task, id=f"{label(method)}-{task}")
    for task in TASKS
    if task not in ("multiclass", "binary")  # tests/contract/test_methods.py
    for method in METHODS
    if method.supports(federation_for(task).task) and (task == "regression" or method.name in FEW)
]


def simulator_of(method: Method, task: TaskName, **settings):
    return make_simulator(method, federation_for(task), LOCAL, **{"rounds": ROUNDS, **settings})


@pytest.mark.parametrize(("method", "task"), CASES)
def test_backends_agree_and_a_resumed_run_is_bit_identical(method, task, tmp_path):
    simulator = simulator_of(method, task)
    state = simulator.start()
    records = [simulator.run_round(state).record]
    save_state(state, tmp_path / "state.safetensors", "test")
    records += [each.record for each in simulator.run(state)]
    whole = snapshot(state)
    assert all(torch.isfinite(value).all() for value in whole.values())
    assert records[-1].primary.value is not None
    assert list(records[-1].metrics) == list(federation_for(task).task.usual)
    assert msgspec.json.decode(msgspec.json.encode(records), type=list[RoundRecord]) == records

    resumed = load_state(tmp_path / "state.safetensors", "test")
    last = [each.record for each in simulator_of(method, task).run(resumed)]
    found = snapshot(resumed)
    assert whole.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in whole.items())
    assert last[-1].metrics == records[-1].metrics

    looped = simulator_of(method, task, backend="loop")
    other = looped.start()
    for record, one in zip(records, looped.run(other), strict=True):
        assert record.loss == pytest.approx(one.record.loss, abs=1e-9)
        for name, metric in record.metrics.items():
            assert one.record.metrics[name].clients == pytest.approx(metric.clients, abs=1e-9)
    for name, value in snapshot(other).items():
        assert torch.allclose(value, whole[name], rtol=0, atol=1e-9), name


def test_methods_that_need_classes_are_known():
    found = {name for name, kind in registry().items() if not kind().supports(Task("regression"))}
    assert found == NEED_CLASSES
    for method in METHODS:
        supported = [name for name in get_args(TaskName) if method.supports(Task(name, 2))]
        assert supported == (["multiclass", "binary"] if method.name in NEED_CLASSES else list(TASKS))


@pytest.mark.parametrize("task", ["multilabel", "ordinal", "regression", "count"])
def test_a_method_that_does_not_support_a_task_is_refused_in_one_sentence(task):
    for method in (*(quick(name) for name in sorted(NEED_CLASSES)), FedReMa(align=1.0)):
        with pytest.raises(BadInput) as refused:
            simulator_of(method, task)
        assert str(refused.value) == (
            f"{method.called()} does not support the task {task}; fedrema methods lists the tasks of each method."
        )


@pytest.mark.parametrize("method", [*(quick(name) for name in FEW), FedRep(finetune_epochs=1)], ids=label)
def test_a_regression_is_learnt(method):
    simulator = simulator_of(method, "regression", rounds=15)
    records = [each.record for each in simulator.run(simulator.start())]
    assert records[-1].loss < 0.7 * records[0].loss
    assert records[-1]["rmse"] < records[0]["rmse"]
    assert records[-1]["r2"] > records[0]["r2"]


@pytest.mark.parametrize("name", ["fedavg", "fedrema", "fedproto", "fedrod", "fedkd", "ditto"])
def test_weights_of_classes_give_the_same_in_both_backends(name):
    federation = federation_for("multiclass")
    local = LocalTraining(epochs=1, batch=5, lr=0.05, class_weights="balanced")
    found = []
    for backend in ("loop", "stacked"):
        simulator = make_simulator(quick(name), federation, local, rounds=ROUNDS, backend=backend, metrics="auc,f1")
        state = simulator.start()
        records = [each.record for each in simulator.run(state)]
        found.append((snapshot(state), records[-1].metrics))
    (looped, loop_metrics), (stacked, stacked_metrics) = found
    assert list(loop_metrics) == list(stacked_metrics) == ["accuracy", "auc", "f1"]
    for metric, record in loop_metrics.items():
        assert record.clients == pytest.approx(stacked_metrics[metric].clients, abs=1e-9)
    for tensor_name, value in looped.items():
        assert torch.allclose(value, stacked[tensor_name], rtol=0, atol=1e-9), tensor_name
