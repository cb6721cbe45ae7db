"""A Flower grid in this process: every message passes through Flower's records and the real client app."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedrema.deploy import flower_client_app


def client_app(node, message, context):
    """Answer a message as Flower's own executor would."""
    return flower_client_app.app(message, context)


class InProcessGrid(Grid):
    """Nodes with their configurations; `spoil` may change a reply, or drop it. `answer` answers a node's message.

    The conductor never calls the other methods of Flower's base class; they would raise an error.
    """

    def __init__(self, run_config, nodes, names=None, spoil=lambda name, reply: reply, answer=client_app):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.nodes = {7 + place: config for place, config in enumerate(nodes)}
        self.contexts = {
            node: Context(1, node, config, RecordDict(), run_config) for node, config in self.nodes.items()
        }
        self.names = names or {}
        self.spoil, self.answer = spoil, answer
        self.offline = set()
        self.sent = []
        self.received = []
        self.replies = {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return [node for node in self.nodes if node not in self.offline]

    def get_nodes(self):
        return [NodeInfo(node_id=node, name=self.names.get(node, "")) for node in self.get_node_ids()]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def push_messages(self, messages):
        pushed = []
        for number, message in enumerate(messages):
            node = message.metadata.dst_node_id
            identity = message.metadata.__dict__["_message_id"] = f"{node}-{number}-{len(self.sent)}"  # as Flower does
            pushed.append(identity)
            self.sent.append(message)
            try:
                reply = self.answer(node, message, self.contexts[node])
            except Exception as error:  # as Flower does
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
            reply = self.spoil(node, reply)
            if reply is not None:
                self.received.append((node, reply))
            else:  # what Flower returns for an expired message
                reply = Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE), reply_to=message)
            self.replies[identity] = reply
        return pushed

    def pull_messages(self, message_ids):
        return [self.replies.pop(identity) for identity in list(message_ids) if identity in self.replies]
