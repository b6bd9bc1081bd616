"""How Triton runs the gradients of attention and varlen_attention. The walks of its programs are in
`triton_backward_walks`.

`attention_delta` turns what forward saved into two numbers a row: lse and delta - dlse. P is exp(S - lse) and dS is
P (dP - delta + dlse) once more, in the two that follow. `attention_keys` has a tile of keys a program, which walks the
queries of every head of their group; it works on S^T, so that P^T and dS^T are left operands as they come out of a
product. `attention_queries` has a tile of queries, which walks keys. Tiles that a mask cuts are walked apart from those
that it leaves whole. No sum depends on timing; in the fused form, `attention_keys` adds to dq in memory, in any order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.backward_configs import DELTA_ROWS
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.softmax import scale_of
from tilewright.ops.attention.triton import DESCRIPTOR
from tilewright.ops.attention.triton_backward_walks import LOG2E, tile_of, walk_keys, walk_queries
from tilewright.ops.attention.triton_tiles import place_of, precision, seen_by, seers


@triton.jit(do_not_specialize=["rows", "heads", "total", "apart"])
def attention_delta(
    do, o, lse, dlse, stats, dq_sum, do_batch, do_row, do_head, do_step, o_batch, o_row, o_head, o_step,
    lse_batch, lse_head, lse_row, dlse_batch, dlse_head, dlse_row, rows, heads, total, apart,
    R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """stats[0] = lse, of half precision in powers of 2, and Inf where a row sees nothing, so that its weights are 0;
    stats[1] = delta - dlse. dq_sum, where it is given, begins with 0."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    mask = number < total
    row, which = number % rows, number // rows
    batch, head = which // heads, which % heads
    value = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, mask=mask, other=0.0)
    # Where scores are so large that their rounding is more than 1, lse is raised by more than that: weights that should
    # be 1 are lost, as they are in any case, but none is beyond 1 by orders of magnitude.
    value += tl.where(tl.abs(value) > 16777216.0, tl.abs(value) * 9.5367431640625e-07, 0.0)
    if o.dtype.element_ty != tl.float32:
        value *= LOG2E
    tl.store(stats + number, tl.where(value == float("-inf"), float("inf"), value), mask=mask)
    found = tl.zeros([R], tl.float32)
    if dlse is not None:
        found -= tl.load(dlse + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=mask, other=0.0)
    if do is not None:
        columns = tl.arange(0, DV)
        there = mask[:, None] & (columns < V_WIDTH)[None, :]
        at = (batch * do_batch + row * do_row + head * do_head) * UNIT
        grad = do + at[:, None] + (columns if do_step is None else columns * do_step)[None, :]
        at = (batch * o_batch + row * o_row + head * o_head) * UNIT
        out = o + at[:, None] + (columns if o_step is None else columns * o_step)[None, :]
        terms = tl.load(grad, mask=there, other=0.0).to(tl.float32) * tl.load(out, mask=there, other=0.0)
        found += tl.sum(terms, 1)
    tl.store(stats + apart + number, found, mask=mask)
    if dq_sum is not None:
        at = dq_sum + number[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(at, tl.zeros([R, D], tl.float32), mask=mask[:, None])


@triton.jit(
    do_not_specialize=[
        "rows", "keys", "count", "tiles", "heads", "left", "right", "prefix_rows", "prefix", "limit", "apart",
    ]
)  # fmt: skip
def attention_keys(
    do, q, k, v, stats, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, mask, state, dk, dv, dq_sum,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, left, right, prefix_rows, prefix, count, rows, keys,
    tiles, heads, factor, limit, kept_scale, scale, apart,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, DROPS: tl.constexpr,
    TMA: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys of one head. Where `dq_sum` is given, what they add to dq is added to it."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = tl.program_id(0)
    # Tiles of one head follow each other, so that what runs at a time shares queries in the L2; the first ones, which
    # most queries see, go first.
    slot, pair = program % tiles.to(tl.int32), program // tiles.to(tl.int32)
    key_heads = (heads // GROUP).to(tl.int32)
    batch, key_head = (pair // key_heads).to(tl.int64), (pair % key_heads).to(tl.int64)
    tile, first_key, length, first_query, queries = place_of(
        slot, batch, keys, rows, None, cu_seqlens_k, cu_seqlens_q, count, 1, N
    )
    there = length
    if kv_len is not None:
        there = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), keys).to(tl.int32)

    first = tile * N
    last = tl.minimum(first + N, there)
    place = first + tl.arange(0, N)
    k_first = k + batch * k_batch + first_key * k_row + key_head * k_head
    v_first = v + batch * v_batch + first_key * v_row + key_head * v_head
    mine = tile_of(k_first, 0, first, there, k_row, None, True, False, N, D, WIDTH)
    values = tile_of(v_first, 0, first, there, v_row, None, True, False, N, DV, V_WIDTH)

    start, whole, edge, end = seers(first, last, queries, there, batch, left, right, prefix_rows, prefix,
                                    prefix_kv_len, BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    start = tl.minimum(start, queries) // M * M
    end = tl.where(first < there, tl.maximum(end, start), start)
    if mask is not None:
        whole, edge = start, start
    else:
        most = tl.cdiv(end, M) * M
        whole = tl.where(last - first < N, most, tl.maximum(tl.minimum(tl.cdiv(whole, M) * M, most), start))
        edge = tl.maximum(tl.minimum(tl.maximum(edge, 0), end) // M * M, whole)
    before = (whole - start) // M
    cut = before + tl.maximum(tl.cdiv(end - edge, M), 0)
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)

    dk_tile = tl.zeros([N, D], tl.float32)
    dv_tile = tl.zeros([N, DV], tl.float32)
    at_q = q + batch * q_batch + first_query * q_row + key_head * GROUP * q_head
    at_do = do
    if do is not None:
        at_do = do + batch * do_batch + first_query * do_row + key_head * GROUP * do_head
    at_stats, at_sum = stats, dq_sum
    if TMA:
        if dq_sum is not None:
            at_sum = dq_sum + ((batch * heads + key_head * GROUP) * rows + first_query) * D
            at_sum = tl.make_tensor_descriptor(
                at_sum, [GROUP, tl.maximum(queries, 1), D], [rows.to(tl.int64) * D, D, 1], [1, M, D]
            )
        at_stats = tl.make_tensor_descriptor(stats, [(2 * apart).to(tl.int32)], [1], [M])
        lines = tl.maximum(queries, 1)
        at_q = tl.make_tensor_descriptor(at_q, [GROUP, lines, WIDTH], [q_head, q_row, 1], [1, M, D])
        if do is not None:
            at_do = tl.make_tensor_descriptor(at_do, [GROUP, lines, V_WIDTH], [do_head, do_row, 1], [1, M, DV])
    for which in tl.range(0, GROUP):
        head = key_head * GROUP + which
        number = (batch * heads + head) * rows + first_query
        one_q, one_do, at_mask = at_q, at_do, mask
        if not TMA:
            one_q = at_q + which * q_head
            if do is not None:
                one_do = at_do + which * do_head
        if mask is not None:
            at_mask = mask + batch * mask_batch + head * mask_head
        if mask is None:
            dk_tile, dv_tile = walk_queries(
                mine, values, one_q, one_do, at_sum, which, at_stats, dk_tile, dv_tile, (edge - whole) // M,
                whole, 0, 0, queries, place, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                at_mask, mask_row, mask_step, factor, q_row, do_row, do_step, drawn, offsets, number, apart, first,
                limit, kept_scale, False, BOTTOM, LEFT, RIGHT, PREFIX, DROPS, dk is not None or dq_sum is not None,
                dv is not None and do is not None, TMA, M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
            )  # fmt: skip
        dk_tile, dv_tile = walk_queries(
            mine, values, one_q, one_do, at_sum, which, at_stats, dk_tile, dv_tile, cut,
            start, before, edge, queries, place, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
            at_mask, mask_row, mask_step, factor, q_row, do_row, do_step, drawn, offsets, number, apart, first, limit,
            kept_scale, True, BOTTOM, LEFT, RIGHT, PREFIX, DROPS, dk is not None or dq_sum is not None,
            dv is not None and do is not None, TMA, M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip

    token = (batch * keys + first_key + place) * key_heads + key_head
    inside, real = (place < length)[:, None], (place < there)[:, None]  # no weight times NaN is not 0
    if dk is not None:
        dk_tile = tl.where(real, dk_tile, 0.0)
        columns = tl.arange(0, D)
        store = inside if WIDTH == D else inside & (columns < WIDTH)[None, :]
        tl.store(dk + token[:, None] * WIDTH + columns[None, :], (dk_tile * scale).to(dk.dtype.element_ty), mask=store)
    if dv is not None:
        dv_tile = tl.where(real, dv_tile, 0.0)
        if DROPS:
            dv_tile *= kept_scale
        columns = tl.arange(0, DV)
        store = inside if V_WIDTH == DV else inside & (columns < V_WIDTH)[None, :]
        tl.store(dv + token[:, None] * V_WIDTH + columns[None, :], dv_tile.to(dv.dtype.element_ty), mask=store)


@triton.jit(
    do_not_specialize=[
        "rows", "keys", "count", "tiles", "heads", "left", "right", "prefix_rows", "prefix", "limit",
        "apart",
    ]
)  # fmt: skip
def attention_queries(
    do, q, k, v, stats, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, mask, state, dq,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, left, right, prefix_rows, prefix, count, rows, keys,
    tiles, heads, factor, limit, kept_scale, scale, apart,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, DROPS: tl.constexpr,
    TMA: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of M queries of one head."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = tl.program_id(0)
    slot = tiles.to(tl.int32) - 1 - program % tiles.to(tl.int32)  # as in forward: the last ones see the most
    pair = program // tiles.to(tl.int32)
    batch, head = (pair // heads.to(tl.int32)).to(tl.int64), (pair % heads.to(tl.int32)).to(tl.int64)
    tile, first_query, queries, first_key, there = place_of(
        slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, 1, M
    )
    begin = tile * M
    query = begin + tl.arange(0, M)
    inside = query < queries
    low, high = seen_by(query, queries, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                        BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    q_first = q + batch * q_batch + first_query * q_row + head * q_head
    mine = tile_of(q_first, 0, begin, queries, q_row, None, True, False, M, D, WIDTH)
    grad = None
    if do is not None:
        do_first = do + batch * do_batch + first_query * do_row + head * do_head
        grad = tile_of(do_first, 0, begin, queries, do_row, do_step, True, False, M, DV, V_WIDTH)
    numbers = (batch * heads + head) * rows + first_query + query
    power = tl.load(stats + numbers, mask=inside, other=0.0)
    shift = tl.load(stats + apart + numbers, mask=inside, other=0.0)

    # Keys [start, end) are seen by some row of the tile, those of [whole, edge) by all of them.
    start = tl.minimum(tl.min(tl.where(inside, low, there), 0), there) // N * N
    end = tl.maximum(tl.minimum(tl.max(tl.where(inside, high, 0), 0), there), start)
    if mask is not None:
        whole, edge = start, start
    else:
        whole, edge = start, end // N * N
        if LEFT:
            whole = tl.minimum(tl.cdiv(tl.max(tl.where(inside, low, 0), 0), N), tl.cdiv(end, N)) * N
        if RIGHT or PREFIX:
            edge = tl.minimum(tl.maximum(tl.min(tl.where(inside, high, there), 0), 0), end) // N * N
        edge = tl.maximum(edge, whole)
    before = (whole - start) // N
    cut = before + tl.maximum(tl.cdiv(end - edge, N), 0)

    key_head = head // GROUP
    at_k = k + batch * k_batch + first_key * k_row + key_head * k_head
    at_v = v + batch * v_batch + first_key * v_row + key_head * v_head
    if TMA:
        lines = tl.maximum(there, 1)
        at_k = tl.make_tensor_descriptor(at_k, [1, lines, WIDTH], [k_row, k_row, 1], [1, N, D])
        at_v = tl.make_tensor_descriptor(at_v, [1, lines, V_WIDTH], [v_row, v_row, 1], [1, N, DV])
    mask_rows = None
    if mask is not None:
        mask_rows = mask + batch * mask_batch + head * mask_head + query.to(tl.int64) * mask_row
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)

    total = tl.zeros([M, D], tl.float32)
    if mask is None:
        total = walk_keys(
            mine, grad, power, shift, at_k, at_v, total, (edge - whole) // N, whole, 0, 0, there, low, high, inside,
            mask_rows, mask_step, factor, k_row, v_row, drawn, offsets, numbers, limit, kept_scale,
            False, DROPS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    total = walk_keys(
        mine, grad, power, shift, at_k, at_v, total, cut, start, before, edge, there, low, high, inside,
        mask_rows, mask_step, factor, k_row, v_row, drawn, offsets, numbers, limit, kept_scale,
        True, DROPS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip

    columns = tl.arange(0, D)
    store = inside[:, None] if WIDTH == D else inside[:, None] & (columns < WIDTH)[None, :]
    token = (batch * rows + first_query + query) * heads + head
    out = dq + token[:, None] * WIDTH + columns[None, :]
    tl.store(out, (total * scale).to(dq.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=["rows", "heads", "total"])
def attention_finish(
    dq_sum, dq, scale, rows, heads, total, R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """dq, from rows of heads to heads of rows."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, D)
    mask = (number < total)[:, None] & (columns < WIDTH)[None, :]
    found = tl.load(dq_sum + number[:, None] * D + columns[None, :], mask=mask, other=0.0)
    row, which = number % rows, number // rows
    token = (which // heads * rows + row) * heads + which % heads
    tl.store(dq + token[:, None] * WIDTH + columns[None, :], (found * scale).to(dq.dtype.element_ty), mask=mask)


def backward(call: Call, config: Config) -> list[Launch]:
    """dq, dk, dv, as far as they are needed: three launches, of which two find P."""
    common = _Common(call)
    stages = [common.delta(None)]
    if call.has("dk") or call.has("dv"):
        stages.append(common.keys(config, None))
    if call.has("dq"):
        tiles = arguments.tiles_of(call, config.q_m, 1)
        stages.append(common.launch(attention_queries, config, "q_", tiles, call.q.shape[-2], 2, dq=call.dq))
    return stages


def fused(call: Call, config: Config) -> list[Launch]:
    """The same, where P is found once, and dq is summed in memory in the order of arrival."""
    common = _Common(call)
    total = Scratch("dq_sum", (common.lines, width_of(call.q)))
    args: dict[str, Argument] = {"dq_sum": total, "dq": call.dq, "scale": scale_of(call.scale, call.q.columns)}
    args |= {"rows": call.q.shape[-3], "heads": call.q.shape[-2], "total": common.lines}
    constants = {"R": DELTA_ROWS, "D": width_of(call.q), "WIDTH": call.q.columns}
    finish = Launch(attention_finish, (-(-common.lines // DELTA_ROWS), 1, 1), args, constants, {"num_warps": 4})
    return [common.delta(total), common.keys(config, total), finish]


class _Common:
    """What the launches of one call share."""

    def __init__(self, call: Call) -> None:
        q, k, v, do = call.q, call.k, call.v, call.do
        self.call = call
        self.batch = q.shape[0] if len(q.shape) == 4 else 1
        self.lines = self.batch * q.shape[-2] * q.shape[-3]
        self.unit = arguments.unit_of(q, k, v, *(t for t in (do, call.o) if t is not None))
        apart = -(-self.lines // 4) * 4
        self.found: dict[str, Argument] = {
            "do": do, **_strides("do", do, self.unit), "stats": Scratch("stats", (2, apart)), "apart": apart,
        }  # fmt: skip
        self.widths = {"D": width_of(q), "DV": width_of(v), "V_WIDTH": v.columns, "UNIT": self.unit}
        drops = call.dropout_p > 0.0
        self.inputs: dict[str, Argument] = {
            **self.found, "q": q, "k": k, "v": v, "state": call.state if drops else None, "heads": q.shape[-2],
            **arguments.strides(q, self.unit), **arguments.strides(k, self.unit), **arguments.strides(v, self.unit),
            **arguments.mask_arguments(call), **_numbers(call),
        }  # fmt: skip
        self.constants = {
            **arguments.mask_constants(call), **self.widths, "DROPS": drops, "WIDTH": q.columns,
            "GROUP": arguments.heads_of(call)["group"], "PRECISION": precision(call),
        }  # fmt: skip

    def delta(self, dq_sum: Scratch | None) -> Launch:
        call = self.call
        args: dict[str, Argument] = {
            **self.found, "o": call.o, "lse": call.lse, "dlse": call.dlse, "dq_sum": dq_sum,
            **_strides("o", call.o, self.unit), **_row_strides("lse", call.lse), **_row_strides("dlse", call.dlse),
            "rows": call.q.shape[-3], "heads": call.q.shape[-2], "total": self.lines,
        }  # fmt: skip
        programs = -(-self.lines // DELTA_ROWS)
        return Launch(attention_delta, (programs, 1, 1), args, {**self.widths, "R": DELTA_ROWS}, {"num_warps": 4})

    def keys(self, config: Config, dq_sum: Scratch | None) -> Launch:
        call, n = self.call, config.k_n
        count = call.k.shape[-3]
        tiles = count // n + call.cu_seqlens_k.shape[0] if "cu_seqlens_k" in call.tensors else -(-count // n)
        outputs = {"dk": call.dk, "dv": call.dv, "dq_sum": dq_sum}
        return self.launch(attention_keys, config, "k_", tiles, call.k.shape[-2], 4, **outputs)

    def launch(
        self, function: Any, config: Config, prefix: str, tiles: int, heads: int, descriptors: int, **outputs: Argument
    ) -> Launch:
        sizes = {"M": config[f"{prefix}m"], "N": config[f"{prefix}n"], "TMA": bool(config.tma)}
        options = {name: config[f"{prefix}{name.removeprefix('num_')}"] for name in ("num_warps", "num_stages")}
        programs, workspace = tiles * self.batch * heads, None
        if config.tma:
            workspace = Scratch(f"{prefix}descriptors", (programs * descriptors * DESCRIPTOR,), torch.uint8)
        given = {**self.inputs, **outputs, "tiles": tiles}
        return Launch(function, (programs, 1, 1), given, {**self.constants, **sizes}, options, workspace=workspace)


def _numbers(call: Call) -> dict[str, Argument]:
    """The scale with its sign, of scores and of gradients."""
    scale = scale_of(call.scale, call.q.columns)
    factor = scale if call.q.dtype == torch.float32 else scale * arguments.LOG2E
    return {**arguments.number_arguments(call), "factor": factor, "scale": scale}


def _strides(name: str, facts: TensorFacts | None, unit: int) -> dict[str, Argument]:
    """Of a gradient or of o, whose columns need not lie side by side."""
    if facts is None:
        return {f"{name}_{which}": 0 for which in ("batch", "row", "head")} | {f"{name}_step": None}
    step = facts.column_stride
    return {**arguments.strides(facts, unit), f"{name}_step": None if step == 1 else step}


def _row_strides(name: str, facts: TensorFacts | None) -> dict[str, Argument]:
    """Of [B, H, S] or [H, T]."""
    batch, head, row = (0, 0, 0) if facts is None else (0, *facts.stride)[-3:]
    return {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
