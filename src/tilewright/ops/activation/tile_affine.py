"""scale_bias_add, bias_act and their gradients in the library's own tile language: what has parameters by column."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.tile_functions import act, chain
from tilewright.ops.tile_rows import Sums, accuracy, grid, one_row, place, sharing, sum_launch


@tile.kernel
def affine_block(t: Any, x: Any, scale: Any, bias: Any, residual: Any, y: Any) -> None:
    """y = x * scale + bias + residual, of those that there are."""
    row, col = place(t, y.shape[1])
    found = t.load(x[row, col]).f32()
    if scale is not None:
        found = found * t.load(scale[col]).f32()
    if bias is not None:
        found = found + t.load(bias[col]).f32()
    if residual is not None:
        found = found + t.load(residual[row, col]).f32()
    t.store(y[row, col], found.to(y.dtype))


@tile.kernel
def bias_block(t: Any, x: Any, bias: Any, y: Any, kind: str, by_column: bool) -> None:
    """y = act(x + bias)."""
    row, col = place(t, y.shape[1])
    g = t.load(x[row, col]).f32() + t.load(bias[col] if by_column else bias[row, col]).f32()
    t.store(y[row, col], act(t, kind, g, accuracy(y)).to(y.dtype))


@tile.kernel
def affine_rows(t: Any, dy: Any, x: Any, scale: Any, dx: Any, dscale: Any, dbias: Any) -> None:
    """dx = dy * scale of every so many-th row, and this program's sums of dy * x and of dy."""
    first, col = place(t, dy.shape[1])
    views = {"scale": dscale, "bias": dbias}
    sums = Sums(t, col.shape, views)
    for row in sums.over(first, dy.shape[0], t.num_programs(0)):
        d = t.load(dy[row, col]).f32()
        if dx is not None:
            t.store(dx[row, col], (d * t.load(scale[col]).f32()).to(dx.dtype))
        if "scale" in sums:
            sums.add("scale", d * t.load(x[row, col]).f32())
        sums.add("bias", d)
    for name, view in views.items():
        if name in sums:
            t.store(view[first, col], sums[name])


@tile.kernel
def bias_rows(t: Any, dy: Any, x: Any, bias: Any, dx: Any, dbias: Any, kind: str, by_column: bool) -> None:
    """dx = dy * act'(x + bias) of every so many-th row, and this program's sum of it."""
    first, col = place(t, dy.shape[1])
    sums = Sums(t, col.shape, {"bias": dbias})
    for row in sums.over(first, dy.shape[0], t.num_programs(0)):
        g = t.load(x[row, col]).f32() + t.load(bias[col] if by_column else bias[row, col]).f32()
        d = chain(t, kind, t.load(dy[row, col]).f32(), g, accuracy(dx, bias))
        if dx is not None:
            t.store(dx[row, col], d.to(dx.dtype))
        sums.add("bias", d)
    if "bias" in sums:
        t.store(dbias[first, col], sums["bias"])


def affine_forward(call: Call, config: Config) -> Launch:
    """scale_bias_add."""
    rows: dict[str, TensorFacts | None] = {"x": call.x, "residual": call.residual, "y": call.y}
    columns = {"scale": call.scale, "bias": call.bias}
    if call.scale is None and call.bias is None:
        rows = one_row(rows)
    y = rows["y"]
    assert y is not None
    return Launch(affine_block, grid(y), {**rows, **columns}, {}, {"flat": tuple(columns), "config": config})


def bias_forward(call: Call, config: Config) -> Launch:
    """bias_act."""
    by_column = call.bias.shape != call.x.shape
    args: dict[str, TensorFacts | None] = {"x": call.x, "bias": call.bias, "y": call.y}
    args = args if by_column else one_row(args)
    y = args["y"]
    assert y is not None
    constants = {"kind": call.act, "by_column": by_column}
    flat = ("bias",) if by_column else ()
    return Launch(bias_block, grid(y), args, constants, {"flat": flat, "config": config})


def _with_sums(
    call: Call, config: Config, kernel: Any, args: dict[str, Argument], constants: dict[str, Any],
    flat: tuple[str, ...], summed: tuple[str, ...],
) -> tuple[Launch, ...]:  # fmt: skip
    """The launch over rows, and one for each sum over them."""
    dy: TensorFacts = call.dy
    wanted = [name for name in summed if call.has(name)]
    rows, blocks, _ = grid(dy)
    programs = sharing(rows) if wanted else rows
    partials = {name: Scratch(f"{name}_partials", (programs, dy.columns)) for name in wanted}
    args |= {"dx": call.tensors.get("dx"), **{name: partials.get(name) for name in summed}}
    first = Launch(kernel, (programs, blocks, 1), args, constants, {"flat": flat, "config": config})
    return (first, *(sum_launch(partials[name], call.tensors[name]) for name in wanted))


def affine_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """scale_bias_add_backward."""
    args: dict[str, Argument] = {"dy": call.dy, "x": call.x, "scale": call.scale}
    return _with_sums(call, config, affine_rows, args, {}, ("scale",), ("dscale", "dbias"))


def bias_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """bias_act_backward."""
    by_column = call.bias.shape != call.x.shape
    args: dict[str, Argument] = {"dy": call.dy, "x": call.x, "bias": call.bias}
    constants = {"kind": call.act, "by_column": by_column}
    return _with_sums(call, config, bias_rows, args, constants, ("bias",) if by_column else (), ("dbias",))
