"""Networks with dropout, recurrent layers, attention and norms: both backends compute the same."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedrema.core import LocalTraining
from fedrema.data import Federation
from fedrema.engine.stackable import why_not_stackable
from fedrema.methods.apfl import APFL
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.per_fedavg import PerFedAvg
from fedrema.models.batch_context import BatchContext
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.layer_functions import LayerFunctions, needs_layer_functions
from tests.fixtures import make_simulator, run_all, snapshot

LOCAL = LocalTraining(epochs=2, batch=4, lr=0.05, drop_incomplete=False)
TIME, WIDTH = 5, 8


class Outputs(nn.Module):
    """The outputs of a recurrent layer at the last time step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        outputs, _ = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        return outputs[:, -1] if self.layer.batch_first else outputs[-1]


class Attention(nn.Module):
    """Self-attention with nn.MultiheadAttention, averaged over time."""

    def __init__(self, mask=None, padding=False, need_weights=False, own_keys=False, **options) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, **options)
        self.mask, self.padding, self.need_weights, self.own_keys = mask, padding, need_weights, own_keys

    def forward(self, x):
        mask = None
        if self.mask == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        elif self.mask == "boolean":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)
        elif self.mask == "per head":
            mask = torch.linspace(0, 1, TIME * TIME, dtype=x.dtype).reshape(TIME, TIME).expand(2 * len(x), TIME, TIME)
        padding = torch.arange(x.shape[1]).expand(len(x), -1) > 3 if self.padding else None
        x = x if self.layer.batch_first else x.transpose(0, 1)
        keys = x.flip(0) if self.own_keys else x
        found, weights = self.layer(
            x, keys, x, padding, self.need_weights, mask, is_causal=self.mask == "causal" and not self.need_weights
        )
        features = found.mean(1 if self.layer.batch_first else 0)
        return features if weights is None else features + weights.sum(dim=(1, 2))[:, None] * features


class Functional(nn.Module):
    """Calls scaled_dot_product_attention and dropout as functions."""

    def __init__(self, p=0.3, **options) -> None:
        super().__init__()
        self.project, self.p, self.options = nn.Linear(WIDTH, 3 * WIDTH), p, options

    def forward(self, x):
        parts = self.project(x).chunk(3, dim=-1)
        q, k, v = (part.reshape(len(x), TIME, 2, -1).transpose(1, 2) for part in parts)
        p = self.p if self.training else 0.0
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **self.options)
        return functional.dropout(found.mean(2).flatten(1), self.p, self.training)


def encoder(dropout, **options):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=dropout, batch_first=True, **options)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten())


def time_first_dropout():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 6)

        def forward(self, x):
            return functional.dropout(self.linear(x).transpose(0, 1), 0.4, self.training).mean(0)

    return TimeFirst()


def image(*layers):
    """Return layers for the samples as images with two channels."""
    return nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Flatten(1, 1), Permute(), *layers, nn.Flatten())


class Permute(nn.Module):
    def forward(self, x):  # [n, time, 2, 4] → [n, 2, time, 4]
        return x.transpose(1, 2)


