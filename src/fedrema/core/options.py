"""Settings of local training and of the simulation, declared once as documented dataclass fields."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedrema.base.options import Purpose, option
from fedrema.core.types import Moment
from fedrema.errors import BadInput, above_zero, at_least

Backend = Literal["auto", "loop", "stacked"]
Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]


@dataclass(frozen=True)
class LocalTraining:
    """Local training on a client."""

    epochs: int = 5
    """Passes over a client's own samples in each round."""
    batch: int = 100
    """Samples per step; a client that has fewer uses all it has. 0: chosen from the data, the default for own data."""
    lr: float = 0.01
    """Learning rate. 0: chosen from the data, the default for own data."""
    momentum: float = 0.9
    """Momentum of SGD."""
    keep_momentum: bool = True
    """Keep each client's momentum from one round to the next, as the paper's released code does."""
    clip: float = 10.0
    """Largest norm of a gradient; larger ones are scaled down, each model by its own norm. 0 switches clipping off."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient after clipping."""
    schedule: Literal["constant", "exponential", "cosine"] = "constant"
    """How the learning rate changes over rounds: not, by a factor --lr-decay every round, or to 0 along a cosine."""
    lr_decay: float = 0.99
    """Factor per round of the exponential schedule."""
    drop_incomplete: bool = True
    """Leave out an epoch's last batch when it is not full; the default for own data is to keep it."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "batch", "epochs", "lr", "clip", "weight_decay")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"--momentum must lie in [0, 1), got {self.momentum}.")
        if not 0 < self.lr_decay <= 1:
            raise BadInput(f"--lr-decay must lie in (0, 1], got {self.lr_decay}.")

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
    """The simulated federation."""

    rounds: int = option(60, Purpose.ROUNDS)
    """Communication rounds."""
    seed: int = option(0, Purpose.SEED)
    """Seed of training: initial weights, batches, probes, who takes part. The data has its own, --data-seed."""
    participation: float = 1.0
    """Share of the clients that take part in a round."""
    dropout: float = option(0.0, simulated=True)
    """Chance that a client which takes part fails before its upload arrives."""
    late: float = option(0.0, simulated=True)
    """Share of the clients that join only in round --late-round."""
    late_round: int = option(10, simulated=True)
    """The round in which late clients join."""
    evaluate_every: int = 1
    """Score all clients every this many rounds, and after the last."""
    device: Literal["auto", "cpu", "cuda"] = option("auto", Purpose.COMPUTATION)
    """Where to train; auto takes a GPU where there is one."""
    precision: Precision = "auto"
    """Arithmetic: float32, float64, on a GPU also tf32, bf16 (products only); auto: float32 on a CPU, bf16 on a GPU."""
    backend: Backend = option("auto", Purpose.COMPUTATION)
    """Train clients one after the other (loop) or as one tensor program (stacked); auto picks the faster."""
    threads: int = option(0, Purpose.COMPUTATION)
    """Threads that share one operation on a CPU; 0: one, or all that torch may use where there is much to share."""
    chunk: int = option(0, Purpose.COMPUTATION)
    """Train at most this many clients at once (rounded up to a multiple of 32); 0: as many as memory allows."""
    memory: float | None = option(None, Purpose.COMPUTATION)
    """GB that training may take; what clients keep beyond that lies on disk. Default: half of what is free."""
    scratch: Path | None = option(None, Purpose.PLACE)
    """Folder for what does not fit into memory; default: the system's temporary folder."""
    record: Literal["none", "relations"] = option("none", Purpose.RECORD)
    """relations: keep the similarities S between the heads (for any method), the chosen sets and the dependency map."""
    record_every: int = option(1, Purpose.RECORD)
    """Keep relations every this many rounds, and of the first and the last."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "rounds", "evaluate_every", "record_every", "late_round")
        at_least(0, self, "chunk", "threads")
        if self.memory is not None:
            above_zero(self, "memory")
        if self.scratch is not None and not self.scratch.is_dir():
            raise BadInput(f"--scratch {self.scratch} is not a folder.")
        if not 0 < self.participation <= 1:
            raise BadInput(f"--participation must lie in (0, 1], got {self.participation}.")
        for name in ("dropout", "late"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"--{name} must lie in [0, 1), got {getattr(self, name)}.")

    def for_inspection(self) -> "Simulation":
        """Return the settings for inspecting a trained run on this machine: automatic device, full participation."""
        precision: Precision = "float64" if self.precision == "float64" else "auto"
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
        )
