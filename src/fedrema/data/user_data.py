"""A user's own data: a `.npz` file, a folder with one per client, or a Python function."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.data.checks import BadRow, are_numbers, as_array
from fedrema.data.federation import Federation, read_npz
from fedrema.errors import BadInput

_FORMS = "a .npz file, a folder with one .npz per client, or module:function"
_RETURNS = "a Federation, arrays (x, y, client[, split]), or a mapping of client names to (x, y)"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Reading:
    """What the data need not say itself."""

    data_seed: int = 0
    test_share: float = 0.2
    """Which samples are for testing, where the data has no `split`."""
    class_names: Sequence[str] | None = None
    """The classes of the run that the data is for; None: those of the data."""


def load_own(
    source: str, data_seed: int = 0, test_share: float = 0.2, class_names: Sequence[str] | None = None
) -> Federation:
    """Load a federation from a `.npz`, a folder of them, or `module:function`.

    The seed and the share are for data that does not say itself which samples are for testing. `class_names` are the
    classes of a run that the data is for; without them the labels that occur are the classes.
    """
    reading = Reading(data_seed, test_share, class_names)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, reading)
    if path.is_file():
        if path.suffix != ".npz":
            raise BadInput(f"--federation {source} is a file but not a .npz; valid are {_FORMS}.")
        return Federation.load(path, data_seed, test_share, class_names)
    if _FUNCTION.fullmatch(source):
        return _call(source, reading)
    raise BadInput(f"--federation {source} is not there; valid are {_FORMS}.")


def _load_folder(folder: Path, reading: Reading) -> Federation:
    files = sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))
    if not files:
        raise BadInput(f"--federation {folder} is a folder without .npz files; one per client is valid.")
    parts = {path.stem: read_npz(path, required=("x", "y"), optional=("split",)) for path in files}
    info = {"federation": folder.name}
    with _naming(f"--federation {folder}"):
        return _from_parts(parts, info, reading)


def _call(source: str, reading: Reading) -> Federation:
    function = load_object(source, "federation")
    if not callable(function):
        raise BadInput(f"--federation {source} is not a function but {type(function).__name__}.")
    with working_folder_importable():
        try:
            returned = function()
        except BadInput:
            raise
        except SystemExit as error:
            raise BadInput(f"--federation {source} failed: {raised_at(error)}.") from error
        except Exception as error:  # whatever a user's function does wrong is told in one sentence
            raise BadInput(f"--federation {source} raised {raised_at(error)}.") from error
    info = {"federation": source}
    with _naming(f"--federation {source}"):
        if isinstance(returned, Federation):
            return returned if reading.class_names is None else returned.relabelled(reading.class_names)
        if isinstance(returned, tuple) and len(returned) in (3, 4):
            x, y, client, split = (*returned, None)[:4]
            return Federation.from_arrays(x, y, client, split, info=info, **vars(reading))
        if isinstance(returned, Mapping) and returned:
            if {"x", "y", "client"} <= set(returned) <= {"x", "y", "client", "split", "classes", "class_names"}:
                own = {**vars(reading), "class_names": None, **returned}
                made = Federation.from_arrays(**own, info=info)
                return made if reading.class_names is None else made.relabelled(reading.class_names)
            if all(isinstance(part, tuple) and len(part) == 2 for part in returned.values()):
                parts = {str(name): {"x": part[0], "y": part[1]} for name, part in returned.items()}
                return _from_parts(parts, info, reading)
    raise BadInput(f"--federation {source} returned {type(returned).__name__}; valid is {_RETURNS}.")


def _from_parts(parts: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], reading: Reading) -> Federation:
    """Join the arrays of single clients."""
    names = list(parts)
    if are_numbers(names):
        names.sort(key=int)  # 2 before 10
    if len({"split" in part for part in parts.values()}) > 1:
        lacking = next(name for name in names if "split" not in parts[name])
        raise BadInput(f"client {lacking!r} has no 'split' but others have; give it to all or to none.")
    columns: dict[str, list[Any]] = {"x": [], "y": [], "split": [], "client": []}
    for name in names:
        part = {key: as_array(value, f"{key} of client {name!r}") for key, value in parts[name].items()}
        if len({array.shape[:1] for array in part.values()}) > 1 or not part["x"].ndim or not part["x"].size:
            raise BadInput(
                f"client {name!r} has x of the shape {part['x'].shape} and y of the shape {part['y'].shape}; "
                "equally many samples and labels, at least one, are valid."
            )
        kind = (part["x"].shape[1:], str(part["x"].dtype))
        first = (columns["x"][0].shape[1:], str(columns["x"][0].dtype)) if columns["x"] else kind
        if kind != first:
            raise BadInput(
                f"client {name!r} has samples of the shape {kind[0]} and type {kind[1]}, client {names[0]!r} "
                f"of {first[0]} and {first[1]}; all clients must have the same."
            )
        for key, array in part.items():
            columns[key].append(array)
        columns["client"].append(np.full(len(part["x"]), name))
    joined: dict[str, Any] = {key: np.concatenate(arrays) for key, arrays in columns.items() if arrays}
    try:
        return Federation.from_arrays(**joined, info=info, **vars(reading), names=names)
    except BadRow as error:  # its row in the client's own arrays
        local = error.row - int(np.argmax(joined["client"] == joined["client"][error.row]))
        raise error.at(f"row {local} of client {str(joined['client'][error.row])!r}") from None


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Put the source in front of what is wrong with its arrays."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
