"""FedDistill against numbers computed by hand from its algorithm."""

import math

import pytest
import torch
from torch import nn

from fedrema.core import Client, LocalTraining, Moment, Uploads
from fedrema.methods.feddistill import FedDistill
from fedrema.methods.local import Local
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import batch_of, make_simulator, run_all, tensor

MOMENT = Moment(round=1, rounds=10, seed=0)
CLASSES, BYTES = 4, 8


@pytest.fixture
def net() -> Net:
    """Two inputs, two features, two classes."""
    return Net(BodyAndHead(nn.Linear(2, 2), nn.Linear(2, 2)).double(), torch.zeros(1, 2, dtype=torch.float64))


def client(**inbox) -> Client:
    """Return a client whose logits are its inputs."""
    eye, none = torch.eye(2, dtype=torch.float64), tensor([0.0, 0.0])
    params = {"body.weight": eye, "body.bias": none, "head.weight": eye, "head.bias": none}
    return Client(params, params, {}, {name: tensor(value) for name, value in inbox.items()}, tensor(3.0))


def sent() -> Uploads:
    """Return the uploads of three clients: all hold class 0, only client 1 holds class 1, none holds class 2."""
    outputs = torch.zeros(3, 3, 3, dtype=torch.float64)
    outputs[0, 0], outputs[1, 0], outputs[2, 0] = tensor([0.6, 0.3, 0.1]), tensor([0.8, 0.1, 0.1]), tensor([1, 0, 0])
    outputs[1, 1] = tensor([0.1, 0.7, 0.2])
    # The number of samples decides whether a client holds a label, but is not a weight.
    counts = tensor([[90, 0, 0], [10, 5, 0], [1, 0, 0]])
    return Uploads(torch.arange(3), {}, {"outputs": outputs, "label_counts": counts}, counts.sum(1))


