"""A federation: what every client holds, in one file format for ours and for users' own data."""

import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedrema.base.files import written_whole
from fedrema.base.memory import check_fits
from fedrema.data.archives import check_archive
from fedrema.data.checks import (
    BadRow,
    are_numbers,
    as_array,
    check_clients,
    check_draw,
    check_labels,
    check_samples,
    check_split,
    listed,
    unless_plain,
)
from fedrema.data.partitions import choose_test
from fedrema.errors import BadInput


@dataclass(frozen=True, eq=False)
class Split:
    """One part (train or test) of all clients, padded to one length."""

    x: NDArray[Any]
    """[K, n, ...] of the federation's type, 0 in the padding."""
    y: NDArray[np.int64]
    """[K, n], 0 in the padding."""
    count: NDArray[np.int64]
    """[K]: how many of the n are real; they come first."""


@dataclass(frozen=True, eq=False)
class Federation:
    """All samples of all clients, stored flat; build one with `from_arrays` or `load`."""

    x: NDArray[Any]
    """[N, ...] uint8 (pixels 0..255, normalised in training), float32, or int32 and int64 (taken as float32, or as they
    are by a network that begins with an embedding)."""
    y: NDArray[np.int64]
    """[N] labels 0 .. classes-1."""
    client: NDArray[np.int64]
    """[N] row of the client that holds the sample."""
    test: NDArray[np.bool_]
    """[N] whether the sample is in its client's test part."""
    names: tuple[str, ...]
    """K permanent names, unique; randomness in training is keyed by them, never by the row."""
    classes: int
    info: dict[str, Any]
    """How it was made; holds only what JSON can."""
    own_class_names: tuple[str, ...] = ()
    """What the classes are called, in the order of the labels; empty where that is 0, 1, 2, …"""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the labels."""
        return self.own_class_names or tuple(map(str, range(self.classes)))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def median_train_count(self) -> int:
        """The median number of training samples of a client."""
        return int(np.median(np.bincount(self.client[~self.test], minlength=len(self))))

    @cached_property
    def input_scale(self) -> float:
        """The root mean square of the inputs; 1 for pixels, which are normalised."""
        if self.x.dtype == np.uint8:
            return 1.0
        total = sum(float(np.square(part, dtype=np.float64).sum()) for part in np.array_split(self.x, self._parts()))
        return math.sqrt(total / self.x.size)

    def _parts(self) -> int:
        """Into how many parts to cut the samples so that none takes much memory."""
        return -(-self.x.size // 1_000_000)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content: samples, labels, who holds them, names of clients and classes, but not `info`."""
        digest = hashlib.sha256()
        # Integers counted as float32 before networks could look them up: results and checkpoints depend on it.
        exact = self.x.dtype.kind == "i" and max(-int(self.x.min()), int(self.x.max())) <= 2**24
        x = self.x.astype(np.float32) if exact else self.x
        header: list[Any] = [str(x.dtype), x.shape, self.classes, self.names]
        if self.own_class_names:
            header.append(self.own_class_names)
        digest.update(json.dumps(header).encode())
        for array, kind in (
            (x, x.dtype),
            (self.y, "int64"),
            (self.client, "int64"),
            (self.test, "bool"),
        ):
            little = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
            digest.update(little.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def split(self, part: Literal["train", "test"]) -> Split:
        """Return one part of every client, stacked and padded; new arrays."""
        rows = np.flatnonzero(self._of_part(part))
        rows = rows[np.argsort(self.client[rows], kind="stable")]
        client = self.client[rows]
        count = np.bincount(client, minlength=len(self)).astype(np.int64)
        position = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        length = int(count.max(initial=0))
        x = np.zeros((len(self), length, *self.sample_shape), self.x.dtype)
        y = np.zeros((len(self), length), np.int64)
        x[client, position], y[client, position] = self.x[rows], self.y[rows]
        return Split(x, y, count)

    def label_counts(self, part: Literal["train", "test"] | None = None) -> NDArray[np.int64]:
        """Count the samples of each class that each client holds (in one part, or in all): [K, classes]."""
        check_fits(8 * len(self) * self.classes, f"counting {self.classes} classes of {len(self)} clients needs")
        counts = np.zeros((len(self), self.classes), np.int64)
        chosen = slice(None) if part is None else self._of_part(part)
        np.add.at(counts, (self.client[chosen], self.y[chosen]), 1)
        return counts

    def reorder(self, order: Sequence[int] | NDArray[np.integer[Any]]) -> "Federation":
        """Permute the clients: row i becomes what row `order[i]` was; names move along."""
        chosen = np.asarray(order)
        if sorted(chosen.tolist()) != list(range(len(self))):
            raise BadInput(f"order {chosen.tolist()} is not a permutation of the rows 0 to {len(self) - 1}.")
        names = tuple(self.names[row] for row in chosen)
        client = np.argsort(chosen)[self.client].astype(np.int64)
        # Stored in the order of the rows, as everywhere: so the fingerprint survives saving and loading.
        sort = np.argsort(client, kind="stable")
        return replace(self, x=self.x[sort], y=self.y[sort], client=client[sort], test=self.test[sort], names=names)

    def only(self, row: int) -> "Federation":
        """Return the federation of one client: what it has at home."""
        if not 0 <= row < len(self):
            raise BadInput(f"There is no client in row {row}; rows go from 0 to {len(self) - 1}.")
        mine = self.client == row
        parts = {name: getattr(self, name)[mine] for name in ("x", "y", "test")}
        return replace(self, **parts, client=np.zeros(int(mine.sum()), np.int64), names=(self.names[row],))

    def relabelled(self, class_names: Sequence[str]) -> "Federation":
        """Return the same samples with other classes, matched by name; a label that is not among them is refused."""
        if tuple(class_names) == self.class_names:
            return self
        place = {name: number for number, name in enumerate(class_names)}
        number = np.array([place.get(name, -1) for name in self.class_names], np.int64)
        labels = number[self.y]
        if (labels < 0).any():
            row = int(np.argmax(labels < 0))
            raise BadInput(
                f"y of client {self.names[self.client[row]]!r} has the label {self.class_names[self.y[row]]!r}; the "
                f"classes are {listed(class_names)}."
            )
        return replace(self, y=labels, classes=len(place), own_class_names=unless_plain(class_names))

    def save(self, path: Path) -> None:
        """Write a `.npz` that `load` reads; whole or not at all."""
        identifiers = np.array(self.names)
        if are_numbers(self.names):
            identifiers = identifiers.astype(np.int64)
        record = {"info": self.info, "classes": self.classes, "names": self.names, "fingerprint": self.fingerprint}
        if self.own_class_names:
            record["class_names"] = self.own_class_names
        try:
            meta = json.dumps(record)
        except (TypeError, ValueError) as error:
            raise BadInput(f"info of the federation holds what JSON cannot: {error}.") from error
        with written_whole(Path(path)) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(
                stream,
                x=self.x,
                y=self.y,
                client=identifiers[self.client],
                split=self.test,
                meta=np.array(meta),
            )

    @classmethod
    def load(
        cls, path: Path, data_seed: int = 0, test_share: float = 0.2, class_names: Sequence[str] | None = None
    ) -> "Federation":
        """Read a `.npz` with `x`, `y`, `client` and perhaps `split` (and, in saved ones, `meta`).

        `class_names` are the classes of a run that the data is for; default: those of the data.
        """
        arrays = read_npz(Path(path), required=("x", "y", "client"), optional=("split", "meta"))
        meta = parse_meta(arrays.pop("meta", None), Path(path))
        try:
            federation = cls.from_arrays(
                **arrays,
                classes=meta.get("classes"),
                class_names=meta.get("class_names") if "classes" in meta else class_names,
                info=meta.get("info", {"federation": Path(path).name}),
                data_seed=data_seed,
                test_share=test_share,
                names=meta.get("names"),
            )
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        if meta.get("fingerprint", federation.fingerprint) != federation.fingerprint:
            raise BadInput(f"{path} was altered after it was saved: save it again, or leave 'meta' out of it.")
        return federation if class_names is None else federation.relabelled(class_names)

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
    ) -> "Federation":
        """Check arrays with one entry per sample and make a federation of them.

        `client` holds whole numbers or strings; clients come in ascending order unless `names` gives another.
        `y` holds whole numbers or strings: the labels that occur are the classes, in ascending order, unless
        `class_names` lists them; with `classes` it holds 0 .. classes-1, and `class_names` only names them.
        `split` holds 'train'/'test', or true (1) for test; without it each client's test part is drawn
        from `data_seed` and its name.
        """
        check_draw(data_seed, test_share)
        whose = as_array(client, "client")
        try:
            samples = check_samples(x)
            rows, found = check_clients(whose, len(samples), names)
            labels, classes, own_class_names = check_labels(y, len(samples), classes, class_names)
            test = None if split is None else check_split(split, len(samples))
        except BadRow as error:
            known = whose.ndim == 1 and error.row < len(whose) and not error.before.startswith("client")
            raise error.at(f"row {error.row}" + (f" (client {str(whose[error.row])!r})" if known else "")) from None
        order = np.argsort(rows, kind="stable")
        samples, labels, rows = samples[order], labels[order], rows[order]
        if test is not None:
            test = test[order]
        else:
            sizes = np.bincount(rows, minlength=len(found))
            pairs = zip(sizes, found, strict=True)
            test = np.concatenate([choose_test(int(n), test_share, data_seed, name) for n, name in pairs])
        trained = np.bincount(rows[~test], minlength=len(found))
        if not trained.all():
            name = found[int(np.argmin(trained))]
            raise BadInput(f"client {name!r} has only test samples; every client needs at least one to train on.")
        info = dict(info or {"federation": "arrays"})
        return cls(samples, labels, rows, test, found, classes, info, own_class_names)

    def _of_part(self, part: str) -> NDArray[np.bool_]:
        if part not in ("train", "test"):
            raise BadInput(f"part {part!r} is unknown; valid are train and test.")
        return self.test if part == "test" else ~self.test


