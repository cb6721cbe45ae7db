"""FedPrior: log π_k is added to the logits in training and prediction, against numbers computed by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.methods.fedprior import SMOOTHINGS, TEMPERATURES, TRUSTS, FedPrior, maximum_likelihood_smoothing
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import BACKENDS, batch_of, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    back,
    begun,
    client_of,
    linear_net,
    local,
    logits,
    mean,
    plus,
    softmax,
)


def log_prior(y, smooth):
    counts = np.array([(y == c).sum() + smooth for c in range(3)])
    return np.log(counts / counts.sum())


def trained(w, x, y, smooth, steps, counted=None):
    """Train on some of the samples, from which the class frequencies are counted too."""
    some = np.ones(len(y), bool) if counted is None else counted
    for _ in range(steps):
        wrong = softmax(logits(w, x) + log_prior(y[some], smooth)) - np.eye(3)[y]
        w = plus(w, back(w, x, wrong * some[:, None] / some.sum()), -LR)
    return w


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smooth", [1.0, 0.25])
def test_two_rounds_equal_a_calculation_by_hand(backend, smooth):
    simulator, state, w, data = begun(FedPrior(smooth=smooth, align=0, held_out=0), backend, local(epochs=2))
    for _ in range(2):
        simulator.run_round(state)
        w = mean([trained(w, x, y, smooth, 2) for x, y in data], data)
    assert_same(state.params.common, w)
    for row, (x, y) in enumerate(data):
        client = simulator.cohort(state, torch.arange(2)).one(row)
        answers = simulator.method.predict(simulator.net, client, torch.from_numpy(x))
        assert answers.numpy() == pytest.approx(logits(w, x) + log_prior(y, smooth), abs=1e-12)


def lost(w, data, held, usual):
    """Return the loss of held-out samples for each (T, b)."""
    found = np.zeros((len(TEMPERATURES), len(TRUSTS)))
    for (x, y), own, prior in zip(data, held, usual, strict=True):
        for i, temperature in enumerate(TEMPERATURES.tolist()):
            for j, trust in enumerate(TRUSTS.tolist()):
                chances = softmax(logits(w, x[own]) / temperature + trust * prior)
                found[i, j] -= np.log(chances[np.arange(own.sum()), y[own]]).sum()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_held_out_samples_choose_temperature_trust_and_round(backend):
    """Over eleven rounds the held-out loss first falls and then rises: all clients keep their best model."""
    simulator, state, w, data = begun(FedPrior(smooth=1.0, align=0, held_out=0.5), backend, local(epochs=10))
    held = [np.arange(len(y)) % 2 == 1 for _, y in data]
    assert [int(each.sum()) for each in held] == [5, 2]
    usual = [log_prior(y[~own], 1.0) for (_, y), own in zip(data, held, strict=True)]
    losses, count, least, newest_is_used = 0.0, 0.0, np.inf, []
    for _ in range(11):
        result = simulator.run_round(state)
        losses, count = 0.8 * losses + lost(w, data, held, usual), 0.8 * count + 7
        before = w
        w = mean([trained(w, x, y, 1.0, 10, ~own) for (x, y), own in zip(data, held, strict=True)], data)
        newest_is_used.append(bool(losses.min() / count <= least))
        if newest_is_used[-1]:
            i, j = np.unravel_index(losses.argmin(), losses.shape)
            chosen = {"temperature": TEMPERATURES.tolist()[i], "trust": TRUSTS.tolist()[j]}
            least, best, used = losses.min() / count, before, w
        else:
            used = best
        assert result.record["trace"] == chosen
        assert_same(state.params.common, w)
        for row, (x, _) in enumerate(data):
            client = simulator.cohort(state, torch.arange(2)).one(row)
            answers = simulator.method.predict(simulator.net, client, torch.from_numpy(x))
            expected = logits(used, x) / chosen["temperature"] + chosen["trust"] * usual[row]
            assert answers.numpy() == pytest.approx(expected, abs=1e-12)
    assert chosen != {"temperature": 1, "trust": 1}
    assert newest_is_used == [True] * 9 + [False] * 2


def test_with_too_few_samples_none_are_held_out():
    simulator, state, w, data = begun(FedPrior(smooth=1.0, align=0, held_out=0.05), "stacked", local(epochs=1))
    assert max(len(y) for _, y in data) < 20
    assert simulator.run_round(state).record["trace"] == {"temperature": 1, "trust": 1}
    assert_same(state.params.common, mean([trained(w, x, y, 1.0, 1) for x, y in data], data))


def test_features_are_aligned_with_prototypes_of_the_training_samples():
    method, net = FedPrior(smooth=1.0, align=0.7, held_out=0.5), linear_net()
    x, y = [[1.0, 2.0], [5.0, 5.0], [-1.0, 0.5], [9.0, 9.0]], [0, 0, 2, 1]  # every second sample is held out
    data = batch_of(x, y)
    client = method.begin(net, method.start(net, client_of(net.initial), moment=None), data, moment=None)
    plain = method.loss(net, client, data)
    prototypes = tensor([[1.0, 0.0, 0.5], [7.0, 7.0, 7.0], [0.0, 1.0, 2.0]])
    inbox = {**client.inbox, "prototypes": prototypes, "known": tensor([1.0, 1.0, 1.0])}
    aligned = method.loss(net, client.having(inbox=inbox), data)
    features = net.features(net.initial, tensor(x)).detach().numpy()
    away = [np.mean((features[0] - [1, 0, 0.5]) ** 2), np.mean((features[2] - [0, 1, 2]) ** 2)]
    assert float(aligned - plain) == pytest.approx(0.7 * np.mean(away), abs=1e-12)

    _, sent = method.end(net, client, data, moment=None)
    assert sent["label_counts"].tolist() == [1, 0, 1]
    assert sent["means"].detach().numpy() == pytest.approx(np.stack([features[0], 0 * features[0], features[2]]))
    assert set(sent) == {"means", "label_counts", "held_losses", "held_count"}
    _, sent = FedPrior(align=0).end(net, client, data, moment=None)
    assert set(sent) == {"held_losses", "held_count"}


def likelihood(counts, a):
    """Return the likelihood of class counts under Pólya's urn."""
    found, total = 1.0, 0
    for count in counts:
        for already in range(count):
            found *= (already + a) / (total + a * len(counts))
            total += 1
    return found


