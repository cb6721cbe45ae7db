"""Trains clients one after another, or several in parallel threads: the CPU default for large networks.

A single convolution does not saturate the cores of a CPU, so that several clients are trained at the same time.
"""

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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

NOT, KEYED, GLOBAL = "not", "with a key", "from torch's generator"


class LoopEngine:
    """Trains each client separately on exactly its own samples: nothing is padded."""

    name = "loop"

    def __init__(
        self,
        net: Net,
        arithmetic: Arithmetic,
        threads: int | None = None,
        parallel: int = 1,
        channels_last: bool = False,
    ) -> None:
        self.net = net
        self.arithmetic = arithmetic
        self.threads = threads
        """Threads per operation; changes how sums are rounded. None: torch's setting."""
        self.parallel = parallel
        """Clients that train at the same time; does not change results."""
        self._layout = _channels_last if channels_last else _unchanged
        self._nets = [net]
        self._draws: dict[Loss, str] = {}
        """By loss: how random numbers are drawn outside of the network, one of NOT, KEYED and GLOBAL."""

    @in_training_arithmetic
    def apply_hook(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack the results."""
        self.net.train(False)
        with torch.no_grad(), self.arithmetic.torch_context():
            results = [
                hook(self._in_fast_layout(cohort.one(k)), _all_samples(samples, cohort, k)) for k in range(len(cohort))
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
                    scores = method.predict(net, self._in_fast_layout(cohort.one(k)), data.x)
                check_scores(method, scores, len(data.y), net.classes)
                predicted[k, : len(data.y)] = scores if outputs else scores.argmax(-1)

        self._for_all(samples.counts[cohort.clients], predict, self.parallel, training=False)
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
            client = client.having(params={name: self._fast_copy(value) for name, value in client.params.items()})
            momentum = {name: self._fast_copy(value[k]) for name, value in velocity.items()}
            losses = LossMean(client.count.new_zeros(()), client.count.new_zeros(()))
            for phase, order in plan.phases:
                value_of = functools.partial(self._value, net, plan.local.augmentations)
                sgd = PhaseSGD(
                    plan.method,
                    phase,
                    plan.local,
                    plan.names,
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

        def train_seeded(net: Net, k: int) -> None:
            # What has no key draws from torch's generator, which all threads share.
            seed = seed_of(*plan.key, cohort.names[k], "layers")
            if devices:
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)  # the same, but it does not initialise CUDA
            train(net, k)

        devices = [samples.x.device] if samples.x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            losses = {phase.loss or plan.method.loss for phase, _ in plan.phases}
            first = 0
            if not devices and (new := losses - self._draws.keys()):
                self._train_first(new, train)
                first = 1
            if devices or any(self._draws[loss] == GLOBAL for loss in losses):
                self._for_all(cohort.counts, train_seeded, 1, training=True)
            else:
                self._for_all(cohort.counts, train, self.parallel, training=True, first=first)
        return trained, new_velocity, mean_losses

    def _train_first(self, losses: set[Loss], train: Callable[[Net, int], None]) -> None:
        """Train the first client, and note how losses that were not used before draw random numbers.

        Numbers from torch's generator would depend on the order of clients. They are then drawn with the key of the
        batch, if possible.
        """
        self.net.train(True)
        for how in (NOT, KEYED, GLOBAL):
            self._draws |= dict.fromkeys(losses, how)
            before = torch.get_rng_state()
            train(self.net, 0)
            if torch.equal(before, torch.get_rng_state()):
                return

    def _for_all(
        self, counts: Tensor, work: Callable[[Net, int], None], parallel: int, training: bool, first: int = 0
    ) -> None:
        """Call a function for every client from `first`, several at a time; each thread has a copy of the network.

        `counts` are the clients' numbers of samples. Clients with many start first, so that no thread has much left to
        do when the others are finished.
        """
        parallel = min(parallel, len(counts))
        if parallel <= 1:
            self.net.train(training)
            for k in range(first, len(counts)):
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
                by_size = first + counts[first:].argsort(descending=True, stable=True)
                list(pool.map(one, by_size.tolist()))
        finally:
            torch.set_num_threads(before)

    def _value(self, net: Net, augmentations: tuple[str, ...], loss: Loss, client: Client, batch: Batch) -> Tensor:
        batch = augmented(batch, augmentations)
        drawing = net.keyed_functions if self._draws.get(loss) == KEYED else nullcontext()
        with self.arithmetic.torch_context(), net.batch_context(None, client.params, batch.key, len(batch.y)), drawing:
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

    def _in_fast_layout(self, client: Client) -> Client:
        """Return a client whose convolution weights have the memory layout that is fastest on a CPU."""
        params, memory = (
            {name: self._layout(value) for name, value in group.items()} for group in (client.params, client.memory)
        )
        return client.having(params=params, memory=memory)

    def _fast_copy(self, value: Tensor) -> Tensor:
        return self._layout(value).clone()


def draws_without_key(net: Net, sample: Tensor) -> bool:
    """Return whether layers of a network draw random numbers that cannot be keyed, for example in TorchScript."""
    net.train(True)
    sample = sample[:1].expand(2, *sample.shape[1:])
    key = _no_key(sample.device)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), net.batch_context(None, None, key, len(sample)):
        before = torch.get_rng_state()
        net(net.initial, sample)
        return not torch.equal(before, torch.get_rng_state())


def can_use_channels_last(net: Net, sample: Tensor) -> bool:
    """Return whether a network computes the same with convolution weights whose channels come last.

    Activations then have this layout too. `x.view(len(x), -1)` fails on them, and code that reads strides may compute
    something else.
    """
    if not any(value.dim() == 4 for value in net.initial.values()):
        return False
    sample = sample[:1].expand(2, *sample.shape[1:]).contiguous()
    key = _no_key(sample.device)
    fast = {name: _channels_last(value) for name, value in net.initial.items()}
    for training in (False, True):
        net.train(training)
        outputs = []
        for params in (net.initial, fast):
            with torch.no_grad(), net.batch_context(None, None, key, len(sample)):
                try:
                    outputs.append(net(params, sample))
                except RuntimeError:
                    return False
        if not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _no_key(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _unchanged(value: Tensor) -> Tensor:
    return value


def _channels_last(value: Tensor) -> Tensor:
    # On a CPU, convolutions and pooling are a quarter faster with this layout of the weights.
    if value.dim() != 4:
        return value
    value = value.contiguous(memory_format=torch.channels_last)
    if value.shape[1] == 1:  # ambiguous for torch, which would choose the slow layout
        _, _, height, width = value.shape
        return value.as_strided(value.shape, (height * width, 1, width, 1))
    return value


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
