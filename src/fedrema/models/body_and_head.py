"""Split any `nn.Module` into a feature extractor (body) and a classifier (head), as functions of named tensors."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import is_parametrized

from fedrema.errors import BadInput, raised_by_user
from fedrema.models.batch_context import BatchContext
from fedrema.models.batch_norm import mask_batch_norm
from fedrema.models.head_search import ReachedHead, Split, check_outputs, materialised, split_at, split_by_search
from fedrema.models.layer_functions import LayerFunctions, needs_layer_functions
from fedrema.tasks.task import Task

Tensors = dict[str, Tensor]
"""A named set of tensors: one client's, or all clients' with a leading axis."""


def size(tensors: Tensors) -> int:
    """Return the number of bytes of tensors."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


class BodyAndHead(nn.Module):
    """A body followed by a head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(x))
        return logits


class Net:
    """A network whose parameters are named `body.…` and `head.…` and are passed with every call.

    The body computes features, and the head, the classifier, computes logits from them: `module(x) == head(body(x))`. A
    network without a head has a body only; methods that treat all parameters alike can train it.

    Parameters
    ----------
    module
        The network; its current parameters become the initial ones.
    sample
        An input [n, ...] of the right shape; its values do not matter.
    head
        Name of the submodule that is the classifier. Default: it is found by running the network (`head_search`).
    """

    def __init__(self, module: nn.Module, sample: Tensor, head: str | None = None) -> None:
        self._context = BatchContext()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = materialised(copy.deepcopy(module), sample).eval()
        self._functions: LayerFunctions | None = None
        """Replaces some of torch's functions in networks that call them."""
        self.integers = False
        """Whether the network takes integers instead of floats, because it begins with an embedding."""
        sample, outputs = self._run(whole, sample)
        check_outputs(whole, sample, outputs)
        split = split_by_search(whole, sample, outputs) if head is None else _split_at(whole, head, sample, outputs)
        self.head_name, self.no_head = split.name, split.reason
        """Name of the head in the user's module; if it is empty, `no_head` says why there is none."""
        self._on_maps, self._scale = split.on_maps, split.scale
        self._body, self._head = split.body, split.head
        for part in self.modules():
            mask_batch_norm(part, self._context)
        self.initial: Tensors = {}
        self.original_names: dict[str, str] = {}
        self._names: dict[str, list[tuple[str, str]]] = {"body": [], "head": []}
        self._collect("body", self._body, "")
        self._collect("head", self._head, self.head_name + ".")
        inside = tuple(
            f"{name}." for name, layer in self.layers() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        )
        self.batch_norm = frozenset(
            name for name, original in self.original_names.items() if original.startswith(inside)
        )
        """Names of the scales, shifts and statistics of batch norm."""
        self.trainable = frozenset(name for name, value in self.initial.items() if value.requires_grad)
        self.initial = {name: value.detach().clone() for name, value in self.initial.items()}
        if not self.trainable:
            raise BadInput("The network has no trainable parameters: all of them are frozen.")
        if needs_layer_functions(whole, sample):
            self._functions = LayerFunctions(self._context)
        with torch.no_grad():
            self.features_count = int(self.features(self.initial, sample).shape[1])
        self.classes = int(outputs.shape[1])
        """Number of outputs; in classification, of classes."""
        self.task = Task("multiclass", self.classes)
        """What the outputs mean, and the loss that trains them."""
        self.class_weights: Tensor | None = None
        """Weights of the task's classes on the network's device; a CUDA graph cannot copy them from the CPU."""

    @torch.no_grad()
    def _run(self, whole: nn.Module, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return a random sample of the type that the network takes, and its outputs."""
        # Random inputs: with zeros, a network that bypasses a head without bias would pass the check.
        sample = torch.rand(sample.shape, generator=torch.Generator().manual_seed(0)).to(sample)
        try:
            return sample, whole(sample)
        except (Exception, SystemExit) as error:  # any error of the user's layers is reported in one sentence
            indices = torch.zeros(sample.shape, dtype=torch.long)
            try:
                outputs = whole(indices)
            except (Exception, SystemExit) as second_error:
                embeds = any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in whole.modules())
                cause = second_error if embeds else error
                reason = (str(cause).splitlines() or [type(cause).__name__])[0].removesuffix(".")
                reason = raised_by_user(cause) if isinstance(cause, SystemExit) else reason
                shape = tuple(sample.shape[1:])
                raise BadInput(f"The network does not accept samples of shape {shape}: {reason}.") from cause
            self.integers = True
            return indices, outputs

    def _collect(self, part: str, module: nn.Module, prefix: str) -> None:
        # Float buffers (batch-norm statistics) are part of a client's model, though they have no gradients.
        buffers = ((name, value) for name, value in module.named_buffers() if value.is_floating_point())
        named = [*module.named_parameters(), *buffers]
        # In a module with submodules `body` and `head`, avoid names such as body.body.0.weight.
        inside = f"{part}." if all(name.startswith(f"{part}.") for name, _ in named) else ""
        for name, value in named:
            full = f"{part}.{name.removeprefix(inside)}"
            self._names[part].append((name, full))
            self.original_names[full] = prefix + name
            self.initial[full] = value

    def features(self, params: Tensors, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return features h [n, d] of inputs x [n, ...]; of a network without a head, the outputs.

        `mask` [n] marks the real samples for batch norm in training, if x are not the samples of the current batch.
        """
        features = self._call("body", self._body, params, x, mask)
        return features if features.dim() == 2 else features.flatten(1)

    def classify(self, params: Tensors, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits [n, C] of features h [n, d]."""
        if not self.head_name:
            return h
        logits = self._call("head", self._head, params, h[..., None, None] if self._on_maps else h, mask)
        logits = logits.flatten(1) if self._on_maps else logits
        return logits if self._scale == 1 else self._scale * logits

    def __call__(self, params: Tensors, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits [n, C] of inputs x [n, ...]."""
        return self.classify(params, self.features(params, x, mask), mask)

    def batch_context(
        self,
        mask: Tensor | None,
        trained: Tensors | None = None,
        key: Tensor | None = None,
        samples: int | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which the network computes on a batch.

        Parameters
        ----------
        mask
            [n] which of its samples are real; None if all are, for any inputs.
        trained
            The tensors that the client trains; only batch-norm statistics among them are updated.
        key
            One integer that keys the random numbers of layers such as dropout; None: they use torch's generator.
        samples
            Number of samples of the batch, including padding.
        """
        return self._context.batch(mask, {id(value): value for value in (trained or {}).values()}, key, samples)

    @property
    def keyed_functions(self) -> AbstractContextManager[object]:
        """A context in which torch's functions draw random numbers that follow from the key of the batch."""
        return LayerFunctions(self._context)

    def classify_all(self, heads: Tensors, h: Tensor) -> Tensor:
        """Return logits [k, n, C] of k stacked heads on the same features h [n, d]."""
        used = {name: heads[name] for _, name in self._names["head"]}
        if any(map(is_parametrized, self._head.modules())):  # vmap has no rule for weight norm
            count = len(next(iter(used.values())))
            each = ({name: value[k] for name, value in used.items()} for k in range(count))
            return torch.stack([self.classify(head, h) for head in each])
        logits: Tensor = vmap(lambda head: self.classify(head, h))(used)
        return logits

    @staticmethod
    def in_head(name: str) -> bool:
        """Return whether a parameter belongs to the classifier."""
        return name.startswith("head.")

    @staticmethod
    def in_body(name: str) -> bool:
        """Return whether a parameter belongs to the feature extractor."""
        return name.startswith("body.")

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trainable; batch-norm statistics and their copies are not.

        A copy of a parameter has its name after a prefix and a dot; tensors that a method added and that are no copies
        are trainable.
        """
        original = name.removeprefix(f"{self.prefix_of(name)}.")
        return original in self.trainable or original not in self.initial

    def prefix_of(self, name: str) -> str:
        """Return the prefix of the copy that a tensor belongs to; empty if it belongs to none."""
        prefix, _, original = name.partition(".")
        return prefix if name not in self.initial and original in self.initial else ""

    def train(self, mode: bool = True) -> None:
        """Switch dropout and batch norm between training and evaluation mode."""
        if mode != self._body.training or mode != self._head.training:
            self._body.train(mode)
            self._head.train(mode)

    def modules(self) -> tuple[nn.Module, nn.Module]:
        """Return the modules of body and head; their own parameters are the initial ones."""
        return self._body, self._head

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Return every layer without submodules, with its name in the user's module."""
        return [
            (name, module)
            for name, module in self.submodules()
            if name and not list(module.children()) and not isinstance(module, nn.Identity)
        ]

    def submodules(self) -> list[tuple[str, nn.Module]]:
        """Return every submodule with its name in the user's module; the body as a whole has the empty name."""
        prefix = self.head_name
        inside = [(f"{prefix}.{name}" if name else prefix, module) for name, module in self._head.named_modules()]
        return [*self._body.named_modules(), *inside]

    def for_task(self, task: Task) -> "Net":
        """Set the task that the network is trained for."""
        if task.has_softmax and self.classes < task.outputs:
            raise BadInput(f"The network predicts {self.classes} classes, but the data has {task.classes}.")
        if not task.has_softmax and self.classes != task.outputs:
            raise BadInput(
                f"The network has {_outputs(self.classes)}, but the task {task.name} needs {_outputs(task.outputs)}."
            )
        self.task = task
        like = next(iter(self.initial.values()))
        self.class_weights = task.weight_tensor(like.device, like.dtype)
        return self

    def to(self, device: torch.device, dtype: torch.dtype) -> "Net":
        """Move the initial values (and constants inside the modules) to a device and precision."""
        self._body.to(device, dtype)
        self._head.to(device, dtype)
        self.initial = {name: value.to(device, dtype) for name, value in self.initial.items()}
        return self

    def _call(self, part: str, module: nn.Module, params: Tensors, value: Tensor, mask: Tensor | None) -> Tensor:
        given: dict[str, Any] = {name: params[full] for name, full in self._names[part]}
        functions: AbstractContextManager[object] = self._functions or nullcontext()
        with self._context.entered(self._context.mask if mask is None else mask, self._context.trained), functions:
            try:
                result: Tensor = functional_call(module, given, (value,))
            except ReachedHead as reached:
                result = reached.features
        # Layers may compute in 16 bits; methods see results in the precision of the parameters.
        return result.to(next(iter(given.values())).dtype) if given else result


def _outputs(number: int) -> str:
    return f"{number} output{'s' if number != 1 else ''}"


def _split_at(module: nn.Module, head: str, sample: Tensor, outputs: Tensor) -> Split:
    """Split a network at the submodule that the user named."""
    try:
        module.get_submodule(head)
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children())
        raise BadInput(f"--head {head!r} is not a submodule of the network; its submodules are {children}.") from None
    if head == "":
        raise BadInput("--head must name a submodule of the network, got an empty name.")
    split = split_at(module, head, sample, outputs)
    if split is None:
        raise BadInput(
            f"--head {head} is not the last submodule that the network calls, on features [samples, numbers]: name the"
            " submodule whose output is the logits, or leave --head out."
        )
    return split


def last_layer(net: Net) -> tuple[str, str]:
    """Return the names of the last linear layer's weight and bias."""
    names = [name for name in net.initial if net.in_head(name) and name in net.trainable]
    if len(names) < 2 or [net.initial[name].dim() for name in names[-2:]] != [2, 1]:
        raise BadInput("This method needs a network whose last layer is linear and has a bias.")
    return names[-2], names[-1]


def last_layer_inputs(net: Net, params: Tensors, x: Tensor) -> Tensor:
    """Return the inputs [n, d] of the last linear layer, by replacing the layer with the identity."""
    weight, bias = last_layer(net)
    width = params[weight].shape[1]
    identity = torch.eye(width, device=x.device, dtype=params[weight].dtype)
    return net({**params, weight: identity, bias: identity.new_zeros(width)}, x)
