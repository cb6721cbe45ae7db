"""A federation: the samples of all clients, in one file format for generated and for users' own data."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedrema.base.files import atomic_file
from fedrema.base.memory import check_fits
from fedrema.data.checks import (
    BadRow,
    are_integers,
    as_array,
    check_clients,
    check_samples,
    check_split,
    check_split_settings,
    custom_names,
    list_names,
)
from fedrema.data.npz import read_npz
from fedrema.data.partitions import draw_test_mask
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.rare_classes import decide
from fedrema.data.saved_meta import parse_meta
from fedrema.data.targets import check_target, task_of
from fedrema.errors import BadInput
from fedrema.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fedrema.base.figures import Figure


PARTITIONED = frozenset({"partition", "partition_file"})
"""Keys of `info` that a dataset has which was partitioned among simulated clients."""


@dataclass(frozen=True, eq=False)
class Split:
    """The train or the test split of all clients, padded to one length."""

    x: NDArray[Any]
    """[K, n, ...] with the type of the federation's samples; 0 in the padding."""
    y: NDArray[Any]
    """[K, n], or [K, n, L] for labels; 0 in the padding."""
    count: NDArray[np.int64]
    """[K] number of real samples of each client; they come before the padding."""


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All samples of all clients, stored without padding; create one with `from_arrays` or `load`."""

    x: NDArray[Any]
    """[N, ...] uint8 (pixels 0..255, normalised in training), float32, or int32 and int64 (converted to float32, except
    for networks that begin with an embedding)."""
    y: NDArray[Any]
    """[N] int64 classes or levels 0 .. classes-1, [N, L] uint8 labels 0 or 1, or [N] float64 quantities or counts."""
    client: NDArray[np.int64]
    """[N] row of the client that the sample belongs to."""
    test: NDArray[np.bool_]
    """[N] whether the sample is in its client's test split."""
    names: tuple[str, ...]
    """K unique, permanent names; random draws in training depend on the name, never on the row."""
    classes: int
    """Number of classes, levels or labels; 1 for quantities and counts."""
    info: dict[str, object]
    """How it was created; JSON values only."""
    own_class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the labels; empty if they are 0, 1, 2, …"""
    own_task: Task | None = None
    """What is predicted; None: classes."""
    class_counts: tuple[int, ...] = ()
    """Training samples of each class in the whole federation, if this is only a part of it."""
    preprocessing: Preprocessing | None = None
    """How the samples were computed from the columns of a table; None: the samples were given as arrays."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.own_class_names or tuple(map(str, range(self.classes)))

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.own_task or Task("binary" if self.classes == 2 else "multiclass", self.classes)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_partitioned(self) -> bool:
        """Whether it is a dataset that was partitioned among simulated clients, and no client's own data."""
        return bool(PARTITIONED & self.info.keys())

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def median_train_count(self) -> int:
        """Median number of training samples per client."""
        return int(np.median(np.bincount(self.client[~self.test], minlength=len(self))))

    @cached_property
    def input_scale(self) -> float:
        """Root mean square of the inputs; 1 for pixels, which are normalised."""
        if self.x.dtype == np.uint8:
            return 1.0
        total = sum(
            float(np.square(part, dtype=np.float64).sum()) for part in np.array_split(self.x, self._part_count())
        )
        return math.sqrt(total / self.x.size)

    def _part_count(self) -> int:
        """Return into how many parts to divide the samples, so that temporary arrays stay small."""
        return -(-self.x.size // 1_000_000)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content: samples, labels, clients, and names of clients and classes, but not `info`."""
        digest = hashlib.sha256()
        # Integers are hashed as float32 for compatibility: they were stored so before networks with embeddings existed.
        exact = self.x.dtype.kind == "i" and max(-int(self.x.min()), int(self.x.max())) <= 2**24
        x = self.x.astype(np.float32) if exact else self.x
        header: list[Any] = [str(x.dtype), x.shape, self.classes, self.names]
        if self.own_class_names:
            header.append(self.own_class_names)
        if not self.task.has_softmax:
            header.append(self.task.name)
        digest.update(json.dumps(header).encode())
        for array, kind in (
            (x, x.dtype),
            (self.y, self.y.dtype),
            (self.client, "int64"),
            (self.test, "bool"),
        ):
            little = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
            digest.update(little.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def split(self, part: Literal["train", "test"]) -> Split:
        """Return one split of all clients, stacked and padded, as new arrays."""
        rows = np.flatnonzero(self._of_part(part))
        rows = rows[np.argsort(self.client[rows], kind="stable")]
        client = self.client[rows]
        count = np.bincount(client, minlength=len(self)).astype(np.int64)
        position = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        length = int(count.max(initial=0))
        x = np.zeros((len(self), length, *self.sample_shape), self.x.dtype)
        y = np.zeros((len(self), length, *self.y.shape[1:]), self.y.dtype)
        x[client, position], y[client, position] = self.x[rows], self.y[rows]
        return Split(x, y, count)

    def label_counts(self, part: Literal["train", "test"] | None = None) -> NDArray[np.int64]:
        """Count the samples of each class that each client holds (in one split, or in both): [K, classes].

        Without classes, the only column counts all samples.
        """
        check_fits(8 * len(self) * self.classes, f"counting {self.classes} classes of {len(self)} clients needs")
        counts = np.zeros((len(self), self.classes), np.int64)
        chosen = slice(None) if part is None else self._of_part(part)
        if self.y.ndim == 2:
            np.add.at(counts, self.client[chosen], self.y[chosen])
        else:
            labels = self.y[chosen] if self.task.has_classes else np.zeros_like(self.client[chosen])
            np.add.at(counts, (self.client[chosen], labels), 1)
        return counts

    def reorder(self, order: Sequence[int] | NDArray[np.integer[Any]]) -> "Federation":
        """Permute the clients: row i becomes the former row `order[i]`; names move with their clients."""
        chosen = np.asarray(order)
        if sorted(chosen.tolist()) != list(range(len(self))):
            raise BadInput(f"order {chosen.tolist()} is not a permutation of the rows 0 to {len(self) - 1}.")
        names = tuple(self.names[row] for row in chosen)
        client = np.argsort(chosen)[self.client].astype(np.int64)
        # Samples are always stored in the order of the rows, so that saving and loading preserves the fingerprint.
        sort = np.argsort(client, kind="stable")
        return replace(self, x=self.x[sort], y=self.y[sort], client=client[sort], test=self.test[sort], names=names)

    def only(self, row: int) -> "Federation":
        """Return a federation that consists of one client."""
        if not 0 <= row < len(self):
            raise BadInput(f"There is no client in row {row}; rows 0 to {len(self) - 1} are valid.")
        mine = self.client == row
        parts = {name: getattr(self, name)[mine] for name in ("x", "y", "test")}
        return replace(self, **parts, client=np.zeros(int(mine.sum()), np.int64), names=(self.names[row],))

    def relabelled(self, class_names: Sequence[str]) -> "Federation":
        """Return the federation with labels matched to other classes by name; raise if a label is not among them."""
        if tuple(class_names) == self.class_names or not self.task.has_classes:
            return self
        if self.y.ndim == 2:
            found, needed = list_names(self.class_names), list_names(class_names)
            raise BadInput(f"y has the labels {found}, but {needed} are needed.")
        place = {name: number for number, name in enumerate(class_names)}
        number = np.array([place.get(name, -1) for name in self.class_names], np.int64)
        labels = number[self.y]
        if (labels < 0).any():
            row = int(np.argmax(labels < 0))
            raise BadInput(
                f"y of client {self.names[self.client[row]]!r} has the label {self.class_names[self.y[row]]!r}; the "
                f"classes are {list_names(class_names)}."
            )
        task = self.own_task and replace(self.own_task, classes=len(place))
        if task is not None and task.has_softmax:
            task = replace(task, name="binary" if len(place) == 2 else "multiclass")
        return replace(self, y=labels, classes=len(place), own_class_names=custom_names(class_names), own_task=task)

    def save(self, path: Path) -> None:
        """Write an `.npz` file that `load` reads; atomic."""
        arrays: dict[str, Any] = self.saved_arrays()
        with atomic_file(Path(path)) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **arrays)

    def saved_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a saved federation, which `from_saved` reads."""
        identifiers = np.array(self.names)
        if are_integers(self.names):
            identifiers = identifiers.astype(np.int64)
        record = {"info": self.info, "classes": self.classes, "names": self.names, "fingerprint": self.fingerprint}
        if self.own_class_names:
            record["class_names"] = self.own_class_names
        if not self.task.has_softmax:
            record["task"] = self.task.name
        if self.task.rare:
            record["rare"] = True
        if self.preprocessing is not None:
            record["preprocessing"] = msgspec.to_builtins(self.preprocessing)
        try:
            meta = json.dumps(record)
        except (TypeError, ValueError) as error:
            raise BadInput(f"info of the federation must contain JSON values only: {error}.") from error
        owners = identifiers[self.client]
        return {"x": self.x, "y": self.y, "client": owners, "split": self.test, "meta": np.array(meta)}

    @classmethod
    def load(
        cls,
        path: Path,
        data_seed: int = 0,
        test_share: float = 0.2,
        class_names: Sequence[str] | None = None,
        task: str | None = None,
        rare: bool | None = None,
    ) -> "Federation":
        """Read an `.npz` file with `x`, `y`, `client` and optionally `split` (saved federations also have `meta`).

        `class_names` are the classes of the run that the data is used for; default: those of the data. `task` is used
        unless the file was saved by fedrema with a task of its own.
        """
        arrays = read_npz(Path(path), required=("x", "y", "client"), optional=("split", "meta"))
        federation = cls.from_saved(arrays, Path(path), data_seed, test_share, class_names, task, rare)
        return federation if class_names is None else federation.relabelled(class_names)

    @classmethod
    def from_saved(
        cls,
        arrays: dict[str, NDArray[Any]],
        path: Path,
        data_seed: int = 0,
        test_share: float = 0.2,
        class_names: Sequence[str] | None = None,
        task: str | None = None,
        rare: bool | None = None,
    ) -> "Federation":
        """Create a federation from the arrays of a file, and check its fingerprint; messages name the file."""
        arrays = dict(arrays)
        meta = parse_meta(arrays.pop("meta", None), path)
        try:
            federation = cls.from_arrays(
                **arrays,
                classes=meta.classes,
                class_names=meta.class_names if meta.classes is not None else class_names,
                info={"federation": Path(path).name} if meta.info is None else meta.info,
                data_seed=data_seed,
                test_share=test_share,
                names=meta.names,
                task=meta.task or task,
                preprocessing=meta.preprocessing,
                rare=rare if meta.fingerprint is None else meta.rare,
            )
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        if meta.fingerprint not in (None, federation.fingerprint):
            raise BadInput(f"{path} was changed after it was saved: save it again, or remove 'meta' from it.")
        return federation

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        client: ArrayLike,
        split: ArrayLike | None = None,
        classes: int | None = None,
        info: Mapping[str, Any] | None = None,
        data_seed: int = 0,
        test_share: float = 0.2,
        names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        task: str | None = None,
        preprocessing: Preprocessing | None = None,
        rare: bool | None = None,
    ) -> "Federation":
        """Validate arrays with one entry per sample and create a federation.

        `client` holds whole numbers or strings; clients are sorted in ascending order unless `names` gives another
        order. `y` holds whole numbers or strings: the labels that occur are the classes, in ascending order, unless
        `class_names` lists them; with `classes`, `y` holds 0 .. classes-1 and `class_names` only names them. `split`
        holds 'train' and 'test', or true (1) for test; without it, each client's test split is drawn from `data_seed`
        and its name. `task` is one of `fedrema.tasks.TASKS`; without it, fractions are a quantity (regression), rows of
        0 and 1 are labels (multilabel), and everything else is classes. `preprocessing` says how `x` was computed.
        `rare` says whether a class is so rare that splits are stratified by class and log loss is the primary metric;
        default: by the shares of the classes, unless a dataset was partitioned.
        """
        check_split_settings(data_seed, test_share)
        identifiers = as_array(client, "client")
        try:
            samples = check_samples(x)
            rows, found = check_clients(identifiers, len(samples), names)
            target = check_target(y, len(samples), task, classes, class_names)
            test = None if split is None else check_split(split, len(samples))
        except BadRow as error:
            known = identifiers.ndim == 1 and error.row < len(identifiers) and not error.before.startswith("client")
            owner = f" (client {str(identifiers[error.row])!r})" if known else ""
            raise error.at(f"row {error.row}{owner}") from None
        order = np.argsort(rows, kind="stable")
        target = replace(target, y=target.y[order])
        samples, rows = samples[order], rows[order]
        info = dict(info or {"federation": "arrays"})
        if target.task not in CLASSIFICATION or PARTITIONED & info.keys():
            rare = False
        else:
            rare = decide(rare, target.y, target.class_names)
        if test is not None:
            test = test[order]
        else:
            sizes = np.bincount(rows, minlength=len(found))
            own = np.split(target.y, np.cumsum(sizes)[:-1])
            parts = zip(sizes, found, own, strict=True)
            test = np.concatenate(
                [draw_test_mask(int(n), test_share, data_seed, name, y if rare else None) for n, name, y in parts]
            )
        trained = np.bincount(rows[~test], minlength=len(found))
        if not trained.all():
            name = found[int(np.argmin(trained))]
            raise BadInput(f"client {name!r} has only test samples; every client needs at least one training sample.")
        own_task = replace(task_of(target, test), rare=rare)
        return cls(
            samples,
            target.y,
            rows,
            test,
            found,
            target.classes,
            info,
            target.class_names,
            own_task if rare or target.task not in CLASSIFICATION else None,
            preprocessing=preprocessing,
        )

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        target: str | Sequence[str] | None = None,
        client: str | None = None,
        **options: Any,
    ) -> "Federation":
        """Create a federation from a pandas or polars frame, or from a mapping of client names to frames.

        Parameters
        ----------
        frame
            One frame with a row per sample, or one frame per client.
        target
            The column to predict, or several. Default: the only column with a usual name for it, such as `target`.
        client
            The column that names each row's client. Default: the only column with a usual name, such as `client`.
        **options
            Other arguments of `fedrema.federation_from`: columns, task, scale, categories, data_seed, test_share, …

        Examples
        --------
        >>> import fedrema
        >>> import pandas
        >>> frame = pandas.DataFrame({"age": [31, 45, 52, 38], "ill": ["no", "yes", "yes", "no"]})
        >>> frame["site"] = ["north", "north", "south", "south"]
        >>> federation = fedrema.Federation.from_dataframe(frame, target="ill", client="site", test_share=0.5)
        >>> federation.names, federation.class_names
        (('north', 'south'), ('no', 'yes'))
        """
        from fedrema.data.from_source import federation_from  # that module imports this one
        from fedrema.data.readers.frames import library_of

        frames = list(frame.values()) if isinstance(frame, Mapping) else [frame]
        if not frames or any(library_of(each) is None for each in frames):
            raise BadInput(
                f"from_dataframe cannot use {type(frame).__name__}: give a pandas or polars DataFrame, or a mapping of "
                "client names to these; fedrema.federation_from takes other sources."
            )
        # `Run.predict` finds the client of new rows by the same column.
        info = {"federation": type(frames[0]).__name__} | ({"client_column": client} if client is not None else {})
        return federation_from(frame, target=target, client_column=client, **{"info": info, **options})

    def plot(self) -> "Figure":
        """Return a Matplotlib figure of the classes and the samples of each client."""
        from fedrema.data.plot import federation_figure  # that module imports this one

        return federation_figure(self)

    def __repr__(self) -> str:
        return f"Federation({len(self)} clients, {len(self.y)} samples, {self.task.name})"

    def _repr_html_(self) -> str:
        from fedrema.data.plot import federation_html  # that module imports this one

        return federation_html(self)

    def _of_part(self, part: str) -> NDArray[np.bool_]:
        if part not in ("train", "test"):
            raise BadInput(f"part {part!r} is unknown; valid are train and test.")
        return self.test if part == "test" else ~self.test


def to_float(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normalise pixels 0..255 to -1..1 as (v/255 - 0.5)/0.5; convert other numbers to `dtype` only."""
    if x.dtype == torch.uint8:
        return (x.to(dtype) / 255 - 0.5) / 0.5
    return x.to(dtype)
