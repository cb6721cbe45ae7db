"""FedProto against numbers computed by hand from its equations."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedrema.core import Client, LocalTraining, Moment, Uploads
from fedrema.data import Federation
from fedrema.methods.fedproto import FedProto
from fedrema.methods.local import Local
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import batch_of, make_simulator, run_all, tensor

MOMENT = Moment(round=1, rounds=10, seed=0)
CLASSES, FEATURES, BYTES = 4, 7, 8


@pytest.fixture
def net() -> Net:
    """Two inputs, two features, three classes."""
    return Net(BodyAndHead(nn.Linear(2, 2), nn.Linear(2, 3)).double(), torch.zeros(1, 2, dtype=torch.float64))


def client(biases=(0.0, 0.0, 0.0), **inbox) -> Client:
    """Return a client whose features are its inputs, and whose classifier has constant logits."""
    params = {
        "body.weight": torch.eye(2, dtype=torch.float64),
        "body.bias": tensor([0.0, 0.0]),
        "head.weight": torch.zeros(3, 2, dtype=torch.float64),
        "head.bias": tensor(list(biases)),
    }
    return Client(params, params, {}, {name: tensor(value) for name, value in inbox.items()}, tensor(3.0))


PROTOTYPES = {"prototypes": [[0.0, 0.0], [1.0, 5.0], [9.0, 9.0]], "known": [1.0, 1.0, 0.0]}
SAMPLES = batch_of([[1, 2], [3, 3], [4, 4], [70, 70]], [0, 1, 2, 0], [1, 1, 1, 0])


def test_the_loss_is_cross_entropy_plus_the_distance_to_prototypes(net):
    # All logits are equal, so that the cross-entropy is log 3. ½(1 + 4) = 2.5 and ½(4 + 4) = 4; class 2 has no
    # prototype; the last sample is padding.
    for align in (0.1, 1.0, 2.0):
        found = FedProto(align=align).loss(net, client(**PROTOTYPES), SAMPLES)
        assert float(found) == pytest.approx(math.log(3) + align * 6.5 / 3, rel=1e-12)


def test_with_an_empty_inbox_the_loss_is_the_cross_entropy(net):
    assert float(FedProto(align=5.0).loss(net, client(), SAMPLES)) == pytest.approx(math.log(3), rel=1e-12)
    # (−log softmax) of the biases (log 2, 0, 0): log 4 − log 2 for class 0, log 4 for the others
    found = FedProto().loss(net, client([math.log(2), 0, 0]), SAMPLES)
    assert float(found) == pytest.approx((math.log(2) + 2 * math.log(4)) / 3, rel=1e-12)


def test_the_nearest_known_prototype_is_predicted(net):
    x = tensor([[1, 2], [1, 4], [9, 9], [0.5, 2.5]])
    scores = FedProto().predict(net, client([0, 0, 5], **PROTOTYPES), x)
    expected = [[-5, -9], [-17, -1], [-162, -80], [-6.5, -6.5]]  # of the squares
    assert (-scores[:, :2].square()).tolist() == [pytest.approx(row) for row in expected]
    # The third sample equals the row of an unknown class, which must not be predicted.
    assert (scores[:, 2] == -math.inf).all()
    assert scores.argmax(1).tolist()[:3] == [0, 1, 1]


def test_the_classifier_predicts_with_an_empty_inbox_and_on_request(net):
    x = tensor([[1, 2], [9, 9]])
    assert FedProto().predict(net, client([1, 2, 5]), x).tolist() == [[1, 2, 5]] * 2
    by_classifier = FedProto(predict_by="classifier").predict(net, client([1, 2, 5], **PROTOTYPES), x)
    assert by_classifier.tolist() == [[1, 2, 5]] * 2


def test_the_classifier_is_declared_as_another_way_of_scoring():
    beside = FedProto(align=0.3, weigh="uniform").beside()
    assert beside == {"classifier": FedProto(align=0.3, weigh="uniform", predict_by="classifier")}
    assert FedProto(predict_by="classifier").beside() == {}


def test_the_other_recorded_accuracy_is_the_classifiers():
    # After very little training, prototypes separate the classes but the classifier does not.
    barely = LocalTraining(epochs=1, batch=5, lr=1e-4)
    _, by_prototype = run_all(make_simulator(FedProto(), local=barely))
    _, by_classifier = run_all(make_simulator(FedProto(predict_by="classifier"), local=barely))
    for one, other in zip(by_prototype, by_classifier, strict=True):
        assert one.alternatives == {"classifier": {"accuracy": other.accuracy}}
        assert not other.alternatives
    assert [one["accuracy"] for one in by_prototype] != [other["accuracy"] for other in by_classifier]


def test_clients_send_means_of_trained_features(net):
    # The received body has other features: only those of the trained body are sent.
    trained = client().having(received={**client().params, "body.bias": tensor([100.0, 100.0])})
    kept, sent = FedProto().end(net, trained, SAMPLES, MOMENT)
    assert kept is trained
    assert sent["means"].tolist() == [[1, 2], [3, 3], [4, 4]]
    assert sent["label_counts"].tolist() == [1, 1, 1]
    assert set(sent) == {"means", "label_counts"}


def test_the_server_averages_by_class(net):
    means = tensor([[[0, 0], [4, 4], [0, 0]], [[6, 3], [8, 0], [0, 0]]])
    counts = tensor([[0, 3, 0], [5, 1, 0]])
    sent = Uploads(torch.arange(2), {}, {"means": means, "label_counts": counts}, counts.sum(1))
    weighted = FedProto().aggregate(net, FedProto().server(net, 2), sent, MOMENT)
    assert weighted.shared["prototypes"].tolist() == [[6, 3], [5, 3], [0, 0]]  # (3·4 + 8)/4, (3·4 + 0)/4
    assert weighted.shared["known"].tolist() == [1, 1, 0]
    assert weighted.personal == {}
    assert weighted.state.keys() == {"prototypes", "known"}
    uniform = FedProto(weigh="uniform")
    alike = uniform.aggregate(net, uniform.server(net, 2), sent, MOMENT)
    assert alike.shared["prototypes"].tolist() == [[6, 3], [6, 2], [0, 0]]


def test_only_prototypes_are_exchanged():
    state, records = run_all(make_simulator(FedProto()))
    each = (CLASSES * FEATURES + CLASSES) * BYTES
    assert [record["bytes_up"] for record in records] == [4 * each] * 3
    assert [record["bytes_down"] for record in records] == [0, 4 * each, 4 * each]
    assert state.params.common == {}
    assert set(state.inbox.common) == {"prototypes", "known"}
    assert state.inbox.own == {}


def test_models_stay_private():
    state, _ = run_all(make_simulator(FedProto()))
    for name, value in state.params.own.items():
        for row in range(1, 4):
            assert not torch.equal(value[0], value[row]), name


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_without_alignment_it_equals_local_training(backend):
    # Momentum, clipping and unequal clients included.
    local = LocalTraining(epochs=2, batch=5, lr=0.05, clip=0.5, weight_decay=0.01)
    alone, expected = run_all(make_simulator(Local(), local=local, backend=backend))
    found, records = run_all(make_simulator(FedProto(align=0.0), local=local, backend=backend))
    assert alone.params.own.keys() == found.params.own.keys()
    for name, value in alone.params.own.items():
        assert torch.equal(found.params.own[name], value), name
    assert [one["loss"] for one in records] == [one["loss"] for one in expected]
    assert [one.alternatives["classifier"]["accuracy"] for one in records] == [one["accuracy"] for one in expected]


def test_alignment_begins_in_the_second_round():
    alone, strong = make_simulator(Local()), make_simulator(FedProto(align=3.0))
    states = alone.start(), strong.start()
    for number in (1, 2):
        alone.run_round(states[0])
        strong.run_round(states[1])
        apart = (states[0].params.own["body.1.weight"] - states[1].params.own["body.1.weight"]).abs().max()
        assert (apart > 1e-4) == (number == 2)


def test_the_server_keeps_the_prototype_of_a_class_whose_only_holder_is_absent():
    generator = np.random.default_rng(0)
    labels = np.concatenate([generator.integers(0, 2, 20), *(generator.integers(1, 3, 20) for _ in range(3))])
    x = generator.normal(size=(80, 6)).astype(np.float32) + labels[:, None]
    federation = Federation.from_arrays(x, labels, np.repeat([0, 1, 2, 3], 20), classes=4)
    simulator = make_simulator(FedProto(), federation, participation=0.5, rounds=8)
    state = simulator.start()
    heard, kept = False, 0
    before = state.server
    for _ in range(8):
        present = simulator.run_round(state).record["participants"]
        now = state.server
        if 0 not in present:
            assert torch.equal(now["prototypes"][0], before["prototypes"][0].to(now["prototypes"]))
            assert not torch.equal(now["prototypes"][1], before["prototypes"][1].to(now["prototypes"]))
            kept += heard
        heard = heard or 0 in present
        assert now["known"].tolist() == [float(heard), 1, 1, 0]  # no client holds class 3
        assert torch.equal(state.inbox.common["prototypes"], now["prototypes"])
        before = now
    assert kept > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--align", "-0.5"], "--align must be 0 or more, got -0.5"),
        (["--align", "nan"], "--align must be 0 or more, got nan"),
        (["--align", "inf"], "--align must be 0 or more, got inf"),
        (["--weigh", "votes"], "--weigh must be samples or uniform, got 'votes'."),
        (
            ["--predict-by", "magic"],
            "--predict-by must be prototype or classifier, got 'magic'.",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(arguments, words, refused_run):
    assert words in refused_run("fedproto", *arguments)
