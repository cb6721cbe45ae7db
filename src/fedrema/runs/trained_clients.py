"""The clients of a trained run: rebuilds their models and predictions from the run's folder."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrema.config.settings import Settings
from fedrema.core import Client, Method, overrides
from fedrema.data import Federation, Preprocessing, build_federation
from fedrema.data.federation import to_float
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.runs.execute import build_simulator
from fedrema.runs.manifest import FederationFacts
from fedrema.runs.plain_model import model_of_run
from fedrema.runs.provenance import GIVEN
from fedrema.runs.run import Run
from fedrema.runs.saved_settings import check_code_of_run, saved_settings
from fedrema.runs.trust import Untrusted
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import SimulationState
from fedrema.tasks import Task

SAMPLES = 4
"""Number of inputs for testing which tensors a prediction depends on."""
GROUPS = ("params", "memory", "inbox")


class TrainedClients:
    """The clients of a run as of its last checkpoint; `module` is the network, if it was given in Python."""

    def __init__(self, run: Run, module: nn.Module | None = None) -> None:
        self.run, self.module = run, module
        self.manifest = run.manifest
        check_code_of_run(run.directory, self.manifest, run.trust_code, ("net",))
        self.plain = model_of_run(self.manifest, module)
        self.state = run.state()

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run."""
        own_module = self.manifest.settings.get("net") == GIVEN
        return saved_settings(self.run.directory, None, own_module, self.run.trust_code, ("method",))

    @cached_property
    def method(self) -> Method | None:
        """The method with its settings; None if it is the user's own and cannot be imported."""
        try:
            return self.settings.method
        except Untrusted:
            raise
        except BadInput:
            return None

    def client(self, row: int, adapt: bool = True) -> Client:
        """Return the client in a row with the parameters it uses, on the CPU."""
        return self.clients([row], adapt)[0]

    def clients(self, rows: Sequence[int], adapt: bool = True) -> list[Client]:
        """Return the clients in some rows with the parameters they use, on the CPU.

        If the method adapts models before use, they are adapted on the run's own data, unless `adapt` is false.
        """
        adapts = adapt and self.method and any(overrides(self.method, hook) for hook in ("adapt", "ready"))
        adapted = self._adapted(rows) if adapts else {}
        return [self._client(row, adapted.get(row)) for row in rows]

    def _client(self, row: int, adapted: Client | None) -> Client:
        state = self.state
        groups = (state.params.row(row), ClientTensors(state.memory).row(row), state.inbox.row(row))
        if adapted is not None:
            groups = (adapted.params, adapted.memory, adapted.inbox)
        used, memory, inbox = ({key: value.detach().cpu() for key, value in group.items()} for group in groups)
        count = torch.tensor(self.manifest.federation.train_counts[row], dtype=getattr(torch, self.plain.dtype))
        return Client(used, used, memory, inbox, count)

    def for_inspection(self, if_changed: str, if_missing: str = "") -> tuple[Simulator, SimulationState]:
        """Return a simulator on the run's data with its last state.

        `if_changed` and `if_missing` end the sentences about data that has changed, and that cannot be built.
        """
        run, settings = self.run, self.settings
        check_code_of_run(run.directory, self.manifest, run.trust_code, ("federation",))
        try:
            federation = build_federation(settings.data)
        except BadInput as error:
            if not if_missing:
                raise
            raise BadInput(f"{str(error).rstrip('.')}; {if_missing}.") from error
        if federation.fingerprint != self.manifest.federation.fingerprint:
            raise BadInput(f"The data of {run.path} has changed since training: {if_changed}.")
        simulation = settings.simulation.for_inspection()
        simulator = build_simulator(replace(settings, simulation=simulation), federation, self.module)
        return simulator, run.directory.state(simulator.device)

    def _adapted(self, rows: Sequence[int]) -> dict[int, Client]:
        """Return the clients in some rows after adapting them to their own samples."""
        simulator, state = self.for_inspection(
            "its models cannot be adapted; use --no-adapt (adapt=False)",
            f"{self.run.method} adapts models on the run's data: to skip that, use --no-adapt (adapt=False)",
        )
        adapted: dict[int, Client] = {}
        # In the same groups as for scoring: the last bits depend on which clients are computed together.
        for part in simulator.chunks(torch.arange(state.clients)):
            wanted = [(place, row) for place, row in enumerate(part.tolist()) if row in rows]
            if wanted:
                cohort = simulator.cohort(state, part)
                found = simulator.adapted(simulator.method, cohort, simulator.moment(state.round))
                adapted |= {row: found.one(place) for place, row in wanted}
        return adapted

    def only_on_node(self, row: int, adapt: bool = True) -> bool:
        """Return whether a client of a deployed run predicts with tensors that the server does not have.

        Tested by giving these tensors two different values and comparing the predictions.
        """
        federation, settings, state = self.manifest.federation, self.settings, self.state
        if not federation.is_deployed:
            return False
        simulation = replace(settings.simulation.for_inspection(), device="cpu", backend="loop")
        dummy = dummy_federation(federation.sample_shape, federation.task)
        # The batch may be left for each node to choose.
        simulator = build_simulator(replace(settings, simulation=simulation).fitted(dummy), dummy, self.module)
        adapts = simulator.method.adapt(settings.local, simulator.moment(state.round))
        if adapt and (adapts or overrides(simulator.method, "ready")):
            return True  # adapts to the client's samples, which the server does not have
        initial = simulator.start()
        held, inbox = state.params.row(row), state.inbox.row(row)
        values = torch.linspace(-1, 1, SAMPLES * int(np.prod(federation.sample_shape)))
        x = values.reshape(SAMPLES, *federation.sample_shape).to(simulator.dtype)
        x = torch.zeros_like(x, dtype=torch.long) if simulator.net.integers else x
        count = torch.tensor(float(federation.train_counts[row]))

        def predicted(change: int) -> Tensor:
            params = {**_changed(initial.params.row(0), change), **held}
            memory = _changed(ClientTensors(initial.memory).row(0), change)
            simulator.net.train(False)
            with torch.no_grad():
                return simulator.method.predict(simulator.net, Client(params, params, memory, inbox, count), x)

        return not torch.equal(predicted(0), predicted(1))

    def predictor(self, row: int, adapt: bool = True) -> nn.Module:
        """Return a module that computes the logits of the client in a row; see `Run.personal_model`."""
        method = self.settings.method
        if self.only_on_node(row, adapt):
            name = self.run.names[row]
            raise BadInput(
                f"The model of {name!r} exists only on its node: fedrema deploy model NODE_FOLDER writes it there."
            )
        client = self.client(row, adapt)
        dtype = getattr(torch, self.plain.dtype)
        net = self.plain.net.to(torch.device("cpu"), dtype)
        if overrides(method, "predict"):
            found: nn.Module = PredictingClient(method, net, client)
        else:
            found = copy.deepcopy(self.plain.module).to(dtype)
            found.load_state_dict(self.plain.tensors(method.model(net, client)))
        convert_inputs(found, net.integers)
        return found.eval()


