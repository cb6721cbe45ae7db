"""Compiles the kernels for Hopper GPUs, which needs none, and prints how each product reads its factors.

Run in a process of its own: other tests run the kernels in Triton's interpreter, which replaces the compiler.
"""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fedrema.engine.kernels import descriptor_programs, gradient_programs, product_programs, tiles

DIVISIBLE = {
    "channels", "outputs", "x_client", "x_image", "x_row", "x_column", "w_client", "w_output", "w_tap", "y_part",
}  # fmt: skip
BF16, FLOAT32 = "*bf16", "*fp32"


def boxes(kind, *shape):
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}]>"


def report(title, program, types, constants, tile):
    """Print a program's products: whether the first factor is in registers, and how many products may be unfinished."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in program.arg_names}
    multiples = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(program.arg_names)
        if signature[name].startswith("*") or (name in DIVISIBLE and signature[name] == "i32")
    }
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=multiples)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    products = [line for line in text.splitlines() if "warp_group_dot " in line or "tt.dot " in line]
    in_registers = any(re.search(r": tensor<[^>]*dot_op[^*]*\*", line) for line in products)
    unfinished = max(map(int, re.findall(r"warp_group_dot_wait.*?pendings = (\d+)", text)), default=0)
    print(f"{title};{len(products)};{'registers' if in_registers else 'shared'};{unfinished}", flush=True)


def main():
    for transposed in (False, True):
        tile = tiles.linear_tile()
        rows, columns, step = tile.rows, tile.columns, tile.reduction
        weight = (step, columns) if transposed else (columns, step)
        report(
            f"linear, transposed={transposed}", descriptor_programs.linear_product,
            {"x": boxes("bf16", rows, step), "weight": boxes("fp32", *weight), "bias": FLOAT32, "y": FLOAT32},
            {"transposed": transposed, "has_bias": not transposed, "block_rows": rows, "block_outputs": columns,
             "block_channels": step}, tile,
        )  # fmt: skip
        for channels, outputs, side in ((16, 32, 8), (32, 64, 16), (64, 32, 16), (64, 128, 8), (256, 256, 8)):
            tile = tiles.descriptor_tile(channels, outputs)
            box = tiles.box(tile.rows, side, side)
            weight = (tile.reduction, tile.columns) if transposed else (tile.columns, tile.reduction)
            report(
                f"convolution {channels} to {outputs}, transposed={transposed}", descriptor_programs.descriptor_product,
                {"x": boxes("bf16", *box, tile.reduction), "weight": boxes("bf16", *weight), "bias": FLOAT32,
                 "y": BF16},
                {"transposed": transposed, "has_bias": not transposed, "images": box.images, "high": box.high,
                 "wide": box.wide, "block_outputs": tile.columns, "block_channels": tile.reduction}, tile,
            )  # fmt: skip
    for channels, outputs, side in ((32, 64, 16), (64, 128, 8), (256, 256, 8)):
        tile = tiles.descriptor_gradient_tile(channels, outputs, 3)
        box = tiles.box(tile.reduction, side, side)
        report(
            f"weight gradient {channels} to {outputs}", descriptor_programs.descriptor_gradient,
            {"x": boxes("bf16", *box, tile.columns), "g": boxes("bf16", tile.reduction, tile.rows), "y": FLOAT32,
             "z": FLOAT32},
            {"kernel_width": 3, "together": tile.taps, "images": box.images, "high": box.high, "wide": box.wide,
             "block_outputs": tile.rows, "block_channels": tile.columns}, tile,
        )  # fmt: skip
    tile = tiles.linear_gradient_tile(100)
    report(
        "weight gradient of a linear layer", descriptor_programs.linear_gradient,
        {"x": boxes("bf16", 1, tile.reduction, tile.columns), "g": boxes("fp32", 1, tile.reduction, tile.rows),
         "y": boxes("fp32", 1, tile.rows, tile.columns), "z": FLOAT32},
        {"block_rows": tile.reduction, "block_outputs": tile.rows, "block_channels": tile.columns}, tile,
    )  # fmt: skip
    for kind in (BF16, FLOAT32):
        tile = tiles.forward_tile(2000, 96, 96, "bf16", wide_operands=kind == FLOAT32)
        report(
            f"gathered {kind}", product_programs.gathered_product,
            {"x": kind, "weight": kind, "bias": FLOAT32, "y": FLOAT32},
            {"transposed": False, "strided": False, "has_bias": True, "bf16": True, "precision": "tf32",
             "block_rows": tile.rows, "block_outputs": tile.columns, "block_channels": tile.reduction}, tile,
        )  # fmt: skip
        tile = tiles.gradient_tile(2000, 96, 96, "bf16", wide_operands=kind == FLOAT32)
        report(
            f"gathered weight gradient {kind}", gradient_programs.weight_gradient,
            {"x": kind, "g": kind, "y": FLOAT32},
            {"bf16": True, "precision": "tf32", "block_outputs": tile.rows, "block_channels": tile.columns,
             "block_rows": tile.reduction}, tile,
        )  # fmt: skip
    tile = tiles.folded_tile(27, 32, "bf16")
    report(
        "few channels", product_programs.folded_product, {"x": FLOAT32, "weight": BF16, "bias": FLOAT32, "y": BF16},
        {"channels": 3, "kernel_width": 3, "folded": 27, "has_bias": True, "bf16": True, "precision": "tf32",
         "block_rows": tile.rows, "block_outputs": tile.columns, "block_folded": tile.reduction}, tile,
    )  # fmt: skip
    tile = tiles.folded_gradient_tile(28, 32)
    report(
        "weight gradient with few channels", gradient_programs.folded_weight_gradient,
        {"x": FLOAT32, "g": BF16, "y": FLOAT32, "z": FLOAT32},
        {"channels": 3, "kernel_width": 3, "folded": 27, "bf16": True, "precision": "tf32",
         "block_outputs": tile.columns, "block_folded": tile.rows, "block_rows": tile.reduction}, tile,
    )  # fmt: skip


if __name__ == "__main__":
    main()
