"""Settings by name: the defaults of each dataset and of own data, and the paper's experiments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedrema.data.options import NATURAL_NAMES

PlainValue = bool | int | float | str | None
"""A setting as records hold it: paths are text."""
Value = bool | int | float | str | Path | Sequence[bool | int | float | str | Path] | None
"""The value of a setting."""
Values = Mapping[str, Value]
"""Settings by their names on the command line, without the dashes in front."""

_PAPER: Values = {
    "clients": 20,
    "partition": "grouped",
    "groups": 5,
    "test-share": 0.2,
    "participation": 1.0,
    "rounds": 500,
    "epochs": 5,
    "batch": 100,
    "lr": 0.01,
    "momentum": 0.9,
    "clip": 10.0,
    "threads": 1,  # on a CPU: the same bits for any number of cores
    "keep-momentum": True,
    "weight-decay": 0.0,
    "schedule": "constant",
    "data-seed": 0,
    "net": "auto",
}
_RECORDED: Values = {"record": "relations", "record-every": 10}


@dataclass(frozen=True)
class Preset:
    """One of the paper's experiments."""

    common: Values
    """Settings for every method."""
    own: Mapping[str, Values] = field(default_factory=dict)
    """Settings for single methods, by their names."""

    def values(self, method: str) -> Values:
        """Return the settings for a method."""
        return {**self.common, **self.own.get(method, {})}


def _paper(dataset: str, samples: int, s: float, fedrema: Values | None = None) -> Preset:
    own: dict[str, Values] = {
        "fedavg": _RECORDED,
        "fedprox": {"mu": 1.0},
        "fedcp": {"align": 5.0},
        "feddbe": {"mean-strength": 50.0},
        "fedkd": {"least-loss": 0.01},
        "fedproto": {"align": 1.0},
        "fedpac": {"align": 1.0},
        "moon": {"mu": 5.0 if dataset == "cifar10" else 1.0},
        "fedrema": {**_RECORDED, **(fedrema or {})},
    }
    return Preset({**_PAPER, "dataset": dataset, "samples": samples, "s": s}, own)


PRESETS: dict[str, Preset] = {
    **{f"table1-{dataset}": _paper(dataset, 600, 0.2) for dataset in ("mnist", "fmnist", "cifar10")},
    **{f"table2-s{s}": _paper("cifar10", 100, s) for s in (0.2, 0.4, 0.6, 0.8)},
    **{f"table3-delta{delta}": _paper("cifar10", 600, 0.2, {"delta": delta}) for delta in (0.1, 0.3, 0.5, 0.7, 0.9)},
    "table4-f": _paper("cifar10", 600, 0.2, {"align": 1.0}),
    "table4-af": _paper("cifar10", 600, 0.2, {"align": 1.0, "alternate": True}),
}
"""The paper's settings: the partition is fixed by --data-seed 0, training seeds vary."""


OWN_DATA: Values = {"batch": 0, "lr": 0.0, "drop-incomplete": False}
"""Defaults for own data: batch and learning rate follow from it, and no client loses samples to an incomplete batch."""


def training_for(samples: int | None, input_scale: float = 1.0) -> dict[str, float]:
    """Return batch and learning rate for data whose median client has this many training samples.

    The batch is a twentieth of them, from 10 to 100, which leaves most clients at least 20 steps per epoch. The
    learning rate of 0.02 suits all of these batches; it is divided by the root mean square of the inputs, if above 1.
    docs/own-data.md shows the measurements. Without a number of samples only the learning rate is returned.
    """
    lr = {"lr": float(f"{0.02 / max(input_scale, 1.0):.2g}")}
    return lr if samples is None else {"batch": min(max(samples // 20, 10), 100), **lr}


def data_defaults(dataset: str) -> Values:
    """Return how a dataset is partitioned by default."""
    if dataset in NATURAL_NAMES:
        return {}
    if dataset == "digits":
        # Few, imbalanced samples per client, half of them kept for testing: with 20 clients of 60 that leaves
        # 600 test samples, enough to distinguish methods.
        return {"samples": 60, "s": 0.05, "test-share": 0.5}
    return {"samples": 600, "s": 0.2}


def training_defaults(dataset: str) -> Values:
    """Return the default settings of training on a dataset."""
    if dataset in NATURAL_NAMES:
        return OWN_DATA
    if dataset == "digits":
        return {"batch": 10, "lr": 0.05, "rounds": 60}
    return {"batch": 100, "lr": 0.01, "rounds": 100}