def to_float(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bring pixels 0..255 to -1..1 as (v/255 - 0.5)/0.5; numbers that are floats already are only cast."""
    if x.dtype == torch.uint8:
        return (x.to(dtype) / 255 - 0.5) / 0.5
    return x.to(dtype)


def read_npz(path: Path, required: Sequence[str], optional: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read the named arrays of a `.npz`, never unpickling anything."""
    if not path.is_file():
        raise BadInput(f"{path} is not there or is not a file; give a .npz file with {', '.join(required)}.")
    try:
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise BadInput(f"{path} is not a .npz file, or it is cut off; make it with numpy.savez.")
            check_archive(stream, path)
            with np.load(stream, allow_pickle=False) as archive:
                missing = [key for key in required if key not in archive.files]
                # A mistyped 'splits' must not silently mean that the test part is drawn anew.
                unknown = [key for key in archive.files if key not in (*required, *optional)]
                if missing or unknown:
                    raise BadInput(
                        f"{path} {f'lacks {missing[0]!r}' if missing else f'holds {unknown[0]!r}'}: it must "
                        f"hold {', '.join(required)} and may hold {', '.join(optional)}, nothing else."
                    )
                arrays = {key: archive[key] for key in (*required, *optional) if key in archive.files}
        # numpy hands out the raw bytes of a member that is no array.
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("a member is not an array")
        return arrays
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else "altered or incomplete"
        raise BadInput(f"{path} cannot be read ({reason}): save plain arrays with numpy.savez again.") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error


def parse_meta(meta: NDArray[Any] | None, path: Path) -> dict[str, Any]:
    """Return what a saved federation says of itself; nothing where there is no `meta`."""
    if meta is None:
        return {}
    try:
        parsed = json.loads(str(meta))
        names, classes = parsed.get("names"), parsed.get("classes")
        valid = isinstance(parsed.get("info", {}), dict) and (classes is None or isinstance(classes, int))
        valid = valid and (names is None or all(isinstance(name, str) for name in names))
        called = parsed.get("class_names")
        valid = valid and (called is None or (len(called) == classes and all(isinstance(name, str) for name in called)))
    except (ValueError, AttributeError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise BadInput(f"{path}: 'meta' is not the JSON object that a saved federation has; leave it out.")
    return dict(parsed)
