"""Second networks of a method: names, distances, and one number per client."""

import torch
from torch import nn

from fedrema.core.aggregation import per_client
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors, squared_distance
from fedrema.models.body_and_head import BodyAndHead, Net


def make_net() -> Net:
    return Net(BodyAndHead(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)), torch.zeros(2, 2))


def test_names_of_a_copy_have_a_prefix():
    tensors = {"body.0.weight": torch.ones(1), "head.bias": torch.zeros(1)}
    both = {**tensors, **copied(tensors, "own")}
    assert list(both) == ["body.0.weight", "head.bias", "own.body.0.weight", "own.head.bias"]
    assert copy_of(both, "own") == tensors
    net = make_net()
    assert list(network_tensors(net, {**copied(net.initial, "own"), **net.initial})) == list(net.initial)


def test_running_statistics_are_not_trainable_nor_are_those_of_a_copy():
    net = make_net()
    assert {name for name in net.initial if not net.trains(name)} == {"body.1.running_mean", "body.1.running_var"}
    assert net.trains("own.body.1.weight")
    assert not net.trains("own.body.1.running_mean")
    assert net.trains("share")


def test_distances_ignore_running_statistics():
    net = make_net()
    first = {name: torch.full_like(value, 3.0) for name, value in net.initial.items()}
    second = {name: torch.ones_like(value) for name, value in net.initial.items()}
    numbers = sum(value.numel() for name, value in net.initial.items() if "running" not in name)
    assert float(squared_distance(net, first, second)) == 4 * numbers
    assert float(squared_distance(net, {"head.bias": first["head.bias"]}, second)) == 8


def test_a_number_per_client_is_multiplied_with_its_tensors():
    assert (per_client(torch.tensor([2.0, 3.0]), torch.ones(2, 4, 5)) * torch.ones(2, 4, 5))[:, 1, 2].tolist() == [2, 3]
    assert per_client(torch.tensor(2.0), torch.ones(4, 5)).shape == (1, 1)
    assert per_client(torch.tensor(2.0), torch.tensor(1.0)).shape == ()
