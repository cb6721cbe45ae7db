"""Settings of local training and of the simulation, declared once as documented dataclass fields."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fedrema.base.options import Purpose, option
from fedrema.core.defences import Defence
from fedrema.core.fixed_point import FixedPoint
from fedrema.core.types import Moment
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.tasks import METRICS, LossName

Backend = Literal["auto", "loop", "stacked"]
Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]
AUGMENTATIONS = ("flip", "crop", "cutout", "noise")
ADAPTIVE = "adaptive"
"""The value of `Simulation.dp_clip` that adapts the norm to the clients' updates."""


@dataclass(frozen=True)
class LocalTraining:
    """Local training of a client."""

    epochs: int = 5
    """Epochs of local training per round."""
    batch: int = 100
    """Batch size; a client with fewer samples uses them all. 0, the default for own data, chooses it from the data."""
    lr: float = 0.01
    """Learning rate. 0, the default for own data, chooses it from the data."""
    momentum: float = 0.9
    """Momentum of local SGD."""
    keep_momentum: bool = True
    """Keep each client's momentum buffers between rounds, as the paper's released code does."""
    clip: float = 10.0
    """Clip each model's gradient to this norm; 0 disables clipping."""
    weight_decay: float = 0.0
    """L2 penalty (weight decay), added to the gradient after clipping."""
    schedule: Literal["constant", "exponential", "cosine"] = "constant"
    """Learning rate over rounds: constant, multiplied by --lr-decay every round, or decayed to 0 along a cosine."""
    lr_decay: float = 0.99
    """Factor per round of the exponential schedule."""
    drop_incomplete: bool = True
    """Drop the last batch of an epoch if it is incomplete. Default for own data: off."""
    augment: str = option("", added=True)
    """Change training images at random: flip, crop, cutout or noise; separate several with commas."""
    regression_loss: LossName = option("squared", added=True)
    """Loss of a regression: squared, absolute or huber."""
    class_weights: str = option("", added=True)
    """Weight of each class in the loss: balanced (inverse to the number of training samples in the federation), or a
    number for each class, separated by commas. Default: equal weights."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "batch", "epochs", "lr", "clip", "weight_decay")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"--momentum must be in [0, 1), got {self.momentum}.")
        if not 0 < self.lr_decay <= 1:
            raise BadInput(f"--lr-decay must be in (0, 1], got {self.lr_decay}.")
        for name in self.augmentations:
            if name not in AUGMENTATIONS:
                raise BadInput(f"--augment {name!r} is unknown; valid are {', '.join(AUGMENTATIONS)}.")

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names in `augment`, in the order in which they are applied."""
        return tuple(name.strip() for name in self.augment.split(",")) if self.augment else ()

    def rate(self, moment: Moment) -> float:
        """Return the learning rate of a round."""
        if self.schedule == "exponential":
            return self.lr * self.lr_decay ** (moment.round - 1)
        if self.schedule == "cosine":
            progress = (moment.round - 1) / max(moment.rounds, 1)
            return self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr


