"""Shorter pauses in Flower's transfers of messages.

Flower announces a message before all of its parts have arrived. The process that fetches it pauses for 1, 2, 4, … s
when a part is not there yet; a round has three such transfers. If the other side does not respond at all, it pauses for
up to 20 s before the next attempt, so that a node would miss rounds after a restart of the server.
"""

from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, pull_objects
from flwr.supercore.retry import http_retry

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 1.0
LONGEST_PAUSE_OFFLINE = 4.0
"""Until the next attempt if the other side does not respond."""


def shorten_pauses() -> None:
    """Fetch parts of messages, and connect again, with shorter pauses in this process."""
    for function in (pull_objects, pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        if {"initial_backoff", "backoff_cap"} <= defaults.keys():
            defaults |= {"initial_backoff": FIRST_PAUSE, "backoff_cap": LONGEST_PAUSE}
            function.__kwdefaults__ = defaults
    assert "MAX_RETRY_DELAY" in vars(http_retry)
    vars(http_retry)["MAX_RETRY_DELAY"] = LONGEST_PAUSE_OFFLINE
