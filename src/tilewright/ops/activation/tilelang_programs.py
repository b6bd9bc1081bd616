"""Device code of the activation family in TileLang: one program a pass, for one input or a gate and a value.

Only `tilelang.py` beside this file calls these, when a launch is compiled. A block takes `depth` vectors a thread of
one row; dense tensors come as one long row. Sizes are run-time everywhere. Columns are counted in vectors, so that the
compiler sees that an access never crosses the end; so are strides where the layout's letter is "v" ("s": element by
element, with a column stride). The layout's digit says in how many levels of strides the rows lie; None is absent.

Loads sit in `if` statements, not in `T.if_then_else`: there TileLang 0.1.15 hoists the vector load of a converted
operand out of the condition, which reads past the end of the tensor. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.functions import CUBIC, DENSITY, FLAT, ROOT_HALF, TWICE_ROOT

F32 = "float32"


def f32(value: Any) -> Any:
    return T.Cast(F32, value)


def constant(value: float) -> Any:
    return T.float32(value)


def logistic(z: Any) -> Any:
    """s(z). The exponential may be infinite: its reciprocal is 0."""
    return constant(1.0) / (constant(1.0) + T.exp(-z))


def inner(g: Any) -> Any:
    return constant(TWICE_ROOT) * g * (constant(1.0) + constant(CUBIC) * g * g)


def normal_cdf(g: Any) -> Any:
    return constant(0.5) * (constant(1.0) + T.erf(g * constant(ROOT_HALF)))


def activation(kind: str, g: Any) -> Any:
    """act(g). A product with s, not a quotient: minus infinity times 0 is NaN, as the contract has it."""
    if kind == "silu":
        return g * logistic(g)
    return g * logistic(inner(g)) if kind == "gelu_tanh" else g * normal_cdf(g)


def slope(kind: str, g: Any) -> Any:
    """act'(g). 1 - s(z) is written s(-z), which does not cancel."""
    if kind == "silu":
        return logistic(g) * (constant(1.0) + g * logistic(-g))
    if kind == "gelu_tanh":
        z = inner(g)
        square = T.min(g * g, constant(FLAT * FLAT))  # else infinity times 0, of a finite g
        rise = constant(TWICE_ROOT) * (constant(1.0) + constant(3.0 * CUBIC) * square)
        return logistic(z) + g * (logistic(z) * logistic(-z) * rise)
    return normal_cdf(g) + g * (constant(DENSITY) * T.exp(constant(-0.5) * g * g))


def tile(vec: int, threads: int, depth: int, dtype: str) -> Any:
    """Registers for a block's elements: neighbouring threads hold neighbouring vectors."""
    made = T.alloc_fragment((vec * threads * depth,), dtype)
    layout = T.Fragment(
        (vec * threads * depth,),
        forward_fn=lambda j: ((j // vec) % threads, (j // (vec * threads)) * vec + j % vec),
    )
    T.annotate_layout({made: layout})
    return made


def at(layout: str, vec: int, row: Any, column: Any, place: tuple[Any, Any, Any, Any]) -> Any:
    """The int64 element offset of (row, column)."""
    count, outer, stride, step = place
    unit = vec if layout[1] == "v" else 1
    if layout[0] == "2":
        wide = T.Cast("int64", count)
        start = T.truncdiv(row, wide) * (outer * unit) + T.truncmod(row, wide) * (stride * unit)
    else:
        start = row * (stride * unit)
    return start + column if layout[1] == "v" else start + column * step


def place_of(block: Any, row_vectors: Any, chunk: int, flat: bool) -> tuple[Any, Any]:
    """A block's row and its first vector in that; `flat`: there is one row."""
    index = T.Cast("int64", block)
    if flat:
        return T.int64(0), index * chunk
    per_row = T.truncdiv(row_vectors + (chunk - 1), T.int64(chunk))
    return T.truncdiv(index, per_row), T.truncmod(index, per_row) * chunk


@T.macro
def load_tile(to, source, layout, vec, row, first, row_vectors, place):
    """Fill a tile from vector `first` of a row; what lies beyond its end is 0."""
    T.clear(to)
    for j in T.Parallel(*to.shape):
        if first + j // vec < row_vectors:
            to[j] = source[at(layout, vec, row, first * vec + j, place)]


def forward(
    *, dtype: str, kind: str, flat: bool, vec: int, threads: int, depth: int, gate_layout: str, up_layout: str | None
) -> Any:
    """y = act(gate) * up, or act(gate)."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def act_forward(
        gate: T.Tensor((n,), dtype), up: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype),
        gate_inner: T.int64, gate_outer: T.int64, gate_stride: T.int64, gate_step: T.int64,
        up_inner: T.int64, up_outer: T.int64, up_stride: T.int64, up_step: T.int64,
        row_vectors: T.int64, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row, first = place_of(block, row_vectors, chunk, flat)
            gates = tile(vec, threads, depth, dtype)
            load_tile(gates, gate, gate_layout, vec, row, first, row_vectors,
                      (gate_inner, gate_outer, gate_stride, gate_step))  # fmt: skip
            if up_layout is not None:
                ups = tile(vec, threads, depth, dtype)
                load_tile(ups, up, up_layout, vec, row, first, row_vectors,
                          (up_inner, up_outer, up_stride, up_step))  # fmt: skip
            for j in T.Parallel(vec * chunk):
                if first + j // vec < row_vectors:
                    value = activation(kind, f32(gates[j]))
                    if up_layout is not None:
                        value = value * f32(ups[j])
                    y[(row * row_vectors + first) * vec + j] = T.Cast(dtype, value)

    return act_forward


def backward(
    *, dtype: str, kind: str, flat: bool, vec: int, threads: int, depth: int, dy_layout: str, gate_layout: str,
    up_layout: str | None, needs_dgate: bool, needs_dup: bool,
) -> Any:  # fmt: skip
    """dgate = dy * up * act'(gate) and dup = dy * act(gate), those that are needed. Without up it is 1."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth
    reads_up = up_layout is not None and needs_dgate

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
            row, first = place_of(block, row_vectors, chunk, flat)
            grads = tile(vec, threads, depth, dtype)
            gates = tile(vec, threads, depth, dtype)
            load_tile(grads, dy, dy_layout, vec, row, first, row_vectors, (dy_inner, dy_outer, dy_stride, dy_step))
            load_tile(gates, gate, gate_layout, vec, row, first, row_vectors,
                      (gate_inner, gate_outer, gate_stride, gate_step))  # fmt: skip
            if reads_up:
                ups = tile(vec, threads, depth, dtype)
                load_tile(ups, up, up_layout, vec, row, first, row_vectors,
                          (up_inner, up_outer, up_stride, up_step))  # fmt: skip
            if needs_dgate:
                for j in T.Parallel(vec * chunk):
                    if first + j // vec < row_vectors:
                        value = f32(grads[j]) * slope(kind, f32(gates[j]))
                        if reads_up:
                            value = f32(grads[j]) * f32(ups[j]) * slope(kind, f32(gates[j]))
                        dgate[(row * row_vectors + first) * vec + j] = T.Cast(dtype, value)
            if needs_dup:
                for j in T.Parallel(vec * chunk):
                    if first + j // vec < row_vectors:
                        dup[(row * row_vectors + first) * vec + j] = T.Cast(
                            dtype, f32(grads[j]) * activation(kind, f32(gates[j]))
                        )

    return act_backward