@pytest.mark.parametrize("counts", [(6, 1, 0), (3, 2, 1), (0, 9, 1), (4, 4, 1)])
def test_each_client_chooses_the_smoothing_of_the_highest_likelihood(counts):
    best = max(SMOOTHINGS.tolist(), key=lambda a: likelihood(counts, a))
    assert float(maximum_likelihood_smoothing(tensor([float(count) for count in counts]))) == best
    method, net = FedPrior(held_out=0), linear_net()
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    client = method.start(net, client_of(net.initial), moment=None)
    found = method.begin(net, client, batch_of([[0.0, 0.0]] * len(labels), labels), moment=None).memory["log_prior"]
    expected = [(count + best) / (sum(counts) + 3 * best) for count in counts]
    assert found.exp().tolist() == pytest.approx(expected, abs=1e-12)


def test_smoothing_is_strongest_for_equal_counts_and_weakest_for_a_single_class():
    assert float(maximum_likelihood_smoothing(tensor([5.0, 5.0, 5.0]))) == float(SMOOTHINGS[-1])
    assert float(maximum_likelihood_smoothing(tensor([15.0, 0.0, 0.0]))) == float(SMOOTHINGS[0])
    assert float(maximum_likelihood_smoothing(tensor([0.0, 0.0, 0.0]))) > 0


def test_padding_is_not_counted_in_the_frequencies():
    method, net = FedPrior(smooth=1.0, held_out=0), linear_net()
    client = client_of(net.initial, memory={"log_prior": tensor([0.0, 0.0, 0.0])})
    data = batch_of([[0.0, 0.0]] * 5, [0, 0, 2, 1, 1], mask=[1.0, 1.0, 1.0, 0.0, 0.0])
    found = method.begin(net, client, data, moment=None).memory["log_prior"]
    assert found.exp().tolist() == pytest.approx([3 / 6, 1 / 6, 2 / 6])


def test_a_client_that_has_not_trained_has_a_uniform_prior():
    net = linear_net()
    client = FedPrior().start(net, client_of(net.initial), moment=None)
    model = FedPrior().model(net, client)
    assert all(torch.equal(model[name], value) for name, value in net.initial.items())


def test_equal_frequencies_change_neither_predictions_nor_gradients():
    method, net = FedPrior(), linear_net()
    data = batch_of([[1.0, 2.0], [-1.0, 0.5], [0.3, -2.0]], [0, 1, 2])
    params = {name: value.clone().requires_grad_() for name, value in net.initial.items()}
    client = method.begin(net, method.start(net, client_of(params), moment=None), data, moment=None)
    ours = torch.autograd.grad(method.loss(net, client, data), list(params.values()))
    plain = torch.autograd.grad(nn.functional.cross_entropy(net(params, data.x), data.y), list(params.values()))
    for mine, other in zip(ours, plain, strict=True):
        assert torch.allclose(mine, other, atol=1e-14)


def test_the_personal_model_includes_the_prior():
    net = linear_net()
    client = client_of(net.initial, memory={"log_prior": tensor([-1.0, -2.0, -3.0])})
    x = tensor([[1.0, -1.0]])
    answer = net(FedPrior().model(net, client), x)
    assert torch.allclose(answer, net(net.initial, x) + tensor([-1.0, -2.0, -3.0]))
    best = {name: value + 1 for name, value in net.initial.items()}
    sent = {"temperature": tensor(4.0), "trust": tensor(0.5), **{"best." + name: value for name, value in best.items()}}
    warmed = net(FedPrior().model(net, client.having(inbox=sent)), x)
    assert torch.allclose(warmed, net(best, x) / 4 + tensor([-0.5, -1.0, -1.5]))


def test_invalid_settings_and_networks_are_refused():
    with pytest.raises(BadInput, match="--smooth must be 0 or more, got -1"):
        FedPrior(smooth=-1)
    with pytest.raises(BadInput, match="--align must be 0 or more, got -1"):
        FedPrior(align=-1)
    with pytest.raises(BadInput, match=r"--held-out must be in \[0, 0.5\], got 0.6"):
        FedPrior(held_out=0.6)
    net = Net(BodyAndHead(nn.Flatten(), nn.Linear(3, 2, bias=False)), torch.zeros(2, 3))
    with pytest.raises(BadInput, match="last layer is linear and has a bias"):
        FedPrior().start(net, client_of(net.initial), moment=None)
