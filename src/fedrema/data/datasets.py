"""Load a public dataset as one pool of samples, from disk or from its publisher."""

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from fedrema.data.download import base_address, download_file
from fedrema.data.file_formats import read_file, read_source
from fedrema.data.sources import SOURCES, Source
from fedrema.errors import BadInput

DATA_VARIABLE = "FEDREMA_DATA"
_DIGITS_SAMPLES = 1797
_DIGITS_SHAPE = (1, 8, 8)


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a dataset, from its training and test files together."""

    name: str
    x: NDArray[Any]
    """uint8 [N, C, H, W], or float32 already normalised to -1..1."""
    y: NDArray[np.int64]
    classes: int


@dataclass(frozen=True)
class DatasetStatus:
    """What is known about a dataset without reading it."""

    name: str
    found: Path | None
    """The folder or archive that holds the complete dataset; None if a file is missing."""
    missing: tuple[str, ...]
    """Missing files in a folder that holds the others; empty if the dataset is complete or not found at all."""
    missing_from: Path | None
    address: str | None
    """Download address; None if no download is needed."""
    samples: int
    shape: tuple[int, ...]
    classes: int


def dataset_names() -> tuple[str, ...]:
    """Return the names of all datasets."""
    return ("digits", *SOURCES)


def pool_size(name: str) -> int:
    """Return the number of samples of a dataset, without loading it."""
    return _DIGITS_SAMPLES if name == "digits" else _source(name).samples


def dataset_shape(name: str) -> tuple[int, ...]:
    """Return the shape of a sample of a dataset, without loading it."""
    return _DIGITS_SHAPE if name == "digits" else _source(name).shape


def load_pool(name: str, data_dir: Path | None = None, download: bool = True, mirror: str | None = None) -> Pool:
    """Load a dataset from `data_dir`, $FEDREMA_DATA or the user's cache, or download it.

    It is downloaded to `data_dir` if given, else to the cache, and from `mirror` (or $FEDREMA_MIRROR) if given, else
    from the publisher.
    """
    if name == "digits":
        return _load_digits()
    source = _source(name)
    files = next((files for _, files, missing in _candidates(source, data_dir) if not missing), None)
    if files is None:
        files = _fetch(source, data_dir, download, mirror)
    x, y = read_source(source, files)
    return Pool(name, x, y, source.classes)


def is_available(name: str, data_dir: Path | None = None) -> bool:
    """Return whether a dataset can be loaded without a download."""
    return name == "digits" or any(not missing for _, _, missing in _candidates(_source(name), data_dir))


def dataset_status(data_dir: Path | None = None, mirror: str | None = None) -> list[DatasetStatus]:
    """Return for every dataset where it is, or what is missing and where it would be downloaded from."""
    statuses = [DatasetStatus("digits", _digits_folder(), (), None, None, _DIGITS_SAMPLES, _DIGITS_SHAPE, 10)]
    for source in SOURCES.values():
        found: Path | None = None
        missing: tuple[str, ...] = ()
        missing_from: Path | None = None
        for folder, files, absent in _candidates(source, data_dir):
            if not absent:
                archive = files.get(source.archive or "")
                found, missing, missing_from = archive or folder, (), None
                break
            if files and missing_from is None:
                missing, missing_from = absent, folder
        statuses.append(
            DatasetStatus(
                source.name,
                found,
                missing,
                missing_from,
                base_address(source, mirror),
                source.samples,
                source.shape,
                source.classes,
            )
        )
    return statuses


def cache_folder() -> Path:
    """Return the user's folder for downloads."""
    return Path(platformdirs.user_cache_dir("fedrema", appauthor=False))


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise BadInput(f"dataset {name!r} is unknown; valid are {', '.join(dataset_names())}.")
    return SOURCES[name]


def _load_digits() -> Pool:
    x, y = _digits()
    return Pool("digits", x.copy(), y.copy(), 10)


@functools.cache
def _digits() -> tuple[NDArray[Any], NDArray[np.int64]]:
    # Cached, because parsing the compressed text is slow and a network node loads it with every message.
    # Imported here, because importing scikit-learn takes a second and only this dataset needs it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Normalise 0..16 to -1..1 as (v/16 - 0.5)/0.5.
    x = (digits.data.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    return x, digits.target.astype(np.int64)


def _digits_folder() -> Path:
    from importlib.util import find_spec

    spec = find_spec("sklearn")
    return Path(spec.origin).parent if spec and spec.origin else Path("sklearn")


def search_folders(data_dir: Path | None) -> list[Path]:
    """Return the folders that are searched for datasets."""
    if data_dir is not None and data_dir.exists() and not data_dir.is_dir():
        raise BadInput(f"--data-dir {data_dir} is a file; it must be the folder that holds the datasets.")
    folders = [] if data_dir is None else [data_dir]
    if variable := os.environ.get(DATA_VARIABLE):
        if not Path(variable).is_dir():
            raise BadInput(f"{DATA_VARIABLE}={variable} is not a folder; set it to the folder that holds the datasets.")
        folders.append(Path(variable))
    return [*folders, cache_folder()]


def _candidates(source: Source, data_dir: Path | None) -> Iterator[tuple[Path, dict[str, Path], tuple[str, ...]]]:
    """Yield each folder that may hold `source`, in order, with the files found there and the names of missing files."""
    for parent in search_folders(data_dir):
        for folder in (*(parent / name for name in source.folders), parent):
            files = _files_in(folder, source)
            if files and not (folder == parent and _holds_another(files, source)):
                missing = () if source.archive in files else tuple(f.name for f in source.files if f.name not in files)
                yield folder, files, missing


def _files_in(folder: Path, source: Source) -> dict[str, Path]:
    endings = ("", ".gz") if source.layout == "idx" else ("",)
    choices = ((file.name, folder / f"{file.name}{ending}") for file in source.files for ending in reversed(endings))
    files = {name: path for name, path in choices if path.is_file()}
    if len(files) < len(source.files) and source.archive is not None and (folder / source.archive).is_file():
        return {source.archive: folder / source.archive}
    return files


def _holds_another(files: Mapping[str, Path], source: Source) -> bool:
    """Return whether a folder holds another dataset that uses the same file names."""
    smallest = min(source.files, key=lambda file: file.size)
    for other in SOURCES.values():
        twin = next((file for file in other.files if file.name == smallest.name), None)
        if other.name == source.name or twin is None or twin.name not in files:
            continue
        try:
            read_file(files[twin.name], twin)
        except BadInput:
            continue
        return True
    return False


def _fetch(source: Source, data_dir: Path | None, download: bool, mirror: str | None) -> dict[str, Path]:
    target = (data_dir or cache_folder()) / source.folders[0]
    if not download:
        partial = next(_candidates(source, data_dir), None)
        where = ", ".join(str(folder) for folder in search_folders(data_dir))
        problem = f"{partial[0]} lacks {partial[2][0]}" if partial else f"not found in {where}"
        raise BadInput(
            f"dataset {source.name}: {problem}; allow the download, or set --data-dir to a folder that has it."
        )
    files = _files_in(target, source)
    for name in source.downloads():
        plain = name if name == source.archive else name.removesuffix(".gz")
        if plain not in files:
            files[plain] = download_file(source, name, target, mirror)
    return files