@dataclass(frozen=True)
class Simulation:
    """Rounds, participation, and how and where they are computed."""

    rounds: int = option(60, Purpose.ROUNDS)
    """Number of communication rounds."""
    seed: int = option(0, Purpose.SEED)
    """Seed of training: initial weights, batches, participation, random draws of methods. The data has its own,
    --data-seed."""
    participation: float = 1.0
    """Fraction of the clients that participate in each round."""
    dropout: float = option(0.0, simulated=True)
    """Probability that a participating client fails before its upload arrives."""
    late: float = option(0.0, simulated=True)
    """Fraction of the clients that join only in round --late-round."""
    late_round: int = option(10, simulated=True)
    """Round in which late clients join."""
    evaluate_every: int = 1
    """Evaluate all clients every N rounds, and after the last."""
    device: Literal["auto", "cpu", "cuda"] = option("auto", Purpose.COMPUTATION)
    """Device to train on; auto uses a GPU if there is one."""
    precision: Precision = "auto"
    """Numeric precision; tf32 and bf16, for matrix products only, need a GPU. auto: float32 on a CPU, bf16 on a GPU.
    It belongs to the result: a run records it, and continues in it only."""
    backend: Backend = option("auto", Purpose.COMPUTATION)
    """Train clients one after the other (loop) or all at once as stacked tensors (stacked); auto chooses the faster."""
    threads: int = option(0, Purpose.COMPUTATION)
    """CPU threads per operation; 0 chooses one, or all that torch may use if operations are large enough."""
    chunk: int = option(0, Purpose.COMPUTATION)
    """Train at most N clients at once, rounded up to a multiple of 32; 0: as many as fit into memory."""
    memory: float | None = option(None, Purpose.COMPUTATION)
    """Memory limit in GB; client states beyond it are kept on disk. Default: half of the free memory."""
    scratch: Path | None = option(None, Purpose.PLACE)
    """Folder for client states that do not fit into memory. Default: the system's temporary folder."""
    record: Literal["none", "relations"] = option("none", Purpose.RECORD)
    """relations: record the similarity matrix between the heads (for any method), and the method's own matrices."""
    record_every: int = option(1, Purpose.RECORD)
    """Record relations every N rounds, and in the first and last round."""
    metrics: str = option("", Purpose.RECORD, added=True)
    """Metrics to record in addition to those of the task, separated by commas; docs/tasks.md lists all of them."""
    dp: Literal["none", "central", "local", "sample"] = option("none", simulated=True, added=True)
    """Differential privacy: the server adds noise to the mean (central), each client to its upload (local), or to every
    gradient step, with clipping per sample (sample). docs/privacy.md says what each protects."""
    dp_clip: str = option("1", simulated=True, added=True)
    """Norm to which --dp clips a client's update, or with --dp sample a sample's gradient; adaptive (central only): the
    median norm, estimated with noise."""
    dp_noise: float = option(1.0, simulated=True, added=True)
    """Standard deviation of the noise of --dp, as a multiple of --dp-clip; 0: clip only, without any guarantee."""
    dp_delta: float | None = option(None, simulated=True, added=True)
    """The δ for which --dp computes ε. Default: central 1/K^1.1 for K clients, local and sample 1e-5."""
    attack: Literal["none", "label-flip", "scale", "noise", "counts", "free-ride"] = option(
        "none", simulated=True, added=True
    )
    """What attackers do: train on wrong labels, multiply their update, send noise of the same norm, report a false
    number of samples, or send the received model unchanged. Only honest clients are scored."""
    attackers: float = option(0.2, simulated=True, added=True)
    """Share of the clients that attack, with --attack; which ones follows from --seed."""
    attack_strength: float | None = option(None, simulated=True, added=True)
    """Factor of the attack: on the update (scale, default 10), the norm (noise, 1) or the sample count (counts, 10)."""
    defence: Defence = option("none", simulated=True, added=True)
    """What the server uses in place of the mean of shared parameters; docs/attacks.md describes them."""
    defence_share: float = option(0.2, simulated=True, added=True)
    """Share of attackers that --defence trimmed-mean and krum tolerate."""
    defence_bound: float = option(0.0, simulated=True, added=True)
    """Norm to which --defence norm-bound scales updates down; 0: the median norm of the round's updates."""
    secure_aggregation: bool = option(False, added=True)
    """Sum shared parameters as whole numbers; in a deployment under masks, so that the server learns only the sum.
    docs/security.md says what it protects."""
    secure_bits: int = option(FixedPoint.bits, added=True)
    """Bits of a number in the sums of --secure-aggregation: 64, or 32 for half of the traffic and less precision."""
    secure_range: float = option(FixedPoint.bound, added=True)
    """Largest change of a parameter in a round with --secure-aggregation; larger changes are clipped and recorded."""
    secure_samples: int = option(FixedPoint.samples, added=True)
    """With --secure-aggregation: at least the number of participants times the largest number of samples of one."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        _check_privacy(self)
        _check_attack(self)
        _check_defence(self)
        _check_secure_aggregation(self)
        at_least(1, self, "rounds", "evaluate_every", "record_every", "late_round")
        at_least(0, self, "chunk", "threads")
        if self.memory is not None:
            above_zero(self, "memory")
        if self.scratch is not None and not self.scratch.is_dir():
            raise BadInput(f"--scratch {self.scratch} is not a folder.")
        for name in self.added_metrics:
            if name not in METRICS:
                raise BadInput(f"--metrics {name!r} is unknown; valid are {', '.join(METRICS)}.")
        if not 0 < self.participation <= 1:
            raise BadInput(f"--participation must be in (0, 1], got {self.participation}.")
        for name in ("dropout", "late"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"--{name} must be in [0, 1), got {getattr(self, name)}.")

    def with_effective_precision(self, kind: str) -> "Simulation":
        """Return the settings with the precision that `auto` means on a kind of device, cpu or cuda."""
        return replace(self, precision=effective_precision(self.precision, kind))

    @property
    def has_absences(self) -> bool:
        """Whether clients miss rounds or join late."""
        return self.participation < 1 or self.dropout > 0 or self.late > 0

    @property
    def added_metrics(self) -> tuple[str, ...]:
        """The names in `metrics`."""
        return tuple(name.strip() for name in self.metrics.split(",")) if self.metrics else ()

    def for_inspection(self) -> "Simulation":
        """Return the settings for inspecting a trained run on this machine: automatic device, full participation.

        The precision stays the same, except that a CPU computes in float32 where training needed a GPU.
        """
        precision: Precision = "auto" if needs_gpu(self.precision) else self.precision
        return replace(
            self,
            device="auto",
            precision=precision,
            backend="auto",
            threads=0,
            participation=1.0,
            dropout=0.0,
            late=0.0,
            scratch=None,
            **{name: _default(name) for name in (*PRIVACY, *ATTACK, *DEFENCE, *SECURE)},
        )

    @property
    def strength(self) -> float:
        """The factor of the attack."""
        usual = {"scale": 10.0, "counts": 10.0}.get(self.attack, 1.0)
        return usual if self.attack_strength is None else self.attack_strength

    @property
    def fixed_point(self) -> FixedPoint | None:
        """How shared parameters are summed with --secure-aggregation; None without it."""
        if not self.secure_aggregation:
            return None
        return FixedPoint(self.secure_bits, self.secure_range, self.secure_samples)

    @property
    def clip_norm(self) -> float | None:
        """The fixed norm of --dp-clip; None if it is adapted."""
        return None if self.dp_clip == ADAPTIVE else float(self.dp_clip)


def kind_of_device(device: str) -> str:
    """Return the kind of a device, cpu or cuda; `auto` is a GPU if this machine has one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


