"""Checks that many contracts share. Each raises `InvalidArgument` naming the argument, its value and what would do.

These hold whichever kernel runs; what one kernel cannot take is a capability's business.
"""

from __future__ import annotations

import torch

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.errors import InvalidArgument

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def floating(call: Call, main: str, *others: str) -> None:
    """`main` is fp32, fp16, bf16 (or fp64, which runs on the reference); the others share its dtype."""
    first = call.tensors[main]
    assert first is not None
    if first.dtype not in FLOATING:
        raise InvalidArgument(call.op, main, f"dtype {_name(first.dtype)}", "takes fp32, fp16, bf16")
    for name in others:
        facts = call.tensors[name]
        if facts is not None and facts.dtype != first.dtype:
            raise InvalidArgument(
                call.op,
                name,
                f"dtype {_name(facts.dtype)}, while {main} is {_name(first.dtype)}",
                f"{name}.to({main}.dtype)",
            )


def wide_rows(call: Call, main: str) -> None:
    """`main` has at least one dimension and a last one that is not empty."""
    facts = call.tensors[main]
    assert facts is not None
    if not facts.shape:
        raise InvalidArgument(call.op, main, "a scalar", "needs at least one dimension")
    if facts.columns == 0:
        raise InvalidArgument(call.op, main, f"shape {list(facts.shape)}", "the last dimension must not be empty")


def same_shape(call: Call, main: str, *others: str) -> None:
    first = call.tensors[main]
    assert first is not None
    for name in others:
        facts = call.tensors[name]
        if facts is not None and facts.shape != first.shape:
            raise InvalidArgument(
                call.op,
                name,
                f"shape {list(facts.shape)}, while {main} has {list(first.shape)}",
                "shapes must be equal",
            )


def per_column(call: Call, main: str, *names: str) -> None:
    """Each of `names`, if given, is [C], of the dtype of `main` or fp32."""
    first = call.tensors[main]
    assert first is not None
    for name in names:
        parameter(call, main, name, (first.columns,), f"the last dimension of {main}")


def parameter(call: Call, main: str, name: str, shape: tuple[int, ...], why: str = "") -> None:
    """`name`, if given, has this shape, and the dtype of `main` or fp32."""
    first, facts = call.tensors[main], call.tensors[name]
    assert first is not None
    has_shape(call, name, shape, why)
    if facts is not None and facts.dtype not in (first.dtype, torch.float32):
        raise InvalidArgument(
            call.op, name, f"dtype {_name(facts.dtype)}", f"takes {_name(first.dtype)} (as {main}) or fp32"
        )


def has_shape(call: Call, name: str, shape: tuple[int, ...], why: str = "") -> None:
    """`name`, if the op has it and it is given, has this shape."""
    facts = call.tensors.get(name)
    if facts is not None and facts.shape != shape:
        wanted = f"needs {list(shape)}" + (f", {why}" if why else "")
        raise InvalidArgument(call.op, name, f"shape {list(facts.shape)}", wanted)


def per_row(call: Call, main: str, *names: str) -> None:
    """Each of `names` is a float32 (float64) number a row of `main`."""
    first = call.tensors[main]
    assert first is not None
    wanted = torch.float64 if first.dtype == torch.float64 else torch.float32
    for name in names:
        facts = call.tensors[name]
        if facts is None:
            continue
        if facts.shape != first.shape[:-1]:
            raise InvalidArgument(
                call.op, name, f"shape {list(facts.shape)}", f"needs {list(first.shape[:-1])}, one a row of {main}"
            )
        if facts.dtype != wanted or not facts.contiguous:
            raise InvalidArgument(call.op, name, f"{facts}", f"needs contiguous {_name(wanted)}, as forward saves it")


def not_negative(call: Call, option: str) -> None:
    if not call.options[option] >= 0:
        raise InvalidArgument(call.op, option, f"{call.options[option]}", "must be 0 or more")


def one_of(call: Call, option: str, *values: str) -> None:
    if call.options[option] not in values:
        raise InvalidArgument(call.op, option, repr(call.options[option]), f"takes {', '.join(map(repr, values))}")


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
