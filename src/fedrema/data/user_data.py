"""Users' own data: a file, a folder with one file or folder per client, or a Python function."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.data.client_arrays import federation_from_parts
from fedrema.data.federation import Federation
from fedrema.data.from_table import federation_from_source, federation_from_table, image_shape, table_from_source
from fedrema.data.load_options import LoadOptions
from fedrema.data.npz import read_npz
from fedrema.data.objects import federation_from_object, is_known_object
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.readers.files import FileSource, FolderSource, is_table
from fedrema.data.readers.image_files import read_image_folder
from fedrema.data.readers.leaf import leaf_files, read_leaf
from fedrema.data.roles import TableOptions
from fedrema.data.table import Table
from fedrema.errors import BadInput

_FORMS = (
    "a .npz, .csv, .csv.gz, .parquet or .json file, a folder with one file or one folder of images per client, or "
    "module:function"
)
_RETURNS = (
    "a Federation, arrays (x, y, client[, split]), a table (pandas, polars or Hugging Face), or a mapping of client "
    "names to (x, y), tables or PyTorch datasets"
)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


def load_user_data(
    source: str,
    data_seed: int = 0,
    test_share: float = 0.2,
    class_names: Sequence[str] | None = None,
    options: TableOptions | None = None,
    preprocessing: Preprocessing | None = None,
    client: str | None = None,
    rare: bool | None = None,
) -> Federation:
    """Load a federation from a file, a folder, or `module:function`.

    Parameters
    ----------
    source
        The value of --federation.
    data_seed, test_share
        Define the test splits of data without `split`.
    class_names
        The classes of the run that the data is used for; by default, the labels that occur are the classes.
    options
        How to read tables and images.
    preprocessing
        The preprocessing of the run that the data is used for; by default, it is fitted to the data.
    client
        Name of the client of a table file in which no column names the clients.
    rare
        Whether a class is rare, so that splits are stratified by class; by default, decided by the data.
    """
    load = LoadOptions(data_seed, test_share, class_names, options or TableOptions(), client, preprocessing, rare)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, load)
    if path.is_file():
        return _load_file(path, load)
    if _FUNCTION.fullmatch(source):
        return _load_from_function(source, load)
    problem = "is not a regular file" if path.exists() else "does not exist"
    raise BadInput(f"--federation {source} {problem}; valid are {_FORMS}.")


def read_user_table(
    source: str,
    options: TableOptions | None = None,
    preprocessing: Preprocessing | None = None,
    client: str | None = None,
    need_target: bool = True,
) -> Table:
    """Read a table file, a folder of them, or a folder of images, without preprocessing.

    A site computes its statistics from it (`local_statistics`). The parameters are those of `load_user_data`; without
    `need_target`, the target may be absent.
    """
    given, path = options or TableOptions(), Path(source).expanduser()
    tables = sorted(filter(is_table, path.iterdir())) if path.is_dir() else []
    with _prefix_errors(f"--federation {path}"):
        if tables:
            return table_from_source(FolderSource(tables), given, preprocessing, path, need_target)
        if path.is_dir():
            return read_image_folder(path, given.image_size, image_shape(preprocessing))
        if path.is_file() and is_table(path):
            return table_from_source(FileSource(path, client), given, preprocessing, path.parent, need_target)
    raise BadInput(f"--federation {source} is not a .csv, .csv.gz or .parquet file or a folder of them or of images.")


def _load_file(path: Path, options: LoadOptions) -> Federation:
    """Load a federation from one file."""
    if path.suffix == ".npz":
        options.table.refuse(str(path), "arrays", "--task")
        task = None if options.table.task == "auto" else options.table.task
        return Federation.load(path, options.data_seed, options.test_share, options.class_names, task, options.rare)
    info = {"federation": path.name}
    with _prefix_errors(f"--federation {path}"):
        if is_table(path):
            return federation_from_source(FileSource(path, options.client), options, info, path.parent)
        if path.suffix == ".json":
            options.table.refuse(str(path), "LEAF data", "--task")
            return _load_leaf([(path, None)], options, info)
    raise BadInput(f"--federation {path} is a file of an unknown kind; valid are {_FORMS}.")


def _load_folder(folder: Path, options: LoadOptions) -> Federation:
    """Load a folder with one file per client, with LEAF's files, or with one folder of images per client."""
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    arrays = [path for path in visible if path.suffix == ".npz"]
    tables = [path for path in visible if is_table(path)]
    info = {"federation": folder.name}
    if arrays and tables:
        raise BadInput(f"--federation {folder} has both .npz files and tables; it must contain one file per client.")
    with _prefix_errors(f"--federation {folder}"):
        if arrays:
            options.table.refuse(str(folder), "arrays", "--task")
            parts = {path.stem: read_npz(path, required=("x", "y"), optional=("split",)) for path in arrays}
            return federation_from_parts(parts, info, options)
        if tables:
            return federation_from_source(FolderSource(tables), options, info, folder)
        if leaf := leaf_files(folder):
            options.table.refuse(str(folder), "LEAF data", "--task")
            return _load_leaf(leaf, options, info)
        if any(path.is_dir() for path in visible):
            options.table.refuse(str(folder), "images", "--task", "--image-size")
            shape = image_shape(options.preprocessing)
            return federation_from_table(read_image_folder(folder, options.table.image_size, shape), options, info)
    raise BadInput(f"--federation {folder} is a folder without data; valid are {_FORMS}.")


def _load_leaf(files: Sequence[tuple[Path, str | None]], options: LoadOptions, info: Mapping[str, Any]) -> Federation:
    parts, added = read_leaf(files)
    return federation_from_parts(parts, {**info, **added}, options)


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
            options.table.refuse(source, "arrays", "--task")
            return Federation.from_arrays(x, y, client, split, info=info, **options.for_arrays)
        if isinstance(returned, Mapping) and returned:
            if {"x", "y", "client"} <= set(returned) <= {"x", "y", "client", "split", "classes", "class_names"}:
                options.table.refuse(source, "arrays", "--task")
                own = {**options.for_arrays, "class_names": None, **returned}
                made = Federation.from_arrays(**own, info=info)
                return made if options.class_names is None else made.relabelled(options.class_names)
            if all(isinstance(part, tuple) and len(part) == 2 for part in returned.values()):
                options.table.refuse(source, "arrays", "--task")
                parts = {str(name): {"x": part[0], "y": part[1]} for name, part in returned.items()}
                return federation_from_parts(parts, info, options)
        if is_known_object(returned):
            return federation_from_object(returned, options, info)
    raise BadInput(f"--federation {source} returned {type(returned).__name__}; it must return {_RETURNS}.")


@contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Prefix error messages with the source of the data."""
    try:
        yield
    except BadInput as error:
        if source.removeprefix("--federation ") in str(error):  # it names the file already
            raise
        raise BadInput(f"{source}: {error}") from error
