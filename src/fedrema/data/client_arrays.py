"""Create a federation from separate arrays of each client."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrema.data.checks import BadRow, are_integers, as_array
from fedrema.data.federation import Federation
from fedrema.data.load_options import LoadOptions
from fedrema.errors import BadInput


def federation_from_parts(
    parts: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], options: LoadOptions
) -> Federation:
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
        return Federation.from_arrays(**joined, info=info, **options.for_arrays, names=names)
    except BadRow as error:  # report the row in the client's own arrays
        local = error.row - int(np.argmax(joined["client"] == joined["client"][error.row]))
        raise error.at(f"row {local} of client {str(joined['client'][error.row])!r}") from None
