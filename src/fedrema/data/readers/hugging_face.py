"""Read Hugging Face datasets, without importing the package `datasets`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.readers.source import Block
from fedrema.data.roles import TableOptions, find_roles
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from fedrema.data.readers.frames import FramesSource


def is_hugging_face(value: Any) -> bool:
    """Return whether a value has the methods of a Hugging Face dataset that are used here."""
    return all(hasattr(value, name) for name in ("column_names", "with_format", "features", "__getitem__"))


def hugging_face_block(dataset: Any, start: int, end: int, columns: Sequence[str]) -> Block:
    """Return some rows of a Hugging Face dataset; names of classes instead of their numbers."""
    arrays = _arrays(dataset, start, end, columns)
    block: dict[str, Sequence[str] | NDArray[Any]] = {}
    for name, array in arrays.items():
        classes = _class_names(dataset, name)
        if array.ndim != 1:
            raise BadInput(f"column {name!r} holds arrays; arrays are valid as the only input: use --columns {name}.")
        if classes is not None:
            block[name] = ["" if number < 0 else classes[number] for number in array.tolist()]
        elif array.dtype.kind in "iuf":
            block[name] = array.astype(np.float64)
        elif array.dtype.kind == "M":
            block[name] = array
        else:
            block[name] = ["" if value is None else str(value) for value in array.tolist()]
    return block


def arrays_of(source: "FramesSource", options: TableOptions) -> dict[str, Any] | None:
    """Return x, y, client and split if the only input is a column of arrays or images; None otherwise."""
    if not all(map(is_hugging_face, source.frames)) or not len(source.frames[0]):
        return None
    roles = find_roles(source.names, options, source.clients is not None)
    first = _arrays(source.frames[0], 0, 1, [roles.inputs[0]])[roles.inputs[0]]
    if len(roles.inputs) > 1 or first.ndim == 1:
        return None
    options.refuse("arrays", "numbers", "--target", "--task", "--client-column", "--split-column", "--columns")
    held = [name for name in roles.all if source.splits is None or name != roles.split]
    parts = [_arrays(frame, 0, len(frame), held) for frame in source.frames]
    sizes = [len(part[roles.inputs[0]]) for part in parts]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in held}
    x = columns[roles.inputs[0]]
    if x.dtype == np.uint8 and x.ndim >= 3:  # images
        x = x[:, None] if x.ndim == 3 else np.moveaxis(x, -1, 1)
    targets = [columns[name] for name in roles.targets]
    classes = _class_names(source.frames[0], roles.targets[0])
    if len(targets) == 1 and classes is not None:
        if (targets[0] < 0).any():
            raise BadInput(f"the target {roles.targets[0]!r} is missing in row {int(np.argmax(targets[0] < 0))}.")
        targets = [np.array(classes)[targets[0]]]
    client = np.repeat(source.clients, sizes) if source.clients is not None else columns[str(roles.client)]
    split = np.repeat(source.splits, sizes) if source.splits is not None else columns.get(str(roles.split))
    return {"x": x, "y": targets[0] if len(targets) == 1 else np.stack(targets, 1), "client": client, "split": split}


def _class_names(dataset: Any, name: str) -> Sequence[str] | None:
    """Return the names of the classes of a column; None if it holds something else."""
    names: Sequence[str] | None = getattr((dataset.features or {}).get(name), "names", None)
    return names


def _arrays(dataset: Any, start: int, end: int, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    rows = dataset.with_format("numpy")[start:end]
    return {name: np.asarray(rows[name]) for name in columns}