def counted_clients(
    state: SimulationState, federation: FederationFacts
) -> tuple[SimulationState, list[str], list[int]]:
    """Return the clients that have contributed to a run, with their names and sample counts.

    The checkpoint of a deployed run also has rows for clients that never joined; they are removed. Other runs are
    returned unchanged.
    """
    if federation.last_counted is None:
        return state, federation.names, federation.train_counts
    rows = [row for row, last in enumerate(federation.last_counted) if last]
    if not rows:
        raise BadInput("No client has contributed to a round of this run yet.")
    own, inbox = (
        {name: value[torch.tensor(rows)] for name, value in group.items()}
        for group in (state.params.own, state.inbox.own)
    )
    held = replace(
        state,
        clients=len(rows),
        params=ClientTensors(own, state.params.common),
        inbox=ClientTensors(inbox, state.inbox.common),
    )
    return held, [federation.names[row] for row in rows], [federation.train_counts[row] for row in rows]


class PredictingClient(nn.Module):
    """A client of a method with its own `predict`: its tensors are the module's buffers."""

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
        # Constants inside the network move to a device with the client's tensors.
        for part in self.net.modules():
            part._apply(fn)  # type: ignore[no-untyped-call]  # not annotated in torch
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]  # not annotated in torch


def _buffer(group: str, name: str) -> str:
    """Return the name of a buffer, which must not contain a dot."""
    return f"{group}/{name.replace('.', '/')}"


def convert_inputs(model: nn.Module, integers: bool) -> None:
    """Let a model accept inputs as a federation holds them."""
    model.register_forward_pre_hook(_to_integers if integers else _to_floats)


def _to_integers(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert inputs to the type that an embedding takes."""
    return (inputs[0].to(next(iter(model.state_dict().values())).device, torch.long), *inputs[1:])


def _to_floats(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert inputs to the range and precision of training."""
    of_model = next(value for value in model.state_dict().values() if value.is_floating_point())
    return (to_float(inputs[0].to(of_model.device), of_model.dtype), *inputs[1:])


def _changed(tensors: Tensors, change: int) -> Tensors:
    return {name: ~value if change and value.dtype is torch.bool else value + change for name, value in tensors.items()}


def dummy_federation(
    shape: tuple[int, ...],
    task: Task,
    class_counts: tuple[int, ...] = (),
    preprocessing: Preprocessing | None = None,
) -> Federation:
    """Return a federation that is used for its shapes only; all arguments are those of the real one."""
    samples = np.zeros((3, *shape), np.float32)  # two training samples: some layers do not accept a batch of one
    target = np.zeros((3, task.classes), np.int64) if task.name == "multilabel" else np.zeros(3, np.int64)
    if not task.has_classes:
        target = np.arange(3)  # a constant quantity is not accepted
    classes = task.classes if task.has_classes and target.ndim == 1 else None
    split = [False, False, True]
    made = Federation.from_arrays(samples, target, ["dummy"] * 3, split, classes=classes, task=task.name)
    own_task = task if task.rare or not task.has_softmax else None
    return replace(made, own_task=own_task, class_counts=class_counts, preprocessing=preprocessing)
