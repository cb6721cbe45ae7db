"""Federations dealt beforehand: for machines that have no dataset, and cannot or should not download one."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedrema.data.datasets import places
from fedrema.data.federation import Federation
from fedrema.errors import BadInput

FOLDER = "federations"
"""Where they lie, below a folder of datasets."""


def find_prepared(info: dict[str, Any], data_dir: Path | None) -> Federation | None:
    """Return the federation that was dealt by these settings, if it lies where datasets are looked for."""
    for place in places(data_dir):
        file = _file(info, place)
        if file.is_file():
            found = Federation.load(file)
            if found.info != info:
                raise BadInput(f"{file} was not dealt by the settings in its name: prepare it again.")
            return found
    return None


def keep_prepared(federation: Federation, folder: Path) -> Path:
    """Save a federation where `find_prepared` finds it, and return its file."""
    file = _file(federation.info, folder)
    federation.save(file)
    return file


def _file(info: dict[str, Any], place: Path) -> Path:
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()[:12]
    return place / FOLDER / f"{info['dataset']}-{digest}.npz"
