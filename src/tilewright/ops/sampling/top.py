"""top_k_top_p_renorm and top_k_top_p_sample: definitions, and what else is declared of them. Neither has a gradient.

What is kept is worked out in `selection`; the functions that users call are in `calls`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.contract import floating, has_shape, one_of, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Spec, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.residual.philox import random_words
from tilewright.ops.sampling import workloads
from tilewright.ops.sampling.selection import ORDERS, kept, power_of_2, unit_bits

FEW = 128
"""Up to so many tokens are found by sorting what each block of a row has most of."""


def few_of(top_k: int | None, order: str) -> bool:
    """Whether a call keeps few tokens, as its k tells: then other programs are fast."""
    return top_k is not None and top_k <= FEW and order == "top_k_first"


def _check(call: Call) -> None:
    wide_rows(call, "probs")
    floating(call, "probs")
    one_of(call, "order", *ORDERS)
    rows = call.probs.shape[:-1]
    for name, dtypes in (("row_k", (torch.int32, torch.int64)), ("row_p", (torch.float32, torch.float64))):
        facts = call.tensors[name]
        has_shape(call, name, rows, "one for each row of probs")
        if facts is not None and facts.dtype not in dtypes:
            found, wanted = (DTYPE_NAMES.get(d, str(d)) for d in (facts.dtype, dtypes[0]))
            raise InvalidArgument(call.op, name, f"dtype {found}", f"takes {wanted}")
    if call.top_k is not None and call.top_k < 1:
        raise InvalidArgument(call.op, "top_k", f"{call.top_k}", "must be 1 or more")
    if call.top_p is not None and math.isnan(call.top_p):
        raise InvalidArgument(call.op, "top_p", "nan", "must be a number")
    if call.few and not few_of(call.top_k, call.order):
        raise InvalidArgument(call.op, "few", "True", f"says that top_k is at most {FEW}, and comes first")
    for name in ("seed", "offset"):
        facts = call.tensors.get(name)
        if facts is not None and (facts.dtype != torch.int64 or facts.shape != (1,)):
            raise InvalidArgument(call.op, name, str(facts), "needs int64[1]")


def _some_k(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    return torch.randint(1, 100, shape, generator=generator, device=device, dtype=torch.int32)


def _some_p(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    return torch.rand(shape, generator=generator, device=device) * 1.1


def _number(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape, generator=generator, device=device)


def _derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Probabilities, a few of them large, as of a language model."""
    probs = found["probs"]
    found["probs"] = torch.softmax(3.0 * upcast(probs), -1).to(probs.dtype)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"top_k": 8, "top_p": 0.9, "few": True},
    {"top_k": None, "top_p": None, "few": False},
    {"top_k": None, "top_p": 0.8, "few": False},
    {"top_k": 140, "top_p": None, "few": False},
    {"top_k": 20, "top_p": 0.7, "few": False, "order": "joint"},
    {"top_k": 140, "top_p": 0.6, "few": False},
    {"top_k": 40, "top_p": 0.0, "few": True},
)
_ROWS: Any = {"row_k": "M", "row_p": "M"}
_ABSENT = (("row_k", "row_p"), (), ("row_p",))


def _cost(call: Call) -> tuple[int, int]:
    return bytes_of(call, "probs", "row_k", "row_p", *call.outputs), per_element(call, 8)


