"""config.json: the settings, data and machine of a run, as typed data with a format version."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fedrema.base.files import regular_file
from fedrema.config.presets import PlainValue
from fedrema.core.reports import Reports
from fedrema.data.preprocessing import Preprocessing
from fedrema.errors import BadInput
from fedrema.runs.checksums import verified
from fedrema.tasks import Task

FORMAT = 3
"""Increased whenever the files of a run change so that one version could misread those of another."""
REQUIRED = {"method": str, "settings": dict, "identity": str, "federation": dict}
"""Keys that distinguish a config.json of fedrema, in any format, from that of another program."""

Inputs = dict[str, dict[str, str]]
"""Digests of the files that a user supplied, by what they are for: method, net, federation, partition-file."""


@dataclass(frozen=True)
class FederationFacts:
    """What is known about the clients and their samples."""

    fingerprint: str
    """Digest of all samples, labels and their partition; in a deployment, of the clients' names."""
    names: list[str]
    classes: int
    class_names: list[str]
    sample_shape: tuple[int, ...]
    train_counts: list[int]
    """Training samples per client."""
    test_counts: list[int]
    """Test samples per client."""
    info: dict[str, object] = field(default_factory=dict)
    """Where the data comes from and how it was partitioned."""
    saved: bool = False
    """Whether the federation was given in Python and saved in the run's folder."""
    last_counted: list[int] | None = None
    """Deployments only: the last round in which each client's reply was used; 0: none."""
    own_task: Task | None = None
    """What is predicted; None: classes."""
    preprocessing: Preprocessing | None = None
    """How the samples are computed from the columns of a table; None: they were given as arrays."""

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.own_task or Task("binary" if self.classes == 2 else "multiclass", self.classes)

    @property
    def is_deployed(self) -> bool:
        """Whether the run was trained over a network, so that its samples were never on the server."""
        return "network" in self.info

    @property
    def labels(self) -> list[str]:
        """The name of each class; its number where it has none."""
        return self.class_names or [str(number) for number in range(self.classes)]


@dataclass(frozen=True)
class RanOn:
    """Where and how a run is computed."""

    device: str
    """The name of the GPU, or cpu."""
    backend: str
    dtype: str
    products: str
    """Precision of matrix products on a GPU."""
    threads: int
    """Threads that torch may use."""
    threads_per_operation: int | None
    started: str
    python: str
    versions: dict[str, str]
    """Of fedrema, torch and numpy."""
    commit: str | None = None
    """Of the source tree, where fedrema was started from one."""
    parallel_clients: int = 1
    """Clients that a loop trains at the same time; no result depends on it."""


@dataclass(frozen=True)
class Manifest:
    """The content of config.json."""

    method: str
    """Its name on the command line."""
    settings: dict[str, PlainValue]
    """All settings that apply, by their names on the command line."""
    identity: str
    """Digest of what determines the result."""
    revisions: dict[str, int]
    """Of the method, and of the engine by kind of device."""
    inputs: Inputs
    federation: FederationFacts
    ran_on: RanOn
    reports: Reports
    """What the method declares about its reports, so that showing a run needs no method class."""
    title: str = ""
    """The method's title in tables and figures, with the settings that are part of it."""
    marks: dict[str, str] = field(default_factory=dict)
    """What shows that this user has given the code that the run names, by kind (`runs.trust`)."""
    format: int = FORMAT

    def as_json(self) -> dict[str, object]:
        """Return it as plain values."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: Path) -> "Manifest":
        """Return the content of a file; refuses another format, a damaged file and one that describes no run."""
        plain = verified_config(content, file)
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise BadInput(f"{file} does not describe a run: {str(error)[:1].lower()}{str(error)[1:]}.") from error


def verified_config(content: Mapping[str, Any], file: Path) -> dict[str, object]:
    """Return the content of a config.json without its checksum, once its format and checksum have been verified."""
    for name, kind in REQUIRED.items():
        if not isinstance(content.get(name), kind):
            raise BadInput(f"{file} does not describe a run: {name!r} is missing.")
    found = content.get("format", 1)
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        version, remedy = ("a newer", "update fedrema") if newer else ("an older", "run it again with this version")
        formats = f"format {found}; this version reads {FORMAT}"
        raise BadInput(f"{file} was written by {version} version of fedrema ({formats}): {remedy}.")
    return verified(dict(content), file)


def is_config(content: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json is that of a run, of any format."""
    return all(isinstance(content.get(name), kind) for name, kind in REQUIRED.items())


def read_object(file: Path, complaint: str, remedy: str = "") -> dict[str, Any]:
    """Read a JSON file that holds an object; the message of an error is the file, `complaint` and the reason."""
    remedy = remedy and f"; {remedy}"
    try:
        content = json.loads(regular_file(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{file} {complaint}: {reason}{remedy}.") from error
    if not isinstance(content, dict):
        raise BadInput(f"{file} {complaint}: it should hold a JSON object{remedy}.")
    return content
