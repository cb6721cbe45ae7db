"""The server's rounds over Flower: waits for nodes, sends requests, collects replies, and resumes after a crash."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedrema.base.terminal import safe, safe_logger
from fedrema.config.settings import Settings
from fedrema.deploy.agreement import Agreement, Needs, NodeStatistics, agree, read_statistics, unusual
from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
from fedrema.deploy.flower_audit import measured, node_head, received, stage_of
from fedrema.deploy.flower_grid import NoResponse, exchange, list_nodes
from fedrema.deploy.flower_records import FACTS, STATISTICS, array_record, read_reply, request_record
from fedrema.deploy.flower_secure_rounds import SecureRound, announced_keys
from fedrema.deploy.folder import FORGOTTEN
from fedrema.deploy.masking import SESSION_BYTES, PublicKeys, Rules
from fedrema.deploy.messages import Reply, without_class
from fedrema.deploy.run_config import Plan, identity_values
from fedrema.deploy.run_state import (
    FailedAttempts,
    RunState,
    attempts_file,
    digest,
    save_agreement,
    saved_agreement,
)
from fedrema.deploy.server import CentralServer
from fedrema.deploy.tls import fingerprint
from fedrema.deploy.unmasking import MaskedSum
from fedrema.errors import BadInput, FedremaError
from fedrema.models.body_and_head import size
from fedrema.runs.lock import RunLock
from fedrema.runs.trained_clients import dummy_federation
from fedrema.simulation.participation import draw_participants
from fedrema.simulation.records import NodeReports, RoundRecord

log = safe_logger("fedrema")
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_IDENTIFY = 30.0
"""How long a node may take to send its name."""
SECONDS_TO_LIST_NODES = 10.0
"""Minimum number of seconds to wait for the list of nodes."""


class Conductor:
    """Executes the rounds of a run that are not yet completed; `pause` waits between two attempts."""

    central: CentralServer
    """Created once the shape of samples is known: for tables, after the nodes have sent statistics."""
    run: RunState

    def __init__(self, grid: Grid, settings: Settings, plan: Plan, pause: Callable[[float], None] = time.sleep) -> None:
        self.grid, self.settings, self.plan, self.pause = grid, settings, plan, pause
        self.least = plan.least_in_round(settings)
        """How many usable replies a round needs."""
        self.needs = Needs.of(settings, plan)
        """What the nodes have to agree on before round 1."""
        self.agreement = Agreement()
        self.audit = AuditLog(Path(plan.folder).parent, SERVER)
        self.fingerprints: dict[str, str] = {}
        """Fingerprints of the keys with which nodes are connected, by name."""
        self.node_heads = self.audit.node_heads()
        """The last line of each node's audit log that the server has seen."""
        self.prepared = False
        """Whether `central` and `run` exist."""
        if not self.needs:
            self._prepare()
        self.failing_since: float | None = None
        """When the first attempt at the current round failed; None if none has."""
        self.attempts: list[dict[str, str]] = []
        """Failed attempts at the current round: for each, the nodes without a usable reply, and why."""
        self.bytes_sent = 0
        """Total size of the last requests to all nodes."""
        self.bytes_masked = 0
        """Total size of the masked contributions to the last sum."""
        self.announced: dict[str, PublicKeys] = {}
        """With secure aggregation: the keys in the last replies, by name."""
        self.reported_names: dict[int, str] = {}
        """Names that nodes without a registered key have sent, by Flower's node ID."""

    def _prepare(self) -> None:
        """Create the server's part of the method and the run, once everything about the data is known."""
        plan = self.agreement.applied(self.plan)
        dummy = dummy_federation(plan.shape, plan.predicted, plan.counts, self.agreement.preprocessing)
        self.central = CentralServer(self.settings, dummy, plan.most_clients, plan.most_samples, plan.most_noise)
        self.run = RunState(Path(plan.folder), self.settings, plan, self.central, self.agreement)
        self.prepared = True

    def conduct(self, lock: RunLock | None = None) -> None:
        """Execute the remaining rounds and score the final models; `lock` is the run's, if the caller holds it."""
        if self.needs:
            folder, key = Path(self.plan.folder), digest(identity_values(self.settings, self.plan))
            saved = saved_agreement(folder, key)
            self.agreement = self._agree() if saved is None else saved
            if saved is None:
                save_agreement(folder, self.agreement, key)
            self._prepare()
        self.run.open(lock)
        rounds = self.settings.simulation.rounds
        if self.central.round:
            log.info("the run resumes after round %d of %d", self.central.round, rounds)
        while self.central.round < rounds:
            self._round()
        online = self._online(self.plan.wait_seconds)
        replies, _ = self._exchange(online, train=False)
        self.run.finish({name: reply.received for name, reply in replies.items()})

    def _agree(self) -> Agreement:
        """Ask the connected nodes for statistics of their samples until enough are usable; return what follows."""
        while True:
            online = self._wait_for_nodes()
            found, refused = self._statistics(online)
            refused |= unusual(found, self.plan.most_samples)
            usable = {name: each for name, each in found.items() if name not in refused}
            for name, why in refused.items():
                log.warning("before round 1: no usable statistics from node %s: %s", name, why)
            self.audit.append(*(Entry(Event.REPLY_REJECTED, name, decision=why) for name, why in refused.items()))
            if len(usable) >= self.plan.least_clients:
                self._succeeded()
                log.info("the preprocessing follows from the statistics of %s", ", ".join(sorted(usable)))
                return agree(usable, self.needs, self.plan, self.settings.data.table_options)
            self.attempts.append(refused)
            self._repeat_later(1, len(usable), refused)

    def _statistics(self, online: Mapping[str, int]) -> tuple[dict[str, NodeStatistics], dict[str, str]]:
        """Ask nodes for statistics; return the valid ones by name, and why the others are missing."""
        seconds, kind = self.plan.round_seconds, f"{MessageType.QUERY}.{STATISTICS}"
        messages = {
            name: Message(RecordDict({FACTS: ConfigRecord({"name": name})}), online[name], kind, ttl=seconds)
            for name in sorted(online)
        }
        arrived, missing = self._replies(messages, Event.STATISTICS_RECEIVED)
        found: dict[str, NodeStatistics] = {}
        for name, content in arrived.items():
            try:
                facts = content.get(FACTS)
                message = facts.get(STATISTICS) if isinstance(facts, ConfigRecord) else None
                found[name] = read_statistics(message, self.needs)
            except FedremaError as error:
                missing[name] = str(error)
        return found, missing

    def _replies(
        self, messages: Mapping[str, Message], what: Event = Event.REPLY_RECEIVED, tensor_bytes: int = 0
    ) -> tuple[dict[str, RecordDict], dict[str, str]]:
        """Send each node its message; return the content of the replies by name, and why the others are missing."""
        number = self._completed + 1
        sent = {name: measured(message.content) for name, message in messages.items()}
        self.audit.append(
            *(
                Entry(
                    Event.REQUEST_SENT,
                    name,
                    self.fingerprints.get(name, ""),
                    number,
                    size,
                    digest,
                    stage_of(messages[name]),
                )
                for name, (size, digest) in sent.items()
            )
        )
        arrived = exchange(self.grid, list(messages.values()), self.plan.round_seconds, tensor_bytes)
        names = {message.metadata.message_id: name for name, message in messages.items()}
        contents: dict[str, RecordDict] = {}
        missing = dict.fromkeys(messages, f"no reply within {self.plan.round_seconds:g} s")
        for message in arrived:
            name = names.get(message.metadata.reply_to_message_id, "")
            if not name:
                continue
            if message.has_error():
                missing[name] = self._reason(message.error)
            else:
                contents[name] = message.content
                missing.pop(name, None)
        self.audit.append(
            *(
                replace(received(what, name, number, content), key=self.fingerprints.get(name, ""))
                for name, content in contents.items()
            )
        )
        for name, content in contents.items():
            self._compare_head(name, content)
        return contents, missing

    def _compare_head(self, name: str, content: RecordDict) -> None:
        """Record that a node's audit log has become shorter, which happens if it was deleted or restored."""
        head, before = node_head(content), self.node_heads.get(name)
        if head is None:
            return
        if before is not None and head.line <= before.line:
            why = f"its audit log ends at line {head.line}, but the server has seen line {before.line}"
            log.warning("node %s: %s", name, why)
            self.audit.append(Entry(Event.DAMAGED_AT_NODE, name, decision=why))
        self.node_heads[name] = head

    def _round(self) -> None:
        start = time.monotonic()
        online = self._wait_for_nodes()
        simulation, number = self.settings.simulation, self.central.round + 1
        chosen = draw_participants(simulation.seed, number, sorted(online), simulation.participation, self.least)
        replies, missing = self._exchange({name: online[name] for name in chosen}, train=True)
        waited = time.monotonic() - start
        if self.central.is_secure:
            record, lost = self._secure_round(replies, online)
            missing |= lost
        else:
            record = self.central.complete_round(replies, self.least)
        assert record.nodes is not None
        rejected = record.nodes.rejected | missing
        self.audit.append(
            *(Entry(Event.REPLY_REJECTED, name, "", number, decision=why) for name, why in rejected.items()),
            *(Entry(Event.REPLY_CLIPPED, name, "", number, decision=why) for name, why in record.nodes.clipped.items()),
        )
        for name, why in rejected.items():
            log.warning("round %d: no usable reply from node %s: %s", number, name, why)
        if not record.participants:
            self.attempts.append(rejected)
            self._repeat_later(number, len(replies.keys() - rejected.keys()), rejected)
            return
        for name, why in record.nodes.clipped.items():
            log.warning("round %d: the reply of node %s was clipped: %s", number, name, why)
        self.run.add_scores({name: reply.received for name, reply in replies.items() if name not in rejected})
        seconds = {"train": waited, "aggregate": time.monotonic() - start - waited, "evaluate": 0.0, "other": 0.0}
        record = replace(
            record,
            bytes_up=sum(size(reply.params) + size(reply.extras) for reply in replies.values()) + self.bytes_masked,
            bytes_down=self.bytes_sent,
            seconds=seconds,
            nodes=replace(record.nodes, rejected=rejected, attempts=self.attempts),
        )
        self._succeeded()
        self.run.save_round(record)
        log.info("round %d of %d: %d nodes participated", number, simulation.rounds, len(record.participants))

    def _secure_round(
        self, replies: Mapping[str, Reply], online: Mapping[str, int]
    ) -> tuple[RoundRecord, dict[str, str]]:
        """Sum the shared parameters under masks and complete the round; return why nodes are not in the sum."""
        screened, number, plan = self.central.screen(replies), self.central.round + 1, self.plan
        rules = Rules(plan.secure_threshold, plan.secure_neighbours, plan.secure_least, "")
        keys = {name: self.announced[name] for name in screened.usable}
        masked = MaskedSum(rules, self.central.empty_sum(), keys)
        summed, lost = SecureRound(masked, number, online, plan.round_seconds, self._replies).sum()
        self.bytes_masked = sum(vector.nbytes for vector in masked.vectors.values())
        if summed is None:
            return RoundRecord(number, nodes=NodeReports(screened.rejected)), lost
        usable = screened.only(masked.survivors)
        if not self.central.counts_hidden and summed.samples != sum(reply.count for reply in usable.usable.values()):
            log.warning("round %d: the nodes of the sum have other numbers of samples than they report", number)
        return self.central.complete(usable, self.least, summed), lost

    def _succeeded(self) -> None:
        self.failing_since, self.attempts = None, []
        attempts_file(Path(self.plan.folder)).unlink(missing_ok=True)

    def _repeat_later(self, number: int, usable: int, rejected: Mapping[str, str]) -> None:
        """Wait before a round with too few usable replies is repeated; stop the run if it has failed for too long."""
        least, now = self.least, time.monotonic()
        log.warning("round %d is repeated: it needs %d usable replies and had %d", number, least, usable)
        self.failing_since = now if self.failing_since is None else self.failing_since
        FailedAttempts(number, len(self.attempts), dict(rejected)).save(Path(self.plan.folder))
        if now - self.failing_since > self.plan.wait_seconds:
            name, why = next(iter(rejected.items()))
            raise BadInput(
                f"Round {number} needs {least} usable replies and had {usable} for {self.plan.wait_seconds:g} s;"
                f" {name}: {why.rstrip('.')}. The run can resume after round {self._completed}."
            )
        self.pause(SECONDS_BETWEEN_CHECKS)

    def _wait_for_nodes(self) -> dict[str, int]:
        """Wait until enough nodes are connected; return their IDs by name."""
        end, reported = time.monotonic() + self.plan.wait_seconds, None
        while len(online := self._online(end - time.monotonic())) < self.least:
            if time.monotonic() > end:
                names = ", ".join(sorted(online)) or "none"
                raise BadInput(
                    f"Only {len(online)} of at least {self.least} nodes were connected after"
                    f" {self.plan.wait_seconds:g} s ({names}); the run can resume after round {self._completed}."
                )
            if reported != sorted(online):
                reported = sorted(online)
                absent = [name for name in self._known_names() if name not in online and not FORGOTTEN.fullmatch(name)]
                connected = ", ".join(reported) or "none"
                log.info(
                    "the server waits for nodes; connected: %s; missing: %s",
                    connected,
                    ", ".join(absent) or "unknown",
                )
            self.pause(SECONDS_BETWEEN_CHECKS)
        return online

    def _online(self, seconds: float = 0.0) -> dict[str, int]:
        """Return the IDs of the connected nodes, by the name of their registered key, or else the name that they send.

        The result is empty if the SuperLink does not respond within this many seconds.
        """
        online: dict[str, int] = {}
        try:
            connected = list_nodes(self.grid, max(seconds, SECONDS_TO_LIST_NODES))
        except NoResponse:
            log.warning("Flower's SuperLink does not respond")
            return {}
        nodes = sorted(connected, key=lambda node: node.node_id)
        self._identify([node.node_id for node in nodes if not node.name and node.node_id not in self.reported_names])
        for node in nodes:
            name = node.name or self.reported_names.get(node.node_id, "")
            if not name:
                continue
            if name in online:
                log.warning("two nodes are called %s: the second does not participate", name)
                continue
            online[name] = node.node_id
            self.fingerprints[name] = fingerprint(node.public_key) if node.public_key else ""
        return self._within_capacity(online)

    def _within_capacity(self, online: dict[str, int]) -> dict[str, int]:
        """Leave out new nodes beyond the capacity, so that they do not affect the others."""
        known, capacity = self._known_names(), self.plan.most_clients
        new = [name for name in online if name not in known]
        for name in new[capacity - len(known) :]:
            log.warning("node %s cannot participate: the federation already has %d (--most-clients)", name, capacity)
            del online[name]
        return online

    @property
    def _completed(self) -> int:
        """The last completed round."""
        return self.central.round if self.prepared else 0

    def _known_names(self) -> list[str]:
        """Return the names of the clients that have a row."""
        return self.central.registry.names if self.prepared else []

    def _identify(self, nodes: list[int]) -> None:
        """Ask nodes without a registered key for their names."""
        if not nodes:
            return
        query = RecordDict({FACTS: ConfigRecord({})})
        messages = [Message(query, node, MessageType.QUERY, ttl=SECONDS_TO_IDENTIFY) for node in nodes]
        for reply in exchange(self.grid, messages, SECONDS_TO_IDENTIFY):
            if not reply.has_error():
                facts = reply.content.config_records.get(FACTS, ConfigRecord({}))
                self.reported_names[reply.metadata.src_node_id] = str(facts.get("name", ""))

    def _exchange(self, online: Mapping[str, int], train: bool) -> tuple[dict[str, Reply], dict[str, str]]:
        """Send each node its request; return the readable replies by name, and why the others are missing."""
        new = [name for name in online if name not in self.central.registry.names]
        session = os.urandom(SESSION_BYTES) if train and self.central.is_secure else b""
        requests = {
            name: replace(self.central.request(name, train), session=session)
            for name in sorted(online, key=self.central.registry.row)
        }
        self.audit.append(
            *(Entry(Event.JOINED, name, self.fingerprints.get(name, ""), self.central.round + 1) for name in new)
        )
        if not requests:
            return {}, {}
        self.bytes_sent = sum(
            size(part)
            for request in requests.values()
            for part in (request.common, request.own, request.inbox_common, request.inbox_own)
        )
        first = next(iter(requests.values()))
        common, inbox_common = array_record(first.common), array_record(first.inbox_common)
        agreement = self.agreement.encoded() if self.needs else b""
        messages = {
            name: Message(
                request_record(request, name, common, inbox_common, agreement),
                online[name],
                MessageType.TRAIN,
                # Flower then rejects replies that arrive after the end of the round.
                ttl=self.plan.round_seconds,
                group_id=str(request.round),
            )
            for name, request in requests.items()
        }
        expected = self.central.expected if train else self.central.expected.without_training()
        arrived, missing = self._replies(messages, tensor_bytes=size(expected.params) + size(expected.extras))
        replies: dict[str, Reply] = {}
        for name, content in arrived.items():
            try:
                replies[name] = read_reply(content, expected)
                if train and self.central.is_secure:
                    self.announced[name] = announced_keys(content, name)
            except FedremaError as error:
                replies.pop(name, None)
                missing[name] = str(error)
        # Replies arrive in any order; the result must not depend on it.
        return {name: replies[name] for name in requests if name in replies}, missing

    def _reason(self, error: Error) -> str:
        """Return the reason for which a node did not reply, from Flower's error."""
        late = f"no reply within {self.plan.round_seconds:g} s"
        known = {
            ErrorCode.MESSAGE_UNAVAILABLE: late,
            ErrorCode.REPLY_MESSAGE_UNAVAILABLE: late,
            ErrorCode.NODE_UNAVAILABLE: "it is disconnected",
            ErrorCode.CLIENT_APP_CRASHED: "its process died",
        }
        # If the node's app raised an exception, the reason is a traceback, and its last line is the error.
        last = ((error.reason or "").strip() or "it failed").splitlines()[-1][-300:]
        return known.get(error.code) or safe(without_class(last))
