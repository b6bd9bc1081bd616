"""rope and its gradient: definitions, and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, wide_rows
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, like, op
from tilewright.core.probes import Probes
from tilewright.ops.rotary import workloads
from tilewright.ops.rotary.angles import (
    CAPPED,
    check_style,
    check_tables,
    positions,
    some_positions,
    spoil,
    turn,
)

SIZES = {"S": 2, "H": 3, "P": 7, "R": 48}
OPTIONS = ({"style": "half"}, {"style": "interleaved"})


def _main(call: Call) -> str:
    return "dy" if "dy" in call.tensors else "x"


def _check(call: Call) -> None:
    main = _main(call)
    wide_rows(call, main)
    floating(call, main)
    facts = call[main]
    if len(facts.shape) < 3:
        raise InvalidArgument(call.op, main, f"shape {list(facts.shape)}", "needs [..., S, H, D]")
    check_style(call)
    check_tables(call, main, facts.columns, facts.shape[:-2])


def _terms(x: Tensor, t: Mapping[str, Any], o: Mapping[str, Any]) -> Tensor:
    return turn(x, t["cos"], t["sin"], positions(x, t["position_ids"]), o["style"], terms=True)


def _cost(call: Call) -> tuple[int, int]:
    main: Any = call[_main(call)]
    used = min(call.cos.shape[0], main.numel // max(1, main.columns * main.shape[-2]))
    tables = 2 * used * call.cos.shape[1] * call.cos.dtype.itemsize
    return bytes_of(call, main.name, "position_ids", *call.outputs) + tables, 3 * main.numel


@op(
    family="rotary",
    out={"y": like("x")},
    gradient=Gradient(
        "rope_backward",
        grads={"y": "dy"},
        takes={"cos": "cos", "sin": "sin", "position_ids": "position_ids"},
        gives={"x": "dx"},
    ),
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: {"y": _terms(t["x"], t, o)},
    probes=Probes(
        dims={"x": "M S H C", "cos": "P R", "sin": "P R", "position_ids": "M S"},
        options=OPTIONS,
        absent=(("position_ids",), ()),
        sizes=SIZES,
        capped=CAPPED,
        values={"position_ids": some_positions},
        derive=spoil,
    ),
    workloads=workloads.HEADS,
)
def rope(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, style: str) -> Tensor:
    """Rotary position embedding (Su et al., 2021): each pair of columns turned by the angle of its token's position.

    With p the row of a token and R twice the width of the tables, for i < R/2: y1 = x1 cos[p, i] - x2 sin[p, i] and
    y2 = x2 cos[p, i] + x1 sin[p, i], where (x1, x2) are columns (i, i + R/2) or (2i, 2i + 1). Columns from R on are
    copied.

    Args:
        x: [..., S, H, D], fp32, fp16 or bf16, any strides with a dense last dimension.
        cos, sin: [P, R/2] with R <= D, both in the dtype of x or both fp32, any strides. They have no gradient.
        position_ids: [..., S], int64 or int32, any strides: the row of each token. None: a token's row is its place in
            its sequence.
        style: "half" (rotate_half: Llama, Qwen, Hugging Face) or "interleaved" (GPT-J, RoFormer). A model knows its
            own; the other runs as well and is silently another function, so there is no default.

    Returns:
        y: shape and dtype of x, contiguous, rounded once. NaN for a token whose position is outside of 0..P-1.

    Raises:
        InvalidArgument: wrong dtypes or shapes, tables with no row (or, without position_ids, with fewer rows than x
            has tokens), no columns, or another style.
    """
    return turn(x, cos, sin, positions(x, position_ids), style).to(x.dtype)


@op(
    family="rotary",
    out={"dx": like("dy")},
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: {"dx": _terms(t["dy"], t, o)},
    probes=Probes(
        dims={"dy": "M S H C", "cos": "P R", "sin": "P R", "position_ids": "M S"},
        options=OPTIONS,
        absent=(("position_ids",), ()),
        sizes=SIZES,
        capped=CAPPED,
        values={"position_ids": some_positions},
        derive=spoil,
    ),
    workloads=workloads.HEADS,
)
def rope_backward(dy: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, style: str) -> Tensor:
    """The gradient of `rope`: the same turn the other way.

    Args:
        dy: [..., S, H, D], upstream gradient of y. Any strides.
        cos, sin, position_ids, style: as in forward.

    Returns:
        dx: shape and dtype of dy, rounded once. 0 for a token whose position is outside of 0..P-1.
    """
    return turn(dy, cos, sin, positions(dy, position_ids), style, back=True).to(dy.dtype)
