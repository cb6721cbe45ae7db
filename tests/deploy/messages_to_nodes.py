"""Messages to a node as a server sends them, and the node's answers: what leaves it, and the files that it leaves."""

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity

STATISTICS = "query.statistics"


def ask(executor, config, content, kind=MessageType.TRAIN):
    """Return a node's answer to a message."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(content, 7, kind, ttl=60.0)
    message.metadata.__dict__["_message_id"] = "1"
    return executor.reply_to(message, Context(1, 7, {}, RecordDict(), dict(config)), TaskType.CLIENT_APP)


def with_facts(content, **facts):
    """Return a request with other facts, such as another round."""
    return RecordDict({**content, "facts": ConfigRecord({**content["facts"], **facts})})


def with_agreement(content, agreement):
    """Return a request with what a server calls the agreement of the nodes, as bytes."""
    return RecordDict({**content, "agreement": ConfigRecord({"agreement": agreement})})


def with_other_model(content, change=1e-3):
    """Return a request whose common parameters are changed."""
    arrays = {name: Array(array.numpy() + change) for name, array in content["common"].items()}
    return RecordDict({**content, "common": ArrayRecord(arrays)})


def reason(reply):
    """Return the error that a node has sent."""
    assert reply.has_error()
    assert not reply.has_content()
    return reply.error.reason


def parameters(reply):
    """Return the parameters in a reply as bytes, by name."""
    return {name: array.numpy().tobytes() for name, array in reply.content["params"].items()}
