"""All clients as one tensor program: the way of a GPU, and of networks too small to fill a CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedrema.core import Batch, Client, Loss, Method
from fedrema.engine.batches import Order
from fedrema.engine.crowd import Crowd, Hook, Job, Samples
from fedrema.engine.descent import Losses, train_phase
from fedrema.net import Net, Tensors


class StackedEngine:
    """Trains all clients step by step together; shorter clients are padded, masked, and held still at the end."""

    name = "stacked"

    def __init__(self, net: Net, autocast: AbstractContextManager[object]) -> None:
        self.net = net
        self.autocast = autocast

    def each(self, hook: Hook, crowd: Crowd, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack what comes out."""
        self.net.train(False)
        nothing = crowd.counts.new_empty((len(crowd), 0))
        data = samples.stacked(crowd.clients) if samples else Batch(nothing, nothing, nothing, nothing)
        with torch.no_grad(), self.autocast:
            # Hooks draw from the moment's generator: the same for each client, as in the loop.
            made: dict[str, Tensors] = _over_clients(hook, crowd, crowd.all(), data, randomness="same")
        # What a hook hands on as it was is copied, as in the loop: later changes in place must not reach it.
        held = {
            _storage(value)
            for group in (crowd.params, crowd.at_first(), crowd.memory, crowd.inbox)
            for value in group.merged().values()
        }
        return {
            group: {name: value.clone() if _storage(value) in held else value for name, value in named.items()}
            for group, named in made.items()
        }

    def scores(self, method: Method, crowd: Crowd, samples: Samples) -> Tensor:
        """Return the class each client predicts for each of its samples [k, n]; -1 in the padding."""
        self.net.train(False)
        data = samples.stacked(crowd.clients)
        with torch.no_grad(), self.autocast:
            logits: Tensor = _over_clients(
                lambda client, batch: method.predict(self.net, client, batch.x), crowd, crowd.all(), data
            )
        return torch.where(data.mask > 0, logits.argmax(-1), -1)

    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum [k, ...] and the mean loss [k]; nothing given is changed."""
        crowd, samples, velocity = job.crowd, job.samples, job.velocity
        self.net.train(True)
        client = crowd.all().having(params=crowd.params.copied(len(crowd)))
        velocity = {name: value.clone() for name, value in velocity.items()}
        losses = Losses(torch.zeros_like(crowd.counts), torch.zeros_like(crowd.counts))

        def value_of(loss: Loss, client: Client, batch: Batch) -> Tensor:
            with self.autocast:
                value: Tensor = _over_clients(
                    lambda one, its: loss(self.net, one, its), crowd, client, batch, params_axis=0
                )
            return value

        for phase, order in job.plan:
            feed = _feed(samples, crowd.clients, order)
            train_phase(job.method, self.net, phase, job.local, client, velocity, feed, losses, value_of)
        return client.params, velocity, losses.mean()


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _over_clients(
    function: Callable[[Client, Batch], Any],
    crowd: Crowd,
    client: Client,
    batch: Batch,
    params_axis: int | None = None,
    randomness: str = "error",
) -> Any:
    """Map a function of one client and its batch over all of them; what is common is not copied."""
    axes: dict[str, Any] = {
        "params": params_axis if params_axis is not None else crowd.params.axes(),
        "received": crowd.at_first().axes(),
        "memory": crowd.memory.axes(),
        "inbox": crowd.inbox.axes(),
        "count": 0,
    }

    def one(fields: dict[str, Any], x: Tensor, y: Tensor, mask: Tensor, index: Tensor) -> Any:
        return function(Client(**fields), Batch(x, y, mask, index))

    fields = {name: getattr(client, name) for name in axes}
    if batch.x.device.type == "cpu":
        # One product for all clients would round otherwise when they are trained in groups; a GPU promises no bits.
        fields, axes = _spread_out(fields, axes, len(crowd))
    # vmap refuses an axis for a dict without tensors.
    axes = {name: None if isinstance(fields[name], dict) and not fields[name] else axis for name, axis in axes.items()}
    mapped = vmap(one, in_dims=(axes, 0, 0, 0, 0), randomness=randomness)
    return mapped(fields, batch.x, batch.y, batch.mask, batch.index)


def _spread_out(fields: dict[str, Any], axes: dict[str, Any], k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give what is common a client axis too, without copying it."""
    spread = dict(fields)
    for group, named in axes.items():
        if isinstance(named, dict):
            common = {name: fields[group][name] for name, axis in named.items() if axis is None}
            spread[group] = {**fields[group], **{name: value.expand(k, *value.shape) for name, value in common.items()}}
    return spread, dict.fromkeys(axes, 0)


def _feed(samples: Samples, clients: Tensor, order: Order) -> Iterator[tuple[tuple[Batch, ...], Tensor | None]]:
    device, dtype = samples.x.device, samples.x.dtype
    index = torch.from_numpy(order.index).to(device)
    sizes = torch.from_numpy(order.sizes).to(device)
    steps = torch.from_numpy(order.steps).to(device)
    rows = clients.to(device)[:, None]
    mask = (torch.arange(index.shape[-1], device=device) < sizes[..., None]).to(dtype)
    together = bool((order.steps == order.steps.max(initial=0)).all())
    for step in range(index.shape[1]):
        batches = []
        for place in range(index.shape[2]):
            chosen = index[:, step, place]
            batches.append(Batch(samples.x[rows, chosen], samples.y[rows, chosen], mask[:, step, place], chosen))
        yield tuple(batches), None if together else (step < steps).to(dtype)


def why_not_stackable(net: Net, sample: Tensor) -> str | None:
    """Return why a network cannot be trained stacked, naming the layer; None if it can.

    Found by trying: one step of two clients, watching which layer was entered last when it fails.
    """
    for name, layer in net.layers():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            # Padded samples and clients that have finished would enter its statistics.
            return f"layer {name!r} ({type(layer).__name__}) mixes the samples of a batch"
    entered: list[str] = []
    labels = [(layer, f"{name!r} ({type(layer).__name__})") for name, layer in net.layers()]
    hooks = [layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)) for layer, label in labels]
    params = {name: value.detach().expand(2, *value.shape).clone() for name, value in net.initial.items()}
    leaves = {name: value.requires_grad_(name in net.trainable) for name, value in params.items()}
    net.train(True)
    try:
        total = vmap(net, in_dims=(0, None))(leaves, sample.expand(2, *sample.shape[1:])).sum()
        torch.autograd.grad(total, [leaves[name] for name in net.trainable], allow_unused=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        return f"layer {entered[-1] if entered else 'unknown'} does not run under vmap ({reason})"
    finally:
        for hook in hooks:
            hook.remove()
    return None
