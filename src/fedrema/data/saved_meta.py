"""The metadata of a saved federation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from fedrema.data.preprocessing import Preprocessing
from fedrema.errors import BadInput


@dataclass(frozen=True)
class SavedMeta:
    """What the `meta` of a saved federation holds; None for what it lacks."""

    names: list[str] | None = None
    classes: int | None = None
    class_names: list[str] | None = None
    info: dict[str, object] | None = None
    task: str | None = None
    rare: bool = False
    preprocessing: Preprocessing | None = None
    fingerprint: str | None = None


def parse_meta(meta: NDArray[Any] | None, path: Path) -> SavedMeta:
    """Return the metadata of a saved federation; empty if there is no `meta`."""
    if meta is None:
        return SavedMeta()
    try:
        parsed = msgspec.json.decode(str(meta), type=SavedMeta)
    except (msgspec.MsgspecError, RecursionError):
        parsed = None
    if parsed is None or (parsed.class_names is not None and len(parsed.class_names) != parsed.classes):
        raise BadInput(f"{path}: 'meta' is not the JSON object of a saved federation; remove it.")
    return parsed
