"""Read federated datasets in the JSON format of LEAF."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedrema.base.files import regular_file
from fedrema.errors import BadInput

LeafFiles = Sequence[tuple[Path, str | None]]
"""Files, each with its split; None if the format does not say."""


@dataclass(frozen=True)
class _Samples:
    x: list[Any]
    y: list[Any]


@dataclass(frozen=True)
class _Leaf:
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Samples]


def leaf_files(folder: Path) -> list[tuple[Path, str | None]]:
    """Return the JSON files of a folder, or of its folders train and test; empty if it has none."""
    found: list[tuple[Path, str | None]] = []
    for split in ("train", "test"):
        found += [(path, split) for path in sorted((folder / split).glob("*.json"))]
    return found or [(path, None) for path in sorted(folder.glob("*.json"))]


def read_leaf(files: LeafFiles) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the arrays x, y and, if known, split of each user, and information about the federation."""
    texts: dict[str, dict[str, list[Any]]] = {}
    for path, split in files:
        content = _decode(path)
        for user, number in zip(content.users, content.num_samples, strict=True):
            samples = content.user_data.get(user)
            if samples is None or not len(samples.x) == len(samples.y) == number:
                raise BadInput(f"{path}: user {user!r} must have {number} samples in user_data, with x and y.")
            joined = texts.setdefault(user, {"x": [], "y": [], "split": []})
            joined["x"] += samples.x
            joined["y"] += samples.y
            joined["split"] += [split] * number
    if not texts:
        raise BadInput(f"{files[0][0]} has no users; there must be at least one.")
    characters = _characters(texts)
    parts: dict[str, dict[str, Any]] = {}
    for user, columns in texts.items():
        parts[user] = {"x": _inputs(columns["x"], user, characters), "y": np.asarray(columns["y"])}
        if files[0][1] is not None:
            parts[user]["split"] = np.array(columns["split"])
    if any(part["x"].dtype.kind == "f" for part in parts.values()):
        for part in parts.values():  # some users may have whole numbers only
            part["x"] = part["x"].astype(np.float32)
    return parts, {"characters": "".join(characters)} if characters else {}


def _decode(path: Path) -> _Leaf:
    try:
        content = msgspec.json.decode(regular_file(path).read_bytes(), type=_Leaf)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path} is not a JSON file of LEAF with users, num_samples and user_data: {error}.") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
    if len(content.users) != len(content.num_samples) or len(set(content.users)) < len(content.users):
        raise BadInput(f"{path}: users must be unique, and num_samples must have one number for each.")
    return content


def _characters(texts: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, int]:
    """Return the number of each character if the inputs are texts; empty if they are numbers."""
    found = [text for columns in texts.values() for text in columns["x"]]
    if not any(isinstance(text, str) for text in found):
        return {}
    if not all(isinstance(text, str) and len(text) == len(found[0]) for text in found):
        raise BadInput("x holds texts of different lengths; all must have the same number of characters.")
    return {character: number for number, character in enumerate(sorted(set().union(*found)))}


def _inputs(values: list[Any], user: str, characters: Mapping[str, int]) -> NDArray[Any]:
    if characters:
        return np.array([[characters[character] for character in text] for text in values], np.int32)
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, np.object_)
    if array.dtype.kind not in "biuf":
        raise BadInput(f"x of user {user!r} must hold numbers of one shape, or texts of one length.")
    return array
