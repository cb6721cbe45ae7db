"""Augmented views of samples: shifts and scales from a table."""

import torch

from fedrema.core import Moment
from fedrema.methods.shared.views import VIEWS, apply_views, draw_views


def test_an_image_is_shifted_with_a_repeated_border_and_scaled():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    views = torch.tensor([[0.25, -0.5, 2.0, 1.0]])  # one row down, two columns left, twice the contrast, brighter by 1
    found = apply_views(image, torch.tensor([0]), views)
    rows, columns = [0, 0, 1, 2], [2, 3, 3, 3]
    expected = [[2 * (4 * row + column) + 1 for column in columns] for row in rows]
    assert found[0, 0].tolist() == expected


def test_each_sample_has_the_view_of_its_index():
    x = torch.ones(3, 2)
    views = torch.tensor([[0.5, 0.5, 2.0, 0.0], [0.0, 0.0, 3.0, 1.0]])
    assert apply_views(x, torch.tensor([0, 1, 2]), views)[:, 0].tolist() == [2.0, 4.0, 2.0]  # the table repeats


def test_views_are_in_their_range_and_depend_on_the_round():
    tables = draw_views(Moment(1, 5, 0), shift=0.1, jitter=0.2)
    assert tables.shape == (2, VIEWS, 4)
    assert tables[..., :2].abs().max() <= 0.1
    assert (tables[..., 2] - 1).abs().max() <= 0.2
    assert tables[..., 3].abs().max() <= 0.2
    assert not torch.equal(tables[0], tables[1])
    assert not torch.equal(tables, draw_views(Moment(2, 5, 0), shift=0.1, jitter=0.2))
    assert torch.equal(tables, draw_views(Moment(1, 5, 0), shift=0.1, jitter=0.2))
