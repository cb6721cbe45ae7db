"""Flower's SuperNode, which exits with its parent. Usage: `python -m fedrema.deploy.flower_supernode ARGUMENTS`.

Flower's SuperNode asks the server for messages every three seconds, and its executor for the reply twice a second. Here
it asks more often while rounds are being executed, and as rarely as Flower's otherwise.
"""

import time

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from fedrema.base.processes import exit_with_parent
from fedrema.deploy.flower_transfers import shorten_pauses

SECONDS_UNTIL_IDLE = 60.0
"""How long after the last message the server is asked more often."""
SECONDS_BETWEEN_QUESTIONS = 1.0
"""Interval for messages of the server during that time."""
SECONDS_BETWEEN_LOOKS = 0.3
"""Interval for the reply of the executor to the last message."""
SHORT = 1.0
"""Flower waits for a reply in shorter pauses than this, and for messages in longer ones."""


class Pauses:
    """Replaces the module `time` in Flower's loop, which uses only `sleep`."""

    def __init__(self) -> None:
        self.last_message = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for at most this time."""
        now = time.monotonic()
        if seconds < SHORT:  # it has received a message, and waits for the reply
            self.last_message = now
            time.sleep(min(seconds, SECONDS_BETWEEN_LOOKS))
        elif now - self.last_message < SECONDS_UNTIL_IDLE:
            time.sleep(min(seconds, SECONDS_BETWEEN_QUESTIONS))
        else:
            time.sleep(seconds)


def main() -> None:
    """Run the SuperNode until it is stopped."""
    exit_with_parent()
    shorten_pauses()
    vars(start_client_internal)["time"] = Pauses()
    flower_supernode()


if __name__ == "__main__":
    main()
