# mypy: ignore-errors
"""Triton programs for convolutions of stacked clients, each of which has its own weights.

A row is one position of one image. Activations are [client, image, height, width, channel] in memory, weights
[client, output, tap, channel]; a tap is one position inside the kernel window. Offsets inside one client are relative
to the first image of a tile, so that 32 bits suffice; the client's own offset has 64 bits.

mypy does not check Triton's language.
"""

import triton
import triton.language as tl

# Sizes for which specialised kernels are not worth the compilation. Channel counts and memory strides are not among
# them, because wide loads are possible only if the compiler knows that they are multiples of 16.
UNSPECIALISED = [
    "rows", "height", "width", "row_height", "row_width", "kernel_height", "kernel_width",
    "stride_height", "stride_width", "pad_height", "pad_width", "rows_per_part",
]  # fmt: skip


UNSPECIALISED_FOLDED = [name for name in UNSPECIALISED if name != "kernel_width"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def gathered_product(
    x, weight, bias, y,
    rows, channels, outputs, height, width, row_height, row_width,
    kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width,
    x_client, x_image, x_row, x_column, w_client, w_output, w_tap, w_channel,
    transposed: tl.constexpr, strided: tl.constexpr, has_bias: tl.constexpr, bf16: tl.constexpr,
    precision: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Compute y[row, output] = Σ over taps and channels of x[row moved by the tap, channel] · weight.

    Transposed, it is the gradient of the input: rows are input positions, x is the gradient of the output, and the
    weight's outputs and channels change places through their strides.
    """
    client = tl.program_id(1).to(tl.int64)
    output_tiles = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // output_tiles * block_rows
    output = tl.program_id(0) % output_tiles * block_outputs + tl.arange(0, block_outputs)
    pixels = row_height * row_width
    first_image = first_row // pixels
    row = tl.arange(0, block_rows)
    position = first_row - first_image * pixels + row
    image = position // pixels
    pixel = position - image * pixels
    top = pixel // row_width
    left = pixel - top * row_width
    if transposed:
        top += pad_height
        left += pad_width
    else:
        top = top * stride_height - pad_height
        left = left * stride_width - pad_width
    real = first_row + row < rows
    x += client * x_client + first_image.to(tl.int64) * x_image
    weight += client * w_client
    start = image * x_image
    if not (transposed and strided):
        start += top * x_row + left * x_column
    accumulator = tl.zeros((block_rows, block_outputs), tl.float32)
    blocks = tl.cdiv(channels, block_channels)
    for step in range(kernel_height * kernel_width * blocks):
        tap = step // blocks
        down = tap // kernel_width
        right = tap - down * kernel_width
        channel = (step - tap * blocks) * block_channels + tl.arange(0, block_channels)
        if transposed:
            down = -down
            right = -right
        vertical = top + down
        horizontal = left + right
        inside = real & (vertical >= 0) & (horizontal >= 0)
        if transposed and strided:
            inside &= (vertical % stride_height == 0) & (horizontal % stride_width == 0)
            vertical = vertical // stride_height
            horizontal = horizontal // stride_width
            place = start + vertical * x_row + horizontal * x_column
        else:
            place = start + (down * x_row + right * x_column)
        inside &= (vertical < height) & (horizontal < width)
        a = tl.load(
            x + place[:, None] + channel[None, :], mask=inside[:, None] & (channel < channels)[None, :], other=0.0
        )
        b = tl.load(
            weight + tap * w_tap + channel[:, None] * w_channel + output[None, :] * w_output,
            mask=(channel < channels)[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        if bf16:
            a = a.to(tl.bfloat16)
            b = b.to(tl.bfloat16)
        accumulator = tl.dot(a, b, accumulator, input_precision=precision)
    if has_bias:
        accumulator += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[None, :]
    y += (client * rows + first_row) * outputs
    tl.store(
        y + row[:, None] * outputs + output[None, :], accumulator.to(y.dtype.element_ty),
        mask=real[:, None] & (output < outputs)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED_FOLDED)
def folded_product(
    x, weight, bias, y,
    rows, outputs, height, width, row_height, row_width,
    stride_height, stride_width, pad_height, pad_width,
    x_client, x_image, x_row, x_column, x_channel, w_client,
    channels: tl.constexpr, kernel_width: tl.constexpr, folded: tl.constexpr,
    has_bias: tl.constexpr, bf16: tl.constexpr, precision: tl.constexpr,
    block_rows: tl.constexpr, block_outputs: tl.constexpr, block_folded: tl.constexpr,
):  # fmt: skip
    """Compute the same forward for few channels: taps and channels are one axis of `folded` entries.

    Rows come first in the tile of x: Triton then lays them along a warp, whose loads are neighbours in the image.
    A thread's entries are known when it is compiled, if the channels are: nothing is left to divide.
    """
    client = tl.program_id(1).to(tl.int64)
    output_tiles = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // output_tiles * block_rows
    output = tl.program_id(0) % output_tiles * block_outputs + tl.arange(0, block_outputs)
    pixels = row_height * row_width
    first_image = first_row // pixels
    row = tl.arange(0, block_rows)
    position = first_row - first_image * pixels + row
    image = position // pixels
    pixel = position - image * pixels
    top = pixel // row_width
    left = (pixel - top * row_width) * stride_width - pad_width
    top = top * stride_height - pad_height
    start = image * x_image + top * x_row + left * x_column
    real = first_row + row < rows
    x += client * x_client + first_image.to(tl.int64) * x_image
    weight += client * w_client
    accumulator = tl.zeros((block_rows, block_outputs), tl.float32)
    for begin in range(0, folded, block_folded):
        entry = begin + tl.arange(0, block_folded)
        tap = entry // channels
        down = tap // kernel_width
        vertical = top[:, None] + down[None, :]
        horizontal = left[:, None] + (tap - down * kernel_width)[None, :]
        inside = real[:, None] & (entry < folded)[None, :]
        inside &= (vertical.to(tl.uint32) < height) & (horizontal.to(tl.uint32) < width)  # below 0 is huge
        beside = (entry - tap * channels) * x_channel + down * x_row + (tap - down * kernel_width) * x_column
        a = tl.load(x + (start[:, None] + beside[None, :]), mask=inside, other=0.0)
        b = tl.load(
            weight + output[None, :] * folded + entry[:, None],
            mask=(entry < folded)[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        if bf16:
            a = a.to(tl.bfloat16)
            b = b.to(tl.bfloat16)
        accumulator = tl.dot(a, b, accumulator, input_precision=precision)
    if has_bias:
        accumulator += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[None, :]
    y += (client * rows + first_row) * outputs
    tl.store(
        y + row[:, None] * outputs + output[None, :], accumulator.to(y.dtype.element_ty),
        mask=real[:, None] & (output < outputs)[None, :],
    )  # fmt: skip
