"""Losses, predictions and class weights of tasks, against numbers computed by hand and formulas of torch and SciPy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from fedrema.core import LocalTraining, task_loss
from fedrema.data import Federation
from fedrema.data.targets import check_target, trained_task
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.tasks import TASKS, Task
from tests.fixtures import batch_of, make_simulator, network, run_all, tensor


def ones(count):
    return torch.ones(count, dtype=torch.float64)


def random_outputs(task, samples=12, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(samples, task.outputs)))


def test_the_number_of_outputs_follows_from_the_task():
    found = {name: Task(name, 5 if name not in ("regression", "count") else 1).outputs for name in TASKS}
    assert found == {"multiclass": 5, "binary": 5, "multilabel": 5, "ordinal": 4, "regression": 1, "count": 1}


def test_tasks_with_a_softmax_and_with_classes():
    assert [name for name in TASKS if Task(name, 2).has_softmax] == ["multiclass", "binary"]
    assert [name for name in TASKS if not Task(name, 2).has_classes] == ["regression", "count"]


def test_the_loss_of_classes_is_the_cross_entropy():
    outputs, target = tensor([[0.0, math.log(3)], [math.log(4), 0.0]]), torch.tensor([1, 1])
    # Softmax: P(1) is 3/4 and 1/5.
    assert Task("binary", 2).losses(outputs, target).tolist() == pytest.approx([math.log(4 / 3), math.log(5)])
    assert float(Task("binary", 2).loss(outputs, target, ones(2))) == pytest.approx(math.log(20 / 3) / 2)
    assert Task("binary", 2).predict(outputs).tolist() == [1, 0]
    assert Task("binary", 2).probabilities(outputs)[:, 1].tolist() == pytest.approx([0.75, 0.2])


def test_the_loss_of_labels_is_averaged_over_them():
    task = Task("multilabel", 2)
    outputs, target = tensor([[math.log(3), 0.0]]), torch.tensor([[1, 0]], dtype=torch.uint8)
    # P(label) is 3/4 and 1/2.
    assert task.losses(outputs, target).tolist() == pytest.approx([(math.log(4 / 3) + math.log(2)) / 2])
    assert task.probabilities(outputs).tolist() == [pytest.approx([0.75, 0.5])]
    assert task.predict(outputs).tolist() == [[1, 0]]


def test_ordinal_probabilities_by_hand():
    task = Task("ordinal", 3)
    outputs = tensor([[math.log(3), 0.0]])  # P(y > 0) = 3/4, P(y > 1 given y ≥ 1) = 1/2
    assert task.probabilities(outputs).tolist() == [pytest.approx([1 / 4, 3 / 8, 3 / 8])]
    for level, probability in enumerate((1 / 4, 3 / 8, 3 / 8)):
        assert float(task.losses(outputs, torch.tensor([level]))) == pytest.approx(-math.log(probability))
    assert task.predict(outputs).tolist() == [1]  # the median: P(y > 0) = 3/4, P(y > 1) = 3/8


def test_ordinal_probabilities_sum_to_one_and_the_loss_is_their_negative_logarithm():
    task = Task("ordinal", 6)
    outputs = 3 * random_outputs(task, 40)
    probabilities = task.probabilities(outputs)
    assert torch.allclose(probabilities.sum(-1), ones(40), atol=1e-12)
    assert (probabilities >= 0).all()
    for level in range(6):
        losses = task.losses(outputs, torch.full((40,), level))
        assert torch.allclose(losses, -probabilities[:, level].log(), atol=1e-9)
    medians = (probabilities.cumsum(-1) < 0.5).sum(-1)
    assert torch.equal(task.predict(outputs), medians)


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [("squared", [4.0, 0.25]), ("absolute", [2.0, 0.5]), ("huber", [1.5, 0.125])],
)
def test_losses_of_a_regression_are_in_standard_deviations_of_the_target(loss, wanted):
    task = Task("regression", 1, centre=10.0, scale=4.0, loss_name=loss)
    outputs, target = tensor([[1.0], [0.0]]), tensor([6.0, 12.0])  # standardised: −1 and 0.5
    assert task.losses(outputs, target).tolist() == pytest.approx(wanted)
    assert task.predict(outputs).tolist() == [14.0, 10.0]
    assert task.probabilities(outputs) is None


def test_the_huber_loss_equals_torch():
    task = replace(Task("regression", 1, 1.5, 0.7), loss_name="huber")
    outputs, target = 3 * random_outputs(task), tensor(np.random.default_rng(1).normal(size=12).tolist())
    wanted = functional.huber_loss(outputs[:, 0], (target - 1.5) / 0.7)
    assert float(task.loss(outputs, target, ones(12))) == pytest.approx(float(wanted))


def test_the_loss_of_counts_is_the_poisson_likelihood_relative_to_the_mean():
    task = Task("count", 1, centre=2.5)
    outputs, target = random_outputs(task), torch.arange(12.0, dtype=torch.float64)
    rate = 2.5 * outputs[:, 0].exp()
    assert torch.allclose(task.predict(outputs), rate)
    likelihood = stats.poisson.logpmf(target.numpy(), rate.numpy())
    at_mean = stats.poisson.logpmf(target.numpy(), 2.5)
    # The constant makes a prediction of the mean, which is an output of 0, have the loss 1.
    assert task.losses(outputs, target).numpy() == pytest.approx((at_mean - likelihood) / 2.5 + 1)
    logarithm = outputs[:, 0] + math.log(2.5)
    of_torch = functional.poisson_nll_loss(logarithm, target, reduction="none") / 2.5
    assert torch.allclose(task.losses(outputs, target), of_torch + target / 2.5 * math.log(2.5))


def test_counts_whose_training_samples_are_all_zero_are_relative_to_one():
    task = Task("count", 1, centre=0.0)
    assert task.losses(tensor([[0.0]]), tensor([3.0])).tolist() == [1.0]
    assert task.predict(tensor([[math.log(2)]])).tolist() == pytest.approx([2.0])


EXAMPLES = {
    "multiclass": (Task("multiclass", 3), torch.tensor([0, 2, 1, 1])),
    "binary": (Task("binary", 2), torch.tensor([0, 1, 1, 1])),
    "multilabel": (Task("multilabel", 2), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])),
    "ordinal": (Task("ordinal", 4), torch.tensor([0, 3, 2, 2])),
    "regression": (Task("regression", 1, 2.0, 3.0), tensor([1.0, 5.0, -2.0, 0.5])),
    "count": (Task("count", 1, 2.0), tensor([0.0, 5.0, 1.0, 2.0])),
}


@pytest.mark.parametrize("name", TASKS)
def test_padding_does_not_change_the_loss(name):
    task, target = EXAMPLES[name]
    outputs = random_outputs(task, 4)
    mask = tensor([1.0, 0.0, 1.0, 0.0])
    kept = [0, 2]
    weights = task.weight_tensor(outputs.device, outputs.dtype)
    found = task.loss(outputs, target, mask, weights)
    assert float(found) == pytest.approx(float(task.losses(outputs[kept], target[kept]).mean()))
    assert float(task.loss(outputs, target, 0 * mask)) == 0.0
    if task.has_classes:
        weighted = replace(task, weights=tuple(range(1, task.classes + 1)))
        weights = weighted.weight_tensor(outputs.device, outputs.dtype)
        found = weighted.loss(outputs, target, mask, weights)
        assert float(found) == pytest.approx(float(weighted.loss(outputs[kept], target[kept], ones(2), weights)))
        assert float(weighted.loss(outputs, target, 0 * mask, weights)) == 0.0


def test_the_weighted_cross_entropy_equals_that_of_torch():
    task = Task("multiclass", 3, weights=(0.5, 0.0, 4.0))
    outputs, target = random_outputs(task), torch.arange(12) % 3
    weights = task.weight_tensor(outputs.device, outputs.dtype)
    wanted = functional.cross_entropy(outputs, target, weight=tensor([0.5, 0.0, 4.0]))
    assert float(task.loss(outputs, target, ones(12), weights)) == pytest.approx(float(wanted))
    ignored = torch.ones(12, dtype=torch.long)  # only the class with the weight 0
    assert float(task.loss(outputs, ignored, ones(12), weights)) == 0.0


def test_weights_of_labels_apply_within_a_sample():
    task = Task("multilabel", 2, weights=(3.0, 1.0))
    outputs, target = tensor([[math.log(3), 0.0]]), torch.tensor([[1, 0]])
    weights = task.weight_tensor(outputs.device, outputs.dtype)
    wanted = (3 * math.log(4 / 3) + math.log(2)) / 4
    assert float(task.loss(outputs, target, ones(1), weights)) == pytest.approx(wanted)


def test_weights_of_levels_apply_to_samples():
    task = Task("ordinal", 3, weights=(1.0, 2.0, 5.0))
    outputs, target = random_outputs(task, 3), torch.tensor([0, 1, 2])
    weights = task.weight_tensor(outputs.device, outputs.dtype)
    wanted = (task.losses(outputs, target) * tensor([1.0, 2.0, 5.0])).sum() / 8
    assert float(task.loss(outputs, target, ones(3), weights)) == pytest.approx(float(wanted))


def federation_of(y, task=None, **more):
    count = len(y)
    split = np.arange(count) % 4 == 3
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return Federation.from_arrays(x, np.asarray(y), np.arange(count) // 4 % 2, split=split, task=task, **more)


CLASSES = [0, 0, 0, 1, 0, 1, 2, 2, 0, 0, 1, 0, 0, 0, 0, 0]
"""Training samples, which are the first three of four: nine of class 0, two of class 1, one of class 2."""


def test_balanced_weights_are_inverse_to_the_training_samples_of_the_federation():
    federation = federation_of(CLASSES)
    assert federation.label_counts("train").sum(0).tolist() == [9, 2, 1]
    found = trained_task(federation, LocalTraining(class_weights="balanced"))
    assert found.weights == pytest.approx((12 / 27, 12 / 6, 12 / 3))
    without = trained_task(federation_of(CLASSES, classes=4), LocalTraining(class_weights="balanced"))
    assert without.weights == pytest.approx((12 / 36, 12 / 8, 12 / 4, 0.0))  # a class without samples
    # A part of a federation, such as a node, knows how many samples the whole federation has.
    part = replace(federation, class_counts=(1, 1, 2))
    assert trained_task(part, LocalTraining(class_weights="balanced")).weights == pytest.approx((4 / 3, 4 / 3, 2 / 3))


def test_weights_can_be_given():
    found = trained_task(federation_of(CLASSES), LocalTraining(class_weights="1, 2.5,0"))
    assert found.weights == (1.0, 2.5, 0.0)
    assert trained_task(federation_of(CLASSES), LocalTraining()).weights == ()


def test_every_method_trains_with_the_weights_of_the_task():
    federation = federation_of(CLASSES)
    net = network(federation)
    simulator = make_simulator(FedAvg(), federation, LocalTraining(class_weights="1,5,2", batch=4), net)
    batch = batch_of(np.random.default_rng(1).normal(size=(5, 3)), [0, 1, 2, 1, 0], [1, 1, 1, 1, 0])
    outputs = simulator.net(simulator.net.initial, batch.x)
    wanted = functional.cross_entropy(outputs[:4], batch.y[:4], weight=tensor([1.0, 5.0, 2.0]))
    assert float(task_loss(simulator.net, outputs, batch)) == pytest.approx(float(wanted))
    equal = make_simulator(FedAvg(), federation, LocalTraining(batch=4))
    states = [run_all(each)[0].params.common for each in (simulator, equal)]
    assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_settings_of_a_loss_must_fit_the_task():
    quantities = federation_of(np.linspace(0, 1, 16))
    with pytest.raises(BadInput, match="--class-weights balanced needs classes, but the task is regression"):
        trained_task(quantities, LocalTraining(class_weights="balanced"))
    with pytest.raises(BadInput, match="--regression-loss huber is for regression, but the task is multiclass"):
        trained_task(federation_of(CLASSES), LocalTraining(regression_loss="huber"))
    assert trained_task(quantities, LocalTraining(regression_loss="huber")).loss_name == "huber"
    for wrong in ("1,2", "1,2,x", "1,2,-1", "1,2,nan", "1,2,inf", "0,0,0", "Balanced"):
        with pytest.raises(BadInput, match="must be 'balanced' or 3 numbers from 0 on, one for each class"):
            trained_task(federation_of(CLASSES), LocalTraining(class_weights=wrong))


def test_the_task_is_inferred_from_the_targets():
    cases = {
        "multiclass": [0, 1, 2, 1],
        "binary": ["yes", "no", "no", "yes"],
        "regression": [0.5, 1.0, 2.0, 1.0],
        "multilabel": [[0, 1], [1, 1], [0, 0], [1, 0]],
    }
    for name, y in cases.items():
        assert check_target(y, 4).task == name
    assert check_target([0.0, 1.0, 2.0, 1.0], 4).task == "multiclass"  # whole numbers
    assert check_target([0, 1, 2, 1], 4, "ordinal").classes == 3
    assert check_target([0, 1, 2, 1], 4, "multiclass").task == "multiclass"
    assert check_target([0, 1, 0, 1], 4, "multiclass").task == "multiclass"


def test_targets_have_the_type_of_their_task():
    labels = check_target([[0.0, 1.0], [1.0, 0.0]], 2, class_names=["cough", "fever"])
    assert (labels.y.dtype, labels.classes, labels.class_names) == (np.uint8, 2, ("cough", "fever"))
    assert check_target([[1], [2]], 2, "count").y.tolist() == [1.0, 2.0]
    assert check_target([1, 2], 2, "regression").y.dtype == np.float64
    assert check_target([True, False], 2, "count").y.tolist() == [1.0, 0.0]


def test_mean_and_deviation_are_those_of_the_training_samples():
    y = np.arange(16.0) + 0.5
    federation = federation_of(y)
    training = y[np.arange(16) % 4 != 3]
    assert federation.task == Task("regression", 1, pytest.approx(training.mean()), pytest.approx(training.std()))
    counts = federation_of(np.arange(16), "count")
    assert counts.task == Task("count", 1, pytest.approx((np.arange(16) % 4 != 3).nonzero()[0].mean()), 1.0)
    same_in_training = np.where(np.arange(16) % 4 == 3, 2.5, 1.5)
    assert federation_of(same_in_training).task == Task("regression", 1, 1.5, 1.0)


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        ([0, 1, 2, 1], {"task": "ranking"}, "--task 'ranking' is unknown; valid are auto, multiclass, binary, multil"),
        ([0, 1, 2, 1], {"task": "binary"}, "--task binary needs 2 classes, but y has 3."),
        ([0, 0, 0, 0], {"task": "ordinal"}, "--task ordinal needs at least 2 levels, but y has 1."),
        (
            [0, 1, 1, 0],
            {"task": "multilabel"},
            r"y has the shape \(4,\); labels need one row for each of the 4 samples",
        ),
        ([[0, 1]] * 3, {}, r"y has the shape \(3, 2\); labels need one row for each of the 4 samples."),
        ([[0, 1]] * 4, {"class_names": ["a"]}, "class_names has 1 names for 2 labels; give one name per label."),
        ([[0, 1]] * 3 + [[0, 2]], {}, "y has 2 in row 3, label 1; labels must be 0 or 1."),
        ([["a", "b"]] * 4, {}, "y has a in row 0, label 0; labels must be 0 or 1."),
        ([[0.0, np.nan]] * 4, {}, "y has nan in row 0, label 1; labels must be 0 or 1."),
        ([1.5, 2.5, 3.5], {}, r"y has the shape \(3,\); it must have one value for each of the 4 samples."),
        ([[1, 2]] * 4, {"task": "regression"}, r"y has the shape \(4, 2\); it must have one value for each of the 4"),
        (list("abcd"), {"task": "regression"}, "y has the type <U1, but --task regression needs numbers."),
        (list("abcd"), {"task": "count"}, "y has the type <U1, but --task count needs numbers."),
        ([1.5, np.inf, 2.0, 0.0], {}, "y is inf in row 1; every sample needs a finite number."),
        ([1.5, 2.0, np.nan, 0.0], {}, "y is nan in row 2; every sample needs a finite number."),
        ([1, 2, -1, 0], {"task": "count"}, "y is -1 in row 2; counts must be whole numbers from 0 on."),
        ([1, 2, 0.5, 0], {"task": "count"}, "y is 0.5 in row 2; counts must be whole numbers from 0 on."),
        ([2.5] * 4, {}, "y is 2.5 for every sample: there is nothing to predict."),
        ([0] * 4, {"task": "count"}, "y is 0 for every sample: there is nothing to predict."),
    ],
)
def test_invalid_targets_are_refused(y, settings, message):
    with pytest.raises(BadInput, match=message):
        check_target(y, 4, **settings)


def test_a_network_must_have_the_outputs_of_the_task():
    federation = federation_of(np.linspace(0, 1, 16))
    labels = federation_of([[0, 1, 1], [1, 0, 0]] * 8)
    with pytest.raises(BadInput, match="The network has 3 outputs, but the task regression needs 1 output"):
        make_simulator(FedAvg(), federation, net=network(labels))
    with pytest.raises(BadInput, match="The network has 1 output, but the task multilabel needs 3 outputs"):
        make_simulator(FedAvg(), labels, net=network(federation))
    with pytest.raises(BadInput, match="The network predicts 1 classes, but the data has 3"):
        make_simulator(FedAvg(), federation_of(CLASSES), net=network(federation))


def test_quantities_far_from_zero_keep_their_precision_in_float32():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3)).astype(np.float32)
    y = 1e9 + x @ np.array([1.0, -2.0, 0.5])  # float32 cannot tell 1e9 from 1e9 + 30
    federation = Federation.from_arrays(x, y, np.arange(60) % 3)
    local = LocalTraining(epochs=5, batch=10, lr=0.05)
    _, records = run_all(make_simulator(FedAvg(), federation, local, rounds=15, precision="float32", hidden=16))
    assert records[-1]["rmse"] < 0.3 * federation.task.scale
