"""How TileLang runs the linear family: launches worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES, layout_of, strides_of, vector

PRODUCT = Program("tilewright.ops.linear.tilelang_programs:product", FULL_RANGE_DIVISION)
POINTWISE = Program("tilewright.ops.linear.tilelang_programs:pointwise", FULL_RANGE_DIVISION)
THREADS = 128
"""Columns of a block in the element-by-element pass, one a thread."""
MOST_GROUPS = 256
"""Of rows in that pass, with a partial sum each."""


def forward(call: Call, config: Config) -> Launch:
    """y, and z where it is saved."""
    x, weight = call.x, call.weight
    return _product(
        config, (x.rows, weight.rows, x.columns), {"a": x, "b": weight, "out": call.y},
        a_columns=False, b_columns=True, kind=call.act, bias=call.bias, residual=call.residual, z=call.z,
    )  # fmt: skip


def backward(call: Call, config: Config) -> list[Launch]:
    """dz and dbias first, then dx and dweight, those that are needed."""
    makes_dz = call.act != "none" and (call.has("dx") or call.has("dweight"))
    dz = Scratch("dz", call.dy.shape, call.x.dtype) if makes_dz else None
    found = _pointwise(call, dz) if makes_dz or call.has("dbias") else []
    upstream = dz if dz is not None else call.dy
    x, weight = call.x, call.weight
    if call.has("dx"):
        sizes = (x.rows, x.columns, weight.rows)
        operands = {"a": upstream, "b": weight, "out": call.dx}
        found.append(_product(config, sizes, operands, a_columns=False, b_columns=False))
    if call.has("dweight"):
        sizes = (weight.rows, x.columns, x.rows)
        operands = {"a": upstream, "b": x, "out": call.dweight}
        found.append(_product(config, sizes, operands, a_columns=True, b_columns=False))
    return found


def _product(
    config: Config,
    sizes: tuple[int, int, int],
    operands: dict[str, Any],
    *,
    a_columns: bool,
    b_columns: bool,
    kind: str = "none",
    bias: TensorFacts | None = None,
    residual: TensorFacts | None = None,
    z: TensorFacts | None = None,
) -> Launch:
    rows, columns, depth = sizes
    facts = {n: t.facts if isinstance(t, Scratch) else t for n, t in operands.items()}
    a, b, out = facts["a"], facts["b"], facts["out"]
    a_vec, b_vec, vec = (vector(t.columns, t.dtype.itemsize) for t in (a, b, out))
    layouts = {
        "a": layout_of(a, a_vec, False),
        "b": layout_of(b, b_vec, False),
        "residual": layout_of(residual, vec, False),
    }
    constants: dict[str, Any] = {
        "dtype": NAMES[a.dtype],
        "bias_dtype": NAMES[a.dtype if bias is None else bias.dtype],
        "out_dtype": NAMES[out.dtype],
        "kind": kind,
        "m": config.m,
        "n": config.n,
        "k": config.k,
        "group": config.group,
        "threads": config.threads,
        "stages": config.stages,
        **{f"{name}_layout": layout for name, layout in layouts.items()},
        "a_columns": a_columns,
        "b_columns": b_columns,
        "a_vec": a_vec,
        "b_vec": b_vec,
        "vec": vec,
        "even": depth % config.k == 0,
        "depth_steps": None if a_columns else -(-depth // config.k),
        "has_bias": bias is not None,
        "saves": z is not None,
    }
    programs = -(-rows // config.m) * -(-columns // config.n)
    args: dict[str, Argument] = {**operands, "bias": bias, "residual": residual, "z": z}
    for name, tensor, width in (("a", a, a_vec), ("b", b, b_vec), ("residual", residual, vec)):
        args |= strides_of(name, tensor, layouts[name], width)
    args |= {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "row_vectors": rows // a_vec,
        "column_vectors": columns // b_vec,
        "depth_a_vectors": depth // a_vec,
        "depth_b_vectors": depth // b_vec,
        "out_vectors": columns // vec,
        "steps": -(-depth // config.k),
        "programs": programs,
    }
    return Launch(PRODUCT, (programs, 1, 1), args, constants)


def _pointwise(call: Call, dz: Scratch | None) -> list[Launch]:
    """The pass over dy, and one over its partial sums where dbias is needed."""
    dy: TensorFacts = call.dy
    z = None if call.act == "none" else call.z
    rows = max(32, power_of_2_at_least(-(-dy.rows // MOST_GROUPS)))
    groups = -(-dy.rows // rows)
    partials = Scratch("partials", (groups, dy.columns)) if call.has("dbias") else None
    found = [_columns(dy, z, dz, partials, call.act, rows, groups)]
    if partials is not None:
        found.append(_columns(partials, None, None, call.dbias, "none", groups, 1))
    return found


def _columns(
    dy: TensorFacts | Scratch,
    z: TensorFacts | None,
    dz: Scratch | None,
    partials: TensorFacts | Scratch | None,
    kind: str,
    group_rows: int,
    groups: int,
) -> Launch:
    facts = dy.facts if isinstance(dy, Scratch) else dy
    layouts = {"dy": layout_of(facts, 1, False), "z": layout_of(z, 1, False)}
    blocks = -(-facts.columns // THREADS)
    constants: dict[str, Any] = {
        "dtype": NAMES[facts.dtype],
        "out_dtype": "float32" if partials is None else NAMES[partials.dtype],
        "kind": kind,
        "threads": THREADS,
        **{f"{name}_layout": layout for name, layout in layouts.items()},
        "makes_dz": dz is not None,
        "sums": partials is not None,
    }
    args: dict[str, Argument] = {"dy": dy, "z": z, "dz": dz, "partials": partials}
    args |= {**strides_of("dy", facts, layouts["dy"], 1), **strides_of("z", z, layouts["z"], 1)}
    args |= {"rows": facts.rows, "columns": facts.columns, "group_rows": group_rows, "blocks": blocks, "groups": groups}
    return Launch(POINTWISE, (blocks, groups, 1), args, constants)
