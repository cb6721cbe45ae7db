"""Tile sizes of the kernels: fixed rules instead of autotuning, so that results are reproducible.

The rules depend on the shapes of one client only, so that a client's result does not depend on the number of clients it
is stacked with.
"""

from typing import NamedTuple

FEW_CHANNELS = 16
"""With fewer channels, kernel positions and channels are one axis: a block of channels would be mostly padding."""


class Tile(NamedTuple):
    """Block sizes of one kernel and its launch options."""

    rows: int
    """Of the result."""
    columns: int
    reduction: int
    """Entries of the summed axis per step."""
    warps: int
    stages: int
    """Steps whose loads are in flight."""
    taps: int = 1
    """Kernel positions of one row that a weight gradient computes together: their common operand is fetched once."""


def power_above(size: int) -> int:
    """Return the smallest power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()


def pieces(size: int, piece: int) -> int:
    """Return how many pieces cover a size."""
    return -(-size // piece)


def forward_tile(rows: int, channels: int, outputs: int, precision: str, wide_operands: bool) -> Tile:
    """Return the tile of a forward product or an input gradient; operands are wide if float32 is loaded."""
    columns = min(max(power_above(outputs), 16), 128)
    reduction = min(max(power_above(channels), 16), 64)
    if precision == "float32":
        return Tile(64, min(columns, 64), min(reduction, 32), 4, 2)
    if precision == "tf32":
        return Tile(128, columns, min(reduction, 32), 8, 3)
    if wide_operands:  # a linear layer: short steps, many loads in flight, because weights are read once
        return Tile(128, columns, min(reduction, 32), 8 if columns == 128 else 4, 4)
    return Tile(256, columns, reduction, 8, 3) if columns <= 32 else Tile(128, columns, reduction, 4, 3)


def folded_tile(entries: int, outputs: int, precision: str) -> Tile:
    """Return the tile of a forward product with few channels."""
    columns = min(max(power_above(outputs), 16), 64)
    return Tile(64 if precision == "float32" else 128, columns, min(max(power_above(entries), 16), 32), 4, 1)


def gradient_tile(rows: int, channels: int, outputs: int, precision: str, wide_operands: bool) -> Tile:
    """Return the tile of a weight gradient: rows are outputs, columns are channels, the sum is over rows."""
    tall = min(max(power_above(outputs), 16), 256)
    columns = min(max(power_above(channels), 16), 128)
    if precision == "float32":
        return Tile(min(tall, 64), min(columns, 64), 32, 4, 2)
    if precision == "tf32":
        return Tile(min(tall, 128), columns, 32, 8 if tall * columns >= 128 * 128 else 4, 2)
    if wide_operands:
        steps = min(max(power_above(rows), 16), 128)
        return Tile(min(tall, 128), columns, steps, 8 if tall * columns >= 128 * 128 else 4, 1)
    return Tile(tall, columns, 64, 8 if tall * columns > 128 * 128 else 4, 3)


def folded_gradient_tile(entries: int, outputs: int) -> Tile:
    """Return the tile of a weight gradient with few channels: rows are entries, columns are outputs."""
    return Tile(min(max(power_above(entries), 16), 64), min(max(power_above(outputs), 16), 64), 64, 4, 1)


def parts(rows: int, tiles: int, step: int, wanted: int = 32, least: int = 512) -> tuple[int, int]:
    """Return into how many parts the rows of a sum are split, and the rows of each.

    Enough that one client makes about `wanted` programs, as long as each has a few steps to do.
    """
    count = max(1, min(pieces(wanted, tiles), rows // least))
    each = pieces(pieces(rows, count), step) * step
    return pieces(rows, each), each


class Box(NamedTuple):
    """A tile of rows as a box of positions."""

    images: int
    high: int
    wide: int


def box(rows: int, height: int, width: int) -> Box | None:
    """Return a tile of this many rows of images of this size as a box; None if it is not one."""
    if width != power_above(width) or width > rows:
        return None
    high = min(height, rows // width)
    if high != power_above(high) or height % high:
        return None
    return Box(rows // (width * high), high, width)


def descriptor_tile(channels: int, outputs: int) -> Tile:
    """Return the tile of a forward product or an input gradient whose operands are fetched as boxes."""
    reduction = 64 if channels % 64 == 0 else 32 if channels % 32 == 0 else 16
    if outputs <= 64:  # the matrix units compute at least 64 outputs at once
        return Tile(256, 64, reduction, 4, 4)
    return Tile(256, 128, reduction, 8, 4) if channels > 64 else Tile(128, 128, reduction, 4, 3)


def descriptor_gradient_tile(channels: int, outputs: int, kernel_width: int) -> Tile:
    """Return the tile of a weight gradient whose operands are fetched as boxes."""
    tall = 128 if outputs > 64 else 64
    columns = min(max(power_above(channels), 16), 256 if tall == 128 else 128)
    taps = kernel_width if tall * columns * kernel_width <= 64 * 128 else 1
    return Tile(tall, columns, 64, 8 if columns == 256 else 4, 3 if columns == 64 else 4, taps)


def linear_tile() -> Tile:
    """Return the tile of a linear layer's output or of its input's gradient, fetched as boxes.

    Small tiles make enough programs to read the weights, each of which is read once.
    """
    return Tile(128, 64, 32, 4, 4)


LINEAR_STEPS = 3
"""Blocks of channels that one program of a linear layer's weight gradient computes for one block of outputs."""


def linear_gradient_tile(rows: int) -> Tile:
    """Return the tile of a linear layer's weight gradient: all rows in one step, up to 128."""
    return Tile(64, 128, min(max(power_above(rows), 16), 128), 4, 1)
