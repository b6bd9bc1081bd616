"""attention and varlen_attention for Hopper, in Triton's Gluon: warps that specialise, as in FlashAttention-3 (Shah et
al., 2024).

One warp brings keys and values by hardware copies (TMA) into a ring of stages; two or three warpgroups of 64 queries
each take them out. A warpgroup asks for the next product of queries and keys before the last one of weights and values
is done, and while one is at its exponentials another has the tensor cores. Blocks of keys are walked from the last to
the first, so that a causal mask is met first. Where tiles are too few to fill the device, PARTS programs share the keys
of one, as in the plain kernel.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.triton import merge, parted, span
from tilewright.ops.attention.triton_tiles import place_of, rates, seen_by
from tilewright.ops.triton_scores import DESCRIPTOR

WARPS = 4
"""Of a warpgroup."""
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def ask(
    tile, base, step, lines, FROM: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Put [ROWS, COLUMNS] from column FROM on under way to `tile`; 0 from `lines` and from WIDTH on."""
    LANES: gl.constexpr = COLUMNS // 8
    PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, PLACES))
    column = FROM + gl.arange(0, COLUMNS, gl.SliceLayout(0, PLACES))
    there = (line < lines)[:, None]
    if FROM + COLUMNS > WIDTH:
        there = there & (column < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(tile, base + line.to(gl.int64)[:, None] * step + column[None, :], mask=there)


@gluon.jit
def arrived(LEFT_OUT: gl.constexpr):
    """Wait until all but the last groups of copies are there for every warp, and for products."""
    async_copy.wait_group(LEFT_OUT)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def soften(
    scores, top, factor, first, low, high, MASKED: gl.constexpr, SIGN: gl.constexpr, N: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """(weights before they are divided by their sum, the largest score, what the sums so far shrink by)."""
    if SIGN != 1:
        scores *= SIGN
    if MASKED:
        key = first + gl.arange(0, N, gl.SliceLayout(0, SCORES))
        scores = gl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), scores, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 1))
    base = gl.where(new == float("-inf"), 0.0, new)  # no key yet: exp2(-Inf - 0) is 0, of -Inf + Inf it is NaN
    rate, level = rates(base, factor)
    p = gl.exp2(scores * rate[:, None] - level[:, None])
    return p, new, gl.exp2((top - base) * factor)


