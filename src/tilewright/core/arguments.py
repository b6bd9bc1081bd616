"""What a caller passes, checked and brought into form: tensors as facts, options as the types that the op declares.

Each refusal names the argument, its value and what would do. What the shapes must be is the op's contract (`Op.call`).
"""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype, strided
from torch._C._functorch import is_legacy_batchedtensor

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.declaration import plain_type
from tilewright.core.device import device_of
from tilewright.core.errors import InvalidArgument, Unsupported
from tilewright.core.op import Op


def facts_of(
    op: Op[Any], tensors: Sequence[Tensor | None], options: dict[str, Any], saving: bool, deterministic: bool
) -> Call:
    """The call as facts, checked against the op's contract."""
    facts: dict[str, TensorFacts | None] = {}
    first: Tensor | None = None
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is None:
            if name not in op.optional:
                raise InvalidArgument(op.name, name, "None", "a tensor is needed")
            facts[name] = None
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(op.name, name, f"a {type(tensor).__name__}", "a torch.Tensor is needed")
        if is_legacy_batchedtensor(tensor):
            raise Unsupported(f"{op.name}: {name} is batched (torch.func.vmap, is_grads_batched): no rule here")
        if tensor.is_nested:
            raise InvalidArgument(op.name, name, "a nested tensor", f"pass {name}.values(), or pad it")
        if tensor.layout is not strided:
            raise InvalidArgument(op.name, name, f"layout {tensor.layout}", "a strided tensor is needed")
        if first is not None and tensor.device != first.device:
            raise InvalidArgument(
                op.name, name, f"on {tensor.device}, other tensors on {first.device}", "move it there first"
            )
        first = tensor if first is None else first
        facts[name] = TensorFacts.of(name, tensor)
    if first is None:
        raise InvalidArgument(op.name, op.tensors[0], "every tensor is None")
    device = device_of(first.device.type, first.device.index)
    return op.call(facts, options, device, saving=saving, deterministic=deterministic)


def normalise(op: Op[Any], options: Sequence[Any], backend: str | None) -> dict[str, Any]:
    """Options as the types that the op declares; anything else is refused by name."""
    if backend is not None:
        registry.check_pin(backend, op)
    found: dict[str, Any] = {}
    for (name, kind), value in zip(op.option_types.items(), options, strict=True):
        kind, optional = plain_type(kind)
        if value is None and optional:
            pass
        elif kind is float:
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "a number is needed")
            try:
                value = float(value)
            except OverflowError:
                raise InvalidArgument(op.name, name, "larger than any float", "a number is needed") from None
            if math.isnan(value):
                raise InvalidArgument(op.name, name, "NaN", "a number is needed")
        elif kind is bool:
            if not isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "True or False")
        elif kind is int:
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "an integer is needed")
            if not -(1 << 63) <= value < 1 << 63:
                raise InvalidArgument(op.name, name, "does not fit in 64 bits", "an int64 is needed")
        elif kind is dtype:
            if not isinstance(value, dtype):
                raise InvalidArgument(
                    op.name, name, f"{value!r} is a {type(value).__name__}", "a torch.dtype is needed"
                )
        elif typing.get_origin(kind) is tuple:
            wanted = len(typing.get_args(kind))
            if not isinstance(value, (list, tuple)) or [type(v) for v in value] != [bool] * wanted:
                raise InvalidArgument(op.name, name, f"{value!r}", f"a tuple of {wanted} booleans is needed")
            value = tuple(value)
        found[name] = value
    return found
