"""rounds.jsonl: one JSON object per line and round, each with a checksum over its line and all before it.

Every line ends in `,"checksum":"…"}`. The checksum is over the bytes before that ending and the checksum of the line
before (of the first line: the run's identity), so that lines can be verified without parsing them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedrema.base.files import regular_file
from fedrema.errors import BadInput
from fedrema.runs.checksums import CHANGED, CHECKSUM, REMEDY, checksum_of
from fedrema.simulation.records import RoundRecord

ENDING = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
ENDING_LENGTH = len(f',"{CHECKSUM}":"{"0" * 32}"}}\n')


@dataclass
class RecordChain:
    """The checksums of a rounds.jsonl up to a line."""

    file: Path
    identity: str
    """The run's, so that its records cannot replace those of another run."""
    lines: int = 0
    last: str = ""

    def __post_init__(self) -> None:
        self.last = self.last or checksum_of(self.identity)

    def seal(self, record: RoundRecord) -> bytes:
        """Return the line of a record that follows the last one."""
        body = msgspec.json.encode(record)[:-1]
        self.last = checksum_of(self.last, body)
        self.lines += 1
        return body + f',"{CHECKSUM}":"{self.last}"}}\n'.encode()

    @property
    def mark(self) -> str:
        """What files of this round name: the run, the round, and the checksum of all records up to there."""
        return f"{self.identity} {self.lines} {self.last}"

    def verify(self, line: bytes) -> bytes:
        """Return the JSON of the next line; refuses one that was changed."""
        self.lines += 1
        found = ENDING.fullmatch(line[-ENDING_LENGTH:])
        body = line[:-ENDING_LENGTH]
        if found is None or found[1].decode() != (now := checksum_of(self.last, body)):
            raise self.damage()
        self.last = now
        return body + b"}"

    def parse(self, text: bytes) -> RoundRecord:
        """Return the record that a verified line holds."""
        try:
            return msgspec.json.decode(text, type=RoundRecord)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise self.damage() from error

    def damage(self) -> BadInput:
        """Return the error about the last line that was read."""
        return BadInput(f"{self.file} line {self.lines} {CHANGED}: {REMEDY}.")


def read_lines(chain: RecordChain) -> Iterator[tuple[RoundRecord, int]]:
    """Yield verified records, each with the end of its line."""
    end = 0
    for line in read_bytes(chain):
        end += len(line)
        yield chain.parse(chain.verify(line)), end


def read_bytes(chain: RecordChain) -> Iterator[bytes]:
    """Yield the lines of a file of records; a last line without newline is still being written."""
    try:
        with regular_file(chain.file).open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadInput(f"{chain.file} cannot be read: {error.strerror}; {REMEDY}.") from error