@gluon.jit
def turn(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, number, first, total, sums, top, weights, low, high,
    factor, zero, MASKED: gl.constexpr, SIGN: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, OUT: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Scores of block `number` while the weights of the block before meet its values."""
    at, before = number % STAGES, (number - 1) % STAGES
    mbarrier.wait(k_full.index(at), (number // STAGES) & 1)
    scores = warpgroup_mma(q_tile, k_ring.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((number - 1) // STAGES) & 1)
    total = warpgroup_mma(weights, v_ring.index(before), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(at), count=1)
    p, top, shrink = soften(scores, top, factor, first, low, high, MASKED, SIGN, N, SCORES)
    sums = sums * shrink + gl.sum(p, 1)
    weights = gl.convert_layout(p.to(q_tile.dtype), WEIGHTS)
    total, weights = warpgroup_mma_wait(0, deps=(total, weights))
    mbarrier.arrive(v_empty.index(before), count=1)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return total, sums, top, weights


@gluon.jit
def attend(
    group, row, told,
    BOTTOM: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, SIGN: gl.constexpr,
    PARTS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, DV: gl.constexpr, V_WIDTH: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's M queries, from `row` on: their o and lse; of one of PARTS of the keys, both as they are merged."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    (
        q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, o, lse, batch, queries, keys,
        token_step, left, right, prefix_rows, prefix, start, blocks, edge, whole, factor,
    ) = told  # fmt: skip
    q_tile = q_tiles.index(group)
    query = row + gl.arange(0, M, gl.SliceLayout(1, SCORES))
    low, high = seen_by(query, queries, keys, batch, left, right, prefix_rows, prefix, None,
                        BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    high = gl.where(query < queries, high, 0)
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    zero = gl.zeros([M, N], gl.float32, SCORES)
    total = gl.zeros([M, DV], gl.float32, OUT)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    p, top, _ = soften(scores, top, factor, start + (blocks - 1) * N, low, high, True, SIGN, N, SCORES)
    sums = gl.sum(p, 1)
    weights = gl.convert_layout(p.to(q_tile.dtype), WEIGHTS)
    for number in range(1, blocks - edge):
        total, sums, top, weights = turn(
            q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, number, start + (blocks - 1 - number) * N,
            total, sums, top, weights, low, high, factor, zero, True, SIGN, N, STAGES, SCORES, OUT, WEIGHTS,
        )  # fmt: skip
    for number in range(blocks - edge, blocks - whole):
        total, sums, top, weights = turn(
            q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, number, start + (blocks - 1 - number) * N,
            total, sums, top, weights, low, high, factor, zero, False, SIGN, N, STAGES, SCORES, OUT, WEIGHTS,
        )  # fmt: skip
    if LEFT:
        for number in range(blocks - whole, blocks):
            total, sums, top, weights = turn(
                q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, number, start + (blocks - 1 - number) * N,
                total, sums, top, weights, low, high, factor, zero, True, SIGN, N, STAGES, SCORES, OUT, WEIGHTS,
            )  # fmt: skip
    last = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((blocks - 1) // STAGES) & 1)
    total = warpgroup_mma(weights, v_ring.index(last), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))

    scale = gl.where(sums == 0.0, 0.0, 1.0 / sums)  # of NaN it is NaN
    level = top * factor + gl.log2(sums)  # -Inf where nothing was seen
    scale = gl.convert_layout(scale, gl.SliceLayout(1, OUT))
    line = gl.arange(0, M, gl.SliceLayout(1, OUT))
    out_row = row + line
    columns = gl.arange(0, DV, gl.SliceLayout(0, OUT))
    found = gl.where((scale == 0.0)[:, None], 0.0, total * scale[:, None])
    gl.store(lse + query * PARTS, level if PARTS > 1 else level * LN2, mask=query < queries)
    place = o + out_row.to(gl.int64)[:, None] * token_step + columns[None, :]
    there = (out_row < queries)[:, None]
    gl.store(place, found.to(o.dtype.element_ty), mask=there if V_WIDTH == DV else there & (columns < V_WIDTH)[None, :])


@gluon.jit
def bring(
    k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_at, v_at, start, blocks, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the rings, a stage as soon as all warpgroups are done with it; the first keys are on their way."""
    for number in range(blocks):
        at, odd = number % STAGES, (number // STAGES) & 1
        first = start + (blocks - 1 - number) * N
        if number > 0:
            mbarrier.wait(k_empty.index(at), odd ^ 1)
            mbarrier.expect(k_full.index(at), k_at.block_type.nbytes)
            tma.async_copy_global_to_shared(k_at, [first, 0], k_full.index(at), k_ring.index(at))
        mbarrier.wait(v_empty.index(at), odd ^ 1)
        mbarrier.expect(v_full.index(at), v_at.block_type.nbytes)
        tma.async_copy_global_to_shared(v_at, [first, 0], v_full.index(at), v_ring.index(at))


@gluon.jit(
    do_not_specialize=["rows", "keys", "count", "tiles", "heads", "group", "left", "right", "prefix_rows", "prefix"]
)  # fmt: skip
def attention_hopper(
    q, k, v, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, o, lse,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    left, right, prefix_rows, prefix, count, rows, keys, tiles, heads, group, factor,
    BOTTOM: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, SIGN: gl.constexpr,
    UNIT: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """o and lse of GROUPS M queries; of a part of the keys, both as merged: lse in powers of 2, o in float32."""
    if PARTS > 1:
        gdc_launch_dependents()
    unit = gl.to_tensor(UNIT).to(gl.int64)
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = gl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    # Tiles of one head follow each other, so that what runs at a time shares keys in the L2; the last ones, which see
    # the most, go first.
    slot = tiles.to(gl.int32) - 1 - program % tiles.to(gl.int32)
    both = program // tiles.to(gl.int32)
    batch = (both // heads.to(gl.int32)).to(gl.int64)
    head = (both % heads.to(gl.int32)).to(gl.int64)
    tile, first_query, queries, first_key, there = place_of(
        slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, 1, GROUPS * M
    )
    row = tile * (GROUPS * M)

    # Keys [start, end) are seen by some query of the tile; of the blocks of them, those from `whole` to `edge` by all.
    # Blocks are counted from `start` on, also where another part has the first of them.
    if PREFIX and prefix_kv_len is not None:
        prefix = gl.minimum(gl.maximum(gl.load(prefix_kv_len + batch), 0), there)
    start, whole, edge, end = span(
        row, GROUPS * M, queries, there, batch, left, right, prefix_rows, prefix, None, 1, BOTTOM, LEFT, RIGHT, PREFIX
    )  # fmt: skip
    blocks = gl.maximum((end - start + N - 1) // N, 1)
    edge = gl.maximum(gl.minimum((edge - start) // N, blocks - 1), 0)
    whole = gl.minimum((gl.maximum(whole - start, 0) + N - 1) // N, edge)
    if PARTS > 1:
        share = (blocks + PARTS - 1) // PARTS
        mine = gl.minimum(part * share, blocks)
        blocks = gl.minimum(share, blocks - mine)
        end = gl.where(blocks > 0, gl.minimum(end, start + (mine + blocks) * N), start)
        start += mine * N
        edge = gl.maximum(gl.minimum(edge - mine, blocks - 1), 0)
        whole = gl.minimum(gl.maximum(whole - mine, 0), edge)
        blocks = gl.maximum(blocks, 1)

    dtype: gl.constexpr = q.dtype.element_ty
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], dtype)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, DV], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, M, D], Q_TILE)
    q += batch * q_batch + (first_query + row) * q_row + head * q_head
    for each in gl.static_range(GROUPS):
        ask(q_tiles.index(each), q + each * M * q_row, q_row, queries - row - each * M, 0, WIDTH, M, D, WARPS)
    async_copy.commit_group()
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, N, D], K_TILE)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, N, DV], V_TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()

    # Descriptors end where the sequence does, or what the tile sees: what lies behind is 0, and not read. Behind it
    # begins a tile that has no queries, or none that sees a key, for its sequence may begin where the tensor ends.
    key_head = head // group
    ends = gl.maximum(end, 1)
    first_query = gl.where(queries > 0, first_query, 0)
    first_key = gl.where(end > start, first_key, 0)
    start = gl.where(end > start, start, gl.maximum(ends, there))
    k_at = tma.make_tensor_descriptor(
        k + batch * k_batch + first_key * k_row + key_head * k_head, [ends, WIDTH], [k_row, 1], [N, D], K_TILE
    )
    mbarrier.expect(k_full.index(0), k_at.block_type.nbytes)  # under way while the other descriptor is made
    tma.async_copy_global_to_shared(k_at, [start + (blocks - 1) * N, 0], k_full.index(0), k_ring.index(0))
    v_at = tma.make_tensor_descriptor(
        v + batch * v_batch + first_key * v_row + key_head * v_head, [ends, V_WIDTH], [v_row, 1], [N, DV], V_TILE
    )
    arrived(0)

    number = (batch * heads + head) * rows + first_query
    if PARTS > 1:
        number = number * PARTS + part
        o_at, token_step = o + number * V_WIDTH, gl.to_tensor(PARTS * V_WIDTH).to(gl.int64)
    else:
        o_at, token_step = o + ((batch * rows + first_query) * heads + head) * V_WIDTH, heads * V_WIDTH
    told = (
        q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, o_at, lse + number, batch, queries, there,
        token_step, left, right, prefix_rows, prefix, start, blocks, edge, whole, factor,
    )  # fmt: skip
    W: gl.constexpr = WARPS
    rings = (k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_at, v_at, start, blocks, N, STAGES)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, row, told, BOTTOM, LEFT, RIGHT, PREFIX, SIGN, PARTS, M, N, DV, V_WIDTH, STAGES, W)),
                (attend, (1, row + M, told, BOTTOM, LEFT, RIGHT, PREFIX, SIGN, PARTS, M, N, DV, V_WIDTH, STAGES, W)),
                (bring, rings),
            ],
            [WARPS, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        last = row + 2 * M
        gl.warp_specialize(
            [
                (attend, (0, row, told, BOTTOM, LEFT, RIGHT, PREFIX, SIGN, PARTS, M, N, DV, V_WIDTH, STAGES, W)),
                (attend, (1, row + M, told, BOTTOM, LEFT, RIGHT, PREFIX, SIGN, PARTS, M, N, DV, V_WIDTH, STAGES, W)),
                (attend, (2, last, told, BOTTOM, LEFT, RIGHT, PREFIX, SIGN, PARTS, M, N, DV, V_WIDTH, STAGES, W)),
                (bring, rings),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def forward(call: Call, config: Config) -> Launch | list[Launch]:
    """o and lse."""
    q, k, v, parts = call.q, call.k, call.v, config.parts
    batch = q.shape[0] if len(q.shape) == 4 else 1
    count, unit = arguments.tiles_of(call, config.m, 1), arguments.unit_of(q, k, v)
    masks = arguments.mask_arguments(call)
    found: dict[str, Argument] = (
        {"o": call.tensors["o"], "lse": call.tensors["lse"]} if parts == 1 else parted(call, parts)
    )
    args: dict[str, Argument] = {
        "q": q, "k": k, "v": v, **found,
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **{name: value for name, value in masks.items() if not name.startswith("mask")},
        **arguments.heads_of(call), "tiles": count, "factor": arguments.number_arguments(call)["factor"],
    }  # fmt: skip
    constants = {
        **arguments.mask_constants(call), "SIGN": arguments.sign_of(call), "UNIT": unit,
        "PARTS": parts, "GROUPS": config.m // 64, "M": 64, "N": config.n, "D": width_of(q), "DV": width_of(v),
        "WIDTH": q.columns, "V_WIDTH": v.columns, "STAGES": config.stages, "WARPS": WARPS,
        "REGISTERS": config.registers,
    }  # fmt: skip
    programs = count * batch * q.shape[-2] * parts
    workspace = Scratch("descriptors", (programs * 2 * DESCRIPTOR,), torch.uint8)
    made = Launch(attention_hopper, (programs, 1, 1), args, constants, {"num_warps": WARPS}, workspace=workspace)
    return made if parts == 1 else [made, merge(call, parts, found)]
