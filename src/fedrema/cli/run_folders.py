"""The folders of runs that a command is given."""

import os
from collections.abc import Sequence
from pathlib import Path


def common_folder(folders: Sequence[Path]) -> Path:
    """Return the folder that contains all the given ones; the current one if only the root of the disk does."""
    if len(folders) == 1:
        return folders[0]
    try:
        common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    except ValueError:  # several disks
        return Path()
    if common == Path(common.anchor):
        return Path()
    here = Path.cwd()
    return common.relative_to(here) if common.is_relative_to(here) else common