def effective_precision(precision: Precision, kind: str) -> Precision:
    """Return the precision of a setting on a kind of device; `auto` is the fastest that is as accurate as float32."""
    if precision == "auto":
        return "float32" if kind == "cpu" else "bf16"
    return precision


def needs_gpu(precision: str) -> bool:
    """Whether only a GPU computes in this precision."""
    return precision in ("tf32", "bf16")


PRIVACY = ("dp", "dp_clip", "dp_noise", "dp_delta")
ATTACK = ("attack", "attackers", "attack_strength")
DEFENCE = ("defence", "defence_share", "defence_bound")
SECURE = ("secure_aggregation", "secure_bits", "secure_range", "secure_samples")
"""Names of related settings, the one that enables the others first."""


def _default(name: str) -> Any:
    return Simulation.__dataclass_fields__[name].default


def _check_privacy(settings: Simulation) -> None:
    """Validate the settings of differential privacy."""
    if settings.dp_clip != ADAPTIVE:
        try:
            clip = float(settings.dp_clip)
        except ValueError:
            clip = math.nan
        if not 0 < clip < math.inf:
            raise BadInput(f"--dp-clip must be a number above 0 or {ADAPTIVE}, got {settings.dp_clip!r}.")
    at_least(0, settings, "dp_noise")
    if settings.dp_delta is not None and not 0 < settings.dp_delta < 1:
        raise BadInput(f"--dp-delta must be above 0 and below 1, got {settings.dp_delta}.")
    _check_unused(settings, PRIVACY, settings.dp == "none", "--dp central, local or sample")
    if settings.dp not in ("none", "central") and settings.dp != "central" and settings.dp_clip == ADAPTIVE:
        raise BadInput(f"--dp-clip {ADAPTIVE} needs --dp central: clients alone do not know each other's norms.")


def _check_attack(settings: Simulation) -> None:
    """Validate the settings of attacks."""
    if not 0 < settings.attackers < 1:
        raise BadInput(f"--attackers must be above 0 and below 1, got {settings.attackers}.")
    _check_unused(settings, ATTACK, settings.attack == "none", "--attack")
    strength = settings.attack_strength
    if strength is None:
        return
    if settings.attack in ("label-flip", "free-ride"):
        raise BadInput(f"--attack-strength has no effect with --attack {settings.attack}.")
    if not math.isfinite(strength) or (settings.attack != "scale" and strength <= 0):
        raise BadInput(f"--attack-strength must be above 0 (with --attack scale: any number), got {strength}.")


def _check_defence(settings: Simulation) -> None:
    """Validate the settings of defences, and their combination with attacks and privacy."""
    if not 0 <= settings.defence_share < 0.5:
        raise BadInput(f"--defence-share must be at least 0 and below 0.5, got {settings.defence_share}.")
    at_least(0, settings, "defence_bound")
    _check_unused(settings, DEFENCE, settings.defence == "none", "--defence")
    if settings.defence_bound and settings.defence != "norm-bound":
        raise BadInput(f"--defence-bound has no effect with --defence {settings.defence}.")
    if settings.defence != "none" and settings.dp == "central":
        raise BadInput("--defence cannot be combined with --dp central, whose noise is for the mean of the updates.")
    if settings.attack == "counts" and settings.dp in ("central", "local"):
        raise BadInput(f"--attack counts has no effect with --dp {settings.dp}: all clients have the same weight.")


def _check_secure_aggregation(settings: Simulation) -> None:
    """Validate the settings of secure aggregation, and its combination with defences."""
    FixedPoint(settings.secure_bits, settings.secure_range, settings.secure_samples)
    _check_unused(settings, SECURE, not settings.secure_aggregation, "--secure-aggregation")
    if settings.secure_aggregation and settings.defence != "none":
        raise BadInput(
            f"--secure-aggregation cannot be combined with --defence {settings.defence}, which needs the update of each"
            " client."
        )


def _check_unused(settings: Simulation, names: tuple[str, ...], is_off: bool, needed: str) -> None:
    """Raise `BadInput` for a setting that has no effect."""
    for name in names[1:]:
        if is_off and getattr(settings, name) != _default(name):
            raise BadInput(f"--{name.replace('_', '-')} has no effect without {needed}.")
