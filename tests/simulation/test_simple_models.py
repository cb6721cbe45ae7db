"""The constant and the linear model of each client: computed by hand, and what they may depend on."""

from dataclasses import replace

import numpy as np
import pytest

from fedrema.data import Federation
from fedrema.simulation import simple_models as module
from fedrema.simulation.simple_models import simple_models
from fedrema.tasks import METRICS

TARGETS = {
    "binary": [0, 0, 0, 1, 0, 1],
    "multiclass": [0, 0, 1, 2, 0, 1],
    "ordinal": [0, 1, 2, 2, 0, 1],
    "multilabel": [[0, 1], [0, 1], [1, 1], [0, 0], [0, 0], [1, 1]],
    "regression": [1.0, 2.5, 7.0, 3.0, 0.0, 1.0],
    "count": [0, 3, 2, 0, 1, 9],
}
SPLIT = [False, False, False, False, True, True]
"""The first four samples are for training."""


def small(task, names=("a",)):
    y = np.concatenate([TARGETS[task]] * len(names))
    x = np.random.default_rng(0).normal(size=(len(y), 3))
    return Federation.from_arrays(x, y, np.repeat(names, 6), SPLIT * len(names), task=task)


def constant_of(task, loss="squared"):
    federation = small(task)
    trained = replace(federation.task, loss_name=loss)
    return trained, simple_models(federation, trained)["constant"].of(0)


def test_constants_of_classes_are_smoothed_shares():
    _, found = constant_of("binary")  # three of four samples: (3 + 1/2) / 5
    np.testing.assert_allclose(found.probabilities[0], [[0.7, 0.3]] * 2, rtol=1e-6)
    _, found = constant_of("multiclass")  # two, one and one of four: (k + 1/3) / 5
    np.testing.assert_allclose(found.probabilities[0], [[7 / 15, 4 / 15, 4 / 15]] * 2, rtol=1e-6)
    _, found = constant_of("ordinal")  # one, one and two of four
    np.testing.assert_allclose(found.probabilities[0], [[4 / 15, 4 / 15, 7 / 15]] * 2, rtol=1e-6)
    _, found = constant_of("multilabel")  # one and three of four: (k + 1/2) / 5
    np.testing.assert_allclose(found.probabilities[0], [[0.3, 0.7]] * 2, rtol=1e-6)


def test_constants_of_quantities_are_mean_median_and_rate():
    _, found = constant_of("regression")
    np.testing.assert_allclose(found.predicted[0], [3.375] * 2, rtol=1e-6)
    _, found = constant_of("regression", "absolute")
    np.testing.assert_allclose(found.predicted[0], [2.75] * 2, rtol=1e-6)
    _, found = constant_of("count")  # five events in four samples: (5 + 1/2) / (4 + 1/2)
    np.testing.assert_allclose(found.predicted[0], [5.5 / 4.5] * 2, rtol=1e-6)


@pytest.mark.parametrize("task", TARGETS)
def test_targets_are_those_of_the_test_split_and_outputs_are_finite(task):
    federation = small(task, ("b", "a"))
    for found in simple_models(federation, federation.task).values():
        assert found.rows == (0, 1)
        assert found.targets.tolist() == 2 * TARGETS[task][4:]
        assert found.outputs.shape == (4, federation.task.outputs)
        assert np.isfinite(found.outputs).all()


def related(task, samples=400, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(samples, 4))
    score = x[:, 0] + 0.3 * generator.normal(size=samples)
    y = {
        "binary": score > 0,
        "multiclass": np.digitize(score, [-0.5, 0.5]),
        "ordinal": np.digitize(score, [-0.5, 0.5]),
        "multilabel": np.stack([score > 0, score < 0.5], 1),
        "regression": score,
        "count": generator.poisson(np.exp(score)),
    }[task]
    return Federation.from_arrays(x, y * 1, generator.integers(0, 3, samples), task=task)


@pytest.mark.parametrize("task", TARGETS)
def test_linear_models_find_a_linear_relation(task):
    federation = related(task)
    found = simple_models(federation, federation.task)
    metric = METRICS[{"regression": "rmse", "count": "deviance"}.get(task, "log_loss")]
    for row in range(3):
        losses = [metric.quotients(found[kind].of(row))[0].item() for kind in ("constant", "linear")]
        assert losses[1] < 0.75 * losses[0]


@pytest.mark.parametrize("task", TARGETS)
def test_a_clients_models_do_not_depend_on_its_row_or_on_other_clients(task):
    federation = related(task)
    whole, turned = (
        simple_models(federation, federation.task),
        simple_models(federation.reorder([2, 0, 1]), federation.task),
    )
    alone = simple_models(federation.only(1), federation.task)
    for kind in ("constant", "linear"):
        expected = whole[kind].of(1).outputs
        assert expected.equal(turned[kind].of(2).outputs)
        assert expected.equal(alone[kind].of(0).outputs)
        assert expected.equal(simple_models(federation, federation.task)[kind].of(1).outputs)


def test_a_client_with_one_sample_of_a_class_has_its_constant_as_linear_model():
    y = [0, 0, 0, 0, 0, 1, 0, 0]
    federation = Federation.from_arrays(
        np.random.default_rng(0).normal(size=(8, 2)), y, ["a"] * 8, [False] * 6 + [True] * 2
    )
    found = simple_models(federation, federation.task)
    assert found["linear"].outputs.tolist() == found["constant"].outputs.tolist()


def test_a_class_with_one_sample_keeps_its_share_next_to_fitted_ones():
    generator = np.random.default_rng(0)
    y = np.array([0, 1] * 10 + [2] + [0, 1])
    federation = Federation.from_arrays(
        generator.normal(size=(23, 2)), y, ["a"] * 23, [False] * 21 + [True] * 2, task="multiclass"
    )
    likely = simple_models(federation, federation.task)["linear"].of(0).probabilities[0]
    np.testing.assert_allclose(likely[:, 2], (1 + 1 / 3) / 22, rtol=1e-5)
    np.testing.assert_allclose(likely.sum(-1), 1, rtol=1e-6)


def test_no_linear_models_of_word_numbers_and_of_too_much_data(monkeypatch):
    federation = small("binary")
    assert list(simple_models(federation, federation.task, embeds=True)) == ["constant"]
    monkeypatch.setattr(module, "MOST_WORK", 0)
    assert list(simple_models(federation, federation.task)) == ["constant"]
