"""Checksums of JSON files, so that damage and edits by hand are noticed before a file is used."""

import hashlib
import json
from pathlib import Path

from fedrema.errors import BadInput

CHECKSUM = "checksum"
BELONGS = "belongs_to"
"""The key under which a file names its run, its round and the records up to there (`RunDirectory.mark`)."""
CHANGED = "was altered or damaged since fedrema wrote it"
FOREIGN = "belongs to another run, or to another round of this one"
REMEDY = "restore it from a backup, or run again in another folder"


def checksum_of(*parts: str | bytes | memoryview) -> str:
    """Return the checksum of the parts: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def with_checksum(content: dict[str, object], belongs_to: str = "") -> dict[str, object]:
    """Return a JSON object with its checksum; `belongs_to` names its owner, where the content does not."""
    return {**content, CHECKSUM: _of_object(content, belongs_to)}


def verified(content: dict[str, object], file: Path, belongs_to: str = "", remedy: str = REMEDY) -> dict[str, object]:
    """Return a JSON object without its checksum; refuses an object that does not match it."""
    plain = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM) != _of_object(plain, belongs_to):
        raise BadInput(f"{file} {CHANGED}: {remedy}.")
    return plain


def _of_object(content: dict[str, object], belongs_to: str) -> str:
    return checksum_of(belongs_to, json.dumps(json.loads(json.dumps(content)), sort_keys=True))
