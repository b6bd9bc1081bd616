"""The family as users call it: softmax over any dimension, k and p that are numbers or tensors, and where no seed is
given, one from torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.core.errors import InvalidArgument
from tilewright.ops.sampling import softmax as rows
from tilewright.ops.sampling import top
from tilewright.ops.seeds import drawn

Numbers = dict[str, Any]


def _apart(top_k: int | Tensor | None, top_p: float | Tensor | None, order: str) -> tuple[Numbers, Numbers]:
    """Tensors and options of the ops."""
    k = None if isinstance(top_k, Tensor) else top_k
    p = None if isinstance(top_p, Tensor) else top_p
    tensors = {"row_k": top_k if k is None else None, "row_p": top_p if p is None else None}
    return tensors, {"top_k": k, "top_p": p, "order": order, "few": top.few_of(k, order)}


def softmax(x: Tensor, *, dim: int = -1, scale: float = 1.0, backend: str | None = None) -> Tensor:
    """softmax(scale * x) over one dimension. See the op, `softmax.op`, which is over the last.

    Args:
        x: fp32, fp16 or bf16, any strides.
        dim: the dimension that is summed over. Of another than the last the result is a view of one with that last.
        scale: a factor of x, as 1 / temperature; finite.
        backend: this backend or an error that says why not.

    Returns:
        y: shape and dtype of x, rounded once. What is -infinity alone is NaN, as in torch.

    Raises:
        InvalidArgument: as the op; also a dimension that x has not.
    """
    if not -x.dim() <= dim < max(x.dim(), 1):
        raise InvalidArgument("softmax", "dim", f"{dim}", f"x has {x.dim()} dimensions")
    if dim in (-1, x.dim() - 1):
        return rows.softmax(x, scale=scale, backend=backend)
    return rows.softmax(x.movedim(dim, -1), scale=scale, backend=backend).movedim(-1, dim)


def top_k_top_p_renorm(
    probs: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    order: str = "top_k_first",
    backend: str | None = None,
) -> Tensor:
    """Probabilities of the k likeliest tokens and of the nucleus of mass p, renormalised. See the op,
    `top_k_top_p_renorm.op`.

    Args:
        probs: [..., V], fp32 (or fp16, bf16).
        top_k: int, or int32 [...] on the device of probs, one a row. top_p: float, or fp32 [...].
        order: "top_k_first" or "joint".
        backend: this backend or an error that says why not.

    Returns:
        y: shape and dtype of probs; NaN in rows that are no distribution.

    Raises:
        InvalidArgument: as the op.
    """
    tensors, options = _apart(top_k, top_p, order)
    y: Tensor = top.top_k_top_p_renorm(probs, **tensors, **options, backend=backend)
    return y


def top_k_top_p_sample(
    probs: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    order: str = "top_k_first",
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each row, from the k likeliest and the nucleus of mass p. See the op, `top_k_top_p_sample.op`.

    Args:
        probs, top_k, top_p, order: as in `top_k_top_p_renorm`.
        seed, offset: int64[1] on the device of probs, which decide the draw; the caller advances one of them, `offset`
            by 1. Without them a seed is drawn on the device from torch's generator: torch.manual_seed repeats it.
        backend: this backend or an error that says why not.

    Returns:
        (ids, valid): int32 and bool, [...]; -1 and False for rows that are no distribution.

    Raises:
        InvalidArgument: as the op; also no seed while a CUDA graph is captured, whose replays would all draw the same,
            or an offset without a seed.
    """
    if seed is None:
        if offset is not None:
            raise InvalidArgument("top_k_top_p_sample", "offset", "given without a seed", "pass both")
        seed = drawn("top_k_top_p_sample", probs.device)
    tensors, options = _apart(top_k, top_p, order)
    found: tuple[Tensor, Tensor] = top.top_k_top_p_sample(probs, seed, offset, **tensors, **options, backend=backend)
    return found


softmax.op = rows.softmax  # type: ignore[attr-defined]  # for explain, and for its reference
top_k_top_p_renorm.op = top.top_k_top_p_renorm  # type: ignore[attr-defined]
top_k_top_p_sample.op = top.top_k_top_p_sample  # type: ignore[attr-defined]
