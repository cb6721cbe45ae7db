"""Trains clients one after another, or several in parallel threads: the CPU default for large networks.

A single convolution does not saturate the cores of a CPU, so that several clients are trained at the same time.
"""

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from fedrema.base.random import seed_of
from fedrema.core import Batch, Client, Loss, Method
from fedrema.core.checks import check_loss, check_scores
from fedrema.engine.augmentation import augmented
from fedrema.engine.batches import Samples, TrainingPlan, client_batches
from fedrema.engine.cohort import Cohort, Hook
from fedrema.engine.devices import Arithmetic, in_training_arithmetic
from fedrema.engine.private_steps import sample_gradients
from fedrema.engine.sgd import LossMean, PhaseSGD
from fedrema.models.body_and_head import Net, Tensors


class LoopEngine:
    """Trains each client separately on exactly its own samples: nothing is padded."""

    name = "loop"

    def __init__(self, net: Net, arithmetic: Arithmetic, threads: int | None = None, parallel: int = 1) -> None:
        self.net = net
        self.arithmetic = arithmetic
        self.threads = threads
        """Threads per operation; changes how sums are rounded. None: torch's setting."""
        self.parallel = parallel
        """Clients that train at the same time; does not change results."""
        self._nets = [net]
        self._draws_numbers: dict[Loss, bool] = {}

    @in_training_arithmetic
    def apply_hook(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack the results."""
        self.net.train(False)
        with torch.no_grad(), self.arithmetic.torch_context():
            results = [
                hook(_in_fast_layout(cohort.one(k)), _all_samples(samples, cohort, k)) for k in range(len(cohort))
            ]
        return {
            group: {name: _stack([result[group][name] for result in results]) for name in results[0][group]}
            for group in results[0]
        }

    @in_training_arithmetic
    def predictions(self, method: Method, cohort: Cohort, samples: Samples, outputs: bool = False) -> Tensor:
        """Return the class that each client predicts for each of its samples [k, n]; -1 in the padding.

        With `outputs`, return the outputs of its network [k, n, C]; they are 0 in the padding.
        """
        shape = (len(cohort), samples.x.shape[1])
        if outputs:
            predicted = cohort.counts.new_zeros(*shape, self.net.classes)
        else:
            predicted = torch.full(shape, -1, device=samples.x.device)
        rows = cohort.clients.tolist()

        def predict(net: Net, k: int) -> None:
            data = samples.of(rows[k])
            if len(data.y):
                with torch.no_grad(), self.arithmetic.torch_context():
                    scores = method.predict(net, _in_fast_layout(cohort.one(k)), data.x)
                check_scores(method, scores, len(data.y), net.classes)
                predicted[k, : len(data.y)] = scores if outputs else scores.argmax(-1)

        self._for_all(len(cohort), predict, self.parallel, training=False)
        return predicted

    @in_training_arithmetic
    def train(self, cohort: Cohort, samples: Samples, plan: TrainingPlan) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters and momentum [k, ...] and the mean losses [k]; the inputs are not changed."""
        velocity = cohort.velocity
        trained = {name: value.new_empty(len(cohort), *value.shape) for name, value in cohort.one(0).params.items()}
        new_velocity = {name: torch.empty_like(value) for name, value in velocity.items()}
        mean_losses = cohort.counts.new_zeros(len(cohort))

        def train(net: Net, k: int) -> None:
            client = cohort.one(k)
            client = client.having(params={name: _fast_copy(value) for name, value in client.params.items()})
            momentum = {name: _fast_copy(value[k]) for name, value in velocity.items()}
            losses = LossMean(client.count.new_zeros(()), client.count.new_zeros(()))
            for phase, order in plan.phases:
                value_of = functools.partial(self._value, net, plan.local.augmentations)
                sgd = PhaseSGD(
                    plan.method,
                    phase,
                    plan.local,
                    momentum,
                    value_of,
                    axes=0,
                    net=net,
                    noise=plan.noise,
                    of_samples=functools.partial(self._of_samples, net, plan.local.augmentations),
                )
                sgd.begin(momentum)
                for batches in client_batches(samples, int(cohort.clients[k]), order, k):
                    sgd.step(client, momentum, losses, batches, active=None)
            for name, value in client.params.items():
                trained[name][k] = value
            for name, value in momentum.items():
                new_velocity[name][k] = value
            mean_losses[k] = losses.mean()

        def train_keyed(net: Net, k: int) -> None:
            # Random layers such as dropout are keyed by the client's name too.
            seed = seed_of(*plan.key, cohort.names[k], "layers")
            if devices:
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)  # the same, but it does not initialise CUDA
            train(net, k)

        devices = [samples.x.device] if samples.x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            if self.parallel > 1 and not self._draws(cohort, samples, plan):
                self._for_all(len(cohort), train, self.parallel, training=True)
            else:  # all threads share one global generator
                self._for_all(len(cohort), train_keyed, 1, training=True)
        return trained, new_velocity, mean_losses

    def _draws(self, cohort: Cohort, samples: Samples, plan: TrainingPlan) -> bool:
        """Return whether layers or losses draw random numbers, which is determined by calling each loss once."""
        losses = {phase.loss or plan.method.loss for phase, _ in plan.phases}
        for loss in losses - self._draws_numbers.keys():
            few = samples.of(int(cohort.clients[0])).rows(slice(2))
            before = torch.get_rng_state()
            self.net.train(True)
            with torch.no_grad():
                loss(self.net, cohort.one(0), few)
            self._draws_numbers[loss] = not torch.equal(before, torch.get_rng_state())
        return any(self._draws_numbers[loss] for loss in losses)

    def _for_all(self, clients: int, work: Callable[[Net, int], None], parallel: int, training: bool) -> None:
        """Call a function for every client, several at a time; each thread has its own copy of the network."""
        parallel = min(parallel, clients)
        if parallel <= 1:
            self.net.train(training)
            for k in range(clients):
                work(self.net, k)
            return
        self._nets += [copy.deepcopy(self.net) for _ in range(parallel - len(self._nets))]
        free: SimpleQueue[Net] = SimpleQueue()
        for net in self._nets[:parallel]:
            net.train(training)
            free.put(net)

        def one(k: int) -> None:
            net = free.get()
            try:
                work(net, k)
            finally:
                free.put(net)

        before = torch.get_num_threads()
        per_operation = self.threads or before
        try:
            with ThreadPoolExecutor(parallel, initializer=torch.set_num_threads, initargs=(per_operation,)) as pool:
                list(pool.map(one, range(clients)))
        finally:
            torch.set_num_threads(before)

    def _value(self, net: Net, augmentations: tuple[str, ...], loss: Loss, client: Client, batch: Batch) -> Tensor:
        batch = augmented(batch, augmentations)
        with self.arithmetic.torch_context(), net.batch_context(None, client.params, batch.key, len(batch.y)):
            return check_loss(loss, loss(net, client, batch))

    def _of_samples(
        self,
        net: Net,
        augmentations: tuple[str, ...],
        loss: Loss,
        client: Client,
        batch: Batch,
        names: tuple[str, ...],
    ) -> tuple[Tensors, Tensor]:
        with self.arithmetic.torch_context():
            return sample_gradients(net, loss, client, batch, names, augmentations)


