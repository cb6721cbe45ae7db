"""Probes and the similarity of heads; the formulas are tested in tests/methods/test_fedrema.py."""

import pytest
import torch

from fedrema.core import Moment
from fedrema.core.similarity import draw_probes, head_similarity, similarity_rows
from fedrema.models.body_and_head import BodyAndHead, Net


@pytest.fixture
def net() -> Net:
    return Net(BodyAndHead(torch.nn.Linear(1, 3), torch.nn.Linear(3, 4)), torch.zeros(1, 1))


def test_probes_are_uniform_between_zero_and_the_limit(net):
    probes = draw_probes(net, Moment(1, 10, seed=0), count=5000, high=0.5)
    assert probes.shape == (1, 5000, 3)
    assert probes.min() >= 0
    assert probes.max() < 0.5
    assert probes.mean(1).flatten().tolist() == pytest.approx([0.25] * 3, abs=0.01)


def test_probes_depend_on_the_round_and_have_the_networks_precision(net):
    first = draw_probes(net, Moment(1, 10, seed=0), 2, 1.0)
    assert torch.equal(first, draw_probes(net, Moment(1, 99, seed=0), 2, 1.0))
    assert not torch.equal(first, draw_probes(net, Moment(2, 10, seed=0), 2, 1.0))
    assert not torch.equal(first, draw_probes(net, Moment(1, 10, seed=1), 2, 1.0))
    assert first.dtype is torch.float32
    net.to(torch.device("cpu"), torch.float64)
    precise = draw_probes(net, Moment(1, 10, seed=0), 2, 1.0)
    assert precise.dtype is torch.float64
    assert torch.equal(precise.float(), first)  # the same numbers, rounded


def test_several_probes_are_averaged(net):
    generator = torch.Generator().manual_seed(0)
    heads = {
        "head.weight": torch.randn(5, 4, 3, generator=generator),
        "head.bias": torch.randn(5, 4, generator=generator),
    }
    probes = draw_probes(net, Moment(1, 10, seed=0), 3, 1.0)
    together = head_similarity(net, heads, probes, temperature=0.5)
    each = [head_similarity(net, heads, probes[:, place : place + 1], temperature=0.5) for place in range(3)]
    assert torch.allclose(together, sum(each) / 3, atol=1e-6)
    assert torch.allclose(together, together.T)
    assert torch.allclose(together.diagonal(), torch.ones(5))
    assert not torch.allclose(each[0], each[1], atol=1e-3)


@pytest.mark.parametrize("names", [(), tuple("abcdefg")])
def test_blocks_of_rows_make_up_the_whole_matrix(net, names, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    heads = {
        "head.weight": torch.randn(7, 4, 3, generator=generator),
        "head.bias": torch.randn(7, 4, generator=generator),
    }
    probes = draw_probes(net, Moment(1, 10, seed=0), 2, 1.0, names)
    whole = head_similarity(net, heads, probes, temperature=0.5, peer_temperature=1.0)
    monkeypatch.setattr("fedrema.core.similarity._rows_per_block", lambda numbers: 3)
    blocks = list(similarity_rows(net, heads, probes, temperature=0.5, peer_temperature=1.0))
    assert [tuple(block.shape) for block in blocks] == [(3, 7), (3, 7), (1, 7)]
    assert torch.allclose(torch.cat(blocks), whole, atol=1e-6)
