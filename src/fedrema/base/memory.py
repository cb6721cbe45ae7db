"""Refuses what does not fit into memory before it is allocated."""

import psutil

from fedrema.errors import BadInput


def free_memory() -> int:
    """Return how many bytes of this machine's memory can still be taken."""
    return int(psutil.virtual_memory().available)


def check_fits(needed: int, what: str) -> None:
    """Refuse what needs more memory than is free; `what` begins the sentence and ends in a verb."""
    free = free_memory()
    if needed > free:
        raise BadInput(f"{what} {amount(needed)} of memory, but only {amount(free)} is free.")


def amount(size: int) -> str:
    """Return a number of bytes as people write it."""
    value, unit = float(size), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
