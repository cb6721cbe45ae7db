# mypy: ignore-errors
"""Triton programs for the same products, with operands that the GPU's copy engine fetches as boxes of an image.

They cover most layers with stride 1. A tile of rows is a box of `images` × `high` × `wide` positions. For each kernel
position (tap) it is another box of the input, and values outside the image are read as 0, so that neither addresses nor
masks are computed. They use Triton's tensor descriptors, which older GPUs do not support.

Both factors of every product in a loop must be in shared memory. Hopper's matrix units work asynchronously. When Triton
keeps the first factor in registers, it may overwrite them for the next step while the product still reads them: with
Triton 3.6, results were wrong when another kernel used the same multiprocessor. tests/engine/test_compiled_kernels.py
compiles the programs and checks them.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

UNSPECIALISED = [
    "rows", "row_height", "kernel_height", "pad_height", "pad_width", "rows_per_part", "samples", "w_rows",
]  # fmt: skip


def described(tensor, block):
    """Return the descriptor of a tensor's memory layout and of the boxes to fetch."""
    return TensorDescriptor.from_tensor(tensor, block)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "kernel_width"])
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
    # is a box takes the way through registers.
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
        box = box.reshape(block_rows, block_channels)
        accumulator = tl.dot(a, box.T, accumulator)
    accumulator = accumulator.T
    output = first_output + tl.arange(0, block_outputs)
    if has_bias:
        accumulator += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[None, :]
    row = tl.arange(0, block_rows)
    y += (client.to(tl.int64) * rows + first_row) * outputs
    # What a tile read beyond this client's rows or outputs belongs to another: it is not stored.
    real = (first_row + row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + output[None, :], accumulator.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "w_rows"])
def linear_product(
    x, weight, bias, y, rows, channels, outputs, w_rows, transposed: tl.constexpr, has_bias: tl.constexpr,
    block_rows: tl.constexpr, block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute y[row, output] = Σ over channels of x[row, channel] · weight[output, channel], for a linear layer.

    x is [clients · rows, channels] in bf16; weight is [clients · outputs, channels] in float32, because each of its
    values is read once, and narrowed on the way. Transposed, weight is [clients · channels, outputs].
    """
    client = tl.program_id(1)
    output_tiles = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // output_tiles * block_rows
    first_output = tl.program_id(0) % output_tiles * block_outputs
    accumulator = tl.zeros((block_rows, block_outputs), tl.float32)
    for step in range(channels // block_channels):
        channel = step * block_channels
        a = x.load([client * rows + first_row, channel])
        if transposed:
            b = weight.load([client * w_rows + channel, first_output])
        else:
            b = weight.load([client * w_rows + first_output, channel]).T
        accumulator = tl.dot(a, b.to(x.dtype), accumulator)
    output = first_output + tl.arange(0, block_outputs)
    if has_bias:
        accumulator += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[None, :]
    row = tl.arange(0, block_rows)
    y += (client.to(tl.int64) * rows + first_row) * outputs
    # What a tile read beyond this client's rows or outputs belongs to another: it is not stored.
    real = (first_row + row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + output[None, :], accumulator.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=UNSPECIALISED)
def descriptor_gradient(
    x, g, y, z,
    rows, channels, outputs, row_height, kernel_height, pad_height, pad_width, rows_per_part, samples, y_part,
    kernel_width: tl.constexpr, together: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute what `weight_gradient` does, taps of a kernel row `together`, and the bias's gradient z.

    g is [clients · rows, outputs], and a client's rows are a multiple of a step's. The first programs of a client sum
    g alone, while others fetch the same of it.
    """
    block_rows: tl.constexpr = images * high * wide
    client = tl.program_id(2)
    output_tiles = tl.cdiv(outputs, block_outputs)
    channel_tiles = tl.cdiv(channels, block_channels)
    begin = tl.program_id(1) * rows_per_part
    end = tl.minimum(begin + rows_per_part, rows)
    part = tl.program_id(1).to(tl.int64) * y_part
    first_output = tl.program_id(0) % output_tiles * block_outputs
    output = first_output + tl.arange(0, block_outputs)
    if tl.program_id(0) < output_tiles:
        total = tl.zeros((block_rows, block_outputs), tl.float32)
        for first_row in tl.range(begin, end, block_rows, num_stages=4):  # said here: no product asks for it
            total += g.load([client * rows + first_row, first_output]).to(tl.float32)
        tl.store(z + part + client * outputs + output, tl.sum(total, 0), mask=output < outputs)
    else:
        tile = tl.program_id(0) // output_tiles - 1
        first_channel = tile % channel_tiles * block_channels
        first_tap = tile // channel_tiles * together
        down = first_tap // kernel_width
        right = first_tap - down * kernel_width
        accumulators = (tl.zeros((block_outputs, block_channels), tl.float32),) * together
        for first_row in range(begin, end, block_rows):
            image = first_row // (row_height * wide)
            top = first_row // wide - image * row_height - pad_height + down
            a = g.load([client * rows + first_row, first_output]).T
            added = ()
            for tap in tl.static_range(together):
                box = x.load([client * samples + image, top, right + tap - pad_width, first_channel])
                added += (tl.dot(a, box.reshape(block_rows, block_channels), accumulators[tap]),)
            accumulators = added
        channel = first_channel + tl.arange(0, block_channels)
        taps = kernel_height * kernel_width
        y += part + client.to(tl.int64) * outputs * taps * channels
        place = (output[:, None] * taps + first_tap) * channels + channel[None, :]
        real = (output < outputs)[:, None] & (channel < channels)[None, :]
        for tap in tl.static_range(together):
            tl.store(y + place + tap * channels, accumulators[tap], mask=real)


@triton.jit(do_not_specialize=["steps"])
def linear_gradient(
    x, g, y, z, outputs, steps,
    block_rows: tl.constexpr, block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute y[output, channel] = Σ over rows of g[row, output] · x[row, channel], and z[output] = Σ g[row, output].

    All rows of x [clients, rows, channels] and g [clients, rows, outputs] are in one step; g is fetched once for all
    `steps` of channels.
    """
    client = tl.program_id(2)
    first_output = tl.program_id(0) * block_outputs
    a = g.load([client, 0, first_output]).reshape(block_rows, block_outputs)
    if tl.program_id(1) == 0:
        output = first_output + tl.arange(0, block_outputs)
        tl.store(z + client * outputs + output, tl.sum(a.to(tl.float32), 0), mask=output < outputs)
    a = a.to(x.dtype).T
    for step in range(steps):
        channel = (tl.program_id(1) * steps + step) * block_channels
        box = x.load([client, 0, channel]).reshape(block_rows, block_channels)
        y.store([client, first_output, channel], tl.dot(a, box).reshape(1, block_outputs, block_channels))
