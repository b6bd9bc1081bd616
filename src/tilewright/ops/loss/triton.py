"""How Triton runs the loss family: bce_with_logits in one pass over its inputs, and its gradient in another, or in the
first all of it but a factor.

A sum has two stages in an order that shape and device fix: each program adds up the tiles that it visits and leaves one
number, a second launch adds those. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.loss.configs import divisor, inputs_of, is_flat, reduces, scales
from tilewright.ops.loss.log1p import LOG1P as _LOG1P
from tilewright.ops.triton_rows import load, places, store, tile_at

LOG1P, DEGREE = tl.constexpr(_LOG1P), tl.constexpr(len(_LOG1P) - 1)


@triton.jit
def softplus(x, u):
    """log(1 + exp(-x)) in float32; u = exp(-|x|), which never overflows."""
    ratio = u * LOG1P[DEGREE] + LOG1P[DEGREE - 1]
    for i in tl.static_range(2, DEGREE + 1):
        ratio = ratio * u + LOG1P[DEGREE - i]
    return u * ratio + tl.where(x < 0.0, -x, 0.0)


@triton.jit
def slope(x, y, u, positive_weight, HAS_POS_WEIGHT: tl.constexpr):
    """(1 - y) s(x) - p y s(-x): both logistic functions are had from one exponential and one quotient."""
    near = 1.0 / (1.0 + u)
    far = u * near
    positive = y * tl.where(x < 0.0, near, far)
    if HAS_POS_WEIGHT:
        positive *= positive_weight
    return (1.0 - y) * tl.where(x < 0.0, far, near) - positive


@triton.jit(do_not_specialize=["total_rows", "logits_count", "targets_count", "weight_count", "pos_weight_count"])
def bce_forward(
    logits, targets, weight, pos_weight, loss, partials, unit,
    logits_stride, logits_outer, logits_count, logits_step, targets_stride, targets_outer, targets_count, targets_step,
    weight_stride, weight_outer, weight_count, weight_step,
    pos_weight_stride, pos_weight_outer, pos_weight_count, pos_weight_step,
    total_rows, total_columns, divisor,
    HAS_WEIGHT: tl.constexpr, HAS_POS_WEIGHT: tl.constexpr, REDUCE: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The loss of each element; REDUCE: the sum of every `num_programs`-th tile, one number a program. `unit`: the
    gradient for an upstream of 1, which is that over `divisor`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(total_rows, ROWS).to(tl.int64) * tl.cdiv(total_columns, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    upstream = tl.math.div_rn(1.0, divisor)
    for tile in tl.range(program, tiles, tl.num_programs(0)):
        rows, columns, mask = tile_at(tile, total_rows, total_columns, ROWS, BLOCK, FLAT)
        x = load(logits, rows, columns, mask, logits_stride, logits_outer, logits_count, logits_step, "")
        y = load(targets, rows, columns, mask, targets_stride, targets_outer, targets_count, targets_step,
                 "")  # fmt: skip
        u = tl.exp(-tl.abs(x))
        value = softplus(x, u)
        p = 1.0
        if HAS_POS_WEIGHT:
            p = load(pos_weight, rows, columns, mask, pos_weight_stride, pos_weight_outer, pos_weight_count,
                     pos_weight_step, "evict_last")  # fmt: skip
            value *= 1.0 + (p - 1.0) * y
        value += (1.0 - y) * x
        w = 1.0
        if HAS_WEIGHT:
            w = load(weight, rows, columns, mask, weight_stride, weight_outer, weight_count, weight_step,
                     "evict_last")  # fmt: skip
            value *= w
        if unit is not None:
            store(unit, rows, columns, total_columns, mask, upstream * w * slope(x, y, u, p, HAS_POS_WEIGHT))
        if REDUCE:
            total += tl.where(mask, value, 0.0)
        else:
            store(loss, rows, columns, total_columns, mask, value)
    if REDUCE:
        tl.store(partials + program, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit(do_not_specialize=["groups"])
def bce_total(partials, loss, groups, divisor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One number from those of all programs, divided and rounded once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, groups, BLOCK):
        total += tl.load(partials + start + lanes, mask=start + lanes < groups, other=0.0)
    tl.store(loss, tl.math.div_rn(tl.sum(total, axis=0), divisor).to(loss.dtype.element_ty))


@triton.jit(
    do_not_specialize=["total_rows", "dy_count", "logits_count", "targets_count", "weight_count", "pos_weight_count"]
)
def bce_backward(
    dy, logits, targets, weight, pos_weight, dlogits, dy_stride, dy_outer, dy_count, dy_step,
    logits_stride, logits_outer, logits_count, logits_step, targets_stride, targets_outer, targets_count, targets_step,
    weight_stride, weight_outer, weight_count, weight_step,
    pos_weight_stride, pos_weight_outer, pos_weight_count, pos_weight_step,
    total_rows, total_columns, divisor,
    HAS_WEIGHT: tl.constexpr, HAS_POS_WEIGHT: tl.constexpr, SCALAR: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits = d w ((1 - y) s(x) - p y s(-x)); SCALAR: d is one number over `divisor`."""
    rows, columns, mask = tile_at(tl.program_id(0).to(tl.int64), total_rows, total_columns, ROWS, BLOCK, FLAT)
    x = load(logits, rows, columns, mask, logits_stride, logits_outer, logits_count, logits_step, "")
    y = load(targets, rows, columns, mask, targets_stride, targets_outer, targets_count, targets_step, "")
    p = 1.0
    if HAS_POS_WEIGHT:
        p = load(pos_weight, rows, columns, mask, pos_weight_stride, pos_weight_outer, pos_weight_count,
                 pos_weight_step, "evict_last")  # fmt: skip
    if SCALAR:
        d = tl.math.div_rn(tl.load(dy).to(tl.float32), divisor)
    else:
        d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
    if HAS_WEIGHT:
        d *= load(weight, rows, columns, mask, weight_stride, weight_outer, weight_count, weight_step, "evict_last")
    found = d * slope(x, y, tl.exp(-tl.abs(x)), p, HAS_POS_WEIGHT)
    store(dlogits, rows, columns, total_columns, mask, found)


