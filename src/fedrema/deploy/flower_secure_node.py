"""A node's messages of secure aggregation: it holds its shared parameters back, and answers the stages of the sum."""

from collections.abc import Callable
from dataclasses import replace

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedrema.core import Role
from fedrema.core.fixed_point import QuantisedSum
from fedrema.deploy.agreement import Agreement
from fedrema.deploy.approval import NodePlan, peer_keys
from fedrema.deploy.flower_audit import answered
from fedrema.deploy.flower_records import FACTS, MASK, MASKED, SHARE, UNMASK, VECTOR, read_stage, stage_record
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.masking import SESSION_BYTES, MaskingSession, Neighbourhood, Rules, SumId, UnmaskedRounds
from fedrema.deploy.messages import Reply, Request, sha256_of
from fedrema.deploy.node import Node
from fedrema.deploy.refusals import Refusal, Refused, refusing
from fedrema.deploy.tls import signature

LARGEST_MESSAGE = 10_000_000
"""Bytes of what the server sends in a stage."""


class SecureNode:
    """The secure aggregation of a node that has approved it; its secrets are in memory only."""

    def __init__(self, folder: NodeFolder, plan: NodePlan) -> None:
        self.folder = folder
        approved = plan.settings()[1]
        # Nodes may have approved different numbers of rounds, on which `plan.run` does not depend.
        self.rules = Rules(approved.secure_threshold, approved.secure_neighbours, approved.secure_least, plan.run)
        self.peers = peer_keys(folder)
        self.session: MaskingSession | None = None
        """The sum of the last request to train; None after a restart: the node is then missing in the sum."""
        self.sessions: set[bytes] = set()
        """The numbers of all sums so far."""

    def hold_back(
        self, node: Node, request: Request, agreement: Agreement, reply: Reply, write: Callable[[str], None]
    ) -> tuple[Reply, RecordDict]:
        """Return the reply without what is summed under masks, and a record with the node's keys for the sum."""
        self.session = None
        if len(request.session) != SESSION_BYTES or request.session in self.sessions:
            why = "The server uses the number of an earlier sum, or none: keys could be replayed."
            raise Refused(Refusal.SUM, why)
        self.sessions.add(request.session)
        simulator, fixed_point = node.simulator, node.simulator.settings.fixed_point
        assert fixed_point is not None
        roles = simulator.roles(node.initial.params)
        before = {name: request.common[name] for name, role in roles.items() if role is Role.SHARED}
        contribution = QuantisedSum(fixed_point, before)
        shared = {name: value[None] for name, value in reply.params.items() if name in before}
        contribution.add(shared, torch.tensor([reply.count]))
        if contribution.clipped_values:
            write(
                f"{contribution.clipped_values} values changed by more than {fixed_point.bound:g} and were clipped"
                " (--secure-range)"
            )
        self.session = MaskingSession(
            self.folder.name,
            SumId(request.round, request.session, common_digest(request, agreement)),
            self.rules,
            contribution,
            lambda text: signature(self.folder.path / "node.key", text)[1],
            self.peers,
            UnmaskedRounds(self.folder.kept / "unmasked.json"),
        )
        visible = {name: value for name, value in reply.params.items() if name not in before}
        is_hidden = simulator.coverage(node.initial).hides_counts
        return replace(reply, params=visible, count=0 if is_hidden else reply.count), stage_record(self.session.keys)

    def answer(self, message: Message) -> RecordDict:
        """Return the answer to a stage."""
        kind, content = message.metadata.message_type, message.content
        number = content.config_records.get(FACTS, ConfigRecord({})).get("round")
        if self.session is None or self.session.number != number:
            raise Refused(Refusal.NO_CONTRIBUTION)
        if kind == SHARE:
            return stage_record(self.session.share(read_stage(content, Neighbourhood, LARGEST_MESSAGE)))
        if kind == MASK:
            vector = self.session.mask(read_stage(content, dict[str, bytes], LARGEST_MESSAGE))
            return RecordDict({MASKED: ArrayRecord({VECTOR: Array(vector)})})
        session, self.session = self.session, None
        return stage_record(session.unmask(read_stage(content, list[str], LARGEST_MESSAGE)))


def common_digest(request: Request, agreement: Agreement) -> bytes:
    """Return a digest of everything that all nodes receive before they train.

    A node whose model differs from that of the others could be singled out in their sum: for example, if the others
    receive a model with which nothing changes.
    """
    return sha256_of(agreement.encoded(), {"common": request.common, "inbox": request.inbox_common}).digest()


@answered
def answer_stage(message: Message, context: Context, secure: SecureNode) -> Message:
    """Answer a stage of the sum."""
    with refusing(Refusal.SUM):
        return Message(secure.answer(message), reply_to=message)


STAGES = (SHARE, MASK, UNMASK)
"""Types of the messages that `answer_stage` answers."""
