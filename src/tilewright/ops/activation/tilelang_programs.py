"""Device code of the activation family in TileLang: one program a pass, for one input or a gate and a value.

Only `tilelang.py` beside this file calls these, when a launch is compiled. How tensors are read is in `tilelang_rows`.

`pack` says how gate and up lie in one tensor: "halves", "pairs" where they alternate, "" where each is its own. Halves
are read as two tensors of which one starts a row's width later. Pairs are read and written whole: `vec` of them are one
access. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.functions import CUBIC, DENSITY, FLAT, LOG2E, TAIL, TAIL_STEP, TWICE_ROOT
from tilewright.ops.tilelang_rows import f32, load_tile, offset, place_of, store_tile, tile


def constant(value: float) -> Any:
    return T.float32(value)


def exponential(x: Any) -> Any:
    """exp(x), by the power of two that a GPU has: within some ulp where x is not far below 0."""
    return T.exp2(x * constant(LOG2E))


def logistics(z: Any) -> tuple[Any, Any]:
    """(s(z), s(-z)) of one exponential and one quotient. The exponential may be infinite: its reciprocal is 0, and
    until then the smaller of the two is as small as a float32 can be; exp(-|z|) is flushed to 0 before."""
    far = constant(1.0) / (constant(1.0) + exponential(T.abs(z)))
    near = constant(1.0) - far
    below = z < constant(0.0)
    return T.Select(below, far, near), T.Select(below, near, far)


def inner(g: Any) -> Any:
    return constant(TWICE_ROOT) * g * (constant(1.0) + constant(CUBIC) * g * g)


def normal(g: Any) -> tuple[Any, Any]:
    """The normal distribution at g, and exp(-g^2 / 2). Neither tail cancels, as 1 + erf does."""
    t = constant(1.0) / (constant(1.0) + constant(TAIL_STEP) * T.abs(g))
    ratio = constant(TAIL[-1])
    for coefficient in TAIL[-2::-1]:
        ratio = ratio * t + constant(coefficient)
    bell = exponential(constant(-0.5) * g * g)
    return T.Select(g < constant(0.0), ratio * bell, constant(1.0) - ratio * bell), bell


def activation(kind: str, g: Any) -> Any:
    """act(g). A product with s, not a quotient: minus infinity times 0 is NaN, as the contract has it."""
    if kind == "none":
        return g
    if kind in ("relu", "relu2"):  # NaN is not below zero, and stays
        return T.if_then_else(g < constant(0.0), constant(0.0), g if kind == "relu" else g * g)
    if kind == "silu":
        return g * logistics(g)[0]
    return g * logistics(inner(g))[0] if kind == "gelu_tanh" else g * normal(g)[0]


def slope(kind: str, g: Any) -> Any:
    """act'(g). 1 - s(z) is s(-z), which does not cancel."""
    if kind == "silu":
        s, rest = logistics(g)
        return s * (constant(1.0) + g * rest)
    if kind == "gelu_tanh":
        s, rest = logistics(inner(g))
        square = T.min(g * g, constant(FLAT * FLAT))  # else infinity times 0, of a finite g
        rise = constant(TWICE_ROOT) * (constant(1.0) + constant(3.0 * CUBIC) * square)
        return s + g * (s * rest * rise)
    below, bell = normal(g)
    return below + g * (constant(DENSITY) * bell)


def chain(kind: str, upstream: Any, g: Any) -> Any:
    """upstream * act'(g). What a rectifier holds back is 0 whatever comes from above."""
    if kind == "none":
        return upstream
    if kind in ("relu", "relu2"):
        through = upstream if kind == "relu" else upstream * (constant(2.0) * g)
        return T.if_then_else(g <= constant(0.0), constant(0.0), through)
    return upstream * slope(kind, g)


