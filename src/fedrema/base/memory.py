"""Refuse requests that do not fit into memory, before anything is allocated."""

import psutil

from fedrema.errors import BadInput


def free_memory() -> int:
    """Return the available memory of this machine in bytes."""
    return int(psutil.virtual_memory().available)


def check_fits(needed: int, what: str) -> None:
    """Raise `BadInput` if more memory is needed than available; `what` is the start of the message, up to a verb."""
    free = free_memory()
    if needed > free:
        raise BadInput(f"{what} {amount(needed)} of memory, but only {amount(free)} is free.")


def amount(size: int) -> str:
    """Return a number of bytes with a unit."""
    value, unit = float(size), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
