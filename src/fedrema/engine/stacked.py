"""All clients as one tensor program: the way of a GPU, and of networks too small to fill a CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedrema.core import Batch, Client, Loss, Method
from fedrema.core.checks import check_loss, check_scores
from fedrema.engine import kernels
from fedrema.engine.cohort import Cohort, Hook, Job, Samples
from fedrema.engine.cuda_graphs import Recorder, Stage
from fedrema.engine.feed import batches_of, packed
from fedrema.engine.precision import Arithmetic, in_training_arithmetic
from fedrema.engine.sgd import Descent
from fedrema.models.body_and_head import Net, Tensors


class StackedEngine:
    """Trains all clients step by step together; shorter clients are padded, masked, and held still at the end.

    On a GPU layers run as our own programs over all clients where those cover them; a step is recorded when it comes
    for the second time, and from then on replayed.
    """

    name = "stacked"

    def __init__(self, net: Net, arithmetic: Arithmetic, threads: int | None = None) -> None:
        self.net = net
        self.arithmetic = arithmetic
        self.threads = threads
        """How many share an operation on a CPU; None: as torch is set."""
        self.fused = kernels.usable(arithmetic.device, arithmetic.dtype, arithmetic.products)
        self.recorder = Recorder() if arithmetic.device.type == "cuda" else None

    def computing(self) -> AbstractContextManager[object]:
        """Return the context that losses and predictions are computed in."""
        if self.fused and self.arithmetic.products == "bf16":
            return kernels.Operators("bf16")
        # Measured on an H200: in TF32 and float32 torch's own layers are as fast as ours, or faster.
        return self.arithmetic.torch_context()

    @in_training_arithmetic
    def each(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack what comes out."""
        self.net.train(False)
        nothing = cohort.counts.new_empty((len(cohort), 0))
        data = samples.stacked(cohort.clients) if samples else Batch(nothing, nothing, nothing, nothing)

        def computed(client: Client, batch: Batch) -> dict[str, Tensors]:
            with self.computing(), self.net.batch_context(batch.mask if samples else None):
                return hook(client, batch)

        with torch.no_grad():
            # Hooks draw from the moment's generator: the same for each client, as in the loop.
            made: dict[str, Tensors] = _over_clients(computed, cohort, cohort.all(), data, randomness="same")
        # What a hook hands on as it was is copied, as in the loop: later changes in place must not reach it.
        held = {
            _storage(value)
            for group in (cohort.params, cohort.at_first(), cohort.memory, cohort.inbox)
            for value in group.merged().values()
        }
        return {
            group: {name: _kept(value, _storage(value) in held) for name, value in named.items()}
            for group, named in made.items()
        }

    @in_training_arithmetic
    def scores(self, method: Method, cohort: Cohort, samples: Samples) -> Tensor:
        """Return the class each client predicts for each of its samples [k, n]; -1 in the padding."""
        self.net.train(False)

        def answered(client: Client, batch: Batch) -> Tensor:
            with self.net.batch_context(batch.mask):
                scores = method.predict(self.net, client, batch.x)
            return check_scores(method, scores, len(batch.y), self.net.classes)

        def predicted(client: Client, data: Batch) -> Tensor:
            with torch.no_grad(), self.computing():
                logits: Tensor = _over_clients(answered, cohort, client, data)
            return torch.where(data.mask > 0, logits.argmax(-1), -1)

        if self.recorder is None:
            return predicted(cohort.all(), samples.stacked(cohort.clients))
        stage = self.recorder.scoring(cohort)
        counts = samples.counts[cohort.clients].to(stage.rows.device, non_blocking=True)
        found: Tensor = self.recorder.run(
            stage,
            (method, type(method).predict, id(samples.x)),
            counts,
            lambda told: predicted(stage.client, samples.gathered(stage.rows, told)),
        )
        return found.clone()

    @in_training_arithmetic
    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum [k, ...] and the mean loss [k]; nothing given is changed."""
        self.net.train(True)
        cohort, samples = job.cohort, job.samples
        stage = self.recorder.training(job) if self.recorder else Stage.training(job)

        def value_of(loss: Loss, client: Client, batch: Batch) -> Tensor:
            def lost(one: Client, its: Batch) -> Tensor:
                with self.net.batch_context(its.mask, one.params):
                    return check_loss(loss, loss(self.net, one, its))

            with self.computing():
                value: Tensor = _over_clients(lost, cohort, client, batch, params_axis=0)
            return value

        for phase, order in job.plan:
            descent = Descent(
                job.method,
                phase,
                job.local,
                stage.velocity,
                value_of,
                axes=1,
                fused=self.fused,
                prefix_of=self.net.prefix_of,
            )
            plan = packed(order, samples.x.device)
            if not len(plan):
                continue
            together = bool((order.steps == len(plan)).all())

            def step(now: Tensor, descent: Descent = descent, together: bool = together) -> None:
                batches, active = batches_of(now, samples, stage.rows)
                stage.take(descent, batches, None if together else active)

            stage.set_rate(phase.lr)
            what = (descent.loss, phase.step, descent.names, phase.momentum, together, job.local, id(samples.x))
            for now in plan:
                if self.recorder is None:
                    step(now)
                else:  # our programs read the rate where it lies; torch's have it as a number
                    self.recorder.run(stage, (*what, None if self.fused else phase.lr), now, step)
        return stage.result(copy=self.recorder is not None)


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _kept(value: Tensor, copy: bool) -> Tensor:
    # In one memory order whoever is there: sums are rounded by it.
    return value.clone(memory_format=torch.contiguous_format) if copy else value.contiguous()


def _over_clients(
    function: Callable[[Client, Batch], Any],
    cohort: Cohort,
    client: Client,
    batch: Batch,
    params_axis: int | None = None,
    randomness: str = "error",
) -> Any:
    """Map a function of one client and its batch over all of them; what is common is not copied."""
    axes: dict[str, Any] = {
        "params": params_axis if params_axis is not None else cohort.params.axes(),
        "received": cohort.at_first().axes(),
        "memory": cohort.memory.axes(),
        "inbox": cohort.inbox.axes(),
        "count": 0,
    }

    def one(fields: dict[str, Any], x: Tensor, y: Tensor, mask: Tensor, index: Tensor) -> Any:
        return function(Client(**fields), Batch(x, y, mask, index))

    fields = {name: getattr(client, name) for name in axes}
    if batch.x.device.type == "cpu":
        # One product for all clients would round otherwise when they are trained in groups; a GPU promises no bits.
        fields, axes = _spread_out(fields, axes, len(cohort))
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
