"""Read images: folders root/client/class/image, and tables with a column of paths."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedrema.base.files import regular_file
from fedrema.base.memory import check_fits
from fedrema.data.checks import list_names
from fedrema.data.readers.source import TableSource, read_table
from fedrema.data.roles import Roles
from fedrema.data.table import CategoryColumn, ImageColumn, Table, sorted_categories
from fedrema.data.text_columns import MISSING, Kind
from fedrema.errors import BadInput

log = logging.getLogger("fedrema")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
MAXIMUM_SIZE = 64
"""Images are reduced to this height and width unless --image-size says otherwise."""
T = TypeVar("T")
_SPLITS = ("train", "test")
_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


def read_image_folder(folder: Path, size: int = 0, shape: tuple[int, int, int] | None = None) -> Table:
    """Read images root/client/class/image or root/client/{train,test}/class/image.

    `size` is the height and width after resizing; 0: those of the first image, at most 64. `shape` are the channels,
    height and width that another federation has.
    """
    clients = sorted_categories([path.name for path in _folders(folder)])
    found: list[tuple[int, str, bool, Path]] = []  # client, class, whether it is a test image, file
    splits: dict[str, bool] = {}
    for number, client in enumerate(clients):
        below = _folders(folder / client)
        splits[client] = bool(below) and all(path.name in _SPLITS for path in below)
        parts = below if splits[client] else [folder / client]
        before = len(found)
        for part in parts:
            for kind in _folders(part):
                found += [(number, kind.name, part.name == "test" and splits[client], path) for path in _images(kind)]
        if len(found) == before:
            raise BadInput(
                f"{folder / client} has no images in folders of classes; images must be at client/class/image or "
                f"client/train/class/image, with the suffix {', '.join(SUFFIXES)}."
            )
    if len(set(splits.values())) > 1:
        without = next(client for client in clients if not splits[client])
        raise BadInput(f"client {without!r} has no folders train and test but others have; all need them, or none.")
    files = [path for *_, path in found]
    classes = sorted({kind for _, kind, _, _ in found})
    codes = np.array([classes.index(kind) for _, kind, _, _ in found], np.int32)
    return Table(
        {"image": ImageColumn(load_images(files, size, shape))},
        {"class": CategoryColumn(codes, tuple(classes))},
        np.array([number for number, *_ in found], np.int64),
        tuple(clients),
        np.array([test for _, _, test, _ in found], np.bool_) if any(splits.values()) else None,
        lambda row: str(files[row]),
    )


def find_image_column(source: TableSource, roles: Roles) -> str | None:
    """Return the input column whose texts are paths of images; None if there is none."""
    _, block = next(source.blocks(roles.inputs), (0, {}))
    found = []
    for name, values in block.items():
        texts = [] if isinstance(values, np.ndarray) else [value.strip() for value in values]
        paths = [text for text in texts if text not in MISSING]
        if paths and all(path.lower().endswith(SUFFIXES) for path in paths):
            found.append(name)
    if len(found) > 1:
        raise BadInput(f"the columns {list_names(found)} all hold image files; name one of them with --columns.")
    return found[0] if found else None


def read_image_table(
    source: TableSource,
    roles: Roles,
    column: str,
    folder: Path,
    size: int = 0,
    shape: tuple[int, int, int] | None = None,
) -> Table:
    """Read a table whose column `column` holds paths of images, relative to `folder`."""
    if unused := [name for name in roles.inputs if name != column]:
        log.warning("Note: images are the only inputs; these columns are not used: %s.", list_names(unused))
    table = read_table(source, replace(roles, inputs=(column,)), {column: Kind.TEXT}, limit=None)
    paths = table.inputs[column]
    assert isinstance(paths, CategoryColumn)
    if (paths.codes < 0).any():
        row = int(np.argmax(paths.codes < 0))
        raise BadInput(f"column {column!r} is empty in {table.where(row)}; every sample needs an image.")
    pixels = load_images([folder / path for path in paths.categories], size, shape)
    return replace(table, inputs={column: ImageColumn(pixels[paths.codes])})


def load_images(files: Sequence[Path], size: int = 0, shape: tuple[int, int, int] | None = None) -> NDArray[np.uint8]:
    """Return images as [N, channels, height, width]; one channel if all of them are grey, otherwise three.

    `shape` gives channels, height and width, instead of choosing them from the images and `size`.
    """
    if shape is not None:
        channels, height, width = shape
    else:
        found = [_opened(path, lambda image: (image.mode, image.height, image.width)) for path in files]
        channels = 1 if all(mode in _GREY for mode, _, _ in found) else 3
        _, height, width = found[0]
        if size or max(height, width) > MAXIMUM_SIZE:
            height = width = size or MAXIMUM_SIZE
    grey = channels == 1
    check_fits(len(files) * channels * height * width, f"{len(files):,} images of {height}×{width} pixels need")
    pixels = np.empty((len(files), channels, height, width), np.uint8)
    for number, path in enumerate(files):
        array = _opened(path, lambda image: _pixels(image, grey, height, width))
        pixels[number] = array if grey else np.moveaxis(array, -1, 0)
    return pixels


def _pixels(image: Image.Image, grey: bool, height: int, width: int) -> NDArray[np.uint8]:
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits per pixel
        upright = Image.fromarray((np.asarray(upright, np.int64) >> 8).clip(0, 255).astype(np.uint8))
    converted = upright.convert("L" if grey else "RGB")
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted)


def _opened(path: Path, read: Callable[[Image.Image], T]) -> T:
    try:
        with Image.open(regular_file(path)) as image:
            return read(image)
    except FileNotFoundError as error:
        raise BadInput(f"the image {path} does not exist.") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BadInput(f"the image {path} cannot be read; it may be damaged.") from error


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")
    )
