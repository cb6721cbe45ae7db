"""Conducts a federation over Flower: waits for clients, plays rounds, and can go on after a crash."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedrema.base.terminal import safe, safe_logger
from fedrema.config.settings import Settings
from fedrema.deploy.carried import FACTS, NO_TRAINING, letter_record, packed, read_reply
from fedrema.deploy.central import Central
from fedrema.deploy.deadline import NoAnswer, exchange_within, nodes_within
from fedrema.deploy.ledger import Ledger
from fedrema.deploy.letters import Reply
from fedrema.deploy.plan import Plan
from fedrema.errors import BadInput, FedremaError
from fedrema.models.body_and_head import size
from fedrema.runs.lock import RunLock
from fedrema.simulation.participation import draw_participants

log = safe_logger("fedrema")
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_SAY_WHO = 30.0
SECONDS_TO_LIST_NODES = 10.0
"""How long a list of the nodes may take, where no longer wait is allowed anyway."""


class Conductor:
    """Plays the rounds that are still to be played."""

    def __init__(self, grid: Grid, settings: Settings, plan: Plan, pause: Callable[[float], None] = time.sleep) -> None:
        self.grid, self.settings, self.plan, self.pause = grid, settings, plan, pause
        self.central = Central(
            settings, plan.shape, plan.classes, plan.most_clients, plan.most_samples, plan.most_noise
        )
        self.ledger = Ledger(Path(plan.folder), settings, plan, self.central)
        self.vain_since: float | None = None
        """When the first attempt at the present round failed; None: none has."""
        self.attempts: list[dict[str, str]] = []
        """Attempts at the present round with too few usable replies: who was rejected, and why."""
        self.sent = 0
        """Bytes of the letters that were sent last."""
        self.asked: dict[int, str] = {}
        """Names of nodes that are not known by a key, by what they said."""

    def conduct(self, lock: RunLock | None = None) -> None:
        """Play to the last round, then score what came of it; `lock` is the run's, where the caller holds it."""
        self.ledger.take_up(lock)
        rounds = self.settings.simulation.rounds
        if self.central.round:
            log.info("going on after round %d of %d", self.central.round, rounds)
        while self.central.round < rounds:
            self._round()
        online = self._online(self.plan.wait_seconds)
        scores, _ = self._exchange(online, train=False)
        self.ledger.finish({name: reply.received for name, reply in scores.items()})

    def _round(self) -> None:
        begun = time.monotonic()
        online = self._wait()
        simulation, number = self.settings.simulation, self.central.round + 1
        least = self.plan.least_clients
        chosen = draw_participants(simulation.seed, number, sorted(online), simulation.participation, least)
        replies, missing = self._exchange({name: online[name] for name in chosen}, train=True)
        waited = time.monotonic() - begun
        record = self.central.close(replies, least)
        assert record.nodes is not None
        rejected = record.nodes.rejected | missing
        for name, why in rejected.items():
            log.warning("round %d: client %s does not count: %s", number, name, why)
        if not record.participants:
            self.attempts.append(rejected)
            self._in_vain(number, sorted(replies.keys() - rejected.keys()), rejected)
            return
        for name, why in record.nodes.clipped.items():
            log.warning("round %d: the reply of client %s was clipped: %s", number, name, why)
        self.ledger.scored({name: reply.received for name, reply in replies.items() if name not in rejected})
        seconds = {"train": waited, "aggregate": time.monotonic() - begun - waited, "evaluate": 0.0, "other": 0.0}
        record = replace(
            record,
            bytes_up=sum(size(reply.params) + size(reply.extras) for reply in replies.values()),
            bytes_down=self.sent,
            seconds=seconds,
            nodes=replace(record.nodes, rejected=rejected, attempts=self.attempts),
        )
        self.vain_since, self.attempts = None, []
        self.ledger.closed(record)
        log.info("round %d of %d: %d clients", number, simulation.rounds, len(record.participants))

    def _in_vain(self, number: int, used: list[str], rejected: Mapping[str, str]) -> None:
        """Repeat a round with too few usable replies; give up when that has gone on for too long."""
        least, now = self.plan.least_clients, time.monotonic()
        log.warning("round %d is repeated: %d of at least %d replies can be used", number, len(used), least)
        self.vain_since = now if self.vain_since is None else self.vain_since
        if now - self.vain_since > self.plan.wait_seconds:
            counted = f"Only {len(used)} of at least {least} clients have counted" if used else "Nobody has counted"
            name, why = next(iter(rejected.items()))
            raise BadInput(
                f"{counted} in round {number} for {self.plan.wait_seconds:g} s; {name}: {why.rstrip('.')}."
                f" It can go on after round {self.central.round}."
            )
        self.pause(SECONDS_BETWEEN_LOOKS)

    def _wait(self) -> dict[str, int]:
        """Return the clients that are there, by name, once there are enough."""
        end, said = time.monotonic() + self.plan.wait_seconds, None
        while len(online := self._online(end - time.monotonic())) < self.plan.least_clients:
            if time.monotonic() > end:
                there = ", ".join(sorted(online)) or "none"
                raise BadInput(
                    f"Only {len(online)} of at least {self.plan.least_clients} clients were there after"
                    f" {self.plan.wait_seconds:g} s ({there}); it can go on after round {self.central.round}."
                )
            if said != sorted(online):
                said = sorted(online)
                absent = [name for name in self.central.registry.names if name not in online]
                log.info("waiting for clients: there are %s; missing: %s", said, absent or "unknown")
            self.pause(SECONDS_BETWEEN_LOOKS)
        return online

    def _online(self, seconds: float = 0.0) -> dict[str, int]:
        """Return who is there: known by the key it proved to have, else by what it says.

        Nobody is, when the SuperLink does not answer within so many seconds.
        """
        names: dict[str, int] = {}
        try:
            found = nodes_within(self.grid, max(seconds, SECONDS_TO_LIST_NODES))
        except NoAnswer:
            log.warning("Flower's SuperLink does not answer")
            return {}
        nodes = sorted(found, key=lambda node: node.node_id)
        self._ask([node.node_id for node in nodes if not node.name and node.node_id not in self.asked])
        for node in nodes:
            name = node.name or self.asked.get(node.node_id, "")
            if not name:
                continue
            if name in names:
                log.warning("two nodes are called %s: the second does not take part", name)
                continue
            names[name] = node.node_id
        return self._with_room(names)

    def _with_room(self, names: dict[str, int]) -> dict[str, int]:
        """Leave out newcomers for whom there is no room: nobody else must suffer from them."""
        known = self.central.registry.names
        room = self.central.capacity - len(known)
        newcomers = [name for name in names if name not in known]
        for name in newcomers[room:]:
            log.warning("%s cannot take part: there is room for --most-clients %d", name, self.central.capacity)
            del names[name]
        return names

    def _ask(self, nodes: list[int]) -> None:
        if not nodes:
            return
        question = RecordDict({FACTS: ConfigRecord({})})
        messages = [Message(question, node, MessageType.QUERY, ttl=SECONDS_TO_SAY_WHO) for node in nodes]
        for reply in exchange_within(self.grid, messages, SECONDS_TO_SAY_WHO):
            if not reply.has_error():
                facts = reply.content.config_records.get(FACTS, ConfigRecord({}))
                self.asked[reply.metadata.src_node_id] = str(facts.get("name", ""))

    def _exchange(self, online: Mapping[str, int], train: bool) -> tuple[dict[str, Reply], dict[str, str]]:
        """Send each client its letter; returns the replies by name, and why others have none."""
        letters = {name: self.central.letter(name, train) for name in sorted(online, key=self.central.registry.row)}
        if not letters:
            return {}, {}
        self.sent = sum(
            size(part)
            for letter in letters.values()
            for part in (letter.common, letter.own, letter.mail, letter.own_mail)
        )
        first = next(iter(letters.values()))
        common, mail = packed(first.common), packed(first.mail)
        messages = {
            name: Message(
                letter_record(letter, name, common, mail),
                online[name],
                MessageType.TRAIN,
                # A reply that comes after the round has been closed is then refused by Flower itself.
                ttl=self.plan.round_seconds,
                group_id=str(letter.round),
            )
            for name, letter in letters.items()
        }
        arrived = exchange_within(self.grid, list(messages.values()), self.plan.round_seconds)
        whose = {message.metadata.message_id: name for name, message in messages.items()}
        replies: dict[str, Reply] = {}
        missing = dict.fromkeys(letters, f"no reply within {self.plan.round_seconds:g} s")
        for message in arrived:
            name = whose.get(message.metadata.reply_to_message_id, "")
            if not name:
                continue
            if message.has_error():
                missing[name] = self._told(message.error)
                continue
            try:
                replies[name] = read_reply(message.content, self.central.expected if train else NO_TRAINING)
                missing.pop(name, None)
            except FedremaError as error:
                missing[name] = str(error)
        # Replies arrive in any order; what is made of them must not depend on it.
        return {name: replies[name] for name in letters if name in replies}, missing

    def _told(self, error: Error) -> str:
        """Say in a few words what Flower says of a client that did not reply."""
        late = f"no reply within {self.plan.round_seconds:g} s"
        known = {
            ErrorCode.MESSAGE_UNAVAILABLE: late,
            ErrorCode.REPLY_MESSAGE_UNAVAILABLE: late,
            ErrorCode.NODE_UNAVAILABLE: "its node is gone",
            ErrorCode.CLIENT_APP_CRASHED: "its process died",
        }
        # Where the client raised something there is a whole traceback; its last line says what happened.
        return known.get(error.code) or safe(((error.reason or "").strip() or "it failed").splitlines()[-1][-300:])
