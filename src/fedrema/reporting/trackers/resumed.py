"""Under which name a run is known elsewhere, so that one that goes on does so there too."""

from fedrema.runs.directory import RunDirectory

FILE = "tracking.json"


def known_id(directory: RunDirectory, tracker: str) -> str | None:
    """Return what a run is called in a tracker; None where it never was there."""
    found = _read(directory).get(tracker)
    return None if found is None else str(found)


def remember_id(directory: RunDirectory, tracker: str, name: str) -> None:
    """Note what a run is called in a tracker."""
    directory.write_json(directory.path / FILE, {**_read(directory), tracker: name})


def _read(directory: RunDirectory) -> dict[str, str]:
    file = directory.path / FILE
    return directory.read_json(file, "remove it, and the run begins anew in its trackers") if file.exists() else {}
