# mypy: ignore-errors
"""Triton programs for weight gradients: sums over rows, split into parts that are added in a fixed order.

There are no atomic additions, so that results are reproducible and do not depend on the number of stacked clients.
"""

import triton
import triton.language as tl

from fedrema.engine.kernels.product_programs import UNSPECIALISED, UNSPECIALISED_FOLDED


@triton.jit(do_not_specialize=UNSPECIALISED)
def weight_gradient(
    x, g, y,
    rows, channels, outputs, height, width, row_height, row_width,
    kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width, rows_per_part,
    x_client, x_image, x_row, x_column, y_part,
    bf16: tl.constexpr, precision: tl.constexpr,
    block_outputs: tl.constexpr, block_channels: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Compute y[part, output, tap, channel] = Σ over the part's rows of g[row, output] · x[row moved, channel]."""
    client = tl.program_id(2).to(tl.int64)
    output_tiles = tl.cdiv(outputs, block_outputs)
    channel_tiles = tl.cdiv(channels, block_channels)
    tap = tl.program_id(0) // (output_tiles * channel_tiles)
    tile = tl.program_id(0) - tap * (output_tiles * channel_tiles)
    output = tile % output_tiles * block_outputs + tl.arange(0, block_outputs)
    channel = tile // output_tiles * block_channels + tl.arange(0, block_channels)
    down = tap // kernel_width
    right = tap - down * kernel_width
    pixels = row_height * row_width
    x += client * x_client
    g += client * rows * outputs
    begin = tl.program_id(1) * rows_per_part
    end = tl.minimum(begin + rows_per_part, rows)
    accumulator = tl.zeros((block_outputs, block_channels), tl.float32)
    for step in range(tl.cdiv(end - begin, block_rows)):
        first_row = begin + step * block_rows
        first_image = first_row // pixels
        row = tl.arange(0, block_rows)
        position = first_row - first_image * pixels + row
        image = position // pixels
        pixel = position - image * pixels
        top = pixel // row_width
        vertical = top * stride_height - pad_height + down
        horizontal = (pixel - top * row_width) * stride_width - pad_width + right
        real = first_row + row < end
        inside = real & (vertical >= 0) & (horizontal >= 0) & (vertical < height) & (horizontal < width)
        place = image * x_image + vertical * x_row + horizontal * x_column
        a = tl.load(
            g + first_row.to(tl.int64) * outputs + row[:, None] * outputs + output[None, :],
            mask=real[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + first_image.to(tl.int64) * x_image + place[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < channels)[None, :], other=0.0,
        )  # fmt: skip
        if bf16:
            a = a.to(tl.bfloat16)
            b = b.to(tl.bfloat16)
        accumulator = tl.dot(tl.trans(a), b, accumulator, input_precision=precision)
    taps = kernel_height * kernel_width
    y += tl.program_id(1).to(tl.int64) * y_part + client * outputs * taps * channels
    tl.store(
        y + (output[:, None] * taps + tap) * channels + channel[None, :], accumulator,
        mask=(output < outputs)[:, None] & (channel < channels)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED_FOLDED)
def folded_weight_gradient(
    x, g, y, z,
    rows, outputs, height, width, row_height, row_width,
    stride_height, stride_width, pad_height, pad_width, rows_per_part,
    x_client, x_image, x_row, x_column, x_channel, y_part,
    channels: tl.constexpr, kernel_width: tl.constexpr, folded: tl.constexpr,
    bf16: tl.constexpr, precision: tl.constexpr,
    block_outputs: tl.constexpr, block_folded: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Compute the same for few channels, taps and channels on one axis.

    One more entry, of ones, gives the bias's gradient z.
    """
    client = tl.program_id(2).to(tl.int64)
    output_tiles = tl.cdiv(outputs, block_outputs)
    output = tl.program_id(0) % output_tiles * block_outputs + tl.arange(0, block_outputs)
    entry = tl.program_id(0) // output_tiles * block_folded + tl.arange(0, block_folded)
    tap = entry // channels
    down = tap // kernel_width
    right = tap - down * kernel_width
    beside = (entry - tap * channels) * x_channel + down * x_row + right * x_column
    pixels = row_height * row_width
    x += client * x_client
    g += client * rows * outputs
    begin = tl.program_id(1) * rows_per_part
    end = tl.minimum(begin + rows_per_part, rows)
    accumulator = tl.zeros((block_folded, block_outputs), tl.float32)
    for step in range(tl.cdiv(end - begin, block_rows)):
        first_row = begin + step * block_rows
        first_image = first_row // pixels
        row = tl.arange(0, block_rows)
        position = first_row - first_image * pixels + row
        image = position // pixels
        pixel = position - image * pixels
        top = pixel // row_width
        left = (pixel - top * row_width) * stride_width - pad_width
        top = top * stride_height - pad_height
        start = image * x_image + top * x_row + left * x_column
        vertical = top[:, None] + down[None, :]
        horizontal = left[:, None] + right[None, :]
        real = first_row + row < end
        inside = real[:, None] & (entry < folded)[None, :]
        inside &= (vertical.to(tl.uint32) < height) & (horizontal.to(tl.uint32) < width)  # below 0 is huge
        a = tl.load(x + first_image.to(tl.int64) * x_image + (start[:, None] + beside[None, :]), mask=inside, other=0.0)
        a = tl.where((entry == folded)[None, :], 1.0, a.to(tl.float32))
        b = tl.load(
            g + first_row.to(tl.int64) * outputs + row[:, None] * outputs + output[None, :],
            mask=real[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        if bf16:
            a = a.to(tl.bfloat16)
            b = b.to(tl.bfloat16)
        accumulator = tl.dot(tl.trans(a), b, accumulator, input_precision=precision)
    part = tl.program_id(1).to(tl.int64)
    y += part * y_part + client * outputs * folded
    z += part * y_part + client * outputs
    known = (output < outputs)[None, :]
    tl.store(y + output[None, :] * folded + entry[:, None], accumulator, mask=known & (entry < folded)[:, None])
    tl.store(z + output[None, :] + entry[:, None] * 0, accumulator, mask=known & (entry == folded)[:, None])


@triton.jit(do_not_specialize=[*UNSPECIALISED, "z_part"])
def column_totals(g, z, rows, outputs, rows_per_part, z_part, block_outputs: tl.constexpr, block_rows: tl.constexpr):
    """Compute z[part, output] = Σ over the part's rows of g[row, output]."""
    client = tl.program_id(2).to(tl.int64)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    g += client * rows * outputs
    begin = tl.program_id(1) * rows_per_part
    end = tl.minimum(begin + rows_per_part, rows)
    total = tl.zeros((block_rows, block_outputs), tl.float32)
    for step in range(tl.cdiv(end - begin, block_rows)):
        first_row = begin + step * block_rows
        row = tl.arange(0, block_rows)
        total += tl.load(
            g + first_row.to(tl.int64) * outputs + row[:, None] * outputs + output[None, :],
            mask=(first_row + row < end)[:, None] & (output < outputs)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    z += tl.program_id(1).to(tl.int64) * z_part + client * outputs
    tl.store(z + output, tl.sum(total, 0), mask=output < outputs)


@triton.jit(do_not_specialize=["count"])
def parts_sum(parts, y, size, part, count, block_parts: tl.constexpr, block: tl.constexpr):
    """Compute y[i] = Σ over parts, always in the same order."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros((block_parts, block), tl.float32)
    for first in range(0, count, block_parts):
        number = first + tl.arange(0, block_parts)
        total += tl.load(
            parts + number[:, None].to(tl.int64) * part + place[None, :],
            mask=(number < count)[:, None] & (place < size)[None, :], other=0.0,
        )  # fmt: skip
    tl.store(y + place, tl.sum(total, 0), mask=place < size)
