"""The process of a node that trains: it answers the messages of the server that the node's owner has approved.

Flower's own executor installs and runs the app that the server sends, in a new process for every message. This one
takes the same messages from the SuperNode, but never looks at that app: it runs the fedrema that is installed on the
node, with the settings of the approved plan, and keeps the node's data and state in memory.
Usage: `python -m fedrema.deploy.flower_executor NODE_FOLDER ADDRESS SECRET_FILE`
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedrema.base.processes import exit_with_parent
from fedrema.deploy import flower_client_app
from fedrema.deploy.agreement import Agreement
from fedrema.deploy.answered_rounds import AnsweredRounds
from fedrema.deploy.approval import NodePlan, approved_plan
from fedrema.deploy.flower_audit import refusal_to
from fedrema.deploy.flower_client_app import open_node, reply_to_request
from fedrema.deploy.flower_heartbeats import shorten_heartbeats
from fedrema.deploy.flower_packing import pack, unpacked
from fedrema.deploy.flower_records import FACTS, STATISTICS
from fedrema.deploy.flower_secure_node import STAGES, SecureNode, answer_stage
from fedrema.deploy.flower_transfers import shorten_pauses
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.messages import Request
from fedrema.deploy.node import Node
from fedrema.deploy.refusals import Refusal, Refused, is_failure, refusing
from fedrema.errors import FedremaError

log = logging.getLogger("fedrema.executor")
SECONDS_BETWEEN_TASKS = 0.5
"""Interval at which the SuperNode is asked for messages while rounds are being executed."""
SECONDS_BETWEEN_IDLE_TASKS = 1.0
"""The same interval if there was no message for some time."""
SECONDS_UNTIL_IDLE = 60.0
STATISTICS_QUERY = f"{MessageType.QUERY}.{STATISTICS}"


class Executor:
    """Answers the server's messages with the approved plan; data and state of the node stay in memory."""

    def __init__(self, folder: NodeFolder, plan: NodePlan) -> None:
        self.folder, self.plan = folder, plan
        self.node: Node | None = None
        """The node of the last request to train; its samples and states are in memory."""
        self.agreement: Agreement | None = None
        """What the nodes had agreed on in that request."""
        self.answered = AnsweredRounds(folder.kept)
        self.secure = SecureNode(folder, plan) if plan.is_secure else None
        """The node's part of secure aggregation; None if the plan does not contain it."""

    def reply_to(self, message: Message, received: Context, kind: str = TaskType.CLIENT_APP) -> Message:
        """Answer a message; `received` is its context as the server describes it, and `kind` is Flower's kind of task.

        A message outside of the approved plan is answered with a refusal, and nothing else is done. The server learns
        the reason of an error from the list in `refusals` only: the text of an error could contain samples.
        """
        folder = self.folder
        try:
            self._check(message, received, kind)
            config = self.plan.run_config()
            context = Context(received.run_id, received.node_id, folder.node_config(), RecordDict(), config)
            if message.metadata.message_type == MessageType.TRAIN:
                hold_back = None if self.secure is None else self.secure.hold_back
                reply = reply_to_request(message, context, self._opened, hold_back)
            elif self.secure is not None and message.metadata.message_type in STAGES:
                reply = answer_stage(message, context, self.secure)
            else:
                reply = flower_client_app.app(message, context)
        except Exception as error:  # no message may stop the executor
            reply = refusal_to(message, error, folder.path, folder.name)
        if reply.has_error() and is_failure(reply.error.reason or ""):
            self.node = None  # its state in memory may be incomplete
        return reply

    def _check(self, message: Message, received: Context, kind: str) -> None:
        """Refuse everything that the node's owner has not approved; nothing was read or computed before."""
        if kind != TaskType.CLIENT_APP:
            raise Refused(Refusal.APP, kind=kind)
        asked = message.metadata.message_type
        stages = STAGES if self.secure is not None else ()
        if asked not in (MessageType.TRAIN, MessageType.QUERY, STATISTICS_QUERY, *stages):
            raise Refused(Refusal.MESSAGE, kind=asked)
        self.plan.check_config(received.run_config)
        if asked == MessageType.QUERY:
            return
        found = message.content.get(FACTS) if message.has_content() else None
        facts = found if isinstance(found, ConfigRecord) else ConfigRecord({})
        name = facts.get("name")
        if name != self.folder.name:
            raise Refused(Refusal.NAME, name=repr(name))
        if asked == MessageType.TRAIN:
            self.plan.check_round(facts.get("round"), train=bool(facts.get("train", True)))

    def _opened(self, context: Context, request: Request, name: str, agreement: Agreement, folder: Path) -> Node:
        """Return the node for a request that may be answered; it is created once, unless the agreement changes."""
        with refusing(Refusal.ANSWERED):
            self.answered.accept(self.plan.run, request, agreement)
        if self.node is None or agreement != self.agreement:
            self.node, self.agreement = None, agreement
            self.node = open_node(context, name, agreement, folder)
        return self.node


