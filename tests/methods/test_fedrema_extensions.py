"""FedReMa with feature alignment (+F) and alternating training (+A), against numbers computed by hand."""

import math

import pytest
import torch
from torch.nn import functional

from fedrema.core import LocalTraining, Moment, Uploads
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import Net
from fedrema.runs.checkpoint import load_state, save_state
from tests.fixtures import LOCAL, batch_of, tensor
from tests.methods.aligned import (
    BYTES,
    CLASSES,
    FEATURES,
    client,
    make_net,
    training_data,
    watched_simulator,
)

MOMENT = Moment(round=1, rounds=10, seed=0)
MODEL = 6 * FEATURES + FEATURES + FEATURES * CLASSES + CLASSES
BACKENDS = ["loop", "stacked"]


@pytest.fixture
def net() -> Net:
    return make_net()


def forward(params, x):
    """Return features and logits of the mlp, without the package's own network."""
    hidden = torch.relu(x @ params["body.1.weight"].T + params["body.1.bias"])
    return hidden, hidden @ params["head.weight"].T + params["head.bias"]


SAMPLES = batch_of([[1, 2], [3, 3], [4, 4], [70, 70]], [0, 1, 2, 0], [1, 1, 1, 0])
PROTOTYPES = {"prototypes": [[0.0, 0.0], [1.0, 5.0], [9.0, 9.0]], "known": [1.0, 1.0, 0.0]}


def test_without_extensions_only_models_are_exchanged(net):
    method = FedReMa()
    assert (method.align, method.alternate) == (0, False)
    assert method.end(net, client(), SAMPLES, MOMENT)[1] == {}
    assert set(method.server(net, 4)) == {"dependencies", "peak", "critical"}
    simulator = watched_simulator(method)
    state = simulator.start()
    for _ in range(3):
        record = simulator.run_round(state).record
        assert record["bytes_up"] == record["bytes_down"] == 4 * MODEL * BYTES
    assert state.inbox.common == state.inbox.own == {}
    assert set(state.params.common) == {"body.1.weight", "body.1.bias"}
    assert set(state.params.own) == {"head.weight", "head.bias"}


def test_without_extensions_body_and_head_are_trained_together():
    (phase,) = FedReMa().phases(LOCAL, MOMENT)
    assert (phase.epochs, phase.lr, phase.momentum, phase.loss) == (2, 0.05, 0.9, None)
    assert phase.trains("body.weight")
    assert phase.trains("head.weight")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", [0.0, 0.7])
def test_rounds_without_alternation_equal_a_calculation_by_hand(backend, align):
    """One batch of all samples, no momentum: cross-entropy, and from the second round on the alignment."""
    local = LocalTraining(epochs=1, batch=1000, lr=0.05, momentum=0.0, clip=0)
    simulator = watched_simulator(FedReMa(align=align), local=local, backend=backend)
    state = simulator.start()
    for number in (1, 2):
        simulator.run_round(state)
        assert ("prototypes" in simulator.inbox) == (number == 2 and align > 0)
        for row in range(4):
            x, labels = training_data(simulator, row)
            params = {name: value.clone().requires_grad_() for name, value in simulator.before[row].items()}
            hidden, logits = forward(params, x)
            loss = functional.cross_entropy(logits, labels)
            if number == 2 and align:
                loss = loss + align * functional.mse_loss(hidden, simulator.inbox["prototypes"][labels])
            slopes = torch.autograd.grad(loss, list(params.values()))
            for (name, value), slope in zip(params.items(), slopes, strict=True):
                assert torch.allclose(simulator.trained[name][row], value - 0.05 * slope, atol=1e-12), name


def test_the_loss_aligns_features_with_prototypes(net):
    # log 3 for equal logits; ½(1 + 4) = 2.5, ½(4 + 4) = 4; class 2 has no prototype; the last sample is padding.
    for align in (0.1, 1.0):
        found = FedReMa(align=align).loss(net, client(**PROTOTYPES), SAMPLES)
        assert float(found) == pytest.approx(math.log(3) + align * 6.5 / 3, rel=1e-12)
    assert float(FedReMa(align=9.0).loss(net, client(), SAMPLES)) == pytest.approx(math.log(3), rel=1e-12)


def test_clients_send_means_of_trained_features(net):
    trained = client().having(received={**client().params, "body.bias": tensor([100.0, 100.0])})
    kept, sent = FedReMa(align=1.0).end(net, trained, SAMPLES, MOMENT)
    assert kept is trained
    assert sent["means"].tolist() == [[1, 2], [3, 3], [4, 4]]
    assert sent["label_counts"].tolist() == [1, 1, 1]
    assert set(sent) == {"means", "label_counts"}


