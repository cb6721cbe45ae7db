"""One client after the other: the way of a CPU, whose cores a single convolution fills."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fedrema.core import Batch, Client, Loss, Method
from fedrema.engine.batches import Order
from fedrema.engine.crowd import Crowd, Hook, Job, Samples
from fedrema.engine.descent import Losses, train_phase
from fedrema.keys import seed_of
from fedrema.net import Net, Tensors


class Loop:
    """Trains clients one by one on exactly their samples: nothing is padded."""

    name = "loop"

    def __init__(self, net: Net, autocast: AbstractContextManager[object]) -> None:
        self.net = net
        self.autocast = autocast

    def each(self, hook: Hook, crowd: Crowd, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack what comes out."""
        self.net.train(False)
        with torch.no_grad(), self.autocast:
            results = [hook(_ready(crowd.one(k)), _data(samples, crowd, k)) for k in range(len(crowd))]
        return {
            group: {name: _stack([result[group][name] for result in results]) for name in results[0][group]}
            for group in results[0]
        }

    def scores(self, method: Method, crowd: Crowd, samples: Samples) -> Tensor:
        """Return the class each client predicts for each of its samples [k, n]; -1 in the padding."""
        self.net.train(False)
        predicted = torch.full((len(crowd), samples.x.shape[1]), -1, device=samples.x.device)
        with torch.no_grad(), self.autocast:
            for k, row in enumerate(crowd.clients.tolist()):
                data = samples.of(row)
                if len(data.y):
                    answers = method.predict(self.net, _ready(crowd.one(k)), data.x)
                    predicted[k, : len(data.y)] = answers.argmax(-1)
        return predicted

    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum [k, ...] and the mean loss [k]; nothing given is changed."""
        crowd, samples, velocity = job.crowd, job.samples, job.velocity
        self.net.train(True)
        trained = {name: value.new_empty(len(crowd), *value.shape) for name, value in crowd.one(0).params.items()}
        moved = {name: torch.empty_like(value) for name, value in velocity.items()}
        mean_losses = []
        devices = [samples.x.device] if samples.x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            for k in range(len(crowd)):
                # Layers that draw for themselves (dropout) follow the client's key too.
                torch.manual_seed(seed_of(*job.key, crowd.names[k], "layers"))
                client = crowd.one(k)
                client = client.having(params={name: _own(value) for name, value in client.params.items()})
                momentum = {name: _own(value[k]) for name, value in velocity.items()}
                losses = Losses(client.count.new_zeros(()), client.count.new_zeros(()))
                for phase, order in job.plan:
                    feed = _feed(samples, int(crowd.clients[k]), order, k)
                    train_phase(job.method, self.net, phase, job.local, client, momentum, feed, losses, self._value)
                for name, value in client.params.items():
                    trained[name][k] = value
                for name, value in momentum.items():
                    moved[name][k] = value
                mean_losses.append(losses.mean())
        return trained, moved, torch.stack(mean_losses)

    def _value(self, loss: Loss, client: Client, batch: Batch) -> Tensor:
        with self.autocast:
            return loss(self.net, client, batch)


def _ready(client: Client) -> Client:
    """Return a client whose networks compute fast."""
    params, memory = ({name: _fast(value) for name, value in group.items()} for group in (client.params, client.memory))
    return client.having(params=params, memory=memory)


def _fast(value: Tensor) -> Tensor:
    # Convolution weights in this layout make pooling and convolutions of a CPU a quarter faster.
    if value.dim() != 4:
        return value
    value = value.contiguous(memory_format=torch.channels_last)
    if value.shape[1] == 1:  # either layout fits a single channel, and torch would take it for the slow one
        _, _, height, width = value.shape
        return value.as_strided(value.shape, (height * width, 1, width, 1))
    return value


def _own(value: Tensor) -> Tensor:
    return _fast(value).clone()


def _stack(values: list[Tensor]) -> Tensor:
    """Put clients' tensors together; those with an entry per sample differ in length and are padded."""
    if len({value.shape for value in values}) > 1:
        return nn.utils.rnn.pad_sequence(values, batch_first=True)
    return torch.stack(values)


def _data(samples: Samples | None, crowd: Crowd, k: int) -> Batch:
    if samples is None:
        nothing = crowd.counts.new_empty(0)
        return Batch(nothing, nothing, nothing, nothing)
    return samples.of(int(crowd.clients[k]))


def _feed(samples: Samples, row: int, order: Order, k: int) -> Iterator[tuple[tuple[Batch, ...], None]]:
    x, y = samples.x[row], samples.y[row]
    for step in range(int(order.steps[k])):
        batches = []
        for place in range(order.index.shape[2]):
            index = torch.from_numpy(order.index[k, step, place, : order.sizes[k, step, place]]).to(x.device)
            batches.append(Batch(x[index], y[index], x.new_ones(len(index)), index))
        yield tuple(batches), None
