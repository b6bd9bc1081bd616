"""attention over so few keys that a program holds all of them, for Hopper, in Triton's Gluon.

Such a call is over in a few microseconds, most of which are waits: so queries, keys and values are asked for at once,
by copies that need no descriptor, and there is one product, one softmax and one product more, without a loop. A head of
72 columns is held in 64 and 16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.hopper import LN2, arrived, ask, soften
from tilewright.ops.attention.triton import columns_of, span
from tilewright.ops.attention.triton_tiles import place_of, seen_by
from tilewright.ops.configs import power_of_2_at_least


@gluon.jit
def tile_of(
    base, step, lines, FROM: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Where [ROWS, COLUMNS] is under way to."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], base.dtype.element_ty)
    tile = gl.allocate_shared_memory(base.dtype.element_ty, [ROWS, COLUMNS], TILE)
    ask(tile, base, step, lines, FROM, WIDTH, ROWS, COLUMNS, WARPS)
    return tile


@gluon.jit
def weigh(weights, values, M: gl.constexpr, DV: gl.constexpr, WARPS: gl.constexpr):
    """Of the weights [M, N] and values [N, DV] the product, under way."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DV, 16])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
    return warpgroup_mma(weights, values, gl.zeros([M, DV], gl.float32, OUT), use_acc=False, is_async=True)


@gluon.jit
def put(
    o, total, scale, row, queries, step, FROM: gl.constexpr, M: gl.constexpr, DV: gl.constexpr, V_WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The columns of o from FROM on."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DV, 16])
    scale = gl.convert_layout(scale, gl.SliceLayout(1, OUT))
    found = gl.where((scale == 0.0)[:, None], 0.0, total * scale[:, None])
    line = row + gl.arange(0, M, gl.SliceLayout(1, OUT))
    column = FROM + gl.arange(0, DV, gl.SliceLayout(0, OUT))
    there = (line < queries)[:, None]
    place = o + line.to(gl.int64)[:, None] * step + column[None, :]
    gl.store(
        place, found.to(o.dtype.element_ty), mask=there if FROM + DV <= V_WIDTH else there & (column < V_WIDTH)[None, :]
    )


@gluon.jit(do_not_specialize=["rows", "keys", "tiles", "heads", "group", "right"])
def attention_short(
    q, k, v, kv_len, o, lse, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    right, rows, keys, tiles, heads, group, factor,
    BOTTOM: gl.constexpr, RIGHT: gl.constexpr, SIGN: gl.constexpr, UNIT: gl.constexpr, WHOLE: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr, DV_REST: gl.constexpr,
    WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """o and lse of M queries. WHOLE: all of them see N keys."""
    unit = gl.to_tensor(UNIT).to(gl.int64)
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = gl.program_id(0)
    slot = program % tiles.to(gl.int32)
    both = program // tiles.to(gl.int32)
    batch = (both // heads.to(gl.int32)).to(gl.int64)
    head = (both % heads.to(gl.int32)).to(gl.int64)
    tile, _, queries, _, there = place_of(slot, batch, rows, keys, kv_len, None, None, 0, 1, M)
    row = tile * M
    _, _, _, end = span(
        row, M, queries, there, batch, 0, right, 0, 0, None, 1, BOTTOM, False, RIGHT, False
    )  # fmt: skip

    q += batch * q_batch + row * q_row + head * q_head
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    q_tile = tile_of(q, q_row, queries - row, 0, WIDTH, M, D, WARPS)
    k_tile = tile_of(k, k_row, end, 0, WIDTH, N, D, WARPS)
    if D_REST:
        q_rest = tile_of(q, q_row, queries - row, D, WIDTH, M, D_REST, WARPS)
        k_rest = tile_of(k, k_row, end, D, WIDTH, N, D_REST, WARPS)
    async_copy.commit_group()
    v_tile = tile_of(v, v_row, end, 0, V_WIDTH, N, DV, WARPS)
    if DV_REST:
        v_rest = tile_of(v, v_row, end, DV, V_WIDTH, N, DV_REST, WARPS)
    async_copy.commit_group()

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    query = row + gl.arange(0, M, gl.SliceLayout(1, SCORES))
    low, high = seen_by(query, queries, there, batch, 0, right, 0, 0, None, BOTTOM, False, RIGHT, False)
    high = gl.where(query < queries, high, 0)
    arrived(1)
    scores = warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), gl.zeros([M, N], gl.float32, SCORES), use_acc=False, is_async=True
    )
    if D_REST:
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    p, top, _ = soften(scores, top, factor, 0, low, high, not WHOLE, SIGN, N, SCORES)
    sums = gl.sum(p, 1)
    weights = p.to(q.dtype.element_ty)
    arrived(0)
    total = weigh(weights, v_tile, M, DV, WARPS)
    if DV_REST:
        rest = weigh(weights, v_rest, M, DV_REST, WARPS)
        rest = warpgroup_mma_wait(0, deps=(rest,))
    total = warpgroup_mma_wait(0, deps=(total,))

    scale = gl.where(sums == 0.0, 0.0, 1.0 / sums)  # of NaN it is NaN
    level = top * factor + gl.log2(sums)  # -Inf where nothing was seen
    gl.store(lse + (batch * heads + head) * rows + query, level * LN2, mask=query < queries)
    o += (batch * rows * heads + head) * V_WIDTH
    put(o, total, scale, row, queries, heads * V_WIDTH, 0, M, DV, V_WIDTH, WARPS)
    if DV_REST:
        put(o, rest, scale, row, queries, heads * V_WIDTH, DV, M, DV_REST, V_WIDTH, WARPS)


def forward(call: Call, config: Config) -> Launch:
    """o and lse."""
    q, k, v, m = call.q, call.k, call.v, config.m
    count, unit, n = (
        arguments.tiles_of(call, m, 1),
        arguments.unit_of(q, k, v),
        max(16, power_of_2_at_least(k.shape[-3])),
    )
    masks = arguments.mask_arguments(call)
    rules = arguments.mask_constants(call)
    (wide, rest), (v_wide, v_rest) = columns_of(q, False), columns_of(v, False)
    args: dict[str, Argument] = {
        "q": q, "k": k, "v": v, "kv_len": masks["kv_len"], "o": call.o, "lse": call.lse,
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        "right": masks["right"], "rows": masks["rows"], "keys": masks["keys"],
        **arguments.heads_of(call), "tiles": count, "factor": arguments.number_arguments(call)["factor"],
    }  # fmt: skip
    whole = not rules["RIGHT"] and not call.has("kv_len") and n == k.shape[-3]
    constants = {
        "BOTTOM": rules["BOTTOM"], "RIGHT": rules["RIGHT"], "SIGN": arguments.sign_of(call), "UNIT": unit,
        "WHOLE": whole, "M": m, "N": n, "D": wide, "D_REST": rest, "DV": v_wide, "DV_REST": v_rest,
        "WIDTH": q.columns, "V_WIDTH": v.columns, "WARPS": m // 16,
    }  # fmt: skip
    return Launch(attention_short, (count * q.shape[0] * q.shape[-2], 1, 1), args, constants, {"num_warps": m // 16})