@triton.jit
def bce_scale(dy, unit, dlogits, total, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """dlogits = dy * unit of `total` elements, every `num_programs`-th block a program. IN_PLACE: they are one tensor,
    which stays as it is where dy is 1."""
    d = tl.load(dy).to(tl.float32)
    blocks = tl.cdiv(total, BLOCK).to(tl.int64)
    if IN_PLACE:
        blocks = tl.where(d == 1.0, 0, blocks)
    for block in tl.range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        tl.store(dlogits + place, tl.load(unit + place, mask=inside, other=0.0) * d, mask=inside)


def _shared(call: Call, config: Config) -> tuple[int, dict[str, Argument], dict[str, Any]]:
    """Tiles, and the arguments and constants that both passes have."""
    logits, flat = call.logits, is_flat(call)
    rows, columns = (1, logits.numel) if flat else (logits.rows, logits.columns)
    tensors: dict[str, TensorFacts | None] = {n: call.tensors[n] for n in ("logits", "targets", "weight", "pos_weight")}
    args: dict[str, Argument] = {**tensors, **places(flat, **tensors), "total_rows": rows, "total_columns": columns}
    constants = {
        "HAS_WEIGHT": call.has("weight"),
        "HAS_POS_WEIGHT": call.has("pos_weight"),
        "FLAT": flat,
        "ROWS": 1 if flat else config.rows,  # a config may come from a call with more rows
        "BLOCK": config.block,
    }
    return triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.block), args, constants


def forward(call: Call, config: Config) -> tuple[Launch, ...]:
    """bce_with_logits."""
    tiles, args, constants = _shared(call, config)
    options = {"num_warps": config.num_warps}
    args |= {"unit": call.unit, "divisor": divisor(call)}
    if not reduces(call):
        args |= {"loss": call.loss, "partials": None}
        return (Launch(bce_forward, (tiles, 1, 1), args, {**constants, "REDUCE": False, "PDL": False}, options),)
    groups = min(tiles, call.device.multiprocessors * config.per_sm)
    pdl = call.device.kind == "cuda" and call.device.sm >= 90
    partials = Scratch("partials", (groups,))
    args |= {"loss": None, "partials": partials}
    first = Launch(bce_forward, (groups, 1, 1), args, {**constants, "REDUCE": True, "PDL": pdl}, options)
    block = min(1024, max(32, triton.next_power_of_2(groups)))
    rest: dict[str, Argument] = {"partials": partials, "loss": call.loss, "groups": groups, "divisor": divisor(call)}
    return first, Launch(
        bce_total, (1, 1, 1), rest, {"BLOCK": block, "PDL": pdl}, {"num_warps": max(1, min(4, block // 256))}, pdl=pdl
    )


def backward(call: Call, config: Config) -> Launch:
    """bce_with_logits_backward."""
    if scales(call):
        return _scale(call, config)
    tiles, args, constants = _shared(call, config)
    scalar = "dy" not in inputs_of(call)
    dy = {"dy": None if scalar else call.dy}
    args |= {"dy": call.dy, **places(constants["FLAT"], **dy), "dlogits": call.dlogits, "divisor": divisor(call)}
    return Launch(bce_backward, (tiles, 1, 1), args, {**constants, "SCALAR": scalar}, {"num_warps": config.num_warps})


def _scale(call: Call, config: Config) -> Launch:
    total = call.unit.numel
    programs = min(triton.cdiv(total, config.block), call.device.multiprocessors * config.per_sm)
    args: dict[str, Argument] = {"dy": call.dy, "unit": call.unit, "dlogits": call.dlogits, "total": total}
    constants = {"IN_PLACE": "dlogits" in call.aliased, "BLOCK": config.block}
    return Launch(bce_scale, (programs, 1, 1), args, constants, {"num_warps": config.num_warps})
