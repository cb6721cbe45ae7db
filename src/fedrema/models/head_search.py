"""Find the classifier of a network: the last linear layer whose output becomes the logits.

A network is split into a body, which computes features, and a head, which computes the logits from them. A submodule
with one of the usual names is the head if head(body(x)) is the network. Otherwise the network is run and its layers are
watched. A network may have no head; it can then be trained by methods that treat all parameters alike.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from fedrema.errors import BadInput

HEAD_NAMES = ("head", "classifier", "fc")


@dataclass(frozen=True)
class Split:
    """A network as a body and a head."""

    body: nn.Module
    head: nn.Module
    name: str = ""
    """The name of the head in the network; empty if it has none. The body is then the whole network."""
    on_maps: bool = False
    """Whether the head is a convolution, of features that are maps of one pixel."""
    scale: float = 1.0
    """What the network multiplies the outputs of the head by."""
    reason: str = ""
    """Why the network has no head."""


class ReachedHead(Exception):
    """Ends the body of a network where its head is called, which may be followed by more code."""

    def __init__(self, features: Tensor) -> None:
        super().__init__("the head")
        self.features = features


class _Stop(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        raise ReachedHead(features)


def materialised(module: nn.Module, sample: Tensor) -> nn.Module:
    """Give the parameters of lazy layers their shapes and initial values, by running a network on a sample."""
    if any(
        isinstance(value, (UninitializedBuffer, UninitializedParameter))
        for value in (*module.parameters(), *module.buffers())
    ):
        with torch.no_grad():
            module.eval()(sample)
    return module


@torch.no_grad()
def check_outputs(whole: nn.Module, sample: Tensor, outputs: object) -> None:
    """Raise `BadInput` unless a network returns logits [n, C], in training too."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        raise BadInput(f"The network must return logits [samples, classes], got {_described(outputs)}.")
    whole.train(True)
    try:
        with torch.random.fork_rng(devices=[]):
            trained = copy.deepcopy(whole)(sample)  # a copy, because batch norm changes its statistics
    except Exception:  # some layers fail in training mode with few samples
        trained = outputs
    finally:
        whole.train(False)
    if not isinstance(trained, Tensor) or trained.shape != outputs.shape:
        raise BadInput(
            f"In training mode, the network returns {_described(trained)} instead of logits [samples, classes]: let"
            " it return the logits only, without the outputs of auxiliary classifiers."
        )
    if (found := _probabilities(whole, sample)) is not None:
        raise BadInput(f"The network ends in {found}: let it return the logits, since the loss applies {found}.")


PROBABILITIES = ("softmax", "sigmoid")
RESHAPING = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")


class _LastFunction(TorchFunctionMode):
    """Notes which tensors are probabilities, by the functions that computed them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, str] = {}
        self.tensors: list[Tensor] = []  # an id is only unique while its tensor exists

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note what it returns."""
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        kept = self.found.get(id(args[0])) if args and name in RESHAPING else None
        if isinstance(result, Tensor) and (name in PROBABILITIES or kept):
            self.found[id(result)] = kept or name
            self.tensors.append(result)
        return result


def _probabilities(whole: nn.Module, sample: Tensor) -> str | None:
    """Return the function that turned logits into probabilities, if the outputs of a network are these."""
    with _LastFunction() as functions:
        outputs = whole(sample)
    found: str | None = functions.found.get(id(outputs))
    return found


def _described(outputs: object) -> str:
    return f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__


def split_at(whole: nn.Module, name: str, sample: Tensor, outputs: Tensor) -> Split | None:
    """Split a network at a submodule; None unless head(body(x)) is the network and they share no parameter."""
    body = copy.deepcopy(whole)
    head = body.get_submodule(name)
    _replace(body, name, nn.Identity())
    if _share_parameters(body, head):
        return None
    try:
        with torch.no_grad():
            features = body(sample)
            fits = features.dim() == 2 and _equal(head(features), outputs)
    except Exception:  # layers after the head may not accept features in place of its output
        return None
    return Split(body, head, name) if fits else None


def split_by_search(whole: nn.Module, sample: Tensor, outputs: Tensor) -> Split:
    """Split a network at one of the usual names, or else at the last linear layer that it calls."""
    children = dict(whole.named_children())
    for name in HEAD_NAMES:
        if name in children and (found := split_at(whole, name, sample, outputs)) is not None:
            return found
    calls = _layer_calls(whole, sample)
    if not calls:
        return _no_head(whole, "it calls no linear layer")
    name, features, output = calls[-1]
    if not name:
        return _no_head(whole, "it is a single linear layer, without a body")
    layer = whole.get_submodule(name)
    after = _after(output.flatten(1), outputs)
    if after is None:
        return _no_head(whole, f"the output of its last linear layer, {name!r}, does not become the logits")
    if [call[0] for call in calls].count(name) > 1:
        return _no_head(whole, f"it calls its last linear layer, {name!r}, more than once")
    on_maps = isinstance(layer, nn.Conv2d)
    if features.flatten(1).shape[1] != (layer.in_channels if isinstance(layer, nn.Conv2d) else layer.in_features):
        return _no_head(whole, f"its last linear layer, {name!r}, has more than one input per sample")
    body = copy.deepcopy(whole)
    head = body.get_submodule(name)
    _replace(body, name, _Stop())
    if _share_parameters(body, head):
        return _no_head(whole, f"its last linear layer, {name!r}, shares parameters with other layers")
    return Split(body, head, name, on_maps, after)


def _no_head(whole: nn.Module, reason: str) -> Split:
    return Split(copy.deepcopy(whole), nn.Identity(), reason=reason)


def _replace(module: nn.Module, name: str, by: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, by)


def _share_parameters(body: nn.Module, head: nn.Module) -> bool:
    return bool({id(value) for value in body.parameters()} & {id(value) for value in head.parameters()})


def _layer_calls(whole: nn.Module, sample: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """Return the calls of linear layers in their order: name, input and output; 1×1 convolutions of one pixel count."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def called(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if isinstance(layer, nn.Linear) or output.shape[2:] == (1, 1):
                calls.append((name, inputs[0], output))

        return called

    hooks = [
        layer.register_forward_hook(watch(name))
        for name, layer in whole.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1))
    ]
    try:
        with torch.no_grad():
            whole(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _after(output: Tensor, logits: Tensor) -> float | None:
    """Return the factor between a layer's output and the logits; log_softmax is dropped, since the loss applies it."""
    if output.shape != logits.shape:
        return None
    if _equal(output, logits) or _equal(functional.log_softmax(output, dim=1), logits):
        return 1.0
    factor = float((output * logits).sum() / output.square().sum().clamp(min=torch.finfo(output.dtype).tiny))
    return factor if factor and _equal(factor * output, logits) else None


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, atol=1e-5, rtol=1e-4)