def pair_tile(vec: int, threads: int, depth: int, dtype: str) -> Any:
    """Registers for pairs, each beside the element of `tile` that it goes with."""
    made = T.alloc_fragment((vec * threads * depth, 2), dtype)
    layout = T.Fragment(
        (vec * threads * depth, 2),
        forward_fn=lambda j, k: ((j // vec) % threads, ((j // (vec * threads)) * vec + j % vec) * 2 + k),
    )
    T.annotate_layout({made: layout})
    return made


def halves(pack: str, second: bool, row_vectors: Any) -> tuple[Any, Any]:
    """How many vectors behind the start of a row gate and up begin."""
    if pack != "halves":
        return T.int64(0), T.int64(0)
    return (row_vectors, T.int64(0)) if second else (T.int64(0), row_vectors)


@T.macro
def load_pairs(gates, ups, both, source, gate_at, layout, vec, row, first, row_vectors, place):
    """`load_tile` for pairs: read together, then taken apart. (A loop may know a tile by one index only.)"""
    T.clear(both)
    for j, k in T.Parallel(*both.shape):
        if first + j // vec < row_vectors:
            both[j, k] = source[offset(layout, 2 * vec, row, (first * vec + j) * 2 + k, place)]
    for j in T.Parallel(*gates.shape):
        gates[j] = both[j, gate_at]
    for j in T.Parallel(*ups.shape):
        ups[j] = both[j, 1 - gate_at]


def forward(
    *, dtype: str, kind: str, flat: bool, vec: int, threads: int, depth: int, gate_layout: str, up_layout: str | None,
    pack: str, gate_second: bool,
) -> Any:  # fmt: skip
    """y = act(gate) * up, or act(gate)."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth
    has_up = up_layout is not None

    @T.prim_func
    def act_forward(
        gate: T.Tensor((n,), dtype), up: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype),
        gate_inner: T.int64, gate_outer: T.int64, gate_stride: T.int64, gate_step: T.int64,
        up_inner: T.int64, up_outer: T.int64, up_stride: T.int64, up_step: T.int64,
        row_vectors: T.int64, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            gate_place = (gate_inner, gate_outer, gate_stride, gate_step)
            gate_begin, up_begin = halves(pack, gate_second, row_vectors)
            gates = tile(vec, threads, depth, dtype)
            if has_up:
                ups = tile(vec, threads, depth, dtype)
            if pack == "pairs":
                both = pair_tile(vec, threads, depth, dtype)
                load_pairs(gates, ups, both, gate, int(gate_second), gate_layout, vec, row, first, row_vectors,
                           gate_place)  # fmt: skip
            else:
                load_tile(gates, gate, gate_layout, vec, row, first, row_vectors, (*gate_place, gate_begin))
                if has_up:
                    load_tile(ups, up, up_layout, vec, row, first, row_vectors,
                              (up_inner, up_outer, up_stride, up_step, up_begin))  # fmt: skip
            for j in T.Parallel(vec * chunk):
                value = activation(kind, f32(gates[j]))
                if has_up:
                    value = value * f32(ups[j])
                gates[j] = T.Cast(dtype, value)
            store_tile(y, gates, vec, row, first, row_vectors)

    return act_forward


def backward(
    *, dtype: str, kind: str, flat: bool, vec: int, threads: int, depth: int, dy_layout: str, gate_layout: str,
    up_layout: str | None, needs_dgate: bool, needs_dup: bool, pack: str, gate_second: bool,
) -> Any:  # fmt: skip
    """dgate = dy * up * act'(gate) and dup = dy * act(gate), those that are needed. Without up it is 1."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth
    reads_up = up_layout is not None and needs_dgate
    gate_at = int(gate_second)
    parts, gate_part, up_part = (2, gate_at, 1 - gate_at) if pack == "halves" else (1, 0, 0)  # of a row of outputs

    @T.prim_func
    def act_backward(
        dy: T.Tensor((n,), dtype), gate: T.Tensor((n,), dtype), up: T.Tensor((n,), dtype),
        dgate: T.Tensor((n,), dtype), dup: T.Tensor((n,), dtype),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        gate_inner: T.int64, gate_outer: T.int64, gate_stride: T.int64, gate_step: T.int64,
        up_inner: T.int64, up_outer: T.int64, up_stride: T.int64, up_step: T.int64,
        row_vectors: T.int64, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            gate_place = (gate_inner, gate_outer, gate_stride, gate_step)
            grads = tile(vec, threads, depth, dtype)
            load_tile(grads, dy, dy_layout, vec, row, first, row_vectors, (dy_inner, dy_outer, dy_stride, dy_step))
            gate_begin, up_begin = halves(pack, gate_second, row_vectors)
            gates = tile(vec, threads, depth, dtype)
            if reads_up:
                ups = tile(vec, threads, depth, dtype)
            if pack == "pairs":
                both = pair_tile(vec, threads, depth, dtype)
                load_pairs(gates, ups, both, gate, gate_at, gate_layout, vec, row, first, row_vectors, gate_place)
                for j in T.Parallel(vec * chunk):
                    value = f32(grads[j]) * f32(ups[j]) * slope(kind, f32(gates[j]))
                    both[j, gate_at] = T.Cast(dtype, value)
                for j in T.Parallel(vec * chunk):
                    both[j, 1 - gate_at] = T.Cast(dtype, f32(grads[j]) * activation(kind, f32(gates[j])))
                for j, k in T.Parallel(vec * chunk, 2):
                    if first + j // vec < row_vectors:
                        dgate[((row * row_vectors + first) * vec + j) * 2 + k] = both[j, k]
            else:
                load_tile(gates, gate, gate_layout, vec, row, first, row_vectors, (*gate_place, gate_begin))
                if reads_up:
                    load_tile(ups, up, up_layout, vec, row, first, row_vectors,
                              (up_inner, up_outer, up_stride, up_step, up_begin))  # fmt: skip
                outs = tile(vec, threads, depth, dtype)
                if needs_dgate:
                    for j in T.Parallel(vec * chunk):
                        value = f32(grads[j]) * slope(kind, f32(gates[j]))
                        if reads_up:
                            value = f32(grads[j]) * f32(ups[j]) * slope(kind, f32(gates[j]))
                        outs[j] = T.Cast(dtype, value)
                    store_tile(dgate, outs, vec, row * parts + gate_part, first, row_vectors)
                if needs_dup:
                    for j in T.Parallel(vec * chunk):
                        outs[j] = T.Cast(dtype, f32(grads[j]) * activation(kind, f32(gates[j])))
                    store_tile(dup, outs, vec, row * parts + up_part, first, row_vectors)

    return act_backward