class SuperNode:
    """The SuperNode's interface for executors, on this machine."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        signed = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"}
        )
        self.client = RuntimeHttpClient.from_server_address(
            address, True, None, [RuntimeVersionHttpInterceptor(component_name="SuperExec"), signed]
        )
        # All kinds of tasks are taken, also those that are refused: Flower's SuperNode waits until one is answered.
        self.request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP])

    def answer_one(self, executor: Executor) -> bool:
        """Answer a message if there is one; return whether there was."""
        acquired = self.client.AcquireTask(self.request)
        if not acquired.HasField("task") or not acquired.token:
            return False
        with self._task(acquired.token) as client:
            status, details = SubStatus.FAILED, "the executor failed"
            try:
                message, received, _, _ = pull_task_input(client)  # the last two are the run and its app: not used
                if message.has_content():
                    message.content = unpacked(message.content)
                reply = executor.reply_to(message, received, acquired.task.type)
                failed = reply.has_error()
                if not failed:
                    pack(reply)
                push_message(client, reply, received)
                status, details = (SubStatus.FAILED, "refused") if failed else (SubStatus.COMPLETED, "")
            finally:
                push_task_output(client, None, status, details)
        return True

    @contextmanager
    def _task(self, token: str) -> Iterator[RuntimeHttpClient]:
        """Yield a client for one task, and tell the SuperNode meanwhile that the task is being executed."""
        client = RuntimeHttpClient.from_server_address(
            self.address,
            True,
            None,
            [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), RuntimeTokenHttpInterceptor(token)],
        )

        def heartbeat() -> bool:
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                return False
            return True

        sender = HeartbeatSender(heartbeat)
        sender.start()
        try:
            yield client
        finally:
            if sender.is_running:
                sender.stop()
            client.close()


def main() -> None:
    """Answer messages until the process is stopped, or until its parent has exited."""
    exit_with_parent()
    shorten_heartbeats()
    shorten_pauses()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    place, address, secret_file = sys.argv[1:4]
    try:
        folder = NodeFolder.open(Path(place))
        executor = Executor(folder, approved_plan(folder))
        executor.plan.settings()  # imports the method once
    except FedremaError as error:
        sys.exit(str(error))
    secret = load_superexec_auth_secret(secret_file)
    assert secret is not None
    supernode, last = SuperNode(address, secret), time.monotonic()
    try:
        while True:
            try:
                if supernode.answer_one(executor):
                    last = time.monotonic()
                    continue
            except Exception as error:  # the SuperNode is starting, or was restarted
                log.warning("no task from the SuperNode: %r", error)
                time.sleep(SECONDS_BETWEEN_IDLE_TASKS)
            is_idle = time.monotonic() - last > SECONDS_UNTIL_IDLE
            time.sleep(SECONDS_BETWEEN_IDLE_TASKS if is_idle else SECONDS_BETWEEN_TASKS)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
