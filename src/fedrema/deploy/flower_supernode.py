"""Flower's SuperNode, which exits with its parent. Usage: `python -m fedrema.deploy.flower_supernode ARGUMENTS`.

Flower's SuperNode asks the server for messages every three seconds, and its executor for the reply twice a second. Here
it asks more often while rounds are being executed, and as rarely as Flower's otherwise. It also forgets a message whose
run ends while the message is being received: Flower's keeps it, and an executor would wait for the rest forever.
"""

import time
from typing import Any

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.start_client_internal import _pull_and_store_message as _receive_message

from fedrema.base.processes import exit_with_parent
from fedrema.deploy.flower_heartbeats import shorten_heartbeats
from fedrema.deploy.flower_transfers import shorten_pauses

SECONDS_UNTIL_IDLE = 60.0
"""How long after the last message the server is asked more often."""
SECONDS_BETWEEN_QUESTIONS = 1.0
"""Interval for messages of the server during that time."""
LARGEST_SHARE = 0.1
"""Largest part of the time that is spent on asking: with many nodes, the server answers slowly, and is asked less."""
SECONDS_BETWEEN_LOOKS = 0.3
"""Interval for the reply of the executor to the last message."""
SHORT = 1.0
"""Flower waits for a reply in shorter pauses than this, and for messages in longer ones."""


class Pauses:
    """Replaces the module `time` in Flower's loop, which uses only `sleep`."""

    def __init__(self) -> None:
        self.last_message = self.last_pause = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for at most this time."""
        now = time.monotonic()
        if seconds < SHORT:  # it has received a message, and waits for the reply
            self.last_message = now
            time.sleep(min(seconds, SECONDS_BETWEEN_LOOKS))
        elif now - self.last_message < SECONDS_UNTIL_IDLE:
            asking = now - self.last_pause  # how long the last question took
            time.sleep(min(seconds, max(SECONDS_BETWEEN_QUESTIONS, asking * (1 / LARGEST_SHARE - 1))))
        else:
            time.sleep(seconds)
        self.last_pause = time.monotonic()


def receive_message(*, state: Any, object_store: Any, receive: Any, **others: Any) -> int | None:
    """Receive a message as Flower does, and delete what remains of one that was not received completely."""
    announced = []

    def receive_and_remember() -> Any:
        if (found := receive()) is not None:
            announced.append(found[0].metadata.message_id)
        return found

    run = _receive_message(state=state, object_store=object_store, receive=receive_and_remember, **others)
    if run is None and announced:
        state.delete_messages(message_ids=announced)
        for identity in announced:
            object_store.delete(identity)  # an executor that waits for a part of it then gives up
    return run


def main() -> None:
    """Run the SuperNode until it is stopped."""
    exit_with_parent()
    shorten_heartbeats()
    shorten_pauses()
    vars(start_client_internal).update({"time": Pauses(), "_pull_and_store_message": receive_message})
    flower_supernode()


if __name__ == "__main__":
    main()
