"""dropout_add and its gradient: their definitions, what else is declared of them, and the function that users call.

The random numbers are in `philox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Saved, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.residual import workloads
from tilewright.ops.residual.philox import random_words, scale, threshold

OPERATIONS = 20
"""Of an element: a fourth of ten rounds of Philox, and the rest."""


def drops(training: bool, p: float) -> bool:
    """Whether any element may be dropped; else no random number is needed."""
    return training and p > 0.0


def _check(call: Call) -> None:
    rows = [name for name in ("x", "residual", "dy") if call.tensors.get(name) is not None]
    wide_rows(call, rows[0])
    floating(call, *rows)
    same_shape(call, *rows)
    if not 0.0 <= call.p <= 1.0:
        raise InvalidArgument(call.op, "p", f"{call.p}", "a probability lies in [0, 1]")
    for name, size in (("seed", 1), ("offset", 1), ("state", 2)):
        facts = call.tensors.get(name)
        if facts is not None and (facts.dtype != torch.int64 or facts.shape != (size,) or not facts.contiguous):
            raise InvalidArgument(call.op, name, str(facts), f"needs int64[{size}]")
    if "seed" in call.tensors and not call.has("seed") and drops(call.training, call.p):
        raise InvalidArgument(call.op, "seed", "None", "what is dropped needs one: int64[1] on the device of x")


def _dropped(x: Tensor, seed: Tensor | None, offset: Tensor | None, p: float, training: bool) -> Tensor:
    """keep * x / (1 - p), in the accumulation dtype."""
    if not drops(training, p) or seed is None:
        return upcast(x)
    start = torch.zeros_like(seed) if offset is None else offset
    columns = x.shape[-1]
    words = random_words(x.numel() // columns, columns, seed, start)
    keep = ((words >> 8) >= threshold(p)).reshape(x.shape)
    return torch.where(keep, upcast(x) * scale(p), 0.0)


def _state(x: Tensor, seed: Tensor | None, offset: Tensor | None) -> Tensor:
    """Copies, for the caller advances them."""
    if seed is None:
        return torch.zeros(2, dtype=torch.int64, device=x.device)
    return torch.cat([seed, torch.zeros_like(seed) if offset is None else offset])


def _number(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    """Any int64 will do; of offsets too, which are 64 bits."""
    return torch.randint(-(2**62), 2**62, shape, generator=generator, device=device)


_P: tuple[dict[str, Any], ...] = ({"p": 0.1}, {"p": 0.5}, {"p": 1.0}, {"p": 0.0}, {"p": 0.3, "training": False})


@op(
    family="residual",
    out={"y": like("x")},
    saved={"state": Saved(lambda t, o: ((2,), torch.int64), _state)},
    gradient=Gradient(
        "dropout_add_backward", grads={"y": "dy"}, takes={"state": "state"}, gives={"x": "dx", "residual": "dy"}
    ),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "residual", "y"), per_element(call, OPERATIONS)),
    error_scale=lambda t, o: {"y": t["residual"].abs() + t["x"].abs() * (scale(o["p"]) if o["training"] else 1.0)},
    probes=Probes(
        dims={"x": "M C", "residual": "M C", "seed": "1", "offset": "1"},
        options=_P,
        absent=((), ("offset",)),
        values={"seed": _number, "offset": _number},
    ),
    workloads=workloads.STREAMS,
)
def dropout_add(
    x: Tensor,
    residual: Tensor,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    p: float,
    training: bool = True,
) -> Tensor:
    """Dropout (Srivastava et al., 2014) and a residual connection: y = residual + keep * x / (1 - p).

    keep is 0 with probability p. It is had from Philox4x32-10 (Salmon et al., 2011) under the key `seed`: of the
    element at row r and column c of x as [M, C], from word c % 4 of the counter with low 64 bits offset + c // 4 and
    high 64 bits r. It is the same in every backend, and for every layout of x. One call uses up ceil(C / 4) offsets.

    Args:
        x, residual: [..., C] of one shape and dtype, fp32, fp16 or bf16, any strides with a dense last dimension.
        seed, offset: int64[1] on the device of x. Read when the kernel runs, so they may be advanced between the
            replays of a CUDA graph. No offset is 0. Without a seed nothing may be dropped.
        p: the probability of dropping an element, in [0, 1], as a float32.
        training: False for y = x + residual.

    Returns:
        y: shape and dtype of x, contiguous, rounded once. What is dropped counts as 0, also where it is not finite.

    Raises:
        InvalidArgument: wrong or different dtypes or shapes, no columns, p outside of [0, 1], or a missing seed.
    """
    return (upcast(residual) + _dropped(x, seed, offset, p, training)).to(x.dtype)


@op(
    family="residual",
    out={"dx": like("dy")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "dx"), per_element(call, OPERATIONS)),
    error_scale=lambda t, o: {"dx": t["dx"].abs()},
    probes=Probes(dims={"dy": "M C", "state": "2"}, options=_P, values={"state": _number}),
    workloads=workloads.STREAMS,
)
def dropout_add_backward(dy: Tensor, state: Tensor, *, p: float, training: bool = True) -> Tensor:
    """The gradient of `dropout_add`: dx = keep * dy / (1 - p), with the mask made again. That of the residual is dy.

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        state: int64[2], seed and offset as forward saved them.
        p, training: as in forward.

    Returns:
        dx: shape and dtype of dy, rounded once.
    """
    return _dropped(dy, state[:1], state[1:], p, training).to(dy.dtype)