@op(
    family="sampling",
    out={"y": like("probs")},
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: {"y": torch.nan_to_num(t["probs"].abs() / t["probs"].abs().sum(-1, keepdim=True))},
    probes=Probes(
        dims={"probs": "M C", **_ROWS},
        options=OPTIONS,
        absent=_ABSENT,
        values={"row_k": _some_k, "row_p": _some_p},
        derive=_derive,
    ),
    workloads=workloads.SAMPLING,
)
def top_k_top_p_renorm(
    probs: Tensor,
    row_k: Tensor | None = None,
    row_p: Tensor | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str = "top_k_first",
    few: bool = False,
) -> Tensor:
    """Probabilities of the k likeliest tokens (Fan et al., 2018) and of the nucleus of mass p (Holtzman et al., 2020),
    divided by their sum; 0 for all others.

    Tokens are ranked by probability, falling, and by index, rising. top_p keeps the shortest prefix whose mass is p or
    more. Masses are counted in whole units of a 2^-40th of the row or less, so every backend keeps the same tokens.

    Args:
        probs: [..., V], fp32 (or fp16, bf16), any strides with a dense last dimension. Rows need not add up to 1.
        row_k: [...] int32 or None, row_p: [...] fp32 or None: k and p of each row, on the device.
        top_k, top_p: of all rows. Of two the smaller counts; k of V or more and p of 1 or more keep all, p of 0 or
            less the first token.
        order: "top_k_first": p is a share of the mass of the k likeliest. "joint": of the whole row's.
        few: a promise that top_k is at most 128, by which kernels are told apart.

    Returns:
        y: shape and dtype of probs, contiguous, rounded once. A row that is no distribution (NaN, infinite or negative
        numbers, nothing but 0), a k below 1 and a NaN p make the row NaN.

    Raises:
        InvalidArgument: wrong dtypes or shapes, another order, top_k below 1, no columns.
    """
    mass, mask, exponent, valid = kept(probs, row_k, row_p, top_k, top_p, order)
    total = mass.sum(-1).double() * power_of_2(exponent - unit_bits(probs.shape[-1]))
    acc = upcast(probs)
    y = torch.where(mask, (acc.double() / total.unsqueeze(-1)).to(acc.dtype), 0.0)
    return torch.where(valid.unsqueeze(-1), y, math.nan).to(probs.dtype)


def _ids(dtype: torch.dtype) -> Any:
    def rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
        return tuple(t["probs"].shape[:-1]), dtype

    return rule


@op(
    family="sampling",
    out={"ids": _ids(torch.int32), "valid": _ids(torch.bool)},
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: {},
    probes=Probes(
        dims={"probs": "M C", "seed": "1", "offset": "1", **_ROWS},
        options=OPTIONS,
        absent=(*_ABSENT, ("offset", "row_k")),
        values={"row_k": _some_k, "row_p": _some_p, "seed": _number, "offset": _number},
        derive=_derive,
    ),
    workloads=workloads.SAMPLING,
)
def top_k_top_p_sample(
    probs: Tensor,
    seed: Tensor,
    offset: Tensor | None = None,
    row_k: Tensor | None = None,
    row_p: Tensor | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str = "top_k_first",
    few: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of each row, drawn from what `top_k_top_p_renorm` keeps.

    u = w * 2^-24 with w the upper 24 bits of word 0 of Philox4x32-10 (Salmon et al., 2011) under the key `seed`, with
    the counter `offset` (low 64 bits) and the row (high 64 bits). The token is the first, by index, at which the mass
    of what is kept exceeds u times the whole. One call uses up one offset.

    Args:
        probs: [..., V], as in `top_k_top_p_renorm`.
        seed, offset: int64[1] on the device of probs, read when the kernel runs. No offset is 0.
        row_k, row_p, top_k, top_p, order, few: as in `top_k_top_p_renorm`.

    Returns:
        (ids, valid): int32 and bool, [...]. Where `top_k_top_p_renorm` makes a row NaN the id is -1 and valid False.

    Raises:
        InvalidArgument: as `top_k_top_p_renorm`; also a seed or an offset that is not int64[1].
    """
    mass, _, _, valid = kept(probs, row_k, row_p, top_k, top_p, order)
    total = mass.sum(-1)
    start = torch.zeros_like(seed) if offset is None else offset
    words = random_words(total.numel(), 1, seed, start).reshape(total.shape) >> 8
    spot = words * (total >> 24) + ((words * (total & 0xFFFFFF)) >> 24)  # u * total, without its fraction
    ids = (mass.cumsum(-1) <= spot.unsqueeze(-1)).sum(-1)
    return torch.where(valid, ids, -1).int(), valid
