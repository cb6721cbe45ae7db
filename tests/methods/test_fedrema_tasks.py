"""FedReMa's similarity of heads for tasks other than classes: densities, levels and labels."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fedrema.core import LocalTraining, Moment
from fedrema.core.similarity import LEAST_PROBES, draw_probes, head_similarity, similarity_rows
from fedrema.data import Federation
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.tasks import Task
from tests.fixtures import make_simulator, run_all, tensor


def net_for(task: Task) -> Net:
    """Return a network with two features, for a task."""
    module = BodyAndHead(torch.nn.Linear(1, 2), torch.nn.Linear(2, task.outputs))
    return Net(module, torch.zeros(1, 1)).to(torch.device("cpu"), torch.float64).for_task(task)


def constant_heads(*outputs) -> dict[str, torch.Tensor]:
    """Return heads whose outputs do not depend on features: one row of outputs per client."""
    bias = tensor(outputs)
    return {"head.weight": bias.new_zeros(*bias.shape, 2), "head.bias": bias}


PROBE = tensor([[[0.5, 0.5]]])
NUMBERS = [Task("regression", 1, 5.0, 2.0), Task("count", 1, 3.0)]


@pytest.mark.parametrize("task", NUMBERS, ids=lambda task: task.name)
def test_similarities_of_numbers_by_hand(task):
    # Differences of 1 and 2, M = 0.5: exp(−1/2) and exp(−4/2).
    found = head_similarity(net_for(task), constant_heads([0.0], [1.0], [2.0]), PROBE, temperature=0.5)
    near, far = math.exp(-0.5), math.exp(-2.0)
    assert found.tolist() == [pytest.approx(row) for row in ([1, near, far], [near, 1, near], [far, near, 1])]


@pytest.mark.parametrize(("own", "peer"), [(0.5, 0.5), (0.5, 1.0), (2.0, 0.1)])
def test_similarities_of_numbers_are_cosines_of_normal_densities(own, peer):
    outputs = (-0.3, 1.1)
    heads = constant_heads(*([each] for each in outputs))
    found = head_similarity(net_for(NUMBERS[0]), heads, PROBE, own, peer)

    def scalar_product(first, first_variance, second, second_variance):
        one, other = stats.norm(first, math.sqrt(first_variance)), stats.norm(second, math.sqrt(second_variance))
        return integrate.quad(lambda value: one.pdf(value) * other.pdf(value), -20, 20, points=outputs, limit=200)[0]

    for i, mine in enumerate(outputs):
        for j, theirs in enumerate(outputs):
            norms = math.sqrt(scalar_product(mine, own, mine, own) * scalar_product(theirs, peer, theirs, peer))
            assert float(found[i, j]) == pytest.approx(scalar_product(mine, own, theirs, peer) / norms, abs=1e-7)


def test_similarities_of_levels_by_hand():
    # P(y > 0) = 1/2 or 3/4; P(y > 1 given y ≥ 1) = 1/2. At M = 0.5 the logits are twice those of the heads.
    heads = constant_heads([0.0, 0.0], [math.log(3) / 2, 0.0])
    first, second = np.array([1 / 2, 1 / 4, 1 / 4]), np.array([1 / 4, 3 / 8, 3 / 8])
    cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    found = head_similarity(net_for(Task("ordinal", 3)), heads, PROBE, temperature=0.5)
    assert found.tolist() == [pytest.approx([1, cosine]), pytest.approx([cosine, 1])]


def test_similarities_of_labels_are_averaged_over_labels():
    # The first label: 1/2 and 3/4; the second: 1/2 for both, so its cosine is 1.
    heads = constant_heads([0.0, 0.0], [math.log(3) / 2, 0.0])
    first, second = np.array([1 / 2, 1 / 2]), np.array([3 / 4, 1 / 4])
    cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    found = head_similarity(net_for(Task("multilabel", 2)), heads, PROBE, temperature=0.5)
    mean = (cosine + 1) / 2
    assert found.tolist() == [pytest.approx([1, mean]), pytest.approx([mean, 1])]


TASKS = [*NUMBERS, Task("ordinal", 4), Task("multilabel", 3), Task("binary", 2)]


@pytest.mark.parametrize("names", [(), ("a", "b", "c", "d", "e")], ids=["same probes", "own probes"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_similarities_are_averaged_over_probes_and_equal_heads_have_similarity_one(task, names, monkeypatch):
    net = net_for(task)
    generator = torch.Generator().manual_seed(0)
    heads = {
        "head.weight": torch.randn(5, task.outputs, 2, generator=generator, dtype=torch.float64),
        "head.bias": torch.randn(5, task.outputs, generator=generator, dtype=torch.float64),
    }
    for value in heads.values():
        value[3] = value[1]
    probes = draw_probes(net, Moment(1, 10, seed=0), 7, 1.0, names)
    found = head_similarity(net, heads, probes, 0.5)
    assert torch.allclose(found.diagonal(), torch.ones(5).double(), atol=1e-12)
    assert float(found[1, 3]) == pytest.approx(1)
    assert ((found >= 0) & (found <= 1 + 1e-12)).all()
    assert (found[0, 1:] < 0.999).all()
    for i in range(5):
        row = probes[i if names else 0]
        alone = [head_similarity(net, heads, probe[None, None], 0.5)[i] for probe in row]
        assert torch.allclose(found[i], torch.stack(alone).mean(0), atol=1e-12)
    if not names:
        assert torch.allclose(found, found.T, atol=1e-12)
    monkeypatch.setattr("fedrema.core.similarity._rows_per_block", lambda numbers: 2)
    blocks = list(similarity_rows(net, heads, probes, 0.5))
    assert [len(block) for block in blocks] == [2, 2, 1]
    assert torch.allclose(torch.cat(blocks), found, atol=1e-12)


@pytest.mark.parametrize(("task", "probes"), [(Task("binary", 2), 1), (Task("regression"), LEAST_PROBES)])
def test_tasks_without_a_softmax_use_more_probes(task, probes, monkeypatch):
    drawn = []

    def draw(net, moment, count, *more):
        found = draw_probes(net, moment, count, *more)
        drawn.append(found.shape[1])
        return found

    monkeypatch.setattr("fedrema.methods.fedrema.draw_probes", draw)
    generator = np.random.default_rng(0)
    y = generator.integers(0, 2, 40) if task.has_softmax else generator.normal(size=40)
    federation = Federation.from_arrays(generator.normal(size=(40, 2)).astype(np.float32), y, np.arange(40) % 4)
    run_all(make_simulator(FedReMa(), federation, rounds=1))
    run_all(make_simulator(FedReMa(probes=20), federation, rounds=1))
    assert drawn == [probes, 20]


def two_groups(clients=8, samples=40, seed=0) -> Federation:
    """Return clients of two groups: the same inputs, and quantities with opposite slopes."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(clients * samples, 3)).astype(np.float32)
    client = np.repeat(np.arange(clients), samples)
    slope = np.where(client % 2 == 0, 1.0, -1.0)
    y = 7 + 3 * slope * (x @ np.array([1.0, -0.5, 0.8])) + generator.normal(scale=0.2, size=len(x))
    return Federation.from_arrays(x, y, client, data_seed=seed)


def test_clients_with_opposite_slopes_are_separated_and_predict_better_than_with_one_model():
    federation = two_groups()
    local = LocalTraining(epochs=3, batch=16, lr=0.05)
    settings = {"rounds": 12, "hidden": 16, "record": "relations"}
    simulator = make_simulator(FedReMa(include_below_gap=False), federation, local, **settings)
    state = simulator.start()
    rounds = list(simulator.run(state))
    same_group = np.arange(8)[:, None] % 2 == np.arange(8) % 2
    chosen = [each.relations["sets"].astype(bool) for each in rounds if "sets" in each.relations]
    assert len(chosen) >= 2
    for sets in chosen[1:]:
        assert not (sets & ~same_group).any()  # nobody chooses a client of the other group
    assert chosen[-1].sum() > 8  # but others of the own group
    _, average = run_all(make_simulator(FedAvg(), federation, local, **settings))
    scores = [record["rmse"] for record in (rounds[-1].record, average[-1])]
    assert scores[0] < 0.5 * scores[1]
    assert rounds[-1].record["r2"] > 0.8
