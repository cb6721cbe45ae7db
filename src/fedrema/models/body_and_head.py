"""Any `nn.Module`, split into a feature extractor (body) and a classifier (head), as functions of named tensors."""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedrema.errors import BadInput, raised_by_user
from fedrema.models.batch_norm import Sight, adopt

Tensors = dict[str, Tensor]
"""A named set of tensors: one client's, or all clients' with a leading axis."""


def size(tensors: Tensors) -> int:
    """Return the bytes that tensors take, in memory or on the wire."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


HEAD_NAMES = ("head", "classifier", "fc")


class Net:
    """A network whose parameters are named `body.…` and `head.…` and are handed in with every call.

    The body is the module with its head taken out, so that `module(x) == head(body(x))` must hold: the head is the
    last thing the module's `forward` calls. That is checked with `sample`.

    Parameters
    ----------
    module
        The network; its present parameters become the initial ones.
    sample
        An input [n, ...] of the shape it takes; its values do not matter.
    head
        Name of the submodule that is the classifier. Default: `head`, `classifier` or `fc`, whichever exists.
    """

    def __init__(self, module: nn.Module, sample: Tensor, head: str | None = None) -> None:
        self.head_name = _head_name(module, head)
        whole = copy.deepcopy(module).eval()
        body = copy.deepcopy(whole)
        self._sight = Sight()
        adopt(body, self._sight)
        self._head = body.get_submodule(self.head_name)
        parent, _, leaf = self.head_name.rpartition(".")
        setattr(body.get_submodule(parent), leaf, nn.Identity())
        self._body = body
        self.initial: Tensors = {}
        self.original_names: dict[str, str] = {}
        self._names: dict[str, list[tuple[str, str]]] = {"body": [], "head": []}
        self._collect("body", self._body, "")
        self._collect("head", self._head, self.head_name + ".")
        inside = tuple(
            f"{name}." for name, layer in self.layers() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        )
        self.batch_norm = frozenset(name for name, its in self.original_names.items() if its.startswith(inside))
        """Scales, shifts and statistics of batch norm."""
        self.trainable = frozenset(name for name, value in self.initial.items() if value.requires_grad)
        self.initial = {name: value.detach().clone() for name, value in self.initial.items()}
        if not self.trainable:
            raise BadInput("The network has no parameters to train: all of them are frozen.")
        self.integers = False
        """Whether it takes integers instead of floats, as a network that begins with an embedding does."""
        features, logits = self._try(whole, sample)
        if features.dim() != 2:
            raise BadInput(
                f"The head must take one feature vector per sample, got features of shape {tuple(features.shape[1:])}:"
                " flatten them in the body."
            )
        self.features_count = int(features.shape[1])
        self.classes = int(logits.shape[1])

    @torch.no_grad()
    def _try(self, whole: nn.Module, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits of a sample; refuses where body and head do not make up the whole."""
        # Random numbers of its shape: zeros would hide a way around a head that has no bias.
        sample = torch.rand(sample.shape, generator=torch.Generator().manual_seed(0)).to(sample)
        try:
            expected = whole(sample)
        except (Exception, SystemExit) as error:  # what a user's layers raise is theirs to read, in one sentence
            places = torch.zeros(sample.shape, dtype=torch.long)
            try:
                expected = whole(places)
            except (Exception, SystemExit) as again:
                embeds = any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in whole.modules())
                cause = again if embeds else error
                reason = (str(cause).splitlines() or [type(cause).__name__])[0].removesuffix(".")
                reason = raised_by_user(cause) if isinstance(cause, SystemExit) else reason
                shape = tuple(sample.shape[1:])
                raise BadInput(f"The network does not accept samples of shape {shape}: {reason}.") from cause
            self.integers, sample = True, places
        if not isinstance(expected, Tensor) or expected.dim() != 2:
            found = (
                f"a tensor of shape {tuple(expected.shape)}"
                if isinstance(expected, Tensor)
                else type(expected).__name__
            )
            raise BadInput(f"The network must return logits [samples, classes], got {found}.")
        try:
            features = self.features(self.initial, sample)
            logits = self.classify(self.initial, features)
            fits = logits.shape == expected.shape and torch.allclose(logits, expected, atol=1e-5, rtol=1e-4)
        except Exception:  # what lies behind the head need not take the features in its place
            fits = False
        if not fits:
            raise BadInput(
                f"--head {self.head_name} is not the last layer that the network calls:"
                " name the submodule whose output is the logits."
            )
        return features, logits

    def _collect(self, part: str, module: nn.Module, prefix: str) -> None:
        # Float buffers (batch-norm statistics) are part of a client's model, though nobody differentiates them.
        buffers = ((name, value) for name, value in module.named_buffers() if value.is_floating_point())
        named = [*module.named_parameters(), *buffers]
        # A module that has parts named body and head need not say body twice.
        inside = f"{part}." if all(name.startswith(f"{part}.") for name, _ in named) else ""
        for name, value in named:
            full = f"{part}.{name.removeprefix(inside)}"
            self._names[part].append((name, full))
            self.original_names[full] = prefix + name
            self.initial[full] = value

    def features(self, params: Tensors, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return features h [n, d] of inputs x [n, ...].

        `mask` [n] says which of them are real, for batch norm in training, where they are not a batch's samples.
        """
        return self._call("body", self._body, params, x, mask)

    def classify(self, params: Tensors, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits [n, C] of features h [n, d]."""
        return self._call("head", self._head, params, h, mask)

    def __call__(self, params: Tensors, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits [n, C] of inputs x [n, ...]."""
        return self.classify(params, self.features(params, x, mask), mask)

    def looking_at(self, mask: Tensor | None, own: Tensors | None = None) -> AbstractContextManager[None]:
        """Return the context in which a batch is looked at.

        Parameters
        ----------
        mask
            [n] which of its samples are real; None where all are, whatever the network is called with.
        own
            What the client trains: among these, batch norm's statistics follow the batch.
        """
        return self._sight.on(mask, {id(value): value for value in (own or {}).values()})

    def classify_all(self, heads: Tensors, h: Tensor) -> Tensor:
        """Return logits [k, n, C] of k stacked heads on the same features h [n, d]."""
        used = {name: heads[name] for _, name in self._names["head"]}
        logits: Tensor = vmap(lambda head: self.classify(head, h))(used)
        return logits

    @staticmethod
    def in_head(name: str) -> bool:
        """Tell whether a parameter belongs to the classifier."""
        return name.startswith("head.")

    @staticmethod
    def in_body(name: str) -> bool:
        """Tell whether a parameter belongs to the feature extractor."""
        return name.startswith("body.")

    def trains(self, name: str) -> bool:
        """Tell whether a tensor can be descended along: not the statistics of batch norm, nor a copy's.

        A copy of a parameter has its name after a prefix and a dot; what is no copy was added to be trained.
        """
        original = name.removeprefix(f"{self.prefix_of(name)}.")
        return original in self.trainable or original not in self.initial

    def prefix_of(self, name: str) -> str:
        """Return the prefix of the copy that a tensor belongs to; empty where it belongs to none."""
        prefix, _, original = name.partition(".")
        return prefix if name not in self.initial and original in self.initial else ""

    def train(self, mode: bool = True) -> None:
        """Switch dropout and batch norm between training and use."""
        if mode != self._body.training or mode != self._head.training:
            self._body.train(mode)
            self._head.train(mode)

    def halves(self) -> tuple[nn.Module, nn.Module]:
        """Return body and head; their own parameters are the initial ones."""
        return self._body, self._head

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Return every innermost layer with its name in the user's module."""
        return [
            (name, module)
            for name, module in self.parts()
            if name and not list(module.children()) and not isinstance(module, nn.Identity)
        ]

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Return every submodule with its name in the user's module; the whole, without its head, has none."""
        prefix = self.head_name
        inside = [(f"{prefix}.{name}" if name else prefix, module) for name, module in self._head.named_modules()]
        return [*self._body.named_modules(), *inside]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Net":
        """Move the initial values (and constants inside the modules) to a device and precision."""
        self._body.to(device, dtype)
        self._head.to(device, dtype)
        self.initial = {name: value.to(device, dtype) for name, value in self.initial.items()}
        return self

    def _call(self, part: str, module: nn.Module, params: Tensors, value: Tensor, mask: Tensor | None) -> Tensor:
        given: dict[str, Any] = {name: params[full] for name, full in self._names[part]}
        with self._sight.on(self._sight.mask if mask is None else mask, self._sight.own):
            result: Tensor = functional_call(module, given, (value,))
        # Layers may compute in sixteen bits; methods see the precision that parameters have.
        return result.to(next(iter(given.values())).dtype) if given else result


def _head_name(module: nn.Module, head: str | None) -> str:
    children = [name for name, _ in module.named_children()]
    if head is not None:
        try:
            module.get_submodule(head)
        except AttributeError:
            raise BadInput(
                f"--head {head!r} is not a part of the network; its parts are {', '.join(children)}."
            ) from None
        if head == "":
            raise BadInput("--head must name a part of the network, got an empty name.")
        return head
    for name in HEAD_NAMES:
        if name in children:
            return name
    raise BadInput(
        f"Which part of the network is the classifier? Say --head NAME; its parts are {', '.join(children) or 'none'}."
    )
