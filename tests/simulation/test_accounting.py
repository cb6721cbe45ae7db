"""Divergences of the mechanisms, compared with formulas that are written out and with Opacus's accountant."""

import itertools
import math

import numpy as np
import pytest

from fedrema.simulation import accounting

pytest.importorskip("opacus")


def test_a_gaussian_mechanism_equals_opacus_without_sampling():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(7):
        accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    expected = accountant.get_epsilon(1e-5)
    assert accounting.epsilon(7 * accounting.gaussian(2.0), 1e-5) == pytest.approx(expected, rel=1e-6)


def test_poisson_sampling_equals_opacus():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.05, 200)]
    expected = accountant.get_epsilon(1e-5)
    assert accounting.epsilon(200 * accounting.poisson(0.05, 1.1), 1e-5) == pytest.approx(expected, rel=1e-3)


def test_sampling_without_replacement_has_the_bound_of_wang_et_al():
    rate, multiplier = 0.1, 1.5
    found = dict(zip(accounting.ORDERS, accounting.without_replacement(rate, multiplier), strict=True))
    each = 1 / (2 * multiplier**2)  # ε(j) = j · each
    second = min(4 * (math.exp(2 * each) - 1), 2 * math.exp(2 * each))
    assert found[2.0] == pytest.approx(math.log(1 + rate**2 * second))
    third = 1 + 3 * rate**2 * second + 2 * rate**3 * math.exp(2 * 3 * each)
    assert found[3.0] == pytest.approx(math.log(third) / 2)
    assert found[2.5] == pytest.approx(min(found[3.0], 2.5 * each))


def test_sampling_never_costs_more_than_taking_part_always_and_less_with_fewer_clients():
    whole = accounting.gaussian(1.0)
    rates = [accounting.without_replacement(rate, 1.0) for rate in (0.01, 0.1, 0.5, 1.0)]
    for smaller, larger in itertools.pairwise(rates):
        assert (smaller <= larger + 1e-12).all()
    assert np.array_equal(rates[-1], whole)
    assert rates[0][10] < 0.01 * whole[10]


def test_sampling_without_replacement_costs_more_than_poisson_sampling_with_half_the_sensitivity():
    # One client is replaced by another instead of removed: twice the sensitivity, and a looser bound.
    assert (accounting.without_replacement(0.1, 1.0) >= accounting.poisson(0.1, 2.0) - 1e-12).all()
