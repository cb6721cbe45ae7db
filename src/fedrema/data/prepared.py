"""Federations prepared in advance, for machines without the dataset: each image is stored once, in files up to 50 MB.

A data folder holds `federations/DATASET-DIGEST.npz`, named after the settings of the partition, with labels, clients
and where each image is; and `images/DATASET-DIGEST.npz`, named after the images in it. Federations that share images
refer to the same files.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.base.files import atomic_file
from fedrema.data.datasets import search_folders
from fedrema.data.federation import Federation
from fedrema.data.npz import read_npz
from fedrema.errors import BadInput

FEDERATIONS, IMAGES = "federations", "images"
"""Subfolders of a data folder."""
MAXIMUM_BYTES = 50 * 10**6
"""Largest size of an image file; many services accept no larger ones."""
HEADER_BYTES = 10_000
"""More than an archive with one array needs beside the array, however badly it compresses."""

Images = NDArray[np.generic]


def find_prepared(info: dict[str, object], data_dir: Path | None) -> Federation | None:
    """Return the prepared federation of these settings; None if no search folder has it."""
    for folder in search_folders(data_dir):
        file = prepared_file(info, folder)
        if file.is_file():
            found = _load(file, folder / IMAGES)
            if found.info != info:
                raise BadInput(f"{file} was prepared with settings that do not match its name: prepare it again.")
            return found
    return None


def prepared_file(info: dict[str, object], folder: Path) -> Path:
    """Return the path of the prepared federation of these settings."""
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()[:12]
    return folder / FEDERATIONS / f"{info['dataset']}-{digest}.npz"


class PreparedFolder:
    """Writes federations to a data folder; images that the folder already holds are not stored again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, dict[bytes, tuple[str, int]]] = {}
        """By dataset: the file and the row of each image, by its digest."""

    def save(self, federation: Federation) -> Path:
        """Save a federation under the name that `find_prepared` looks for, and return its path."""
        dataset = str(federation.info["dataset"])
        if dataset not in self.places:
            self.places[dataset] = self._stored(dataset)
        places = self.places[dataset]
        digests = [_digest(image) for image in federation.x]
        new = dict.fromkeys(digest for digest in digests if digest not in places)
        first = {digest: row for row, digest in reversed(list(enumerate(digests)))}
        images = federation.x[[first[digest] for digest in new]]
        for start, file, part in self._written(dataset, images):
            places |= {digest: (file, row) for row, digest in enumerate(list(new)[start : start + len(part)])}
        files = sorted({places[digest][0] for digest in digests})
        numbers = {file: number for number, file in enumerate(files)}
        arrays: dict[str, Any] = federation.saved_arrays()
        del arrays["x"]
        path = prepared_file(federation.info, self.folder)
        with atomic_file(path) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(
                stream,
                **arrays,
                archives=np.array(files),
                archive=np.array([numbers[places[digest][0]] for digest in digests], np.int64),
                row=np.array([places[digest][1] for digest in digests], np.int64),
            )
        return path

    def _stored(self, dataset: str) -> dict[bytes, tuple[str, int]]:
        """Return the place of each image that the folder holds; damaged files are written again."""
        found: dict[bytes, tuple[str, int]] = {}
        for path in sorted((self.folder / IMAGES).glob(f"{dataset}-*.npz")):
            try:
                images = _read_images(path)
            except BadInput:
                continue
            found |= {_digest(image): (path.name, row) for row, image in enumerate(images)}
        return found

    def _written(self, dataset: str, images: Images) -> Iterator[tuple[int, str, Images]]:
        """Write images in files of limited size; yield the first row, the name of the file and the images of each."""
        if not len(images):
            return
        at_once = max(1, (MAXIMUM_BYTES - HEADER_BYTES) // images[0].nbytes)
        for start in range(0, len(images), at_once):
            part = images[start : start + at_once]
            path = self.folder / IMAGES / f"{dataset}-{_digest(part).hex()[:16]}.npz"
            with atomic_file(path) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, x=part)
            yield start, path.name, part


def _load(file: Path, folder: Path) -> Federation:
    """Read a prepared federation whose images are in this folder."""
    arrays = read_npz(file, required=("y", "client", "split", "meta", "archives", "archive", "row"), optional=())
    files, number, row = (arrays.pop(name) for name in ("archives", "archive", "row"))
    names = [str(name) for name in files.flatten()]
    valid = re.compile(r"[a-z0-9]+-[0-9a-f]{16}\.npz")  # no path: a folder from elsewhere must not name other files
    if not names or not all(valid.fullmatch(name) for name in names) or number.shape != row.shape or row.ndim != 1:
        raise BadInput(f"{file} does not say where its images are: prepare it again.")
    images = [_read_images(folder / name) for name in names]
    counts = np.array([len(each) for each in images])
    inside = number.dtype.kind == row.dtype.kind == "i" and bool(
        ((number >= 0) & (number < len(names)) & (row >= 0)).all()
    )
    if not inside or bool((row >= counts[number]).any()) or len({each.shape[1:] for each in images}) > 1:
        raise BadInput(f"{file} refers to images that its files do not hold: prepare it again.")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return Federation.from_saved({**arrays, "x": np.concatenate(images)[starts[number] + row]}, file)


def _read_images(path: Path) -> Images:
    """Read a file of images, and check them against the digest in its name."""
    if not path.is_file():
        raise BadInput(f"{path} is missing: copy the whole folder, or prepare it again.")
    images: Images = read_npz(path, required=("x",), optional=())["x"]
    if not images.ndim or _digest(images).hex()[:16] != path.stem.rpartition("-")[2]:
        raise BadInput(f"{path} was changed after it was saved: prepare it again.")
    return images


def _digest(images: Images) -> bytes:
    """Return the SHA-256 of one or more images."""
    header = json.dumps([str(images.dtype), images.shape]).encode()
    return hashlib.sha256(header + np.ascontiguousarray(images).tobytes()).digest()
