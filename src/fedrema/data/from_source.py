"""Create a federation from anything that holds samples: files, folders, frames and datasets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrema.data.federation import Federation
from fedrema.data.load_options import LoadOptions
from fedrema.data.objects import federation_from_object, is_known_object
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.roles import CategoriesName, ScaleName, TableOptions, TaskChoice
from fedrema.data.user_data import load_user_data
from fedrema.errors import BadInput


def federation_from(
    source: Any,
    target: str | Sequence[str] | None = None,
    client_column: str | None = None,
    split_column: str | None = None,
    columns: str | Sequence[str] | None = None,
    task: TaskChoice = "auto",
    scale: ScaleName = "federation",
    categories: CategoriesName = "onehot",
    image_size: int = 0,
    data_seed: int = 0,
    test_share: float = 0.2,
    class_names: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    info: Mapping[str, Any] | None = None,
) -> Federation:
    """Create a federation.

    Parameters
    ----------
    source
        A pandas or polars frame or a Hugging Face dataset with the samples of all clients; a mapping of client names to
        frames, or to PyTorch datasets that yield (x, y), or to pairs of them for training and testing; or a value of
        --federation.
    target, client_column, split_column, columns, task, scale, categories, image_size, data_seed, test_share
        As the settings of these names.
    class_names
        The classes of the run that the data is used for; default: those of the data.
    preprocessing
        The preprocessing of the run that the data is used for; default: it is fitted to the training samples.
    info
        How the data was created; JSON values only.
    """
    table = TableOptions(target, client_column, split_column, columns, scale, categories, image_size, task)
    if isinstance(source, Federation):
        return source
    if isinstance(source, str | Path):
        return load_user_data(str(source), data_seed, test_share, class_names, table, preprocessing)
    if not is_known_object(source):
        raise BadInput(
            f"a federation cannot be made from {type(source).__name__}; valid are pandas and polars frames, Hugging "
            "Face datasets, mappings of client names to frames or PyTorch datasets, and values of --federation."
        )
    options = LoadOptions(data_seed, test_share, class_names, table, preprocessing=preprocessing)
    return federation_from_object(source, options, info or {"federation": type(source).__name__})
