# mypy: ignore-errors
"""The same products where the GPU's copy engine can fetch whole boxes of an image: most layers with stride 1.

A tile of rows is a box of `images` × `high` × `wide` positions. Moved by a tap, it is another box of the input, and
what reaches over the edge is read as 0: no addresses and no masks are computed. Offered through Triton's tensor
descriptors, which older GPUs do without.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

UNSPECIALISED = [
    "rows", "row_height", "kernel_height", "kernel_width", "pad_height", "pad_width", "rows_per_part", "samples",
    "w_rows",
]  # fmt: skip


def described(tensor, block):
    """Return what tells the copy engine how a tensor lies and which boxes of it are fetched."""
    return TensorDescriptor.from_tensor(tensor, block)


@triton.jit(do_not_specialize=UNSPECIALISED)
def descriptor_product(
    x, weight, bias, y,
    rows, channels, outputs, row_height, kernel_height, kernel_width, pad_height, pad_width, samples, w_rows,
    transposed: tl.constexpr, has_bias: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute what `gathered_product` does.

    x is [clients · samples, height, width, channels], weight [clients · outputs, taps · channels].
    """
    block_rows: tl.constexpr = images * high * wide
    client = tl.program_id(1)
    output_tiles = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // output_tiles * block_rows
    first_output = tl.program_id(0) % output_tiles * block_outputs
    image = first_row // (row_height * wide)
    top = first_row // wide - image * row_height
    image += client * samples
    # Outputs × rows, not rows × outputs: the second factor is read where the copy engine put it, while a first one that
    # is a box would take the way through registers.
    accumulator = tl.zeros((block_outputs, block_rows), tl.float32)
    blocks = channels // block_channels
    for step in range(kernel_height * kernel_width * blocks):
        tap = step // blocks
        down = tap // kernel_width
        right = tap - down * kernel_width
        channel = (step - tap * blocks) * block_channels
        if transposed:
            box = x.load([image, top + pad_height - down, pad_width - right, channel])
            a = weight.load([client * w_rows + channel, tap * outputs + first_output]).T
        else:
            box = x.load([image, top - pad_height + down, right - pad_width, channel])
            a = weight.load([client * w_rows + first_output, tap * channels + channel])
        accumulator = tl.dot(a, box.reshape(block_rows, block_channels).T, accumulator)
    output = first_output + tl.arange(0, block_outputs)
    if has_bias:
        accumulator += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[:, None]
    row = tl.arange(0, block_rows)
    y += (client.to(tl.int64) * rows + first_row) * outputs
    # What a tile read beyond this client's rows or outputs belongs to another: it is not stored.
    real = (first_row + row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + output[None, :], accumulator.T.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=UNSPECIALISED)
def descriptor_gradient(
    x, g, y,
    rows, channels, outputs, row_height, kernel_height, kernel_width, pad_height, pad_width, rows_per_part, samples,
    y_part, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute what `weight_gradient` does.

    g is [clients · rows, outputs], and a client's rows are a multiple of a step's.
    """
    block_rows: tl.constexpr = images * high * wide
    client = tl.program_id(2)
    output_tiles = tl.cdiv(outputs, block_outputs)
    channel_tiles = tl.cdiv(channels, block_channels)
    tap = tl.program_id(0) // (output_tiles * channel_tiles)
    tile = tl.program_id(0) - tap * (output_tiles * channel_tiles)
    first_output = tile % output_tiles * block_outputs
    first_channel = tile // output_tiles * block_channels
    down = tap // kernel_width
    right = tap - down * kernel_width
    begin = tl.program_id(1) * rows_per_part
    end = tl.minimum(begin + rows_per_part, rows)
    accumulator = tl.zeros((block_outputs, block_channels), tl.float32)
    for step in range(tl.cdiv(end - begin, block_rows)):
        first_row = begin + step * block_rows
        image = first_row // (row_height * wide)
        top = first_row // wide - image * row_height
        a = g.load([client * rows + first_row, first_output])
        box = x.load([client * samples + image, top - pad_height + down, right - pad_width, first_channel])
        accumulator = tl.dot(a.T, box.reshape(block_rows, block_channels), accumulator)
    taps = kernel_height * kernel_width
    output = first_output + tl.arange(0, block_outputs)
    channel = first_channel + tl.arange(0, block_channels)
    y += tl.program_id(1).to(tl.int64) * y_part + client.to(tl.int64) * outputs * taps * channels
    tl.store(
        y + (output[:, None] * taps + tap) * channels + channel[None, :], accumulator,
        mask=(output < outputs)[:, None] & (channel < channels)[None, :],
    )  # fmt: skip
