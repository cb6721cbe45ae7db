"""One client after the other, or one per core: the way of a CPU, whose cores a convolution hardly fills."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from fedrema.base.random import seed_of
from fedrema.core import Batch, Client, Loss, Method
from fedrema.core.checks import check_loss, check_scores
from fedrema.engine.batches import Order
from fedrema.engine.cohort import Cohort, Hook, Job, Samples
from fedrema.engine.precision import Arithmetic, in_training_arithmetic
from fedrema.engine.sgd import Descent, Losses
from fedrema.models.body_and_head import Net, Tensors

MOST_LANES = 8
"""More threads would wait for each other between the operations of a step."""


class Loop:
    """Trains clients one by one on exactly their samples: nothing is padded."""

    name = "loop"

    def __init__(self, net: Net, arithmetic: Arithmetic, threads: int | None = None, side_by_side: int = 1) -> None:
        self.net = net
        self.arithmetic = arithmetic
        self.threads = threads
        """How many share an operation, which changes how its sums are rounded; None: as torch is set."""
        self.lanes = side_by_side
        """How many clients train at the same time, which changes nothing."""
        self._nets = [net]
        self._draws: dict[Loss, bool] = {}

    @in_training_arithmetic
    def each(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack what comes out."""
        self.net.train(False)
        with torch.no_grad(), self.arithmetic.torch_context():
            results = [hook(_ready(cohort.one(k)), _data(samples, cohort, k)) for k in range(len(cohort))]
        return {
            group: {name: _stack([result[group][name] for result in results]) for name in results[0][group]}
            for group in results[0]
        }

    @in_training_arithmetic
    def scores(self, method: Method, cohort: Cohort, samples: Samples) -> Tensor:
        """Return the class each client predicts for each of its samples [k, n]; -1 in the padding."""
        predicted = torch.full((len(cohort), samples.x.shape[1]), -1, device=samples.x.device)
        rows = cohort.clients.tolist()

        def score(net: Net, k: int) -> None:
            data = samples.of(rows[k])
            if len(data.y):
                with torch.no_grad(), self.arithmetic.torch_context():
                    answers = method.predict(net, _ready(cohort.one(k)), data.x)
                check_scores(method, answers, len(data.y), net.classes)
                predicted[k, : len(data.y)] = answers.argmax(-1)

        self._for_all(len(cohort), score, self.lanes, training=False)
        return predicted

    @in_training_arithmetic
    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum [k, ...] and the mean loss [k]; nothing given is changed."""
        cohort, samples, velocity = job.cohort, job.samples, job.velocity
        trained = {name: value.new_empty(len(cohort), *value.shape) for name, value in cohort.one(0).params.items()}
        moved = {name: torch.empty_like(value) for name, value in velocity.items()}
        mean_losses = cohort.counts.new_zeros(len(cohort))

        def train(net: Net, k: int) -> None:
            client = cohort.one(k)
            client = client.having(params={name: _own(value) for name, value in client.params.items()})
            momentum = {name: _own(value[k]) for name, value in velocity.items()}
            losses = Losses(client.count.new_zeros(()), client.count.new_zeros(()))
            for phase, order in job.plan:
                value_of = functools.partial(self._value, net)
                descent = Descent(job.method, phase, job.local, momentum, value_of, axes=0, prefix_of=net.prefix_of)
                for batches in _feed(samples, int(cohort.clients[k]), order, k):
                    descent.step(client, momentum, losses, batches, active=None)
            for name, value in client.params.items():
                trained[name][k] = value
            for name, value in momentum.items():
                moved[name][k] = value
            mean_losses[k] = losses.mean()

        def train_keyed(net: Net, k: int) -> None:
            # Layers that draw for themselves (dropout) follow the client's key too.
            seed = seed_of(*job.key, cohort.names[k], "layers")
            if devices:
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)  # the same, without a traceback for GPUs that are not there
            train(net, k)

        devices = [samples.x.device] if samples.x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            if self.lanes > 1 and not self._draw(job):
                self._for_all(len(cohort), train, self.lanes, training=True)
            else:  # there is one source of random numbers for all threads
                self._for_all(len(cohort), train_keyed, 1, training=True)
        return trained, moved, mean_losses

    def _draw(self, job: Job) -> bool:
        """Tell whether layers or losses draw random numbers; found by trying each loss once."""
        for loss in {phase.loss or job.method.loss for phase, _ in job.plan} - self._draws.keys():
            data = job.samples.of(int(job.cohort.clients[0]))
            few = data.rows(slice(2))
            before = torch.get_rng_state()
            self.net.train(True)
            with torch.no_grad():
                loss(self.net, job.cohort.one(0), few)
            self._draws[loss] = not torch.equal(before, torch.get_rng_state())
        return any(self._draws[phase.loss or job.method.loss] for phase, _ in job.plan)

    def _for_all(self, clients: int, work: Callable[[Net, int], None], lanes: int, training: bool) -> None:
        """Do something for every client, several at a time; each thread has a network of its own."""
        lanes = min(lanes, clients)
        if lanes <= 1:
            self.net.train(training)
            for k in range(clients):
                work(self.net, k)
            return
        self._nets += [copy.deepcopy(self.net) for _ in range(lanes - len(self._nets))]
        free: SimpleQueue[Net] = SimpleQueue()
        for net in self._nets[:lanes]:
            net.train(training)
            free.put(net)

        def one(k: int) -> None:
            net = free.get()
            try:
                work(net, k)
            finally:
                free.put(net)

        before = torch.get_num_threads()
        inside = self.threads or before
        try:
            with ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(inside,)) as pool:
                list(pool.map(one, range(clients)))
        finally:
            torch.set_num_threads(before)

    def _value(self, net: Net, loss: Loss, client: Client, batch: Batch) -> Tensor:
        with self.arithmetic.torch_context(), net.batch_context(None, client.params):
            return check_loss(loss, loss(net, client, batch))


def lanes(threads: int, clients: int) -> int:
    """Return how many clients to train side by side: two threads inside an operation do the work of 1.7."""

    def time(side_by_side: int) -> float:
        inside = threads // side_by_side
        return math.ceil(clients / side_by_side) / math.pow(inside, math.log2(1.7))

    return min(range(1, max(2, min(threads, clients, MOST_LANES) + 1)), key=time)


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


def _data(samples: Samples | None, cohort: Cohort, k: int) -> Batch:
    if samples is None:
        nothing = cohort.counts.new_empty(0)
        return Batch(nothing, nothing, nothing, nothing)
    return samples.of(int(cohort.clients[k]))


def _feed(samples: Samples, row: int, order: Order, k: int) -> Iterator[tuple[Batch, ...]]:
    x, y = samples.x[row], samples.y[row]
    for step in range(int(order.steps[k])):
        batches = []
        for place in range(order.index.shape[2]):
            index = torch.from_numpy(order.index[k, step, place, : order.sizes[k, step, place]]).to(x.device)
            mask = x.new_ones(len(index), dtype=samples.mask_dtype)
            batches.append(Batch(x[index], y[index], mask, index))
        yield tuple(batches)
