"""What a node sends if it does not answer a message: a code and its sentence, never the text of an error.

The text of an error can quote samples, files and paths. It stays in the node's own log. `Refusal` lists everything that
may be sent instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from fedrema.base.terminal import safe
from fedrema.deploy.limits import quoted
from fedrema.errors import BadInput, Diverged, FedremaError

SEE_LOG = "its node.log says why"


class Refusal(StrEnum):
    """All that a node sends; `{…}` is a value of the refused message or of the approved plan, nothing else."""

    APP = "the node's owner has not approved apps of the kind {kind}"
    MESSAGE = "the node's owner has not approved messages of the type {kind}"
    NAME = "the server calls this node {name}, which is not its name"
    SETTING = "the node's owner has not approved {name} = {value}"
    SETTING_MISSING = "the server's plan has no {name}, which the node's owner approved"
    SETTING_UNKNOWN = "the node's owner has not approved any {name}"
    ROUNDS = "the node's owner has approved {approved} rounds, not {rounds}"
    ROUND = "the node's owner has approved rounds 1 to {approved}, and this is round {number}"
    REPEATED = (
        "the request for round {number} is not the one that the node has answered before; its owner can permit it with"
        " fedrema deploy approve NODE --repeat-from {number}"
    )
    ANSWERED = f"it cannot record which rounds it has answered, and {SEE_LOG}"
    AGREEMENT = "the approved plan does not let the server choose this: {what}"
    AGREEMENT_CHANGED = (
        "what the nodes agreed on has changed since an earlier request; its owner can permit it with --repeat-from 1"
    )
    REQUEST = f"the request is malformed, and {SEE_LOG}"
    TENSOR = "the server sent {name}, which the method does not allow"
    TENSOR_MISSING = "the server did not send {name}: it uses another method or network"
    NO_DATA = "the node has no data"
    COLUMN_MISSING = "its table has no column {name}"
    COLUMN_ADDED = f"its table has a column that the federation does not have, and {SEE_LOG}"
    DATA = f"its data cannot be used in this federation, and {SEE_LOG}"
    STATISTICS = "it sends no statistics, because this federation needs none"
    STATISTICS_PRIVATE = "it sends no statistics, because its owner adds noise to what leaves it (privacy-clip)"
    BUDGET = "its privacy budget is spent"
    PRIVACY = f"its privacy settings do not allow a reply, and {SEE_LOG}"
    STATE = (
        "it has lost its state after round {number}: restore its folder, let it join under another name, or set"
        " accept-lost-state in its node.toml"
    )
    SECURE = "secure aggregation needs a node that fedrema deploy client runs"
    NO_CONTRIBUTION = "the node has no contribution to this sum: it was restarted, or has not trained for it"
    SUM = f"the rules of secure aggregation do not allow an answer, and {SEE_LOG}"
    UNMASKED = (
        "round {number} was unmasked before for a sum over other nodes: start the nodes of that sum, or their owners"
        " delete kept/unmasked.json"
    )
    AUDIT = "it cannot write its audit log, and sends nothing that is not recorded there"
    DIVERGED = "its training diverged"
    MEMORY = "it has not enough memory"
    INTERNAL = f"it failed, and {SEE_LOG}"

    @property
    def code(self) -> str:
        """The code by which programs recognise the sentence."""
        return self.name.lower().replace("_", "-")


class Refused(BadInput):
    """An error of which the server learns the code and its sentence; the text of the error is for the node's owner.

    Parameters
    ----------
    refusal
        What is sent.
    details
        The text for the node's owner; empty: the sentence.
    values
        What replaces `{…}` in the sentence.
    """

    def __init__(self, refusal: Refusal, details: str = "", **values: object) -> None:
        self.refusal = refusal
        sentence = refusal.format(**{name: quoted(safe(str(value))) for name, value in values.items()})
        self.sent = f"{refusal.code}: {sentence}"
        """What the server learns."""
        super().__init__(details or sentence)


@contextmanager
def refusing(refusal: Refusal) -> Iterator[None]:
    """Turn an error of fedrema into a refusal with this code."""
    try:
        yield
    except Refused:
        raise
    except FedremaError as error:
        raise Refused(refusal, str(error)) from error


def as_refused(error: Exception) -> Refused:
    """Return the refusal that is sent for any error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, FedremaError):
        return Refused(Refusal.DIVERGED if isinstance(error, Diverged) else Refusal.DATA, str(error))
    refusal = Refusal.MEMORY if isinstance(error, MemoryError) else Refusal.INTERNAL
    return Refused(
        refusal, f"it failed with {type(error).__name__}; the log of the process that trains has the details"
    )


def is_failure(reason: str) -> bool:
    """Return whether an error that was sent is about a failure of the program."""
    return reason.partition(":")[0] in (Refusal.MEMORY.code, Refusal.INTERNAL.code)