def sent_prototypes() -> Uploads:
    counts = tensor([[0, 3, 0], [5, 1, 0]])
    return Uploads(
        clients=torch.arange(2),
        mean={"body.weight": tensor([[0, 0], [0, 0]]), "body.bias": tensor([0, 0])},
        params={
            "head.weight": torch.zeros(2, 3, 2, dtype=torch.float64),
            "head.bias": tensor([[1, 0, 0], [0, 0, 1]]),
        },
        extras={"means": tensor([[[0, 0], [4, 4], [0, 0]], [[6, 3], [8, 0], [0, 0]]]), "label_counts": counts},
        counts=counts.sum(1),
    )


@pytest.mark.parametrize(("weigh", "second"), [("samples", [5, 3]), ("uniform", [6, 2])])
def test_prototypes_are_weighted_like_heads(net, weigh, second):
    method = FedReMa(align=1.0, weigh=weigh)
    answer = method.aggregate(net, method.server(net, 2), sent_prototypes(), MOMENT)
    assert answer.shared["prototypes"].tolist() == [[6, 3], second, [0, 0]]  # (3·4 + 8)/4, (3·4 + 0)/4 or means
    assert answer.shared["known"].tolist() == [1, 1, 0]
    # Two clients share their heads: by 3 and 6 samples, or equally.
    head = [1 / 3, 0, 2 / 3] if weigh == "samples" else [0.5, 0, 0.5]
    assert answer.personal["head.bias"].tolist() == [pytest.approx(head)] * 2
    assert set(answer.shared) == {"body.weight", "body.bias", "prototypes", "known"}


def test_the_state_contains_prototypes_and_the_dependency_map(net):
    method = FedReMa(align=1.0)
    answer = method.aggregate(net, method.server(net, 2), sent_prototypes(), MOMENT)
    assert set(answer.state) == {"dependencies", "peak", "critical", "prototypes", "known"}
    # A class that is missing in the next round keeps its prototype, also with a single participant.
    later = sent_prototypes()
    one = Uploads(
        later.clients[:1],
        {name: value[:1] for name, value in later.params.items()},
        {name: value[:1] for name, value in later.extras.items()},
        later.counts[:1],
    )
    again = method.aggregate(net, answer.state, one, MOMENT)
    assert again.state["prototypes"].tolist() == [[6, 3], [4, 4], [0, 0]]
    assert again.state["known"].tolist() == [1, 1, 0]


def test_prototypes_are_updated_after_the_critical_period(net):
    method = FedReMa(align=1.0)
    state = {**method.server(net, 2), "critical": False, "dependencies": torch.ones(2, 2)}
    answer = method.aggregate(net, state, sent_prototypes(), MOMENT)
    assert answer.shared["prototypes"].tolist() == [[6, 3], [5, 3], [0, 0]]
    assert answer.trace["critical"] is False


@pytest.mark.parametrize("alternate", [False, True])
def test_prototypes_are_exchanged_with_alignment(alternate):
    simulator = watched_simulator(FedReMa(align=1.0, alternate=alternate))
    records = [each.record for each in simulator.run(simulator.start())]
    prototypes = CLASSES * FEATURES + CLASSES
    assert [record["bytes_up"] for record in records] == [4 * (MODEL + prototypes) * BYTES] * 3
    down, more = 4 * MODEL * BYTES, 4 * prototypes * BYTES
    assert [record["bytes_down"] for record in records] == [down, down + more, down + more]


