"""Limits on the plain values in a message from another machine, and the checks of them."""

from fedrema.errors import BadInput

LARGEST_COUNT = 10**12
"""No count in a message may be above this."""
LARGEST_NUMBER = 1e12
"""No other number in a reply, apart from tensors and sums, may be above this."""
LARGEST_SUM = 1e100
"""No sum over samples, such as one of squared errors, may be above this."""
AUTOMATIC_NEIGHBOURS = 32
"""With how many nodes a node exchanges shares in secure aggregation, if the plan does not set it."""
LONGEST_QUOTE = 100
"""How much of a text from another machine is quoted in a message."""


def quoted(text: str) -> str:
    """Shorten a text from another machine, to quote it."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def count(value: object, name: str) -> int:
    """Return a count; refuses anything but a whole number within the limits."""
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise BadInput(f"its {name} must be a whole number from 0 to {LARGEST_COUNT}, got {quoted(repr(value))}")
    return value
