"""dropout_add as users call it: where no seed is given, one comes from torch's generator."""

from __future__ import annotations

from torch import Tensor

from tilewright.core.errors import InvalidArgument
from tilewright.ops.residual import dropout
from tilewright.ops.seeds import drawn


def dropout_add(
    x: Tensor,
    residual: Tensor,
    *,
    p: float,
    training: bool = True,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Dropout and a residual connection: y = residual + keep * x / (1 - p). See the op, `dropout_add.op`.

    Args:
        x, residual: [..., C] of one shape and dtype, fp32, fp16 or bf16, any strides with a dense last dimension.
        p: the probability of dropping an element, in [0, 1].
        training: False for y = x + residual.
        seed, offset: int64[1] on the device of x, which decide the mask; the caller advances one of them, `offset` by
            ceil(C / 4). Without them a seed is drawn on the device from torch's generator: torch.manual_seed repeats
            it, and so does activation checkpointing.
        backend: this backend or an error that says why not.

    Returns:
        y: shape and dtype of x, contiguous, rounded once.

    Raises:
        InvalidArgument: as the op; also no seed while a CUDA graph is captured, whose replays would all drop the same,
            or an offset without a seed.
    """
    if seed is None and training and p:
        if offset is not None:
            raise InvalidArgument("dropout_add", "offset", "given without a seed", "pass both")
        seed = drawn("dropout_add", x.device)
    y: Tensor = dropout.dropout_add(x, residual, seed, offset, p=p, training=training, backend=backend)
    return y


dropout_add.op = dropout.dropout_add  # type: ignore[attr-defined]  # for explain, and for its reference
