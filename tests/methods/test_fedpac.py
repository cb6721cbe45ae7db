"""FedPAC, against numbers computed from its equations by hand or with another solver."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedrema.core import LocalTraining, Moment, Uploads
from fedrema.methods.fedpac import FedPAC, combination_weights
from fedrema.models.body_and_head import Net
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
from tests.methods.shared.test_simplex import by_scipy

MOMENT = Moment(round=1, rounds=10, seed=0)
BODY, HEAD = 6 * FEATURES + FEATURES, FEATURES * CLASSES + CLASSES


@pytest.fixture
def net() -> Net:
    return make_net()


def statistics(features, labels, classes):
    """Return h_kc and V_k as they are defined, class by class."""
    samples = len(labels)
    weighted = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    expected_square = squared_means = 0.0
    for label in range(classes):
        own = [feature for feature, its in zip(features, labels.tolist(), strict=True) if its == label]
        if not own:
            continue
        share = len(own) / samples
        mean = sum(own) / len(own)
        weighted[label] = share * mean
        expected_square += share * sum(float(feature @ feature) for feature in own) / len(own)
        squared_means += share**2 * float(mean @ mean)
    return weighted, (expected_square - squared_means) / samples


def test_statistics_equal_a_calculation_by_hand(net):
    # Class 0: (1, 0), (3, 0), so p = ⅔, µ = (2, 0), E‖f‖² = 5; class 2: (0, 3), so p = ⅓, E‖f‖² = 9; then padding.
    samples = batch_of([[1, 0], [3, 0], [0, 3], [50, 50]], [0, 0, 2, 0], [1, 1, 1, 0])
    made = FedPAC().begin(net, client(), samples, MOMENT).inbox
    expected = [[4 / 3, 0], [0, 0], [0, 1]]
    assert made["weighted"].tolist() == [pytest.approx(row) for row in expected]
    # (⅔·5 + ⅓·9 − (4/9·4 + 1/9·9)) / 3
    assert float(made["variance"]) == pytest.approx((19 / 3 - 25 / 9) / 3)
    assert made["own"].tolist() == [[2, 0], [0, 0], [0, 3]]
    assert made["held"].tolist() == [1, 0, 1]


def test_received_prototypes_stay_in_the_inbox(net):
    received = {"prototypes": [[1.0, 1.0]] * 3, "known": [1.0, 0.0, 1.0]}
    made = FedPAC().begin(net, client(1.0, **received), batch_of([[1, 0]], [0]), MOMENT).inbox
    assert made["prototypes"].tolist() == received["prototypes"]
    assert made["known"].tolist() == received["known"]


def test_a_single_sample_has_no_variance(net):
    made = FedPAC().begin(net, client(1.0), batch_of([[3, 4]], [1]), MOMENT).inbox
    assert float(made["variance"]) == 0


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_statistics_use_the_received_body_and_prototypes_the_trained_one(backend):
    simulator = watched_simulator(FedPAC(), backend=backend)
    state = simulator.start()
    for _ in range(2):
        simulator.run_round(state)
        for row in range(4):
            x, labels = training_data(simulator, row)
            weighted, variance = statistics(simulator.net.features(simulator.before[row], x), labels, CLASSES)
            assert torch.allclose(simulator.uploads.extras["weighted"][row], weighted, atol=1e-12)
            assert float(simulator.uploads.extras["variance"][row]) == pytest.approx(variance, rel=1e-10)
            trained = {name: value[row] for name, value in simulator.trained.items()}
            features = simulator.net.features(trained, x)
            counts = [int((labels == label).sum()) for label in range(CLASSES)]
            assert simulator.uploads.extras["label_counts"][row].tolist() == counts
            for label in range(CLASSES):
                if counts[label]:
                    mean = features[labels == label].mean(0)
                    assert torch.allclose(simulator.uploads.extras["means"][row, label], mean, atol=1e-12)
            # Otherwise this test could not distinguish them.
            assert not torch.allclose(features, simulator.net.features(simulator.before[row], x), atol=1e-3)


def problem(weighted, variance, i):
    """Return P⁽ⁱ⁾ as it is defined: a sum over classes of inner products."""
    clients, classes, _ = weighted.shape
    matrix = np.zeros((clients, clients))
    for j in range(clients):
        for l in range(clients):  # noqa: E741 - the index of the equation
            for c in range(classes):
                matrix[j, l] += float((weighted[i, c] - weighted[j, c]) @ (weighted[i, c] - weighted[l, c]))
        matrix[j, j] += float(variance[j])
    return matrix


def expected_weights(matrix):
    """Return the weights of a general solver, without the small ones that FedPAC drops."""
    found = by_scipy(matrix)
    kept = np.where(found < 1e-3, 0, found)
    return kept / kept.sum()


@pytest.mark.parametrize(("clients", "classes", "width"), [(2, 1, 1), (3, 2, 4), (6, 3, 2), (10, 2, 5)])
def test_weights_equal_those_of_another_solver(clients, classes, width):
    generator = torch.Generator().manual_seed(clients)
    weighted = torch.randn(clients, classes, width, generator=generator, dtype=torch.float64)
    variance = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.2
    found = combination_weights(weighted, variance)
    for i in range(clients):
        assert found[i].numpy() == pytest.approx(expected_weights(problem(weighted, variance, i)), abs=1e-4)


def test_without_bias_weights_are_inverse_variances():
    found = combination_weights(torch.ones(3, 2, 2, dtype=torch.float64), tensor([1.0, 2.0, 4.0]))
    assert found.numpy() == pytest.approx(np.tile([4 / 7, 2 / 7, 1 / 7], (3, 1)), abs=1e-5)


def groups(within: float) -> torch.Tensor:
    """Return h of two groups of four, 10⁴ apart in squared distance; `within` is that of a client to its group."""
    weighted = torch.zeros(8, 1, 10, dtype=torch.float64)
    weighted[:4, 0, 8] = weighted[4:, 0, 9] = math.sqrt(0.5e4)
    weighted[torch.arange(8), 0, torch.arange(8)] = math.sqrt(within)
    return weighted


@pytest.mark.parametrize("within", [0.0, 0.5, 4.0])
def test_two_clear_groups_share_within_and_not_across(within):
    """Own weight a against (1 − a)/3 for each of three peers.

    With V = 1 and offsets e_j of square b, D⁽ⁱ⁾_jl = b + b·[j = l] among the peers, so that αᵀPα is
    a² + (1 + b)(1 − a)²/3 + b(1 − a)². Its slope vanishes at a = r/(1 + r), r = (1 + b)/3 + b:
    identical clients (b = 0) share equally; b = ½ gives ½ and three times ⅙.
    A client of the other group would lower αᵀPα, but by weights of no more than a/10⁴, which are dropped.
    """
    pull = (1 + within) / 3 + within
    own = pull / (1 + pull)
    found = combination_weights(groups(within), torch.ones(8, dtype=torch.float64))
    for i in range(8):
        for j in range(8):
            same = (i < 4) == (j < 4)
            expected = own if i == j else (1 - own) / 3 if same else 0.0
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-3)
            assert same or float(found[i, j]) == 0.0
    if within == 0.5:
        assert 0.4 < float(found[0, 0]) < 0.6


def test_negligible_weights_are_dropped_and_the_rest_sums_to_one():
    same = torch.ones(3, 1, 1, dtype=torch.float64)
    # By inverse variances (1, 1, 1/5000): the last has 10⁻⁴ of the weight; with 1/100 it has 0.5 %.
    dropped = combination_weights(same, tensor([1.0, 1.0, 5000.0]))
    assert (dropped[:, 2] == 0).all()
    assert dropped[:, :2].numpy() == pytest.approx(np.full((3, 2), 0.5), abs=1e-4)
    assert dropped.sum(1).tolist() == pytest.approx([1, 1, 1], abs=1e-12)
    kept = combination_weights(same, tensor([1.0, 1.0, 100.0]))
    assert kept[:, 2].tolist() == pytest.approx([0.01 / 2.01] * 3, abs=1e-5)
    assert kept.sum(1).tolist() == pytest.approx([1, 1, 1], abs=1e-12)


def test_one_client_keeps_its_head():
    assert combination_weights(torch.randn(1, 3, 2), torch.ones(1)).tolist() == [[1]]


def test_without_a_solution_clients_keep_their_heads():
    assert torch.equal(combination_weights(torch.ones(3, 1, 2), torch.full((3,), math.nan)).float(), torch.eye(3))


def test_the_order_of_clients_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    weighted = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(6, generator=generator, dtype=torch.float64) + 0.1
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    straight, permuted = (combination_weights(weighted[rows], variance[rows]) for rows in (torch.arange(6), order))
    assert torch.allclose(permuted, straight[order][:, order], atol=1e-5)


def test_memory_does_not_grow_with_the_square_of_the_features():
    # A square of 200 000 features would take 320 GB.
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    wide = torch.zeros(5, 2, 200_000, dtype=torch.float64)
    wide[:, :, [7, 100_000, 199_999]] = small
    assert torch.allclose(combination_weights(wide, variance), combination_weights(small, variance), atol=1e-6)


def test_the_server_returns_the_mean_body_and_combined_heads(net):
    # Clients 0 and 1 are alike, client 2 is distant: the first two share heads, independently of sample counts.
    counts = tensor([[1, 0, 0], [0, 3, 0], [2, 4, 0]])
    weighted = torch.zeros(3, 3, 2, dtype=torch.float64)
    weighted[2] = 30
    sent = Uploads(
        clients=torch.arange(3),
        mean={"body.weight": tensor([[3.7, 3.7]] * 2), "body.bias": tensor([0.0, 0.0])},
        params={
            "head.weight": torch.zeros(3, 3, 2, dtype=torch.float64),
            "head.bias": tensor([[1, 0, 0], [3, 0, 6], [0, 9, 0]]),
        },
        extras={
            "means": tensor([[[2, 2], [0, 0], [0, 0]], [[0, 0], [7, 0], [0, 0]], [[5, 8], [0, 7], [0, 0]]]),
            "label_counts": counts,
            "weighted": weighted,
            "variance": tensor([1.0, 3.0, 1.0]),
        },
        counts=counts.sum(1),
    )
    method = FedPAC()
    answer = method.aggregate(net, method.server(net, 3), sent, MOMENT)
    assert answer.shared["body.weight"].flatten().tolist() == [3.7] * 4
    # Inverse variances 1 and ⅓: ¾ of the first head and ¼ of the second.
    expected = [[1.5, 0, 1.5], [1.5, 0, 1.5], [0, 9, 0]]
    assert answer.personal["head.bias"].tolist() == [pytest.approx(row, abs=1e-4) for row in expected]
    assert answer.shared["prototypes"].tolist() == [pytest.approx(row) for row in [[4, 6], [3, 4], [0, 0]]]
    assert answer.shared["known"].tolist() == [1, 1, 0]
    assert set(answer.shared) == {"body.weight", "body.bias", "prototypes", "known"}
    assert set(answer.personal) == {"head.weight", "head.bias"}
    assert answer.trace["set_sizes"].tolist() == [2, 2, 1]
    assert float(answer.trace["own_weight"]) == pytest.approx((0.75 + 0.25 + 1) / 3, abs=1e-5)
    # E‖f‖² of each client is n V + Σ‖h‖², weighted by n.
    squares = sent.counts * sent.extras["variance"] + weighted.square().sum((1, 2))
    assert float(answer.trace["feature_norm"]) == pytest.approx(
        float((sent.counts * squares).sum() / sent.counts.sum()) ** 0.5
    )
    heads = [sum(float(value[k].square().sum()) for value in sent.params.values()) ** 0.5 for k in range(3)]
    assert float(answer.trace["head_norm"]) == pytest.approx(sum(heads) / 3)
    alike = FedPAC(weigh="uniform").aggregate(net, method.server(net, 3), sent, MOMENT)
    assert alike.shared["prototypes"].tolist() == [[3.5, 5], [3.5, 3.5], [0, 0]]


def test_only_the_loss_of_the_body_aligns_features_with_prototypes(net):
    samples = batch_of([[1, 2], [3, 3], [70, 70]], [0, 1, 0], [1, 1, 0])
    # Class 1 has no global prototype: the client's own is used. ½(1 + 4) = 2.5, ½(1 + 0) = 0.5.
    inbox = {
        "prototypes": [[0, 0], [50, 50], [50, 50]], "known": [1, 0, 0],
        "own": [[9, 9], [2, 3], [0, 0]], "held": [1, 1, 0],
    }  # fmt: skip
    found = FedPAC(align=0.5).loss(net, client(**inbox), samples)
    assert float(found) == pytest.approx(math.log(3) + 0.5 * (2.5 + 0.5) / 2, rel=1e-12)
    head_loss = FedPAC(align=0.5).phases(LOCAL, MOMENT)[0].loss
    assert float(head_loss(net, client(**inbox), samples)) == pytest.approx(math.log(3), rel=1e-12)


def test_with_an_empty_inbox_the_loss_is_the_cross_entropy(net):
    begun = FedPAC().begin(net, client(), batch_of([[1, 2], [3, 3], [0, 1]], [0, 1, 0]), MOMENT)
    found = FedPAC(align=9.0).loss(net, begun, batch_of([[1, 2], [3, 3]], [0, 1]))
    assert float(found) == pytest.approx(math.log(3), rel=1e-12)


def test_the_head_is_trained_for_an_epoch_and_then_the_body():
    local = LocalTraining(epochs=5, lr=0.02, momentum=0.5, schedule="exponential", lr_decay=0.5)
    later = Moment(round=3, rounds=10, seed=0)
    head, body = FedPAC().phases(local, later)
    assert (head.epochs, head.lr, head.momentum) == (1, 0.1, 0.5)  # constant like the authors' 0.1
    assert (body.epochs, body.lr, body.momentum) == (5, 0.02 / 4, 0.5)
    for phase, trains in ((head, "head.weight"), (body, "body.weight")):
        assert [name for name in ("body.weight", "head.weight") if phase.trains(name)] == [trains]
    head, _ = FedPAC(head_epochs=3, head_lr=0).phases(local, later)
    assert (head.epochs, head.lr) == (3, 0.02 / 4)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize(("epochs", "head_epochs"), [(0, 1), (2, 0), (2, 1)])
def test_each_phase_leaves_the_other_part_bit_identical(backend, epochs, head_epochs):
    local = LocalTraining(epochs=epochs, batch=5, lr=0.05, weight_decay=0.01)
    simulator = watched_simulator(FedPAC(head_epochs=head_epochs), local=local, backend=backend)
    state = simulator.start()
    for _ in range(2):
        simulator.run_round(state)
        for row in range(4):
            for name, value in simulator.trained.items():
                moved = head_epochs if name.startswith("head.") else epochs
                assert torch.equal(value[row], simulator.before[row][name]) == (not moved), name


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_round_is_a_step_of_the_head_and_then_one_of_the_body_with_alignment(backend):
    """With one batch of all samples and no momentum, both rounds can be computed by hand."""
    local = LocalTraining(epochs=1, batch=1000, lr=0.05, momentum=0.0, clip=0)
    simulator = watched_simulator(FedPAC(align=0.7), local=local, backend=backend)
    state = simulator.start()
    for number in (1, 2):
        simulator.run_round(state)
        assert ("prototypes" in simulator.inbox) == (number == 2)
        for row in range(4):
            x, labels = training_data(simulator, row)
            params = {name: value.clone().requires_grad_() for name, value in simulator.before[row].items()}
            heads = [name for name in params if name.startswith("head.")]
            bodies = [name for name in params if name.startswith("body.")]

            def forward(params, x=x):
                hidden = torch.relu(x @ params["body.1.weight"].T + params["body.1.bias"])
                return hidden, hidden @ params["head.weight"].T + params["head.bias"]

            loss = functional.cross_entropy(forward(params)[1], labels)
            slopes = torch.autograd.grad(loss, [params[name] for name in heads])
            for name, slope in zip(heads, slopes, strict=True):
                params[name] = (params[name] - 0.1 * slope).detach()
            hidden, logits = forward(params)
            loss = functional.cross_entropy(logits, labels)
            if number == 2:
                loss = loss + 0.7 * functional.mse_loss(hidden, simulator.inbox["prototypes"][labels])
            slopes = torch.autograd.grad(loss, [params[name] for name in bodies])
            for name, slope in zip(bodies, slopes, strict=True):
                params[name] = params[name] - 0.05 * slope
            for name, value in params.items():
                assert torch.allclose(simulator.trained[name][row], value, atol=1e-12), (number, name)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_the_loss_recorded_while_the_head_trains_is_the_cross_entropy(backend):
    # Without epochs of the body, and with a very large weight of alignment.
    local = LocalTraining(epochs=0, batch=1000, momentum=0.0)
    simulator = watched_simulator(FedPAC(align=1000.0), local=local, backend=backend)
    state = simulator.start()
    for _ in range(2):
        record = simulator.run_round(state).record
        for row in range(4):
            x, labels = training_data(simulator, row)
            expected = functional.cross_entropy(simulator.net(simulator.before[row], x), labels)
            assert record["client_loss"][row] == pytest.approx(float(expected), rel=1e-10)
    assert "prototypes" in simulator.inbox


def test_bytes_include_models_prototypes_and_statistics():
    simulator = watched_simulator(FedPAC())
    records = [each.record for each in simulator.run(simulator.start())]
    means, label_counts, weighted, variance = CLASSES * FEATURES, CLASSES, CLASSES * FEATURES, 1
    up = 4 * (BODY + HEAD + means + label_counts + weighted + variance) * BYTES
    prototypes, known = CLASSES * FEATURES, CLASSES
    down = 4 * (BODY + HEAD) * BYTES
    assert [record["bytes_up"] for record in records] == [up] * 3
    messages = 4 * (prototypes + known) * BYTES
    assert [record["bytes_down"] for record in records] == [down, down + messages, down + messages]


def test_all_clients_get_the_common_body_and_their_own_head():
    simulator = watched_simulator(FedPAC())
    state = simulator.start()
    simulator.run_round(state)
    assert set(state.params.common) == {"body.1.weight", "body.1.bias"}
    assert set(state.params.own) == {"head.weight", "head.bias"}
    sizes = [len(training_data(simulator, row)[1]) for row in range(4)]
    for name, value in state.params.common.items():
        expected = sum(size * simulator.trained[name][row] for row, size in enumerate(sizes)) / sum(sizes)
        assert torch.allclose(value, expected, atol=1e-12), name
    weighted, variance = simulator.uploads.extras["weighted"], simulator.uploads.extras["variance"]
    for i in range(4):
        alpha = expected_weights(problem(weighted, variance, i))
        for name, value in state.params.own.items():
            expected = sum(float(alpha[j]) * simulator.trained[name][j] for j in range(4))
            assert torch.allclose(value[i], expected, atol=1e-4), name


def test_a_round_with_one_client_returns_its_own_head():
    simulator = watched_simulator(FedPAC(), participation=0.25)
    state = simulator.start()
    record = simulator.run_round(state).record
    (row,) = record["participants"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(state.params.own[name][row], simulator.trained[name][0])
    assert record["trace"]["own_weight"] == 1
    absent = next(other for other in range(4) if other != row)  # has not taken part: the mean of the others' heads
    assert torch.equal(state.params.own["head.weight"][absent], simulator.trained["head.weight"][0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--align", "-1"], "--align must be 0 or more, got -1"),
        (["--align", "nan"], "--align must be 0 or more, got nan"),
        (["--align", "inf"], "--align must be 0 or more, got inf"),
        (["--head-epochs", "-1"], "--head-epochs must be 0 or more, got -1"),
        (["--head-epochs", "nan"], "--head-epochs must be a whole number, got 'nan'."),
        (["--head-lr", "-0.1"], "--head-lr must be 0 or more, got -0.1"),
        (["--head-lr", "nan"], "--head-lr must be 0 or more, got nan"),
        (["--head-lr", "inf"], "--head-lr must be 0 or more, got inf"),
        (["--weigh", "votes"], "--weigh must be samples or uniform, got 'votes'."),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(arguments, words, refused_run):
    assert words in refused_run("fedpac", *arguments)


def test_with_very_many_clients_not_all_weights_are_dropped(monkeypatch):
    monkeypatch.setattr(
        "fedrema.methods.fedpac.minimise_on_simplex",
        lambda quadratic, linear: torch.full_like(linear, 1 / len(linear)),
    )
    weights = combination_weights(torch.ones(1001, 1, 1), torch.ones(1001))
    assert torch.allclose(weights, torch.full_like(weights, 1 / 1001))


def test_a_client_whose_weights_cannot_be_found_keeps_its_own_head(monkeypatch):
    monkeypatch.setattr(
        "fedrema.methods.fedpac.minimise_on_simplex", lambda quadratic, linear: torch.full_like(linear, math.nan)
    )
    assert torch.equal(combination_weights(torch.ones(3, 2, 2), torch.ones(3)), torch.eye(3, dtype=torch.float64))


def test_features_that_are_all_zero_give_equal_weights():
    """How a collapse shows in the records: every client then learns from every other."""
    weights = combination_weights(torch.zeros(20, 10, 5), torch.zeros(20))
    assert torch.allclose(weights, torch.full_like(weights, 0.05))


def test_only_the_phase_of_the_head_resets_its_momentum():
    local = LocalTraining()
    assert [phase.reset_momentum for phase in FedPAC().phases(local, MOMENT)] == [False, False]
    assert [phase.reset_momentum for phase in FedPAC(reset_head_momentum=True).phases(local, MOMENT)] == [True, False]