def _in_fast_layout(client: Client) -> Client:
    """Return a client whose convolution weights have the memory layout that is fastest on a CPU."""
    params, memory = (
        {name: _channels_last(value) for name, value in group.items()} for group in (client.params, client.memory)
    )
    return client.having(params=params, memory=memory)


def _channels_last(value: Tensor) -> Tensor:
    # On a CPU, convolutions and pooling are a quarter faster with this layout of the weights.
    if value.dim() != 4:
        return value
    value = value.contiguous(memory_format=torch.channels_last)
    if value.shape[1] == 1:  # ambiguous for torch, which would choose the slow layout
        _, _, height, width = value.shape
        return value.as_strided(value.shape, (height * width, 1, width, 1))
    return value


def _fast_copy(value: Tensor) -> Tensor:
    return _channels_last(value).clone()


def _stack(values: list[Tensor]) -> Tensor:
    """Stack clients' tensors; those with an entry per sample differ in length and are padded."""
    if len({value.shape for value in values}) > 1:
        return nn.utils.rnn.pad_sequence(values, batch_first=True)
    return torch.stack(values)


def _all_samples(samples: Samples | None, cohort: Cohort, k: int) -> Batch:
    if samples is None:
        empty = cohort.counts.new_empty(0)
        return Batch(empty, empty, empty, empty)
    return samples.of(int(cohort.clients[k]))
