"""Splitting a network into body and head."""

import pytest
import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.models.body_and_head import BodyAndHead, Net

SAMPLE = torch.linspace(-1, 1, 12).reshape(2, 6)


class Classifier(nn.Module):
    """A body in two parts, and a head with a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = name
        setattr(self, name, nn.Linear(5, 3))

    def forward(self, x):
        return getattr(self, self.last)(self.norm(self.first(x)).relu())


class Nested(nn.Module):
    """The head is inside a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
        self.top = nn.ModuleDict({"drop": nn.Dropout(0.5), "out": nn.Linear(5, 3)})

    def forward(self, x):
        return self.top["out"](self.top["drop"](self.trunk(x)))


def refusal(module, head=None, sample=SAMPLE):
    with pytest.raises(BadInput) as caught:
        Net(module, sample, head)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", ["head", "classifier", "fc"])
def test_heads_with_common_names_are_found(name):
    net = Net(Classifier(name), SAMPLE)
    assert net.head_name == name
    assert set(net.initial) == {
        *("body.first.weight", "body.first.bias", "body.norm.weight", "body.norm.bias"),
        *("body.norm.running_mean", "body.norm.running_var", "head.weight", "head.bias"),
    }
    assert net.features_count == 5
    assert net.classes == 3


def test_of_several_common_names_head_is_preferred():
    module = Classifier("head")
    module.fc = nn.Linear(1, 1)
    assert Net(module, SAMPLE).head_name == "head"


def test_a_head_can_be_named():
    assert Net(Classifier("output"), SAMPLE, head="output").head_name == "output"


def test_a_head_can_be_nested():
    module = Nested().eval()
    net = Net(module, SAMPLE, head="top.out")
    assert {net.original_names[name] for name in net.initial if net.in_head(name)} == {"top.out.weight", "top.out.bias"}
    assert torch.allclose(net(net.initial, SAMPLE), module(SAMPLE))


def test_a_layer_of_a_sequential_is_named_by_its_index():
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    net = Net(module, SAMPLE, head="2")
    assert net.original_names == {
        "body.0.weight": "0.weight", "body.0.bias": "0.bias", "head.weight": "2.weight", "head.bias": "2.bias",
    }  # fmt: skip
    assert torch.allclose(net.features(net.initial, SAMPLE), module[:2](SAMPLE))


def test_a_head_that_is_not_called_last_is_refused():
    assert refusal(Classifier("fc"), head="first") == (
        "--head first is not the last submodule that the network calls, on features [samples, numbers]: name the"
        " submodule whose output is the logits, or leave --head out."
    )


def test_a_module_that_is_not_a_classifier_is_refused():
    class Pair(Classifier):
        def forward(self, x):
            return super().forward(x), x

    assert refusal(Pair("fc")) == "The network must return logits [samples, classes], got tuple."
    module = BodyAndHead(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3))))
    assert refusal(module) == "The network must return logits [samples, classes], got a tensor of shape (2, 2, 3)."


@pytest.mark.parametrize(("function", "words"), [("softmax", "ends in softmax:"), ("sigmoid", "ends in sigmoid:")])
def test_probabilities_instead_of_logits_are_refused(function, words):
    class Softened(Classifier):
        def forward(self, x):
            logits = super().forward(x)
            return logits.softmax(1) if function == "softmax" else logits.sigmoid()

    assert words in refusal(Softened("head"))


def test_a_second_output_in_training_is_refused():
    class Auxiliary(Classifier):
        def forward(self, x):
            return (super().forward(x), x) if self.training else super().forward(x)

    assert refusal(Auxiliary("fc")) == (
        "In training mode, the network returns tuple instead of logits [samples, classes]: let it return the logits"
        " only, without the outputs of auxiliary classifiers."
    )


def test_an_unknown_head_is_refused_with_a_list_of_modules():
    assert refusal(Classifier("fc"), head="fcc") == (
        "--head 'fcc' is not a submodule of the network; its submodules are first, norm, fc."
    )
    assert "must name a submodule of the network" in refusal(Classifier("fc"), head="")


def test_a_head_with_another_name_is_found():
    assert Net(Classifier("output"), SAMPLE).head_name == "output"
    assert refusal(nn.Flatten()) == "The network has no trainable parameters: all of them are frozen."


