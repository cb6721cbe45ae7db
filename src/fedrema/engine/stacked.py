"""Trains all clients as one tensor program: the default on a GPU, and on a CPU for small networks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedrema.core import Batch, Client, Loss, Method
from fedrema.core.checks import check_loss, check_scores
from fedrema.engine import kernels
from fedrema.engine.augmentation import augmented
from fedrema.engine.batches import Samples, TrainingPlan, pack, stacked_batches
from fedrema.engine.buffers import StaticBuffers
from fedrema.engine.cohort import Cohort, Hook, RoundHook
from fedrema.engine.cuda_graphs import CudaGraphs
from fedrema.engine.devices import Arithmetic, in_training_arithmetic
from fedrema.engine.private_steps import sample_gradients
from fedrema.engine.sgd import PhaseSGD
from fedrema.models.body_and_head import Net, Tensors


class StackedEngine:
    """Takes each step for all clients at once; batches are padded, and clients are inactive after their last step.

    On a GPU, layers run as our own kernels over all clients where these cover them. Steps, predictions and the hooks of
    a round are captured as CUDA graphs when they run for the second time, and replayed from then on.
    """

    name = "stacked"

    def __init__(self, net: Net, arithmetic: Arithmetic, threads: int | None = None) -> None:
        self.net = net
        self.arithmetic = arithmetic
        self.threads = threads
        self.parallel = 1
        """Threads per operation on a CPU; None: torch's setting."""
        self.fused = kernels.usable(arithmetic.device, arithmetic.dtype, arithmetic.products)
        self.graphs = CudaGraphs() if arithmetic.device.type == "cuda" else None

    def precision_context(self) -> AbstractContextManager[object]:
        """Return the context in which losses and predictions are computed."""
        if self.fused and self.arithmetic.products == "bf16":
            return kernels.Operators("bf16")
        # Measured on an H200: in TF32 and float32, torch's layers are at least as fast as our kernels.
        return self.arithmetic.torch_context()

    @in_training_arithmetic
    def apply_hook(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack the results."""
        self.net.train(False)
        if samples and self.graphs and isinstance(hook, RoundHook):
            return self._captured_hook(self.graphs, hook, cohort, samples)
        empty = cohort.counts.new_empty((len(cohort), 0))
        data = samples.of_cohort(cohort) if samples else Batch(empty, empty, empty, empty)
        results = self._hook_results(hook, cohort, cohort.all(), data, masked=samples is not None)
        # Tensors that a hook returns unchanged are copied, as in the loop: later changes in place must not reach them.
        inputs = {
            _storage(value)
            for group in (cohort.params, cohort.at_start(), cohort.memory, cohort.inbox)
            for value in group.merged().values()
        }
        return {
            group: {name: _contiguous(value, _storage(value) in inputs) for name, value in named.items()}
            for group, named in results.items()
        }

    def _captured_hook(
        self, graphs: CudaGraphs, hook: RoundHook, cohort: Cohort, samples: Samples
    ) -> dict[str, Tensors]:
        """Apply a hook of a round on static buffers; it is captured unless it reads the moment."""
        buffers = graphs.prediction_buffers(cohort)
        counts = samples.counts[cohort.clients].to(buffers.rows.device, non_blocking=True)

        def computed(static_counts: Tensor) -> dict[str, Tensors]:
            data = samples.padded(buffers.rows, static_counts)
            called = hook.without_moment() if graphs.capturing else hook
            return self._hook_results(called, cohort, buffers.client, data, masked=True)

        results: dict[str, Tensors] = graphs.run(buffers, (hook.key, id(samples.x)), counts, computed)
        return {
            group: {name: _contiguous(value, copy=True) for name, value in named.items()}
            for group, named in results.items()
        }

    def _hook_results(
        self, hook: Hook, cohort: Cohort, client: Client, data: Batch, masked: bool
    ) -> dict[str, Tensors]:
        def computed(one: Client, batch: Batch) -> dict[str, Tensors]:
            with self.precision_context(), self.net.batch_context(batch.mask if masked else None):
                return hook(one, batch)

        with torch.no_grad():
            # Hooks draw from the round's generator: the same numbers for each client, as in the loop.
            results: dict[str, Tensors] = _over_clients(computed, cohort, client, data, randomness="same")
        return results

    @in_training_arithmetic
    def predictions(self, method: Method, cohort: Cohort, samples: Samples, outputs: bool = False) -> Tensor:
        """Return the class that each client predicts for each of its samples [k, n]; -1 in the padding.

        With `outputs`, return the outputs of its network [k, n, C]; they are undefined in the padding.
        """
        self.net.train(False)

        def class_scores(client: Client, batch: Batch) -> Tensor:
            with self.net.batch_context(batch.mask):
                scores = method.predict(self.net, client, batch.x)
            return check_scores(method, scores, len(batch.y), self.net.classes)

        def predicted(client: Client, data: Batch) -> Tensor:
            with torch.no_grad(), self.precision_context():
                found: Tensor = _over_clients(class_scores, cohort, client, data)
            return found if outputs else torch.where(data.mask > 0, found.argmax(-1), -1)

        if self.graphs is None:
            return predicted(cohort.all(), samples.of_cohort(cohort))
        buffers = self.graphs.prediction_buffers(cohort)
        counts = samples.counts[cohort.clients].to(buffers.rows.device, non_blocking=True)
        found: Tensor = self.graphs.run(
            buffers,
            (method, type(method).predict, id(samples.x), outputs),
            counts,
            lambda static_counts: predicted(buffers.client, samples.padded(buffers.rows, static_counts)),
        )
        return found.clone()

    @in_training_arithmetic
    def train(self, cohort: Cohort, samples: Samples, plan: TrainingPlan) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters and momentum [k, ...] and the mean losses [k]; the inputs are not changed."""
        self.net.train(True)
        buffers = self.graphs.training_buffers(cohort) if self.graphs else StaticBuffers.for_training(cohort)

        def value_of(loss: Loss, client: Client, batch: Batch) -> Tensor:
            def one_loss(one: Client, its: Batch) -> Tensor:
                its = augmented(its, plan.local.augmentations)
                with self.net.batch_context(its.mask, one.params, its.key, len(its.y)):
                    return check_loss(loss, loss(self.net, one, its))

            with self.precision_context():
                value: Tensor = _over_clients(one_loss, cohort, client, batch, params_axis=0)
            return value

        def of_samples(loss: Loss, client: Client, batch: Batch, names: tuple[str, ...]) -> tuple[Tensors, Tensor]:
            def of_client(one: Client, its: Batch) -> tuple[Tensors, Tensor]:
                return sample_gradients(self.net, loss, one, its, names, plan.local.augmentations)

            with self.arithmetic.torch_context():  # our kernels compute no gradients of single samples
                found: tuple[Tensors, Tensor] = _over_clients(of_client, cohort, client, batch, params_axis=0)
            return found

        for phase, order in plan.phases:
            sgd = PhaseSGD(
                plan.method,
                phase,
                plan.local,
                plan.names,
                value_of,
                axes=1,
                fused=self.fused,
                net=self.net,
                noise=plan.noise,
                of_samples=of_samples,
            )
            sgd.begin(buffers.velocity)
            packed = pack(order, samples.x.device)
            if not len(packed):
                continue
            all_active = bool((order.steps == len(packed)).all())

            def step(packed_step: Tensor, sgd: PhaseSGD = sgd, all_active: bool = all_active) -> None:
                batches, active = stacked_batches(packed_step, samples, buffers.rows)
                buffers.step(sgd, batches, None if all_active else active)

            buffers.set_rate(phase.lr)
            how = (sgd.loss, phase.step, sgd.names, phase.momentum, all_active, plan.local, plan.noise)
            graph_key = (*how, id(samples.x))
            for packed_step in packed:
                if self.graphs is None:
                    step(packed_step)
                else:  # our kernels read the rate from memory; torch's step has it as a constant
                    self.graphs.run(buffers, (*graph_key, None if self.fused else phase.lr), packed_step, step)
        return buffers.result(copy=self.graphs is not None)


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _contiguous(value: Tensor, copy: bool) -> Tensor:
    # One memory layout for every cohort: the layout changes how sums are rounded.
    return value.clone(memory_format=torch.contiguous_format) if copy else value.contiguous()


def _over_clients(
    function: Callable[[Client, Batch], Any],
    cohort: Cohort,
    client: Client,
    batch: Batch,
    params_axis: int | None = None,
    randomness: str = "error",
) -> Any:
    """Map a function of one client and its batch over all clients; common tensors are not copied."""
    axes: dict[str, Any] = {
        "params": params_axis if params_axis is not None else cohort.params.axes(),
        "received": cohort.at_start().axes(),
        "memory": cohort.memory.axes(),
        "inbox": cohort.inbox.axes(),
        "count": 0,
    }

    def one(fields: dict[str, Any], x: Tensor, y: Tensor, mask: Tensor, index: Tensor, key: Tensor | None) -> Any:
        return function(Client(**fields), Batch(x, y, mask, index, key))

    fields = {name: getattr(client, name) for name in axes}
    if batch.x.device.type == "cpu":
        # A product with common weights would be rounded differently in groups of clients of another size. On a GPU
        # results need not be equal to the bit.
        fields, axes = _expanded(fields, axes, len(cohort))
    # vmap refuses an axis for a dict without tensors.
    axes = {name: None if isinstance(fields[name], dict) and not fields[name] else axis for name, axis in axes.items()}
    mapped = vmap(one, in_dims=(axes, 0, 0, 0, 0, None if batch.key is None else 0), randomness=randomness)
    return mapped(fields, batch.x, batch.y, batch.mask, batch.index, batch.key)


def _expanded(fields: dict[str, Any], axes: dict[str, Any], k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add a client axis to common tensors, without copying them."""
    expanded = dict(fields)
    for group, named in axes.items():
        if isinstance(named, dict):
            common = {name: fields[group][name] for name, axis in named.items() if axis is None}
            expanded[group] = {
                **fields[group],
                **{name: value.expand(k, *value.shape) for name, value in common.items()},
            }
    return expanded, dict.fromkeys(axes, 0)
