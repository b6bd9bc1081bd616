"""The norm family in the library's own tile language: one forward and one backward kernel for all its ops."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.tile_rows import Sums, sharing, sum_launch


@tile.fragment
def add_residual(t: Any, v: Any, at: Any, residual: Any, pre_bias: Any, h: Any) -> Any:
    """h = v + pre_bias + residual, rounded and stored; the norm reads the rounded sum."""
    if pre_bias is not None:
        v = v + t.load(pre_bias[at[1]]).f32()
    total = (v + t.load(residual[at]).f32()).to(h.dtype)
    t.store(h[at], total)
    return total.f32()


@tile.kernel(static={"x": (1,)})
def norm(
    t: Any, x: Any, weight: Any, bias: Any, y: Any, mean: Any, rstd: Any, eps: Any, offset: Any,
    center: bool, divide: bool, cast: bool, prologue: Any = None,
) -> None:  # fmt: skip
    """One row: centred if asked, over the root of its mean (or summed) square, times weight, plus bias."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col]).f32()
    v = prologue(t, v, (row, col)) if prologue else v
    if center:
        centre = t.mean(v)
        v = v - centre
        if mean is not None:
            t.store(mean[row], centre)
    root = t.rsqrt((t.mean(v * v) if divide else t.sum(v * v)) + eps)
    if rstd is not None:
        t.store(rstd[row], root)
    out = v * root
    if weight is not None:
        out = out.to(y.dtype).f32() if cast else out
        w = t.load(weight[col]).f32()
        out = out * (w if offset is None else w + offset)
    if bias is not None:
        out = out + t.load(bias[col]).f32()
    t.store(y[row, col], out.to(y.dtype))


@tile.kernel(static={"x": (1,)})
def norm_backward(
    t: Any, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dh: Any, dx: Any, dweight: Any, dbias: Any,
    dpre_bias: Any, offset: Any, divide: bool, stored: bool, cast: bool,
) -> None:  # fmt: skip
    """Rows program_id, program_id + num_programs, ..: dx of each, and sums over them of what the parameters need.

    With e = dy * w and n the normalised value (x itself if `stored`): dx = rstd * (e - mean(e) - n * mean(e * n)) + dh,
    with mean(e) only where there is a `mean`.
    """
    first, col = t.program_id(0), t.arange(x.shape[1])
    average = t.mean if divide else t.sum
    views = {"weight": dweight, "bias": dbias, "pre_bias": dpre_bias}
    sums = Sums(t, col.shape, views)
    for row in sums.over(first, x.shape[0], t.num_programs(0)):
        at = (row, col)
        d: Any = None
        if dy is not None:
            g, n = t.load(dy[at]).f32(), t.load(x[at]).f32()
            root = t.load(rstd[row])
            n = n if mean is None else n - t.load(mean[row])
            n = n if stored else n * root
            sums.add("weight", g * (n.to(x.dtype).f32() if cast else n))
            sums.add("bias", g)
            if dx is not None or dpre_bias is not None:
                if weight is not None:
                    w = t.load(weight[col]).f32()
                    g = g * (w if offset is None else w + offset)
                d = g - n * average(g * n)
                d = (d if mean is None else d - t.mean(g)) * root
        if dh is not None:
            extra = t.load(dh[at]).f32()
            d = extra if d is None else d + extra
        sums.add("pre_bias", d)
        if dx is not None:
            t.store(dx[at], d.to(dx.dtype))
    for name, view in views.items():
        if name in sums:
            t.store(view[first, col], sums[name])


def forward(call: Call, config: Config) -> Launch:
    """Every forward op of the family."""
    centred, options, tensors = call.op.endswith("layer_norm"), call.options, call.tensors
    kernel = norm
    if call.has("residual"):
        kernel = norm.bind(prologue=add_residual(call.residual, tensors.get("pre_bias"), call.h))
    args = {"x": call.x, "y": call.y, "eps": float(options["eps"]), "offset": options.get("weight_offset") or None}
    args |= {name: tensors.get(name) for name in ("weight", "bias", "mean", "rstd")}
    constants = {
        "center": centred,
        "divide": call.op != "l2_norm",
        "cast": bool(options.get("cast_before_weight", False)),
    }
    flat = ("weight", "bias", "mean", "rstd", "prologue_pre_bias")
    return Launch(kernel, (call.x.rows, 1, 1), {**args, **kernel.bound()}, constants, {"flat": flat, "config": config})


def rms_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """rms_norm_backward, and layer_norm_backward, which has a mean."""
    return _backward(call, config, call.x, stored=False)


layer_backward = rms_backward


def l2_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """l2_norm_backward: what forward saved is y, the normalised value itself."""
    return _backward(call, config, call.y, stored=True)


def _backward(call: Call, config: Config, x: TensorFacts, stored: bool) -> tuple[Launch, ...]:
    tensors, options = call.tensors, call.options
    wanted = [name for name in ("dweight", "dbias", "dpre_bias") if call.has(name)]
    programs = sharing(x.rows) if wanted else x.rows
    partials = {name: Scratch(f"{name}_partials", (programs, x.columns)) for name in wanted}
    args: dict[str, Argument] = {name: tensors.get(name) for name in ("dy", "weight", "mean", "rstd", "dh", "dx")}
    args |= {"x": x, "offset": options.get("weight_offset") or None}
    args |= {name: partials.get(name) for name in ("dweight", "dbias", "dpre_bias")}
    constants = {"divide": not stored, "stored": stored, "cast": bool(options.get("cast_before_weight", False))}
    how = {"flat": ("weight", "mean", "rstd"), "config": config}
    rows = Launch(norm_backward, (programs, 1, 1), args, constants, how)
    return (rows, *(sum_launch(partials[name], tensors[name]) for name in wanted))
