"""Several tensors as one array, for transfers over the network.

Flower transfers a message in parts: two for each array, and each part is an HTTP request of a node or of the server's
app to the SuperLink. A network with 60 tensors would need 120 requests per node in each direction. Packed, a group of
tensors consists of one array, which Flower divides only if it is large. What was packed is checked when it is unpacked
as if it had arrived unpacked.
"""

import msgspec
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedrema.errors import BadInput

PACKED = "packed"
"""The name and the serialisation type of an array that holds other arrays."""
LENGTH_BYTES = 8
LARGEST_INDEX = 1_000_000


class PackedArray(msgspec.Struct, array_like=True, frozen=True):
    """Where an array is, and what its message declares about it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stype: str
    length: int


def pack(*messages: Message) -> None:
    """Replace each group of tensors of some messages by one array; a group that several messages share stays shared."""
    done: dict[int, ArrayRecord] = {}
    for message in messages:
        content = RecordDict(dict(message.content.items()))
        for name, record in message.content.array_records.items():
            if id(record) not in done:
                done[id(record)] = _packed(record)
            content[name] = done[id(record)]
        message.content = content


def unpacked(content: RecordDict) -> RecordDict:
    """Return the content of a message as it was before it was packed; what is not packed is returned as it is."""
    return RecordDict(
        {
            name: _unpacked(record) if isinstance(record, ArrayRecord) and set(record) == {PACKED} else record
            for name, record in content.items()
        }
    )


def _packed(record: ArrayRecord) -> ArrayRecord:
    if len(record) < 2:  # nothing to gain
        return record
    index = msgspec.json.encode(
        [PackedArray(name, each.dtype, tuple(each.shape), each.stype, len(each.data)) for name, each in record.items()]
    )
    data = b"".join([len(index).to_bytes(LENGTH_BYTES), index, *(each.data for each in record.values())])
    return ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})


def _unpacked(record: ArrayRecord) -> ArrayRecord:
    array = record[PACKED]
    if array.stype != PACKED:  # an ordinary tensor with this name
        return record
    data = memoryview(array.data)
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES])
    if not LENGTH_BYTES < start <= min(len(data), LARGEST_INDEX):
        raise BadInput("the index of its tensors has a wrong length")
    try:
        index = msgspec.json.decode(data[LENGTH_BYTES:start], type=list[PackedArray])
    except msgspec.MsgspecError as error:
        raise BadInput("the index of its tensors cannot be read") from error
    arrays = {}
    for each in index:
        if each.length < 0 or start + each.length > len(data):
            raise BadInput("the index of its tensors does not match their size")
        arrays[each.name] = Array(each.dtype, each.shape, each.stype, bytes(data[start : start + each.length]))
        start += each.length
    if start != len(data) or len(arrays) != len(index):
        raise BadInput("the index of its tensors does not match their size")
    return ArrayRecord(arrays)
