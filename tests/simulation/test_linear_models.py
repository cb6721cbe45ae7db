"""Ridge, logistic and Poisson regression: the same as scikit-learn's, with a sensible penalty."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from fedrema.simulation import linear_models
from fedrema.simulation.linear_models import PENALTIES, Inputs, predict

SHAPES = [(30, 5), (12, 40), (200, 10)]


def drawn(samples, columns, kind, seed=0):
    generator = np.random.default_rng(seed)
    x, test = generator.normal(size=(samples, columns)) * 3 + 1, generator.normal(size=(7, columns)) * 3 + 1
    y = {
        "squared": x[:, 0] + generator.normal(size=samples),
        "logistic": (x[:, 0] + generator.normal(size=samples) > 1).astype(float),
        "poisson": generator.poisson(np.exp(0.2 * x[:, 0])).astype(float),
    }[kind]
    return x, test, y


def of_sklearn(x, test, y, kind, penalty):
    """Return what scikit-learn predicts on the same scale; its penalties are defined in other ways."""
    centred, moved = x - x.mean(axis=0), test - x.mean(axis=0)
    size = np.sqrt(np.square(centred).mean())
    exact = {"tol": 1e-12, "max_iter": 100_000}
    if kind == "squared":
        return Ridge(alpha=penalty).fit(centred / size, y).predict(moved / size)
    if kind == "logistic":
        return LogisticRegression(C=1 / penalty, **exact).fit(centred / size, y).decision_function(moved / size)
    return np.log(PoissonRegressor(alpha=penalty / len(y), **exact).fit(centred / size, y).predict(moved / size))


@pytest.mark.parametrize("kind", ["squared", "logistic", "poisson"])
@pytest.mark.parametrize(("samples", "columns"), SHAPES)
def test_every_penalty_gives_the_model_of_scikit_learn(samples, columns, kind, monkeypatch):
    x, test, y = drawn(samples, columns, kind)
    order = np.arange(samples)
    for penalty in PENALTIES.tolist():
        monkeypatch.setattr(linear_models, "PENALTIES", np.array([penalty]))
        found = predict(Inputs.of(x, test), y, kind, order)
        np.testing.assert_allclose(found, of_sklearn(x, test, y, kind, penalty), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["squared", "logistic", "poisson"])
def test_the_penalty_is_the_largest_without_a_relation_and_smaller_with_one(kind, monkeypatch):
    x, test, y = drawn(300, 6, kind)
    order = np.random.default_rng(1).permutation(300)
    related = predict(Inputs.of(x, test), y, kind, order)
    unrelated = predict(Inputs.of(x, test), y[np.random.default_rng(2).permutation(300)], kind, order)
    assert np.corrcoef(related, test[:, 0])[0, 1] > 0.9
    assert np.ptp(unrelated) < 0.3 * np.ptp(related)


def test_a_class_with_one_sample_gives_no_model_and_one_with_two_does():
    x = np.random.default_rng(0).normal(size=(20, 3))
    for count, fits in ((0, False), (1, False), (2, True), (18, True), (19, False)):
        y = (np.arange(20) < count).astype(float)
        found = predict(Inputs.of(x, x), y, "logistic", np.arange(20))
        assert (found is not None) == fits
        assert found is None or np.isfinite(found).all()


def test_classes_that_can_be_separated_give_finite_logits():
    x = np.repeat([[-1.0], [1.0]], 20, axis=0)
    found = predict(Inputs.of(x, np.array([[-1e6], [1e6]])), (x[:, 0] > 0).astype(float), "logistic", np.arange(40))
    assert found.tolist() == [-30, 30]


def test_constant_inputs_give_the_share_of_the_class():
    found = predict(Inputs.of(np.ones((40, 2)), np.ones((3, 2))), (np.arange(40) < 10) * 1.0, "logistic", np.arange(40))
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), 0.25, atol=1e-6)
