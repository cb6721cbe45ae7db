"""Groups of tensors are transferred as one array, and arrive as they were sent."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fedrema.deploy.flower_packing import PACKED, pack, unpacked
from fedrema.errors import BadInput


def record(seed, tensors=4):
    generator = np.random.default_rng(seed)
    return ArrayRecord({f"layer.{n}": Array(generator.normal(size=(n + 1, 3))) for n in range(tensors)})


def message(**records):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return Message(RecordDict({"facts": ConfigRecord({"round": 1}), **records}), 7, MessageType.TRAIN)


def test_tensors_arrive_as_they_were_sent_in_fewer_parts():
    sent = message(common=record(0, 30), own=record(1, 1), inbox=ArrayRecord())
    before, parts = sent.content, len(get_all_nested_objects(sent))
    pack(sent)
    assert set(sent.content["common"]) == {PACKED}
    assert parts > 60
    assert len(get_all_nested_objects(sent)) < 12
    after = unpacked(sent.content)
    assert after.object_id == before.object_id  # Flower's digest of all names, types, shapes and values
    assert unpacked(before).object_id == before.object_id


def test_what_messages_share_is_packed_once():
    common = record(0)
    first, second = message(common=common, own=record(1)), message(common=common, own=record(2))
    pack(first, second)
    assert first.content["common"] is second.content["common"]
    assert first.content["own"] is not second.content["own"]


def spoiled(change):
    sent = message(common=record(0))
    pack(sent)
    data = change(sent.content["common"][PACKED].data)
    return RecordDict({"common": ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"", "has a wrong length"),
        (lambda data: b"\xff" * 8 + data[8:], "has a wrong length"),
        (lambda data: bytes(8) + data[8:], "has a wrong length"),
        (lambda data: data[:8] + b"x" + data[9:], "cannot be read"),
        (lambda data: data[:-1], "does not match their size"),
        (lambda data: data + b"x", "does not match their size"),
        (lambda data: data.replace(b'"layer.1"', b'"layer.0"'), "does not match their size"),
        (lambda data: data.replace(b'"float64"', b"12345678 "), "cannot be read"),
    ],
)
def test_a_spoiled_index_is_refused(change, why):
    with pytest.raises(BadInput, match=why):
        unpacked(spoiled(change))


def test_a_tensor_that_is_called_packed_is_left_alone():
    content = RecordDict({"common": ArrayRecord({PACKED: Array(np.ones(3))})})
    assert unpacked(content)["common"][PACKED].numpy().tolist() == [1.0, 1.0, 1.0]
