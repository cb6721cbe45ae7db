"""The noise of deployments: its distribution, and where its randomness comes from."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

from fedrema.deploy.messages import Reply
from fedrema.deploy.noise import AT_ONCE, gaussian_noise
from fedrema.deploy.privacy import PrivacyGuard, PrivacySettings

pytest.importorskip("opacus")


def test_it_has_the_standard_normal_distribution():
    drawn = gaussian_noise((500, 1001))
    assert drawn.shape == (500, 1001)
    assert drawn.dtype == np.float64
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-6
    assert stats.kstest(np.abs(drawn.ravel()[: 2 * AT_ONCE]), "halfnorm").pvalue > 1e-6
    # 1.35e-3 beyond three deviations on each side: 676 of 500,500 values are expected.
    for tail in ((drawn > 3).sum(), (drawn < -3).sum()):
        assert abs(tail - 676) < 6 * np.sqrt(676)
    # The two numbers of a pair are independent, and so are neighbours.
    flat = drawn.ravel()
    for shift in (1, AT_ONCE):
        assert abs(np.corrcoef(flat[:-shift], flat[shift:])[0, 1]) < 6 / np.sqrt(len(flat) - shift)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2 * AT_ONCE + 1,)])
def test_it_has_the_requested_shape(shape):
    drawn = gaussian_noise(shape)
    assert drawn.shape == shape
    assert np.isfinite(drawn).all()


def released(tmp_path, name):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=1.0, privacy_noise=1.0), tmp_path / name)
    zeros = {"w": torch.zeros(50, dtype=torch.float64)}
    return guard.protect(Reply(1, 5, dict(zeros)), zeros).params["w"]


def test_all_of_it_comes_from_the_operating_system(tmp_path, monkeypatch):
    assert not torch.equal(released(tmp_path, "a"), released(tmp_path, "b"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: b"\x40" * count)
        assert torch.equal(released(tmp_path, "c"), released(tmp_path, "d"))
