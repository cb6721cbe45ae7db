"""Users' own data: an `.npz` file, a folder with one per client, or a Python function."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.data.checks import BadRow, are_integers, as_array
from fedrema.data.federation import Federation
from fedrema.data.npz import read_npz
from fedrema.errors import BadInput

_FORMS = "a .npz file, a folder with one .npz per client, or module:function"
_RETURNS = "a Federation, arrays (x, y, client[, split]), or a mapping of client names to (x, y)"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class LoadOptions:
    """Settings for what the data does not specify itself."""

    data_seed: int = 0
    """Seed of the test splits, if the data has no `split`."""
    test_share: float = 0.2
    """Share of test samples, if the data has no `split`."""
    class_names: Sequence[str] | None = None
    """The classes of the run that the data is used for; None: those of the data."""


def load_user_data(
    source: str, data_seed: int = 0, test_share: float = 0.2, class_names: Sequence[str] | None = None
) -> Federation:
    """Load a federation from an `.npz` file, a folder of them, or `module:function`.

    `data_seed` and `test_share` define the test splits of data without `split`. `class_names` are the classes of the
    run that the data is used for; by default, the labels that occur are the classes.
    """
    options = LoadOptions(data_seed, test_share, class_names)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, options)
    if path.is_file():
        if path.suffix != ".npz":
            raise BadInput(f"--federation {source} is a file but not a .npz; valid are {_FORMS}.")
        return Federation.load(path, data_seed, test_share, class_names)
    if _FUNCTION.fullmatch(source):
        return _load_from_function(source, options)
    raise BadInput(f"--federation {source} does not exist; valid are {_FORMS}.")


def _load_folder(folder: Path, options: LoadOptions) -> Federation:
    """Load one client from each `.npz` file of a folder."""
    files = sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))
    if not files:
        raise BadInput(f"--federation {folder} is a folder without .npz files; it must contain one per client.")
    parts = {path.stem: read_npz(path, required=("x", "y"), optional=("split",)) for path in files}
    info = {"federation": folder.name}
    with _prefix_errors(f"--federation {folder}"):
        return _from_parts(parts, info, options)


def _load_from_function(source: str, options: LoadOptions) -> Federation:
    """Load the data that the function `module:function` returns."""
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
        except Exception as error:  # any error of the user's function is reported in one sentence
            raise BadInput(f"--federation {source} raised {raised_at(error)}.") from error
    info = {"federation": source}
    with _prefix_errors(f"--federation {source}"):
        if isinstance(returned, Federation):
            return returned if options.class_names is None else returned.relabelled(options.class_names)
        if isinstance(returned, tuple) and len(returned) in (3, 4):
            x, y, client, split = (*returned, None)[:4]
            return Federation.from_arrays(x, y, client, split, info=info, **vars(options))
        if isinstance(returned, Mapping) and returned:
            if {"x", "y", "client"} <= set(returned) <= {"x", "y", "client", "split", "classes", "class_names"}:
                own = {**vars(options), "class_names": None, **returned}
                made = Federation.from_arrays(**own, info=info)
                return made if options.class_names is None else made.relabelled(options.class_names)
            if all(isinstance(part, tuple) and len(part) == 2 for part in returned.values()):
                parts = {str(name): {"x": part[0], "y": part[1]} for name, part in returned.items()}
                return _from_parts(parts, info, options)
    raise BadInput(f"--federation {source} returned {type(returned).__name__}; it must return {_RETURNS}.")


def _from_parts(parts: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], options: LoadOptions) -> Federation:
    """Join the arrays of the individual clients."""
    names = list(parts)
    if are_integers(names):
        names.sort(key=int)  # sort 2 before 10
    if len({"split" in part for part in parts.values()}) > 1:
        incomplete = next(name for name in names if "split" not in parts[name])
        raise BadInput(
            f"client {incomplete!r} has no 'split' but other clients have; provide it for all clients or for none."
        )
    columns: dict[str, list[Any]] = {"x": [], "y": [], "split": [], "client": []}
    for name in names:
        part = {key: as_array(value, f"{key} of client {name!r}") for key, value in parts[name].items()}
        if len({array.shape[:1] for array in part.values()}) > 1 or not part["x"].ndim or not part["x"].size:
            raise BadInput(
                f"client {name!r} has x of the shape {part['x'].shape} and y of the shape {part['y'].shape}; "
                "there must be at least one sample, and as many labels as samples."
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
        return Federation.from_arrays(**joined, info=info, **vars(options), names=names)
    except BadRow as error:  # report the row in the client's own arrays
        local = error.row - int(np.argmax(joined["client"] == joined["client"][error.row]))
        raise error.at(f"row {local} of client {str(joined['client'][error.row])!r}") from None


@contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Prefix error messages with the source of the data."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
