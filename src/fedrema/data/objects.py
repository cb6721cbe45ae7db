"""Create federations from Python objects: frames, Hugging Face datasets and PyTorch datasets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fedrema.data.client_arrays import federation_from_parts
from fedrema.data.federation import Federation
from fedrema.data.from_table import federation_from_source
from fedrema.data.load_options import LoadOptions
from fedrema.data.readers.frames import FramesSource, is_frame
from fedrema.data.readers.hugging_face import arrays_of, is_hugging_face
from fedrema.errors import BadInput

_SPLITS = {"train", "test"}


def is_known_object(source: Any) -> bool:
    """Return whether `federation_from_object` can use an object."""
    if isinstance(source, Mapping):
        return bool(source) and (_all_frames(source.values()) or all(map(_is_dataset, source.values())))
    return is_frame(source)


def federation_from_object(source: Any, options: LoadOptions, info: Mapping[str, Any]) -> Federation:
    """Create a federation from a frame with all clients, or from a mapping of client names to frames or datasets."""
    if isinstance(source, Mapping) and not _all_frames(source.values()):
        options.table.refuse("PyTorch datasets", "arrays", "--task")
        parts = {str(name): _arrays(str(name), dataset) for name, dataset in source.items()}
        return federation_from_parts(parts, info, options)
    if isinstance(source, Mapping) and set(source) <= _SPLITS and all(map(is_hugging_face, source.values())):
        frames = FramesSource(list(source.values()), splits=list(source))  # a DatasetDict
    elif isinstance(source, Mapping):
        frames = FramesSource(list(source.values()), clients=[str(name) for name in source])
    else:
        frames = FramesSource([source])
    if (arrays := arrays_of(frames, options.table)) is not None:
        return Federation.from_arrays(**arrays, info=info, **options.for_arrays)
    return federation_from_source(frames, options, info)


def _all_frames(values: Any) -> bool:
    return all(is_frame(value) for value in values)


def _is_dataset(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(each, Dataset) for each in value)
    return isinstance(value, Dataset)


def _arrays(client: str, dataset: Any) -> dict[str, NDArray[Any]]:
    """Return the samples of a client's dataset, or of its training and test dataset."""
    datasets = dataset if isinstance(dataset, tuple) else (dataset,)
    x: list[NDArray[Any]] = []
    y: list[NDArray[Any]] = []
    split: list[str] = []
    for each, part in zip(datasets, ("train", "test"), strict=False):
        for number, sample in enumerate(_samples(each)):
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise BadInput(f"sample {number} of client {client!r} is {type(sample).__name__}; it must be (x, y).")
            x.append(_array(sample[0]))
            y.append(_array(sample[1]))
            split.append(part)
            if x[-1].shape != x[0].shape or y[-1].shape != y[0].shape:
                raise BadInput(
                    f"sample {number} of client {client!r} has the shape {x[-1].shape}, the first {x[0].shape}; all "
                    "samples must have the same."
                )
    if not x:
        raise BadInput(f"the dataset of client {client!r} is empty; every client needs at least one sample.")
    arrays: dict[str, NDArray[Any]] = {"x": np.stack(x), "y": np.stack(y)}
    return arrays | ({"split": np.array(split)} if isinstance(dataset, tuple) else {})


def _samples(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        return iter(dataset)
    return (dataset[number] for number in range(len(dataset)))


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, Tensor):
        tensor: NDArray[Any] = value.detach().cpu().numpy()
        return tensor
    array = np.asarray(value)
    if not isinstance(value, np.ndarray | Sequence) and array.ndim >= 2 and array.dtype == np.uint8:  # a PIL image
        array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    if array.dtype.kind not in "biufU":
        raise BadInput(f"a dataset holds {type(value).__name__}; samples must be tensors, arrays, images or numbers.")
    return array
