"""The rounds that a node has answered, each with one request: the server cannot try several models in one round.

A request that is repeated, because a reply was lost or the server was restarted, is the same and is answered again. If
the server is restored from a backup, a repeated round can start from another model: the node's owner then permits that.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from filelock import FileLock

from fedrema.base.files import write_text
from fedrema.deploy.agreement import Agreement
from fedrema.deploy.messages import Request, sha256_of
from fedrema.deploy.refusals import Refusal, Refused
from fedrema.errors import BadInput
from fedrema.runs.checksums import verified, with_checksum
from fedrema.runs.manifest import read_object

FILE, LOCK_FILE = "answered.json", "answered.lock"
PART = "answered rounds"
"""Part of the checksum: another file of fedrema cannot be used as this one."""
RESTORE = "restore it from a backup, or permit all rounds with fedrema deploy approve NODE --repeat-from 1"


@dataclass
class Answered:
    """The content of answered.json."""

    run: str = ""
    """The approved settings that it belongs to; rounds of other settings are not repeated rounds."""
    agreement: str = ""
    """SHA-256 of what the nodes agreed on before round 1."""
    rounds: dict[int, str] = field(default_factory=dict)
    """SHA-256 of the request of each round."""


class AnsweredRounds:
    """The answered rounds of the node whose state is in a folder."""

    def __init__(self, kept: Path) -> None:
        self.file, self._lock = kept / FILE, FileLock(kept / LOCK_FILE, thread_local=False)

    def accept(self, run: str, request: Request, agreement: Agreement) -> None:
        """Record a request before anything is computed for it; refuses one that differs from an earlier one.

        It is on disk when this function returns, so that it is known after a crash.
        """
        agreed, asked = hashlib.sha256(agreement.encoded()).hexdigest(), digest_of(request)
        with self._changed() as answered:
            if answered.run != run:
                answered.run, answered.agreement, answered.rounds = run, agreed, {}
            if answered.agreement not in ("", agreed):
                raise Refused(Refusal.AGREEMENT_CHANGED)
            if answered.rounds.get(request.round, asked) != asked:
                raise Refused(Refusal.REPEATED, number=request.round)
            answered.agreement = agreed
            answered.rounds[request.round] = asked

    def permit_from(self, number: int) -> None:
        """Permit other requests for a round and all later ones; from round 1, also another agreement."""
        with self._changed(reset=number == 1) as answered:
            for each in [each for each in answered.rounds if each >= number]:
                del answered.rounds[each]

    @contextmanager
    def _changed(self, reset: bool = False) -> Iterator[Answered]:
        """Yield the content, and write it if it was changed."""
        with self._lock:
            before = Answered() if reset or not self.file.exists() else self._read()
            answered = Answered(before.run, before.agreement, dict(before.rounds))
            yield answered
            if reset or answered != before:
                content = {**asdict(answered), "rounds": {str(key): value for key, value in answered.rounds.items()}}
                write_text(self.file, json.dumps(with_checksum(content, PART)) + "\n")

    def _read(self) -> Answered:
        content = verified(read_object(self.file, "cannot be read", RESTORE), self.file, PART, RESTORE)
        try:
            return msgspec.convert(content, Answered, strict=False)
        except msgspec.ValidationError as error:
            raise BadInput(f"{self.file} is not a list of answered rounds: {RESTORE}.") from error


def digest_of(request: Request) -> str:
    """Return the SHA-256 of everything in a request that a reply depends on.

    Not of whether to train: the model that is scored after the last round is the one that a further round starts from.
    """
    facts = json.dumps([request.round, request.last_used_round, request.late])
    groups = {"common": request.common, "own": request.own}
    groups |= {"inbox": request.inbox_common, "own inbox": request.inbox_own}
    return sha256_of(facts.encode(), groups).hexdigest()
