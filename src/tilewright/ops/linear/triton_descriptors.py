"""How Triton runs linear where hardware copies tiles: programs that stay, each with many tiles of y one after another.

Operands come through descriptors of the tensors (the TMA of Hopper and later), which every program makes for itself in
the launch's workspace; what lies past an end is read as 0 and not stored. The loops over tiles and over a sum are one
loop to the compiler, so that the next tile is already under way while the epilogue of the last one runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.triton_functions import activation
from tilewright.ops.linear.triton_tiles import forward_arguments, place_of, product
from tilewright.ops.triton_rows import row_start

DESCRIPTOR = 128
"""Bytes of one."""


@triton.jit
def finish(
    total, bias, residual, y, z, row, column, residual_stride, residual_outer, residual_count, total_rows,
    total_columns, ACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """y = act(total + b) + residual of [M, N] elements from (row, column) on; z = total + b."""
    columns = column + tl.arange(0, N)
    inside = columns < total_columns
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if z is not None:
        z.store([row, column], total.to(z.dtype))
    value = activation(total, ACT)
    if residual is not None:
        rows = row + tl.arange(0, M)
        start = row_start(rows.to(tl.int64), residual_stride, residual_outer, residual_count)
        mask = (rows < total_rows)[:, None] & inside[None, :]
        value += tl.load(residual + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    y.store([row, column], value.to(y.dtype))


@triton.jit(do_not_specialize=["total_rows", "residual_count"])
def linear_tiles(
    x, weight, bias, residual, y, z, x_stride, weight_stride, residual_stride, residual_outer, residual_count,
    total_rows, total_columns, depth,
    ACT: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y = act(x W^T + b) + residual; z = x W^T + b."""
    PART: tl.constexpr = N // 2 if HALVES else N
    rows, width, steps = total_rows.to(tl.int32), total_columns.to(tl.int32), tl.cdiv(depth, K).to(tl.int32)
    a = tl.make_tensor_descriptor(x, [rows, depth.to(tl.int32)], [x_stride, 1], [M, K])
    b = tl.make_tensor_descriptor(weight, [width, depth.to(tl.int32)], [weight_stride, 1], [N, K])
    to_y = tl.make_tensor_descriptor(y, [rows, width], [total_columns, 1], [M, PART])
    if z is not None:
        to_z = tl.make_tensor_descriptor(z, [rows, width], [total_columns, 1], [M, PART])
    else:
        to_z = None
    down, across = tl.cdiv(rows, M), tl.cdiv(width, N)
    programs = tl.num_programs(0)
    done = tl.program_id(0) - programs  # told apart from `tile`: the loop runs ahead of what is stored
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        row, column = place_of(tile, down, across, GROUP)
        total = tl.zeros([M, N], tl.float32)
        for step in tl.range(0, steps):
            total = product(a.load([row * M, step * K]), b.load([column * N, step * K]).T, total)
        done += programs
        row, column = place_of(done, down, across, GROUP)
        if HALVES:  # a wide tile's epilogue in two parts, for which registers and shared memory suffice
            left, right = tl.split(tl.permute(tl.reshape(total, (M, 2, PART)), (0, 2, 1)))
            finish(left, bias, residual, to_y, to_z, row * M, column * N, residual_stride, residual_outer,
                   residual_count, rows, width, ACT, M, PART)  # fmt: skip
            finish(right, bias, residual, to_y, to_z, row * M, column * N + PART, residual_stride, residual_outer,
                   residual_count, rows, width, ACT, M, PART)  # fmt: skip
        else:
            finish(total, bias, residual, to_y, to_z, row * M, column * N, residual_stride, residual_outer,
                   residual_count, rows, width, ACT, M, PART)  # fmt: skip


def forward(call: Call, config: Config) -> Launch:
    """y, and z where it is saved."""
    x, weight = call.x, call.weight
    args: dict[str, Argument] = {**forward_arguments(call), "x_stride": x.row_levels[0][1]}
    constants = {
        "ACT": call.act,
        "HALVES": config.m * config.n >= 128 * 32 * config.num_warps,
        "GROUP": config.group,
        "M": config.m,
        "N": config.n,
        "K": config.k,
    }
    tiles = triton.cdiv(x.rows, config.m) * triton.cdiv(weight.rows, config.n)
    programs = min(tiles, call.device.multiprocessors)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    workspace = Scratch("descriptors", (programs * 4 * DESCRIPTOR,), torch.uint8)
    return Launch(linear_tiles, (programs, 1, 1), args, constants, options, workspace=workspace)
