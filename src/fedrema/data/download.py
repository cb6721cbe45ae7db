"""Download dataset files; a file is moved to its final name only after its content has been verified."""

import os
import sys
from pathlib import Path

import pooch
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrema.base.files import atomic_file
from fedrema.base.terminal import Console
from fedrema.data.file_formats import read_archive, read_file
from fedrema.data.sources import Source
from fedrema.errors import BadInput

MIRROR_VARIABLE = "FEDREMA_MIRROR"
_TIMEOUT_SECONDS = 30


def base_address(source: Source, mirror: str | None = None) -> str:
    """Return the web folder of `source`: the subfolder of a mirror if one is set, else the publisher's."""
    mirror = mirror or os.environ.get(MIRROR_VARIABLE)
    return f"{mirror.rstrip('/')}/{source.name}/" if mirror else source.address


def download_file(source: Source, name: str, folder: Path, mirror: str | None = None) -> Path:
    """Download one file of `source` into `folder`; it appears there only after its content has been verified."""
    address = base_address(source, mirror) + name
    target = folder / name
    with atomic_file(target) as temporary:
        _fetch(address, temporary, name)
        try:
            if name == source.archive:
                read_archive(temporary, source)
            else:
                expected = next(file for file in source.files if f"{file.name}.gz" == name)
                read_file(temporary, expected)
        except BadInput as error:
            raise BadInput(
                f"{name} from {address} is altered or incomplete and was discarded: try again, "
                f"or set {MIRROR_VARIABLE} to another server."
            ) from error
    return target


def _fetch(address: str, target: Path, name: str) -> None:
    # A dependency of pooch, imported here for its exceptions only.
    import requests.exceptions

    if not address.startswith(("http://", "https://")):
        raise BadInput(f"cannot download {name}: {address} is not an http or https address.")
    bar = DownloadBar(name) if sys.stderr.isatty() else None
    downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=1 << 16, timeout=_TIMEOUT_SECONDS)
    try:
        downloader(address, str(target), None)
    except requests.exceptions.HTTPError as error:
        # The message starts with the status, as in "404 Client Error: File not found for url: ...".
        answer = str(error).partition(" for url")[0]
        raise BadInput(
            f"cannot download {name}: {address} returned {answer}; set {MIRROR_VARIABLE} to another server."
        ) from error
    except requests.exceptions.RequestException as error:
        if isinstance(error, requests.exceptions.ConnectionError | requests.exceptions.Timeout):
            problem = "the server is unreachable or does not respond"
        else:
            problem = "the transfer was interrupted"
        raise BadInput(
            f"cannot download {name} from {address}: {problem}; check the connection, "
            f"set {MIRROR_VARIABLE} to another server, or set --data-dir to a folder that has the files."
        ) from error
    finally:
        if bar is not None:
            bar.close()


class DownloadBar:
    """Progress bar with the interface that pooch expects, drawn by rich on standard error."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.total = 0
        self._task: TaskID | None = None
        self._name = name
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )

    def update(self, amount: int) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(self._name, total=self.total or None)
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        if self._task is not None:
            self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()
