"""A run's network as plain PyTorch: how to build it without fedrema, and clients' tensors under its parameter names."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields

import msgspec
import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.models.batch_norm import restore_batch_norm
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.networks import NETWORKS, Network, build_net, own_module
from fedrema.models.sequence import SEQUENCE_NETWORKS
from fedrema.models.vision import IMAGE_NETWORKS
from fedrema.runs.manifest import Manifest
from fedrema.runs.provenance import GIVEN


@dataclass(frozen=True)
class PlainModel:
    """A network that plain PyTorch can build, and the names of its parameters there."""

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

        Tensors that federated training does not change (counters of batch norm, a second name of a tied weight) come
        from the module itself, so that the dict is complete.
        """
        precise = self.module.to(getattr(torch, self.dtype))
        precise.load_state_dict({own: params[name] for name, own in self.names.items()}, strict=False)
        return dict(precise.state_dict())

    def code(self, file: str, prediction: str = "classes = outputs.argmax(dim=1)") -> list[str]:
        """Return Python that builds the network, loads a file, and predicts `x`; `prediction` is its last line."""
        # Models trained in float64 would otherwise silently lose digits on loading.
        precision = ".double()" if self.dtype == "float64" else ""
        return [
            "from safetensors.torch import load_file",
            *self.imports,
            "",
            f"model = {self.construction}",
            f'model{precision}.load_state_dict(load_file("{file}"))',
            f"{prediction.replace('outputs', 'model.eval()(x)')}",
        ]


def plain_model(
    network: Network, shape: tuple[int, ...], classes: int, dtype: str, module: nn.Module | None = None
) -> PlainModel:
    """Build a network for inputs of a shape; `module` replaces the one that `network` names, if given in Python."""
    if module is not None:
        net = Net(module, torch.zeros(2, *shape), network.head)
        own = copy.deepcopy(module)
        return PlainModel(net, shape, dtype, own, net.original_names, (), "module  # the one given to fedrema.run")
    net = build_net(network, shape, classes, seed=0)
    if ":" in network.net:
        own, construction = own_module(network.net, shape, classes)
        source, _, function = network.net.partition(":")
        return PlainModel(
            net, shape, dtype, own, net.original_names, (f"from {source} import {function}",), construction
        )
    if network.net in IMAGE_NETWORKS or network.net in SEQUENCE_NETWORKS:
        # Not a chain of torch's layers, such as with residual connections: only our own modules can build it.
        own = NETWORKS[network.net](shape, classes, projection=network.projection)
        construction = f"NETWORKS[{network.net!r}]({shape!r}, {classes}, projection={network.projection})"
        imports = ("from fedrema.models.networks import NETWORKS",)
        return PlainModel(net, shape, dtype, own, net.original_names, imports, construction)
    if network.embed:
        own = NETWORKS["mlp"](shape, classes, network.hidden, network.projection, network.embedded)
        arguments = f"{shape!r}, {classes}, {network.hidden}, {network.projection}, {network.embedded!r}"
        imports = ("from fedrema.models.networks import mlp",)
        return PlainModel(net, shape, dtype, own, net.original_names, imports, f"mlp({arguments})")
    layers = net.layers()
    places = {layer: place for place, (layer, _) in enumerate(layers)}
    names = {}
    for full, original in net.original_names.items():
        layer, _, leaf = original.rpartition(".")
        names[full] = f"{places[layer]}.{leaf}"
    modules = [restore_batch_norm(copy.deepcopy(layer)) for _, layer in layers]
    # The repr of a layer is the call that constructs it.
    construction = f"Sequential({', '.join(repr(layer) for layer in modules)})"
    return PlainModel(net, shape, dtype, nn.Sequential(*modules), names, ("from torch.nn import *",), construction)


def network_of(manifest: Manifest) -> Network:
    """Return the settings of a run's network."""
    settings = manifest.settings
    names = [field.name for field in fields(Network)]
    return msgspec.convert({name: settings[name] for name in names if name in settings}, Network)


def model_of_run(manifest: Manifest, module: nn.Module | None = None) -> PlainModel:
    """Rebuild the network of a run; `module` is the network, if it was given in Python."""
    federation, network = manifest.federation, network_of(manifest)
    given = network.net == GIVEN
    if given and module is None:
        raise BadInput("The network of this run was given in Python: give it again as module=….")
    return plain_model(
        network, federation.sample_shape, federation.task.outputs, manifest.ran_on.dtype, module if given else None
    )
