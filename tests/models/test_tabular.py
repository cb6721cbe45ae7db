"""Embedded columns of tables."""

import pytest
import torch

from fedrema.errors import BadInput
from fedrema.models.networks import Network, build_net
from fedrema.models.tabular import EmbedColumns, width_of


def test_codes_become_vectors_and_numbers_are_passed_on():
    layer = EmbedColumns((0, 3, 0, 40))
    x = torch.tensor([[0.5, 2.0, -1.0, 39.0], [1.5, 0.0, 2.0, 0.0]])
    found = layer(x)
    assert layer.width == found.shape[1] == 2 + 2 + 16
    assert torch.equal(found[:, :2], x[:, [0, 2]])
    assert torch.equal(found[:, 2:4], layer.embeddings[0].weight[[2, 0]])
    assert torch.equal(found[:, 4:], layer.embeddings[1].weight[[39, 0]])


def test_widths_grow_with_the_number_of_codes():
    assert [width_of(codes) for codes in (2, 3, 10, 31, 1000)] == [1, 2, 5, 16, 16]


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        ({"embed": "0,3"}, (3,), "--embed describes 2 columns, but a sample has the shape (3,)"),
        ({"embed": "0,3", "net": "lstm"}, (2,), "--net lstm takes no columns of category codes"),
        ({"embed": "a"}, (1,), "--embed 'a' must be whole numbers separated by commas"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(network, shape, message):
    with pytest.raises(BadInput) as error:
        build_net(Network(**network), shape, 2, seed=0)
    assert message in str(error.value)
