"""The executor of a node that lies: a different attack in each round, with a real key.

python tests/network/hostile_executor.py NODE_FOLDER ADDRESS SECRET_FILE
"""

import sys

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedrema.deploy import flower_executor
from fedrema.deploy.flower_records import FACTS

HUGE = 500_000_000
generator = np.random.default_rng(0)


def with_params(content, change):
    arrays = {name: array.numpy() for name, array in content["params"].items()}
    content["params"] = ArrayRecord({name: Array(value) for name, value in change(arrays).items()})


def first(arrays, value):
    name = next(iter(arrays))
    return {**arrays, name: value(arrays[name])}


def not_a_number(content):
    with_params(content, lambda arrays: first(arrays, lambda value: np.full_like(value, np.nan)))


def wrong_shape(content):
    with_params(content, lambda arrays: first(arrays, lambda value: value[:1]))


def wrong_name(content):
    with_params(content, lambda arrays: {f"other.{name}": value for name, value in arrays.items()})


def too_large_values(content):
    with_params(content, lambda arrays: {name: value * 1e4 for name, value in arrays.items()})


def false_count(content):
    content[FACTS] = ConfigRecord({**content[FACTS], "count": 10**6})


def huge_in_parts(content):
    """500 MB, which Flower sends in parts of 5 MB."""
    with_params(content, lambda arrays: first(arrays, lambda value: generator.integers(0, 255, HUGE, dtype=np.uint8)))


def huge_at_once(content):
    """500 MB in one part."""
    content[FACTS] = ConfigRecord({**content[FACTS], "more": generator.bytes(HUGE)})


ATTACKS = {
    2: not_a_number,
    3: wrong_shape,
    4: wrong_name,
    5: too_large_values,
    6: false_count,
    8: huge_in_parts,
    9: huge_at_once,
}
REPLAYED = 7
"""In this round, the reply of round 1 is sent again."""


class Hostile(flower_executor.Executor):
    """Answers as an honest node, and then changes the answer."""

    saved = None

    def reply_to(self, message, received, kind=flower_executor.TaskType.CLIENT_APP):
        reply = super().reply_to(message, received, kind)
        number = message.content[FACTS].get("round")
        if number == 1:
            self.saved = RecordDict(dict(reply.content.items()))
        if number == REPLAYED:
            reply.content = self.saved
        if number in ATTACKS:
            ATTACKS[number](reply.content)
        return reply


if __name__ == "__main__":
    flower_executor.Executor = Hostile
    flower_executor.main()
    sys.exit(0)
