"""The server's messages of secure aggregation: three stages after the replies to a round's requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict

from fedrema.base.terminal import safe_logger
from fedrema.core.fixed_point import QuantisedSum
from fedrema.deploy.audit import Event
from fedrema.deploy.flower_records import FACTS, MASK, SHARE, UNMASK, read_stage, read_vector, stage_record
from fedrema.deploy.masking import PublicKeys
from fedrema.deploy.unmasking import MaskedSum
from fedrema.errors import FedremaError

log = safe_logger("fedrema")
LONGEST_KEYS = 10_000
"""Bytes of what a node announces."""
LONGEST_ANSWER = 10_000_000
"""Bytes of the shares that a node sends."""
Exchange = Callable[[Mapping[str, Message], Event, int], tuple[dict[str, RecordDict], dict[str, str]]]
"""Sends each node its message; returns the answers by name, and why the others are missing.

The number is the size of the tensors in an answer.
"""


def announced_keys(content: RecordDict, name: str) -> PublicKeys:
    """Return the keys in a node's reply to a request to train."""
    keys = read_stage(content, PublicKeys, LONGEST_KEYS)
    if keys.name != name:
        raise FedremaError("it announces the keys of another node")
    return keys


@dataclass
class SecureRound:
    """The stages of one sum."""

    masked: MaskedSum
    number: int
    """The round."""
    online: Mapping[str, int]
    """Flower's IDs of the nodes, by name."""
    seconds: float
    """How long each stage may take."""
    exchange: Exchange

    def sum(self) -> tuple[QuantisedSum | None, dict[str, str]]:
        """Return the sum, and why nodes are not in it; None if the rules of the nodes do not allow it."""
        masked = self.masked
        lost = self._stage(
            SHARE,
            {name: masked.neighbourhood(name) for name in sorted(masked.keys)},
            Event.SHARES_RECEIVED,
            lambda name, content: masked.add_encrypted(name, read_stage(content, dict[str, bytes], LONGEST_ANSWER)),
        )
        length, bits = masked.template.length, masked.template.fixed_point.bits
        lost |= self._stage(
            MASK,
            {name: masked.encrypted_for(name) for name in sorted(masked.encrypted)},
            Event.MASKED_RECEIVED,
            lambda name, content: masked.add_vector(name, read_vector(content, length, bits)),
            masked.template.fixed_point.bytes_of(length),
        )
        silent = self._stage(
            UNMASK,
            dict.fromkeys(masked.survivors, masked.survivors),
            Event.UNMASKING_RECEIVED,
            lambda name, content: masked.add_shares(name, read_stage(content, dict[str, bytes], LONGEST_ANSWER)),
        )
        for name, why in silent.items():
            log.warning("round %d: node %s did not help to unmask the sum: %s", self.number, name, why)
        try:
            return masked.unmasked(), lost
        except FedremaError as error:
            return None, {**silent, **{name: silent.get(name, str(error)) for name in masked.survivors}, **lost}

    def _stage(
        self,
        kind: str,
        contents: Mapping[str, object],
        event: Event,
        add: Callable[[str, RecordDict], None],
        tensor_bytes: int = 0,
    ) -> dict[str, str]:
        """Send a stage's messages and add the answers to the sum; return why nodes have not answered it.

        Nothing is sent to fewer nodes than a sum needs: they would refuse it.
        """
        if len(contents) < self.masked.rules.least:
            return {}
        messages = {}
        for name, content in contents.items():
            record = stage_record(content)
            record[FACTS] = ConfigRecord({"name": name, "round": self.number})
            messages[name] = Message(record, self.online[name], kind, ttl=self.seconds, group_id=str(self.number))
        arrived, missing = self.exchange(messages, event, tensor_bytes)
        for name, content in arrived.items():
            try:
                add(name, content)
            except FedremaError as error:
                missing[name] = str(error)
        return missing
