"""A client's model as an `nn.Module` that returns the logits the client would use."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedrema.core import Client, Method, overrides
from fedrema.data.federation import to_float
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.runs.deployed import depends_on_nodes
from fedrema.runs.directory import is_deployed
from fedrema.runs.export import parameters_in_use, trained_client
from fedrema.runs.manifest import saved_settings
from fedrema.runs.plain_model import plain_model
from fedrema.runs.run import Run

GROUPS = ("params", "memory", "inbox")


def personal_model(run: Run, row: int, adapt: bool = True, module: nn.Module | None = None) -> nn.Module:
    """Return the model of the client in a row; see `Run.personal_model`."""
    plain = plain_model(run.config, module)
    settings = saved_settings(run.directory, (), module is not None)
    method, state = settings.method, run.state()
    if is_deployed(run.config) and depends_on_nodes(settings, state, row, run.config, module, adapt):
        name = run.names[row]
        raise BadInput(
            f"The model of {name!r} exists only on its node: fedrema deploy model NODE_FOLDER writes it there."
        )
    (params,) = parameters_in_use(run, state, [row], method, adapt, module)
    client = trained_client(run, state, params, row)
    dtype = getattr(torch, plain.dtype)
    net = plain.net.to(torch.device("cpu"), dtype)
    if overrides(method, "predict"):
        found: nn.Module = PredictingClient(method, net, client)
    else:
        found = copy.deepcopy(plain.module).to(dtype)
        found.load_state_dict(plain.tensors(method.model(net, client)))
    found.register_forward_pre_hook(_to_integers if net.integers else _to_floats)
    return found.eval()


class PredictingClient(nn.Module):
    """A client of a method with a `predict` of its own: its tensors are the module's buffers."""

    def __init__(self, method: Method, net: Net, client: Client) -> None:
        super().__init__()
        self.method, self.net = method, net
        self.register_buffer("count", client.count)
        self.names = {group: tuple(getattr(client, group)) for group in GROUPS}
        for group in GROUPS:
            for name, value in getattr(client, group).items():
                self.register_buffer(_buffer(group, name), value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of inputs [n, ...]."""
        params, memory, inbox = (self._tensors(group) for group in GROUPS)
        client = Client(params, params, memory, inbox, self.get_buffer("count"))
        return self.method.predict(self.net, client, x)

    def _tensors(self, group: str) -> Tensors:
        return {name: self.get_buffer(_buffer(group, name)) for name in self.names[group]}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PredictingClient":
        # Constants inside the network follow the client's tensors to a device.
        for part in self.net.modules():
            part._apply(fn)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]  # nor this


def _buffer(group: str, name: str) -> str:
    """Return the name of a buffer, which must not contain a dot."""
    return f"{group}/{name.replace('.', '/')}"


def _to_integers(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Bring inputs to the type that an embedding takes."""
    return (inputs[0].to(next(iter(model.state_dict().values())).device, torch.long), *inputs[1:])


def _to_floats(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Bring inputs to the range and precision of training."""
    of_model = next(value for value in model.state_dict().values() if value.is_floating_point())
    return (to_float(inputs[0].to(of_model.device), of_model.dtype), *inputs[1:])
