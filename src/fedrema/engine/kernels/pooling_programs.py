# mypy: ignore-errors
"""Triton programs for max pooling with channels last; positions inside a window are numbered row by row.

Offsets are relative to the first image of a tile, so that 32 bits suffice, which divide faster.
"""

import triton
import triton.language as tl

UNSPECIALISED = ["rows", "height", "width", "out_height", "out_width"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def pooled(
    x, y, winners, rows, channels, height, width, out_height, out_width,
    kernel_height: tl.constexpr, kernel_width: tl.constexpr, stride_height: tl.constexpr, stride_width: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr, choosing: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Take the largest of each window and note which it was; choosing, take the one that was noted.

    As in torch, the first of equal ones wins, and what is no number wins over everything.
    """
    first_row = tl.program_id(0) * block_rows
    first_image = first_row // (out_height * out_width)
    row = tl.arange(0, block_rows)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    position = first_row - first_image * (out_height * out_width) + row
    image = position // (out_height * out_width)
    pixel = position - image * (out_height * out_width)
    top = pixel // out_width
    left = (pixel - top * out_width) * stride_width - pad_width
    top = top * stride_height - pad_height
    real = (first_row + row < rows)[:, None] & (channel < channels)[None, :]
    x += first_image.to(tl.int64) * height * width * channels
    y += first_row.to(tl.int64) * channels
    winners += first_row.to(tl.int64) * channels
    out = row[:, None] * channels + channel[None, :]
    best = tl.full((block_rows, block_channels), float("-inf"), tl.float32)
    winner = tl.full((block_rows, block_channels), -1, tl.int32)
    if choosing:
        winner = tl.load(winners + out, mask=real, other=0).to(tl.int32)
    for down in tl.static_range(kernel_height):
        for right in tl.static_range(kernel_width):
            number = down * kernel_width + right
            vertical = top + down
            horizontal = left + right
            inside = (vertical >= 0) & (vertical < height) & (horizontal >= 0) & (horizontal < width)
            place = ((image * height + vertical) * width + horizontal) * channels
            covered = real & inside[:, None]
            value = tl.load(x + place[:, None] + channel[None, :], mask=covered, other=0.0).to(tl.float32)
            if choosing:
                best = tl.where(winner == number, value, best)
            else:
                better = covered & ((winner < 0) | (value > best) | (value != value))
                best = tl.where(better, value, best)
                winner = tl.where(better, number, winner)
    tl.store(y + out, best.to(y.dtype.element_ty), mask=real)
    if not choosing:
        tl.store(winners + out, winner.to(tl.uint8), mask=real)


@triton.jit(do_not_specialize=UNSPECIALISED)
def pooled_gradient(
    g, winners, y, rows, channels, height, width, out_height, out_width,
    kernel_height: tl.constexpr, kernel_width: tl.constexpr, stride_height: tl.constexpr, stride_width: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Sum for each input position what the windows that it won send back.

    A row is a cell of as many positions as windows are apart: the same windows cover it, and each is loaded once.
    """
    cells_high = tl.cdiv(height + pad_height, stride_height)
    cells_wide = tl.cdiv(width + pad_width, stride_width)
    first_row = tl.program_id(0) * block_rows
    first_image = first_row // (cells_high * cells_wide)
    row = tl.arange(0, block_rows)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    position = first_row - first_image * (cells_high * cells_wide) + row
    image = position // (cells_high * cells_wide)
    cell = position - image * (cells_high * cells_wide)
    cell_top = cell // cells_wide
    cell_left = cell - cell_top * cells_wide
    real = (first_row + row < rows)[:, None] & (channel < channels)[None, :]
    g += first_image.to(tl.int64) * out_height * out_width * channels
    winners += first_image.to(tl.int64) * out_height * out_width * channels
    y += first_image.to(tl.int64) * height * width * channels
    # The windows that cover a cell begin in it or at most a kernel's length before it.
    backs: tl.constexpr = (kernel_height + stride_height - 1) // stride_height
    asides: tl.constexpr = (kernel_width + stride_width - 1) // stride_width
    values = ()
    numbers = ()
    for window in tl.static_range(backs * asides):
        top = cell_top - window // asides
        left = cell_left - window % asides
        covered = (top >= 0) & (top < out_height) & (left >= 0) & (left < out_width)
        place = (((image * out_height + top) * out_width + left) * channels)[:, None] + channel[None, :]
        values += (tl.load(g + place, mask=real & covered[:, None], other=0.0).to(tl.float32),)
        numbers += (tl.load(winners + place, mask=real & covered[:, None], other=255).to(tl.int32),)
    for inner in tl.static_range(stride_height * stride_width):
        total = tl.zeros((block_rows, block_channels), tl.float32)
        for window in tl.static_range(backs * asides):
            down = inner // stride_width + window // asides * stride_height
            right = inner % stride_width + window % asides * stride_width
            if down < kernel_height and right < kernel_width:
                total += tl.where(numbers[window] == down * kernel_width + right, values[window], 0.0)
        vertical = cell_top * stride_height + inner // stride_width - pad_height
        horizontal = cell_left * stride_width + inner % stride_width - pad_width
        inside = (vertical >= 0) & (vertical < height) & (horizontal >= 0) & (horizontal < width)
        place = (((image * height + vertical) * width + horizontal) * channels)[:, None] + channel[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=real & inside[:, None])
