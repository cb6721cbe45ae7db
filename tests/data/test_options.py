import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from fedrema.data import DataSettings
from fedrema.data.options import UNUSED
from fedrema.errors import BadInput


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "svhn"}, "--dataset svhn is unknown; valid are digits, mnist, fmnist, cifar10"),
        ({"partition": "fair"}, "--partition fair is unknown; valid are grouped, dirichlet"),
        ({"clients": 0}, "--clients must be at least 1, got 0"),
        ({"samples": 1}, "--samples must be at least 2, got 1"),
        ({"groups": 0}, "--groups must be at least 1, got 0"),
        ({"classes_per_client": 0}, "--classes-per-client must be at least 1, got 0"),
        ({"s": 1.1}, "--s 1.1 is outside 0 to 1"),
        ({"s": float("nan")}, "--s nan is outside 0 to 1"),
        ({"alpha": 0.0}, "--alpha 0.0 is not valid"),
        ({"alpha": float("inf")}, "--alpha inf is not valid"),
        ({"alpha": float("nan")}, "--alpha nan is not valid"),
        ({"test_share": 0.0}, "--test-share 0.0 must be between 0 and 1"),
        ({"data_seed": -3}, "--data-seed -3 is negative"),
        ({"federation": "a.npz", "partition_file": Path("b.npz")}, "exclude each other"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        DataSettings(**change)


def test_every_field_is_documented():
    body = ast.parse(inspect.getsource(DataSettings)).body[0].body
    fields = [number for number, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert len(fields) == len(dataclasses.fields(DataSettings))
    for number in fields:
        assert isinstance(body[number + 1], ast.Expr), body[number].target.id


def test_own_data_makes_the_settings_of_the_partition_irrelevant():
    assert UNUSED == ("dataset", "partition", "clients", "samples", "s", "alpha", "groups", "classes_per_client")
    settings = DataSettings(federation="it.npz", clients=9, s=0.5, test_share=0.3)
    assert settings.without_unused() == DataSettings(federation="it.npz", test_share=0.3)