def test_features_that_are_no_vectors_belong_to_the_body():
    module = BodyAndHead(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(8, 3)))
    net = Net(module, sample := torch.rand(2, 1, 4, 4))
    assert (net.head_name, net.features_count) == ("head.1", 8)
    assert torch.equal(net(net.initial, sample), module(sample))


@pytest.mark.parametrize("module", [Classifier("fc"), BodyAndHead(nn.BatchNorm2d(6), nn.Linear(6, 3))])
def test_samples_of_another_shape_are_refused(module):
    sentence = refusal(module, sample=torch.ones(2, 7))
    assert sentence.startswith("The network does not accept samples of shape (7,): ")


def test_a_network_without_trainable_parameters_is_refused():
    module = Classifier("fc").requires_grad_(False)
    assert refusal(module) == "The network has no trainable parameters: all of them are frozen."


def test_names_of_parameters_are_unique():
    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 4)
            self.weight = nn.Parameter(torch.ones(4))
            self.head = nn.Sequential()
            self.head.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.body(x) * self.weight)

    module = Confusing()
    net = Net(module, SAMPLE)
    assert net.original_names == {
        "body.weight": "weight", "body.body.weight": "body.weight", "body.body.bias": "body.bias",
        "head.weight": "head.head.weight", "head.bias": "head.head.bias",
    }  # fmt: skip
    assert torch.allclose(net(net.initial, SAMPLE), module(SAMPLE))


def test_a_module_with_a_body_has_no_doubled_prefix():
    net = Net(BodyAndHead(nn.Linear(6, 4), nn.Linear(4, 3)), SAMPLE)
    assert net.original_names == {
        name: name for name in ("body.weight", "body.bias", "head.weight", "head.bias")
    }  # fmt: skip


def test_parameters_can_be_loaded_into_the_users_module():
    trained, module = Classifier("fc").eval(), Classifier("fc").eval()
    net = Net(trained, SAMPLE)
    state = {net.original_names[name]: value for name, value in net.initial.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert missing == unexpected == []
    assert torch.equal(module(SAMPLE), trained(SAMPLE))


def test_calls_use_the_given_parameters_and_do_not_change_the_users_module():
    module, other = Classifier("fc").eval(), Classifier("fc").eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    net, another = Net(module, SAMPLE), Net(other, SAMPLE)
    assert torch.allclose(net(another.initial, SAMPLE), other(SAMPLE))
    assert torch.allclose(net(net.initial, SAMPLE), module(SAMPLE))
    features = net.features(net.initial, SAMPLE)
    assert torch.allclose(features, module.norm(module.first(SAMPLE)).relu())
    assert torch.allclose(net.classify(net.initial, features), module.fc(features))
    net.train(True)
    net(net.initial, SAMPLE)
    assert not module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_stacked_heads_are_applied_to_the_same_features():
    net = Net(BodyAndHead(nn.Linear(6, 2), nn.Linear(2, 2)), SAMPLE)
    heads = {
        "head.weight": torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [1, 0]], [[2, 0], [0, 0]]]),
        "head.bias": torch.tensor([[0.0, 0], [1, 1], [0, 5]]),
    }
    assert net.classify_all(heads, torch.tensor([[3.0, 4.0]])).tolist() == [[[3, 4]], [[5, 4]], [[6, 5]]]


def test_frozen_parameters_and_statistics_are_part_of_the_model_but_not_trained():
    module = Classifier("fc")
    module.first.weight.requires_grad_(False)
    net = Net(module, SAMPLE)
    assert set(net.initial) - net.trainable == {
        *("body.first.weight", "body.norm.running_mean", "body.norm.running_var")
    }
    assert not any(value.requires_grad for value in net.initial.values())


def test_layers_have_the_names_of_the_users_module():
    assert [name for name, _ in Net(Nested(), SAMPLE, head="top.out").layers()] == [
        *("trunk.0", "trunk.1", "top.drop", "top.out"),
    ]


def test_a_network_can_be_converted_to_another_precision():
    net = Net(Classifier("fc"), SAMPLE).to(torch.device("cpu"), torch.float64)
    assert all(value.dtype is torch.float64 for value in net.initial.values())
    assert net(net.initial, SAMPLE.double()).dtype is torch.float64
