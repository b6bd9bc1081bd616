"""What the ops of the rotary family share: turning by tables of cosines and sines in torch, its checks and probes.

A position turns pairs of columns: (i, i + R/2) in the style "half", (2i, 2i + 1) in "interleaved", for i < R/2. The
rest of a head is copied. Of a position outside the tables every output is NaN, and the gradient 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.contract import one_of, parameter
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import upcast

STYLES = ("half", "interleaved")


def positions(x: Tensor, position_ids: Tensor | None) -> Tensor:
    """Rows of the tables, of the tokens of x [..., S, H, D]: [S], or the shape of `position_ids`."""
    return torch.arange(x.shape[-3], device=x.device) if position_ids is None else position_ids.long()


def pairs(x: Tensor, half: int, style: str) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair."""
    if style == "half":
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def join(first: Tensor, second: Tensor, rest: Tensor, style: str) -> Tensor:
    """The head of which these are the pairs, and what is not turned."""
    if style == "half":
        return torch.cat([first, second, rest], -1)
    return torch.cat([torch.stack([first, second], -1).flatten(-2), rest], -1)


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, style: str, *, back: bool = False, terms: bool = False
) -> Tensor:
    """The heads x [..., S, H, D] turned by the angles of their tokens' rows, in the accumulation dtype; `back` turns
    the other way, which is the gradient. `terms`: of absolute values, added up."""
    half, acc = cos.shape[1], upcast(x)
    inside = (rows >= 0) & (rows < cos.shape[0])
    place = torch.where(inside, rows, 0)
    c, s = (upcast(table[place]).to(acc.dtype).unsqueeze(-2) for table in (cos, sin))
    s = -s if back else s
    first, second = pairs(acc, half, style)
    if terms:
        acc, first, second, c, s = acc.abs(), first.abs(), second.abs(), c.abs(), -s.abs()
        made = join(first * c - second * s, second * c - first * s, acc[..., 2 * half :], style)
    else:
        made = join(first * c - second * s, second * c + first * s, acc[..., 2 * half :], style)
    return torch.where(inside.unsqueeze(-1).unsqueeze(-1), made, 0.0 if back else math.nan)


def check_style(call: Call) -> None:
    one_of(call, "style", *STYLES)


def check_tables(call: Call, main: str, width: int, tokens: tuple[int, ...]) -> None:
    """cos and sin [P, R/2] with R <= width, and position_ids of the shape `tokens`. Without them token s has row s, and
    shapes tell whether there is one; with them the device knows."""
    cos: TensorFacts | None = call.cos
    if cos is None:
        if call.has("sin"):
            raise InvalidArgument(call.op, "cos", "None, while sin is given", "pass both")
    else:
        if len(cos.shape) != 2 or not cos.shape[0] or 2 * cos.shape[1] > width:
            wanted = f"needs [P, R/2] with a row at least and R at most {width}, the width of a head"
            raise InvalidArgument(call.op, "cos", f"shape {list(cos.shape)}", wanted)
        if not call.has("sin"):
            raise InvalidArgument(call.op, "sin", "None, while cos is given", "pass both")
        parameter(call, main, "cos", cos.shape)
        parameter(call, main, "sin", cos.shape, "the shape of cos")
        if call.sin.dtype != cos.dtype:
            kinds = f"dtype {DTYPE_NAMES[call.sin.dtype]}, while cos is {DTYPE_NAMES[cos.dtype]}"
            raise InvalidArgument(call.op, "sin", kinds, "the tables share one dtype")
    if "position_ids" in call.tensors:
        check_numbers(call, "position_ids", tokens)
        if cos is not None and not call.has("position_ids") and tokens[-1] > cos.shape[0]:
            wanted = f"{main} has sequences of {tokens[-1]} tokens, and without position_ids their rows are 0 and on"
            raise InvalidArgument(call.op, "cos", f"{cos.shape[0]} rows", wanted)


def check_numbers(call: Call, name: str, shape: tuple[int, ...]) -> None:
    """`name`, if given, holds int32 or int64 numbers of this shape."""
    facts = call.tensors.get(name)
    if facts is None:
        return
    if facts.dtype not in (torch.int64, torch.int32):
        dtype = DTYPE_NAMES.get(facts.dtype, str(facts.dtype).removeprefix("torch."))
        raise InvalidArgument(call.op, name, f"dtype {dtype}", "takes int64, int32")
    if facts.shape != shape:
        wanted = f"needs {list(shape)}; {name}.expand({', '.join(map(str, shape))}) may do"
        raise InvalidArgument(call.op, name, f"shape {list(facts.shape)}", wanted)


def some_positions(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    """Positions in any order."""
    return torch.randint(0, sizes["P"], shape, generator=generator, device=device)


CAPPED = {"R": lambda columns: columns // 2}
"""Tables are no wider than half a head."""


def spoil(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """With the style "interleaved" some positions are outside the tables, but in float64, where finite differences are
    taken."""
    ids, cos = found.get("position_ids"), found.get("cos")
    if ids is not None and cos is not None and options["style"] == "interleaved" and cos.dtype != torch.float64:
        spoilt = ids.clone().contiguous()
        flat, edges = spoilt.view(-1), torch.iinfo(ids.dtype)
        for place, bad in zip((1, 4, 9, 16), (-1, cos.shape[0], edges.max, edges.min), strict=True):
            if place < flat.numel():
                flat[place] = bad
        found["position_ids"] = spoilt
