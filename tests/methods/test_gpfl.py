"""GPFL against an implementation with torch's own modules and optimisers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedrema.methods.gpfl import GPFL
from tests.fixtures import BACKENDS, make_federation, make_simulator
from tests.methods.by_hand import LR, begun, local

ADDED = ("gain", "lift")


class Reference(nn.Module):
    """One client's modules; `added` are those with weight decay."""

    def __init__(self, params):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)
        self.embeddings = nn.Parameter(params["embeddings"].clone())
        self.linear = nn.ModuleDict({name: nn.Linear(3, 3) for name in ADDED})
        self.norm = nn.ModuleDict({name: nn.LayerNorm(3) for name in ADDED})
        self.double()
        names = {"body": self.body, "head": self.head, **dict(self.linear.items())}
        for name, part in names.items():
            part.weight.data, part.bias.data = params[f"{name}.weight"].clone(), params[f"{name}.bias"].clone()
        for name, part in self.norm.items():
            part.weight.data, part.bias.data = params[f"{name}.scale"].clone(), params[f"{name}.offset"].clone()

    def tensors(self):
        parts = {"body": self.body, "head": self.head, **dict(self.linear.items())}
        found = {
            f"{name}.{each}": getattr(part, each).data for name, part in parts.items() for each in ("weight", "bias")
        }
        for name, part in self.norm.items():
            found |= {f"{name}.scale": part.weight.data, f"{name}.offset": part.bias.data}
        return {**found, "embeddings": self.embeddings.data}

    def changed(self, h, condition):
        gain, lift = (self.norm[name](torch.relu(self.linear[name](condition))) for name in ADDED)
        return torch.relu(h * (gain + 1) + lift)

    def logits(self, x, condition):
        return self.head(self.changed(self.body(x), condition))

    def trained(self, x, y, steps, guide, decay, clip):
        received = self.embeddings.data.clone()
        own = sum(received[label] for label in y) / len(y)
        model = [*self.body.parameters(), *self.head.parameters()]
        added = [self.embeddings, *self.linear.parameters(), *self.norm.parameters()]
        optimiser = torch.optim.SGD([*model, *added], lr=LR)
        for _ in range(steps):
            generic = self.changed(self.body(x), received.mean(dim=0))
            cosines = functional.cosine_similarity(generic[:, None], self.embeddings[None], dim=2)
            loss = functional.cross_entropy(self.logits(x, own), y) + functional.cross_entropy(cosines, y)
            loss = loss + guide * ((generic - received[y]) ** 2).sum().sqrt()
            loss = loss + decay / 2 * sum((value**2).sum() for value in added)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), clip)
            optimiser.step()
        return self


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("guide", "decay", "clip", "present"),
    [
        (0.01, 0.1, 1e9, [[0, 1], [0, 1]]),
        (0.5, 0.0, 1e9, [[0, 1], [0, 1]]),
        (0.1, 0.1, 0.3, [[1], [1]]),  # client 0 never trains
    ],
)
def test_two_rounds_equal_those_of_torch_modules(backend, guide, decay, clip, present):
    simulator, state, _, data = begun(GPFL(guide=guide, decay=decay), backend, local(epochs=2, clip=clip))
    simulator.participation.choose = lambda number: (present[number - 1], [])
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    counts = torch.tensor([len(y) for _, y in data], dtype=torch.float64)
    models = [{name: value.clone() for name, value in state.params.row(row).items()} for row in range(2)]
    for rows in present:
        simulator.run_round(state)
        trained = [Reference(models[row]).trained(*data[row], 2, guide, decay, clip).tensors() for row in rows]
        mean = {
            name: sum(n * each[name] for n, each in zip(counts[rows], trained, strict=True)) / counts[rows].sum()
            for name in trained[0]
            if not name.startswith("head.")
        }
        for row, each in zip(rows, trained, strict=True):
            models[row] = each
        models = [{**each, **mean} for each in models]
    for row, model in enumerate(models):
        found = state.params.row(row)
        assert found.keys() == model.keys()
        for name, value in model.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name
        x, y = data[row]
        condition = sum(model["embeddings"][label] for label in y) / len(y)
        cohort = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(2)), simulator.moment(2))
        expected = Reference(model).logits(x, condition)
        found = simulator.method.predict(simulator.net, cohort.one(row), x)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_head_is_not_sent():
    simulator = make_simulator(GPFL(), make_federation())
    record = simulator.run_round(simulator.start()).record
    width, classes, inputs = 7, 4, 6
    sent = width * (inputs + 1) + classes * width + 2 * (width * (width + 1) + 2 * width)
    assert record["bytes_up"] == 4 * 8 * sent


def test_negative_strengths_are_refused(refused_run):
    for setting in ("--guide", "--decay"):
        assert f"{setting} must be 0 or more, got -1" in refused_run("gpfl", setting, "-1")