def test_targets_are_means_over_other_clients_that_hold_a_label(net):
    method = FedDistill()
    answer = method.aggregate(net, {}, sent(), MOMENT)
    expected = [
        [[0.9, 0.05, 0.05], [0.1, 0.7, 0.2], [0, 0, 0]],
        [[0.8, 0.15, 0.05], [0, 0, 0], [0, 0, 0]],  # the only holder of class 1 has no teacher for it
        [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0, 0, 0]],
    ]
    targets = answer.personal["targets"].tolist()
    assert targets == [[pytest.approx(row) for row in rows] for rows in expected]
    assert answer.personal["taught"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert answer.shared == {}


def test_a_clients_own_outputs_can_be_included_in_its_targets(net):
    answer = FedDistill(include_own=True).aggregate(net, {}, sent(), MOMENT)
    everyone = [[0.8, 0.4 / 3, 0.2 / 3], [0.1, 0.7, 0.2], [0, 0, 0]]
    for rows in answer.personal["targets"].tolist():
        assert rows == [pytest.approx(row) for row in everyone]
    assert answer.personal["taught"].tolist() == [[1, 1, 0]] * 3


@pytest.mark.parametrize(("include_own", "taught"), [(False, [[0, 0, 0]]), (True, [[1, 1, 0]])])
def test_a_single_client_has_no_teacher_but_itself(net, include_own, taught):
    together = sent()
    alone = Uploads(
        together.clients[1:2], {}, {name: value[1:2] for name, value in together.extras.items()}, together.counts[1:2]
    )
    answer = FedDistill(include_own=include_own).aggregate(net, {}, alone, MOMENT)
    assert answer.personal["taught"].tolist() == taught
    assert torch.isfinite(answer.personal["targets"]).all()


LOGITS = [[math.log(3), 0.0], [0.0, math.log(3)], [50.0, 9.0]]  # softmax: (¾, ¼), (¼, ¾), padding
LABELS, MASK = [0, 1, 0], [1, 1, 0]


def test_the_loss_compares_softmax_outputs_by_cross_entropy(net):
    taught = client(targets=[[0.5, 0.5], [0.2, 0.8]], taught=[1, 1])
    found = FedDistill(gamma=0.1).loss(net, taught, batch_of(LOGITS, LABELS, MASK))
    own = -math.log(0.75)  # both samples
    first = -0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    second = -0.2 * math.log(0.25) - 0.8 * math.log(0.75)
    assert float(found) == pytest.approx(own + 0.1 * (first + second) / 2, rel=1e-12)


def test_the_loss_compares_logits_by_mean_square(net):
    taught = client(targets=[[1.0, 2.0], [-1.0, 0.0]], taught=[1, 1])
    found = FedDistill(gamma=0.1, target_loss="mse").loss(net, taught, batch_of(LOGITS, LABELS, MASK))
    first = ((math.log(3) - 1) ** 2 + 4) / 2
    second = (1 + math.log(3) ** 2) / 2
    assert float(found) == pytest.approx(-math.log(0.75) + 0.1 * (first + second) / 2, rel=1e-12)


@pytest.mark.parametrize("target_loss", ["cross-entropy", "mse"])
def test_a_label_without_a_target_adds_nothing_to_the_loss(net, target_loss):
    method = FedDistill(gamma=0.1, target_loss=target_loss)
    samples = batch_of(LOGITS, LABELS, MASK)
    untaught = client(targets=[[0.0, 0.0], [0.0, 0.0]], taught=[0, 0])
    assert float(method.loss(net, untaught, samples)) == pytest.approx(-math.log(0.75), rel=1e-12)
    # One of two samples has a target: the mean is still over both.
    half = client(targets=[[0.5, 0.5], [0.0, 0.0]], taught=[1, 0])
    told = {"cross-entropy": -0.5 * math.log(0.75 * 0.25), "mse": ((math.log(3) - 0.5) ** 2 + 0.25) / 2}[target_loss]
    assert float(method.loss(net, half, samples)) == pytest.approx(-math.log(0.75) + 0.1 * told / 2, rel=1e-12)


def test_with_an_empty_inbox_the_loss_is_the_cross_entropy(net):
    found = FedDistill(gamma=7.0).loss(net, client(), batch_of(LOGITS, LABELS, MASK))
    assert float(found) == pytest.approx(-math.log(0.75), rel=1e-12)


@pytest.mark.parametrize(
    ("target_loss", "expected"),
    [
        ("cross-entropy", [[(0.75 + 0.25) / 2, 0.5], [0.5, 0.5]]),
        ("mse", [[math.log(3) / 2, math.log(3) / 2], [0.0, 0.0]]),
    ],
)
def test_clients_send_mean_outputs_of_the_trained_model(net, target_loss, expected):
    # The received model has other outputs: only those of the trained model are sent.
    trained = client()
    trained = trained.having(received={**trained.params, "head.bias": tensor([5.0, 0.0])})
    samples = batch_of([*LOGITS[:2], [0.0, 0.0], [50.0, 9.0]], [0, 0, 1, 0], [1, 1, 1, 0])
    kept, found = FedDistill(target_loss=target_loss).end(net, trained, samples, MOMENT)
    assert kept is trained
    assert set(found) == {"outputs", "label_counts"}
    assert found["outputs"].tolist() == [pytest.approx(row) for row in expected]
    assert found["label_counts"].tolist() == [2, 1]


def test_the_mean_of_softmax_outputs_is_not_the_softmax_of_the_mean(net):
    samples = batch_of([[math.log(3), 0.0], [0.0, 0.0]], [0, 0])
    _, found = FedDistill().end(net, client(), samples, MOMENT)
    assert found["outputs"][0].tolist() == pytest.approx([0.625, 0.375])  # of mean logits: √3/(√3 + 1) = 0.634


def test_only_mean_outputs_are_exchanged():
    state, records = run_all(make_simulator(FedDistill()))
    each = (CLASSES * CLASSES + CLASSES) * BYTES
    assert [record["bytes_up"] for record in records] == [4 * each] * 3
    assert [record["bytes_down"] for record in records] == [0, 4 * each, 4 * each]
    assert state.params.common == {}
    assert state.inbox.common == {}
    assert set(state.inbox.own) == {"targets", "taught"}


def test_targets_are_computed_with_the_trained_models():
    simulator = make_simulator(FedDistill(), rounds=1)
    state = simulator.start()
    simulator.run_round(state)
    data = simulator.federation.split("train")
    means, holds = torch.zeros(4, CLASSES, CLASSES).double(), torch.zeros(4, CLASSES, dtype=torch.bool)
    for row in range(4):
        x = torch.from_numpy(data.x[row, : data.count[row]]).double()
        labels = data.y[row, : data.count[row]]
        outputs = torch.softmax(simulator.net(state.params.row(row), x), dim=1)
        for label in set(labels.tolist()):
            means[row, label] = outputs[torch.from_numpy(labels == label)].mean(0)
            holds[row, label] = True
    for row in range(4):
        for label in range(CLASSES):
            others = [other for other in range(4) if other != row and holds[other, label]]
            assert bool(state.inbox.own["taught"][row, label]) == bool(others)
            if others:
                expected = means[others, label].mean(0)
                assert torch.allclose(state.inbox.own["targets"][row, label], expected, atol=1e-12)


@pytest.mark.parametrize("target_loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_without_distillation_it_equals_local_training(backend, target_loss):
    local = LocalTraining(epochs=2, batch=5, lr=0.05, clip=0.5, weight_decay=0.01)
    alone, expected = run_all(make_simulator(Local(), local=local, backend=backend))
    found, records = run_all(
        make_simulator(FedDistill(gamma=0.0, target_loss=target_loss), local=local, backend=backend)
    )
    assert alone.params.own.keys() == found.params.own.keys()
    for name, value in alone.params.own.items():
        assert torch.equal(found.params.own[name], value), name
    for one, other in zip(records, expected, strict=True):
        assert one["client_accuracy"] == other["client_accuracy"]
        assert one["loss"] == other["loss"]


def test_distillation_begins_in_the_second_round():
    alone, strong = make_simulator(Local()), make_simulator(FedDistill(gamma=1.0))
    states = alone.start(), strong.start()
    for number in (1, 2):
        alone.run_round(states[0])
        strong.run_round(states[1])
        apart = (states[0].params.own["head.weight"] - states[1].params.own["head.weight"]).abs().max()
        assert (apart > 1e-4) == (number == 2)


def test_the_defaults_are_the_papers():
    assert FedDistill() == FedDistill(gamma=0.01, target_loss="cross-entropy", include_own=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gamma", "-1"], "--gamma must be 0 or more, got -1"),
        (["--gamma", "nan"], "--gamma must be 0 or more, got nan"),
        (["--gamma", "inf"], "--gamma must be 0 or more, got inf"),
        (
            ["--target-loss", "kl"],
            "--target-loss must be cross-entropy or mse, got 'kl'.",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(arguments, words, refused_run):
    assert words in refused_run("feddistill", *arguments)
