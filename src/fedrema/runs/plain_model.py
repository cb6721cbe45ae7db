"""A run's network as plain PyTorch: how to build it without fedrema, and a client's tensors under its names."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.models.batch_norm import restore_batch_norm
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.networks import Network, build_net, own_module
from fedrema.runs.manifest import GIVEN


@dataclass(frozen=True)
class PlainModel:
    """A network that anybody can build, and the way from fedrema's names of parameters to its own."""

    net: Net
    shape: tuple[int, ...]
    dtype: str
    module: nn.Module
    """The network as it is built without fedrema."""
    names: Mapping[str, str]
    """The name in `module` of each of the network's parameters."""
    imports: tuple[str, ...]
    construction: str
    """Python that builds `module`."""

    def tensors(self, params: Tensors) -> Tensors:
        """Return a client's parameters as the state dict of `module`.

        What federated training leaves alone (counters of batch norm, a second name of a tied weight) comes from
        the module itself, so that the dict is complete.
        """
        precise = self.module.to(getattr(torch, self.dtype))
        precise.load_state_dict({own: params[name] for name, own in self.names.items()}, strict=False)
        return dict(precise.state_dict())

    def code(self, file: str) -> list[str]:
        """Return Python that builds the network, loads a file, and predicts the classes of `x`."""
        # Models trained in float64 would otherwise lose digits on loading, without a word.
        precision = ".double()" if self.dtype == "float64" else ""
        return [
            "from safetensors.torch import load_file",
            *self.imports,
            "",
            f"model = {self.construction}",
            f'model{precision}.load_state_dict(load_file("{file}"))',
            "classes = model.eval()(x).argmax(dim=1)",
        ]


def plain_model(config: Mapping[str, Any], module: nn.Module | None = None) -> PlainModel:
    """Rebuild the network of a run from its config.json; `module` is the one given in Python, if it was."""
    try:
        settings, federation = config["settings"], config["federation"]
        shape, classes = tuple(federation["sample_shape"]), int(federation["classes"])
        dtype, name = str(config["ran_on"]["dtype"]), str(settings["net"])
    except KeyError as error:
        raise BadInput(f"The run's config.json is not complete: {error} is missing.") from error
    head = settings.get("head")
    if name == GIVEN:
        if module is None:
            raise BadInput("The network of this run was given in Python: give it again as module=….")
        net = Net(module, torch.zeros(2, *shape), head)
        own = copy.deepcopy(module)
        return PlainModel(net, shape, dtype, own, net.original_names, (), "module  # the one given to fedrema.run")
    sizes = {size: int(settings.get(size, getattr(Network, size))) for size in ("hidden", "projection")}
    network = Network(name, head, **sizes)
    net = build_net(network, shape, classes, seed=0)
    if ":" in name:
        own, construction = own_module(name, shape, classes)
        imports = (f"from {name.partition(':')[0]} import {name.partition(':')[2]}",)
        return PlainModel(net, shape, dtype, own, net.original_names, imports, construction)
    layers = net.layers()
    places = {layer: place for place, (layer, _) in enumerate(layers)}
    names = {}
    for full, original in net.original_names.items():
        layer, _, leaf = original.rpartition(".")
        names[full] = f"{places[layer]}.{leaf}"
    modules = [restore_batch_norm(copy.deepcopy(layer)) for _, layer in layers]
    # A layer's repr is the call that makes it.
    construction = f"Sequential({', '.join(repr(layer) for layer in modules)})"
    imports = ("from torch.nn import *",)
    return PlainModel(net, shape, dtype, nn.Sequential(*modules), names, imports, construction)
