"""FedCP against an implementation with torch's own modules, and its parts against numbers computed by hand."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedrema.errors import BadInput
from fedrema.methods.fedcp import BANDWIDTHS, FedCP, head_weights, mean_discrepancy
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import BACKENDS, make_federation, make_simulator, tensor
from tests.methods.by_hand import LR, begun, local


class Reference(nn.Module):
    """One client's modules."""

    def __init__(self, params):
        super().__init__()
        self.body, self.own, self.common = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.policy, self.norm = nn.Linear(3, 6), nn.LayerNorm(6)
        parts = (self.body, "body"), (self.own, "personal.head"), (self.common, "head"), (self.policy, "policy")
        for part, name in parts:
            part.weight.data, part.bias.data = params[f"{name}.weight"].clone(), params[f"{name}.bias"].clone()
        self.norm.weight.data, self.norm.bias.data = params["policy.scale"].clone(), params["policy.offset"].clone()
        self.common.requires_grad_(False)

    def forward(self, x, direction):
        h = self.body(x)
        hidden = torch.relu(self.norm(self.policy(h * direction)))
        first, second = hidden[:, :3], hidden[:, 3:]
        share = torch.sigmoid(first - second)
        return h, self.own(share * h) + self.common((1 - share) * h)

    def trained(self, x, y, steps, strength, clip):
        received = copy.deepcopy(self.body)
        direction = self.own.weight.data.sum(dim=0)
        direction = direction / direction.norm()
        optimiser = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR)
        for _ in range(steps):
            h, z = self(x, direction)
            loss = functional.cross_entropy(z, y) + strength * discrepancy(h, received(x).detach())
            optimiser.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(self.parameters(), clip)
            optimiser.step()
        self.common.weight.data = (self.common.weight + self.own.weight).data / 2
        self.common.bias.data = (self.common.bias + self.own.bias).data / 2
        return self


def discrepancy(first, second):
    total = 0.0
    for width in BANDWIDTHS:
        for one, other, sign in ((first, first, 1), (second, second, 1), (first, second, -2)):
            total = total + sign * torch.exp(-((one[:, None] - other[None]) ** 2).sum(dim=2) / (2 * width)).mean()
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("strength", "clip", "present"),
    [(5.0, 0.0, [[0, 1], [0, 1]]), (0.0, 0.0, [[0, 1], [0, 1]]), (1.0, 0.3, [[0, 1], [1], [0, 1]])],
)
def test_rounds_equal_those_of_torch_modules(backend, strength, clip, present):
    simulator, state, _, data = begun(FedCP(align=strength), backend, local(epochs=2, clip=clip))
    simulator.participation.choose = lambda number: (present[number - 1], [])
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    counts = torch.tensor([len(y) for _, y in data], dtype=torch.float64)
    shared = {name: value.clone() for name, value in state.params.common.items()}
    heads = [
        {f"personal.{name}": shared[name] for name in ("head.weight", "head.bias")} for _ in data
    ]  # copies of the global head
    for rows in present:
        simulator.run_round(state)
        clients = [Reference({**shared, **heads[row]}).double().trained(*data[row], 2, strength, clip) for row in rows]
        names = {
            "body": "body", "common": "head", "policy": "policy", "norm": "norm"
        }  # fmt: skip
        sent = [dict(client.named_parameters()) for client in clients]
        for ours, name in names.items():
            for part in ("weight", "bias"):
                parts = [each[f"{ours}.{part}"].data for each in sent]
                mean = sum(n * each for n, each in zip(counts[rows], parts, strict=True)) / counts[rows].sum()
                norm = {"weight": "policy.scale", "bias": "policy.offset"}
                shared[norm[part] if ours == "norm" else f"{name}.{part}"] = mean
        for row, client in zip(rows, clients, strict=True):
            heads[row] = {f"personal.head.{part}": getattr(client.own, part).data for part in ("weight", "bias")}
    assert shared.keys() == state.params.common.keys()
    for name, value in shared.items():
        assert torch.allclose(state.params.common[name], value, rtol=0, atol=1e-12), name
    for row, head in enumerate(heads):
        for name, value in head.items():
            assert torch.allclose(state.params.row(row)[name], value, rtol=0, atol=1e-10), name
        client = simulator.cohort(state, torch.arange(2)).one(row)
        direction = functional.normalize(head["personal.head.weight"].sum(dim=0), dim=0)
        expected = Reference({**shared, **head}).double()(data[row][0], direction)[1]
        assert torch.allclose(simulator.method.predict(simulator.net, client, data[row][0]), expected, atol=1e-10)


def test_the_discrepancy_of_two_points_is_computed_by_hand_and_ignores_padding():
    first, second, mask = tensor([[0, 0], [9, 9]]), tensor([[3, 4], [7, 7]]), tensor([1, 0])
    expected = sum(2 - 2 * math.exp(-25 / (2 * width)) for width in BANDWIDTHS)
    assert float(mean_discrepancy(first, second, mask)) == pytest.approx(expected, rel=1e-12)
    assert float(mean_discrepancy(first, first, mask)) == 0


def test_the_weights_of_several_layers_are_multiplied():
    torch.manual_seed(0)
    module = BodyAndHead(nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)))
    simulator = make_simulator(FedCP(), make_federation(), net=Net(module, torch.zeros(1, 6)))
    state = simulator.start()
    simulator.run_round(state)
    params = state.params.row(0)
    expected = params["personal.head.2.weight"] @ params["personal.head.0.weight"]
    assert torch.equal(head_weights(simulator.net, params), expected)


def test_a_head_without_linear_layers_is_refused():
    module = BodyAndHead(nn.Linear(6, 4), nn.LayerNorm(4))
    simulator = make_simulator(FedCP(), make_federation(), net=Net(module, torch.zeros(1, 6)))
    with pytest.raises(BadInput, match="head consists of linear layers"):
        simulator.start()


def test_the_policy_is_sent_and_the_personal_head_is_not():
    simulator = make_simulator(FedCP(), make_federation())
    record = simulator.run_round(simulator.start()).record
    width, classes, inputs = 7, 4, 6
    network = width * (inputs + 1) + classes * (width + 1)
    assert record["bytes_up"] == 4 * 8 * (network + 2 * width * (width + 1) + 4 * width)


def test_a_negative_strength_is_refused(refused_run):
    assert "--align must be 0 or more, got -1" in refused_run("fedcp", "--align", "-1")