BODIES = {
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 9), nn.ReLU(), nn.Dropout(0.4), nn.Dropout(0.2)),
    "dropout of everything": lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 9), nn.Dropout(1.0)),
    "dropout, time first": time_first_dropout,
    "dropout1d": lambda: nn.Sequential(nn.Conv1d(TIME, 4, 3), nn.Dropout1d(0.4), nn.Flatten()),
    "dropout2d": lambda: image(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.4)),
    "dropout3d": lambda: nn.Sequential(
        nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(TIME, 4, 1), nn.Dropout3d(0.4), nn.Flatten()
    ),
    "alpha dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 9), nn.SELU(), nn.AlphaDropout(0.3)),
    "feature alpha dropout": lambda: image(nn.Conv2d(2, 4, 1), nn.SELU(), nn.FeatureAlphaDropout(0.3)),
    "rnn": lambda: Outputs(nn.RNN(WIDTH, 6, batch_first=True)),
    "rnn, relu, no bias": lambda: Outputs(nn.RNN(WIDTH, 6, nonlinearity="relu", bias=False, batch_first=True)),
    "lstm": lambda: Outputs(nn.LSTM(WIDTH, 6, batch_first=True)),
    "lstm, two layers, both directions": lambda: Outputs(nn.LSTM(WIDTH, 6, 2, bidirectional=True, batch_first=True)),
    "lstm, time first": lambda: Outputs(nn.LSTM(WIDTH, 6, 2)),
    "lstm with dropout": lambda: Outputs(nn.LSTM(WIDTH, 6, 3, dropout=0.3, batch_first=True)),
    "lstm with dropout, time first": lambda: Outputs(nn.LSTM(WIDTH, 6, 2, dropout=0.3, bidirectional=True)),
    "gru": lambda: Outputs(nn.GRU(WIDTH, 6, batch_first=True)),
    "gru with dropout": lambda: Outputs(nn.GRU(WIDTH, 6, 2, dropout=0.3, bidirectional=True, batch_first=True)),
    "attention": lambda: Attention(batch_first=True),
    "attention, causal": lambda: Attention("causal", batch_first=True),
    "attention, boolean mask": lambda: Attention("boolean", batch_first=True),
    "attention, mask per head": lambda: Attention("per head", batch_first=True),
    "attention, padding": lambda: Attention(padding=True, batch_first=True),
    "attention, mask, padding and weights": lambda: Attention("boolean", padding=True, need_weights=True),
    "attention with dropout": lambda: Attention("boolean", dropout=0.3, batch_first=True),
    "attention, weights": lambda: Attention(need_weights=True, dropout=0.2, batch_first=True),
    "attention, other keys": lambda: Attention(own_keys=True, kdim=WIDTH, vdim=WIDTH, bias=False),
    "attention, extra keys": lambda: Attention("boolean", padding=True, add_bias_kv=True, add_zero_attn=True),
    "attention function": lambda: Functional(),
    "attention function, causal": lambda: Functional(is_causal=True, scale=0.5),
    "attention function without dropout": lambda: Functional(p=0.0, is_causal=True),
    "transformer": lambda: encoder(0.0),
    "transformer, norm first, dropout": lambda: encoder(0.2, norm_first=True, activation="gelu"),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm([TIME, WIDTH]), nn.Flatten(), nn.Linear(40, 9), nn.LayerNorm(9)),
    "rms norm": lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Flatten()),
    "group norm": lambda: image(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "instance norm": lambda: image(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "batch norm": lambda: image(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
    "convolutions": lambda: image(
        nn.Conv2d(2, 4, 3, stride=2, padding=2, dilation=2, bias=False), nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.ConvTranspose2d(8, 4, 3, 2), nn.AdaptiveAvgPool2d(3), nn.Upsample(scale_factor=2), nn.AdaptiveMaxPool2d(2),
    ),
}  # fmt: skip


@functools.cache
def federation() -> Federation:
    generator = np.random.default_rng(0)
    counts = (13, 5, 18)
    y = generator.integers(0, 3, sum(counts))
    x = generator.normal(size=(sum(counts), TIME, WIDTH)) + y[:, None, None]
    return Federation.from_arrays(x.astype(np.float32), y, np.repeat(np.arange(3), counts), classes=3)


def make_net(name) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = BODIES[name]().double()
        sample = torch.zeros(2, TIME, WIDTH, dtype=torch.float64)
        head = nn.Linear(body(sample).shape[1], 3).double()
        return Net(BodyAndHead(body, head), sample)


def trained(name, backend, method=FedAvg, **settings):
    state, records = run_all(make_simulator(method(), federation(), LOCAL, make_net(name), backend=backend, **settings))
    return snapshot(state), [record.loss for record in records]


@pytest.mark.parametrize("name", BODIES)
def test_both_backends_train_the_same_model(name):
    looped, losses = trained(name, "loop", rounds=2)
    stacked, other_losses = trained(name, "stacked", rounds=2)
    assert losses == pytest.approx(other_losses, abs=1e-9)
    assert max(float((looped[each] - stacked[each]).abs().max()) for each in looped) < 1e-9
    initial = make_net(name).initial
    changed = [not torch.equal(looped[f"common/{each}"], value) for each, value in initial.items()]
    assert sum(changed) > 2 or name == "dropout of everything"


@pytest.mark.parametrize("method", [FedReMa, APFL, PerFedAvg])
@pytest.mark.parametrize("name", ["lstm with dropout", "transformer, norm first, dropout"])
def test_both_backends_train_the_same_models_with_methods_that_evaluate_several(name, method):
    looped, stacked = (trained(name, backend, method, rounds=2)[0] for backend in ("loop", "stacked"))
    assert max(float((looped[each] - stacked[each]).abs().max()) for each in looped) < 1e-9


def test_only_networks_that_call_such_functions_are_called_with_replacements():
    linear = BodyAndHead(nn.Linear(4, 3), nn.Linear(3, 2))
    assert not needs_layer_functions(linear, torch.zeros(2, 4))
    assert Net(linear, torch.zeros(2, 4))._functions is None
    for name in ("dropout", "lstm", "attention", "attention function", "transformer"):
        assert make_net(name)._functions is not None


def test_dropout_that_is_called_in_training_only_is_found():
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(functional.dropout(x, 0.5) if self.training else x)

    assert needs_layer_functions(Training(), torch.zeros(2, 4))


def test_what_cannot_be_stacked_is_named():
    net = Net(BodyAndHead(nn.Sequential(nn.Flatten(), nn.RReLU()), nn.Linear(40, 2)), torch.zeros(2, TIME, WIDTH))
    assert "layer 'body.1' (RReLU)" in why_not_stackable(net, torch.zeros(1, TIME, WIDTH))
    assert why_not_stackable(make_net("lstm with dropout"), torch.zeros(1, TIME, WIDTH)) is None


@pytest.mark.parametrize("name", ["lstm, two layers, both directions", "gru", "attention, boolean mask", "transformer"])
def test_stacked_layers_equal_torchs_own(name):
    """Without vmap, and without dropout, torch's own functions are called."""
    module = make_net(name).modules()[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, TIME, WIDTH, generator=generator, dtype=torch.float64)
    params = {
        key: torch.randn(3, *value.shape, generator=generator, dtype=torch.float64) * 0.3
        for key, value in module.named_parameters()
    }
    with LayerFunctions(BatchContext()):
        stacked = vmap(lambda own, given: functional_call(module, own, (given,)))(params, x)
    for row in range(3):
        own = {key: value[row] for key, value in params.items()}
        assert torch.allclose(functional_call(module, own, (x[row],)), stacked[row], atol=1e-12)


def test_a_resumed_run_with_dropout_equals_an_uninterrupted_one():
    whole, _ = trained("lstm with dropout", "stacked", rounds=3)
    net = make_net("lstm with dropout")
    first = make_simulator(FedAvg(), federation(), LOCAL, net, backend="stacked", rounds=3)
    state = first.start()
    first.run_round(state)
    second = make_simulator(FedAvg(), federation(), LOCAL, make_net("lstm with dropout"), backend="loop", rounds=3)
    list(second.run(second.adopt(state)))
    later = snapshot(state)
    assert max(float((whole[each] - later[each]).abs().max()) for each in whole) < 1e-9


def test_the_order_of_clients_does_not_change_their_dropout():
    data = federation()
    turned = data.reorder([2, 0, 1])
    losses = []
    for each in (data, turned):
        _, records = run_all(make_simulator(FedAvg(), each, LOCAL, make_net("dropout"), backend="stacked", rounds=1))
        losses.append(dict(zip(each.names, records[0].client_loss, strict=True)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_another_seed_drops_other_units():
    assert trained("dropout", "stacked", seed=1)[1] != trained("dropout", "stacked", seed=2)[1]
