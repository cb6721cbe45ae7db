"""Checks whether a network can be trained with stacked clients."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from fedrema.errors import BadInput
from fedrema.models.batch_norm import MaskedBatchNorm
from fedrema.models.body_and_head import Net


def why_not_stackable(net: Net, sample: Tensor) -> str | None:
    """Return why a network cannot be trained stacked, naming the layer; None if it can.

    Runs one step of two clients; if it fails, the culprit is the layer that was entered and not left.
    """
    for name, layer in net.layers():
        if _counts_padding(layer):
            return f"layer {name!r} ({type(layer).__name__}) takes statistics of whole batches"
    net = copy.deepcopy(net).to(torch.device("cpu"), torch.float32)  # a GPU would first load large libraries
    sample = sample.to("cpu", torch.float32) if sample.is_floating_point() else sample.cpu()
    trace = _Trace(net)
    params = {name: value.detach().expand(2, *value.shape).clone() for name, value in net.initial.items()}
    leaves = {name: value.requires_grad_(name in net.trainable) for name, value in params.items()}
    net.train(True)
    failure = (RuntimeError, ValueError, NotImplementedError, BadInput)
    try:
        with trace, _no_slow_fallback(), net.batch_context(torch.ones(2), key=torch.tensor(0), samples=2):
            total = vmap(net, in_dims=(0, None))(leaves, sample.expand(2, *sample.shape[1:])).sum()
    except failure as error:
        return f"{trace.inside()} does not run under vmap ({_reason(error)})"
    try:
        with _no_slow_fallback():
            torch.autograd.grad(total, [leaf for leaf in leaves.values() if leaf.requires_grad], allow_unused=True)
    except failure as error:
        culprit = trace.without_gradient(failure)
        return f"{culprit} cannot be differentiated under vmap ({_reason(error)})"
    return None


@contextmanager
def _no_slow_fallback() -> Iterator[None]:
    """Raise an error where vmap would compute one client after the other, which is slower than a loop."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


class _Trace:
    """Records which parts of a network are entered and left while it is called."""

    def __init__(self, net: Net) -> None:
        self.parts = [(name, part) for name, part in net.submodules() if name]
        self.open: list[tuple[str, nn.Module]] = []
        """Parts that have been entered but not left, the innermost last."""
        self.inputs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and type of one client's input to each part."""
        self.hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for name, part in self.parts:

            def enter(module: nn.Module, given: tuple[Any, ...], name: str = name) -> None:
                self.open.append((name, module))
                if len(given) == 1 and isinstance(given[0], Tensor):
                    self.inputs[name] = (given[0].shape, given[0].dtype)

            self.hooks += [
                part.register_forward_pre_hook(enter),
                part.register_forward_hook(lambda *_: self.open.pop() and None),
            ]

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def inside(self) -> str:
        """Return the innermost part that has been entered but not left."""
        return _label(*self.open[-1]) if self.open else "the network's own forward"

    def without_gradient(self, failure: tuple[type[Exception], ...]) -> str:
        """Return the first layer whose gradient fails under vmap when it is called alone."""
        for name, part in self.parts:
            shape, dtype = self.inputs.get(name, (None, None))
            if shape is None or dtype is None or list(part.children()):
                continue
            params = {key: value.detach().expand(2, *value.shape).clone() for key, value in part.named_parameters()}
            leaves = [value.requires_grad_() for value in params.values()]
            x = torch.zeros(2, *shape, dtype=dtype)
            leaves += [x.requires_grad_()] if dtype.is_floating_point else []
            try:
                total = vmap(lambda own, given, part=part: functional_call(part, own, (given,)))(params, x).sum()
                torch.autograd.grad(total, leaves, allow_unused=True)
            except failure:
                return _label(name, part)
        return "the network's own forward"


def _label(name: str, part: nn.Module) -> str:
    return f"layer {name!r} ({type(part).__name__})"


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _counts_padding(layer: nn.Module) -> bool:
    """Return whether padding and inactive clients would enter a layer's statistics.

    Our batch norm uses real samples only; a user's own batch norm, or instance norm with running statistics, does not.
    """
    if isinstance(layer, MaskedBatchNorm) or not isinstance(layer, _NormBase):
        return False
    return isinstance(layer, _BatchNorm) or layer.track_running_stats
