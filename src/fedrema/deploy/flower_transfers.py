"""Shorter pauses in Flower's transfers of messages.

Flower announces a message before all of its parts have arrived. The process that fetches it pauses for 1, 2, 4, … s
when a part is not there yet; a round has three such transfers.
"""

from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, pull_objects

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 1.0


def shorten_pauses() -> None:
    """Fetch parts of messages with shorter pauses in this process."""
    for function in (pull_objects, pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        if {"initial_backoff", "backoff_cap"} <= defaults.keys():
            defaults |= {"initial_backoff": FIRST_PAUSE, "backoff_cap": LONGEST_PAUSE}
            function.__kwdefaults__ = defaults