@pytest.mark.parametrize("align", [0.0, 1.0])
def test_alternating_training_trains_the_head_and_then_the_body_for_all_epochs(align):
    local = LocalTraining(epochs=5, lr=0.02, momentum=0.5, schedule="exponential", lr_decay=0.5)
    later = Moment(round=3, rounds=10, seed=0)
    phases = FedReMa(alternate=True, align=align).phases(local, later)
    assert [(phase.epochs, phase.lr, phase.momentum) for phase in phases] == [(5, 0.02 / 4, 0.5)] * 2
    parts = [[name for name in ("body.weight", "head.weight") if phase.trains(name)] for phase in phases]
    assert parts == [["head.weight"], ["body.weight"]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", [0.0, 0.7])
def test_alternating_rounds_equal_a_calculation_by_hand(backend, align):
    """Two epochs of one batch: two steps of the head, then two of the body, with alignment only in the latter."""
    local = LocalTraining(epochs=2, batch=1000, lr=0.05, momentum=0.0, clip=0)
    simulator = watched_simulator(FedReMa(align=align, alternate=True), local=local, backend=backend)
    state = simulator.start()
    for number in (1, 2):
        simulator.run_round(state)
        for row in range(4):
            x, labels = training_data(simulator, row)
            params = {name: value.clone() for name, value in simulator.before[row].items()}
            for part in ("head.", "head.", "body.", "body."):
                params = {name: value.detach().requires_grad_(name.startswith(part)) for name, value in params.items()}
                moving = [name for name in params if name.startswith(part)]
                hidden, logits = forward(params, x)
                loss = functional.cross_entropy(logits, labels)
                if number == 2 and align and part == "body.":
                    loss = loss + align * functional.mse_loss(hidden, simulator.inbox["prototypes"][labels])
                slopes = torch.autograd.grad(loss, [params[name] for name in moving])
                for name, slope in zip(moving, slopes, strict=True):
                    params[name] = params[name] - 0.05 * slope
            for name, value in params.items():
                assert torch.allclose(simulator.trained[name][row], value, atol=1e-12), (number, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_heads_phase_leaves_the_body_bit_identical_and_ignores_alignment(backend):
    # Momentum and weight decay would change parameters that are only masked; the head must not depend on alignment.
    local = LocalTraining(epochs=2, batch=5, lr=0.05, weight_decay=0.01)
    moment = Moment(round=2, rounds=3, seed=3)
    heads = {}
    for align in (0.5, 50.0):
        method = FedReMa(align=align, alternate=True)
        simulator = watched_simulator(method, local=local, backend=backend)
        state = simulator.start()
        # The first round is the same for both: there are no prototypes yet.
        simulator.run_round(state)
        cohort = simulator.cohort(state, torch.arange(4), with_velocity=True)
        assert "prototypes" in cohort.inbox.common
        assert all(value.abs().max() > 0 for value in state.velocity.values())
        only_head = method.phases(local, moment)[:1]
        trained, velocity, _ = simulator._train(method, only_head, "train", cohort, moment)
        for name, value in trained.items():
            same = name.startswith("body.")
            before = state.params.merged()[name].expand_as(value)
            assert torch.equal(value, before) == same, name
            assert torch.equal(velocity[name], state.velocity[name]) == same, name
        heads[align] = {name: value for name, value in trained.items() if name.startswith("head.")}
    for name, value in heads[0.5].items():
        assert torch.equal(value, heads[50.0][name]), name


def test_the_gradient_of_the_head_does_not_depend_on_prototypes(net):
    parts = {}
    for inbox in ({}, PROTOTYPES):
        one = client(**inbox)
        params = {name: value.clone().requires_grad_() for name, value in one.params.items()}
        params["head.weight"] = tensor([[1, 0], [0, 1], [1, 1]]).requires_grad_()
        loss = FedReMa(align=3.0).loss(net, one.having(params=params), SAMPLES)
        parts[len(inbox)] = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    for name, slope in parts[0].items():
        assert torch.equal(slope, parts[2][name]) == name.startswith("head."), name


@pytest.mark.parametrize("alternate", [False, True])
def test_a_resumed_run_has_its_prototypes(alternate, tmp_path):
    method = FedReMa(align=1.0, alternate=alternate)
    whole = watched_simulator(method, rounds=4, participation=0.75)
    expected = whole.start()
    list(whole.run(expected))
    first = watched_simulator(method, rounds=4, participation=0.75)
    state = first.start()
    for _ in range(2):
        first.run_round(state)
    save_state(state, tmp_path / "state.safetensors", "test")
    found = load_state(tmp_path / "state.safetensors", "test")
    assert torch.equal(found.server["prototypes"], state.server["prototypes"])
    assert found.server["known"].tolist() == state.server["known"].tolist()
    list(watched_simulator(method, rounds=4, participation=0.75).run(found))
    for ours, theirs in (
        (expected.params.common, found.params.common),
        (expected.params.own, found.params.own),
        (expected.inbox.common, found.inbox.common),
    ):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    assert torch.equal(expected.server["prototypes"], found.server["prototypes"])
    assert torch.equal(expected.server["dependencies"], found.server["dependencies"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--align", "-1"], "--align must be 0 or more, got -1"),
        (["--align", "nan"], "--align must be 0 or more, got nan"),
        (["--align", "inf"], "--align must be 0 or more, got inf"),
        (["--weigh", "votes"], "--weigh must be samples or uniform, got 'votes'."),
        (
            ["--alternate", "maybe"],
            "fedrema run fedrema: unexpected argument 'maybe'; fedrema run fedrema --help-all",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(arguments, words, refused_run):
    assert words in refused_run("fedrema", *arguments)
