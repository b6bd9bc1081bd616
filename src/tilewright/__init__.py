"""Tilewright: one logical operator, many kernels, always the fastest one that is proven right on this machine.

>>> import tilewright as tw
>>> y = tw.rms_norm(x, w, eps=1e-6)
>>> print(tw.explain(tw.rms_norm, x, w))
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tilewright import backends as _backends  # noqa: F401  first: kernels name their backends
from tilewright.core.dispatch import explain
from tilewright.core.dispatch import install_comparer as _install_comparer
from tilewright.core.errors import (
    CheckFailed,
    InvalidArgument,
    NoGradient,
    NoKernel,
    NotWarm,
    OutOfRange,
    TilewrightError,
    UnknownName,
    Unsupported,
)
from tilewright.core.evidence import install_isolated_prover as _install_isolated_prover
from tilewright.core.evidence import install_prover as _install_prover
from tilewright.core.policy import use
from tilewright.ops.activation import (
    bias_act,
    bias_act_,
    bias_act_backward,
    geglu,
    geglu_backward,
    geglu_packed,
    geglu_packed_backward,
    gelu,
    gelu_,
    gelu_backward,
    scale_bias_add,
    scale_bias_add_,
    scale_bias_add_backward,
    silu,
    silu_,
    silu_backward,
    swiglu,
    swiglu_backward,
    swiglu_packed,
    swiglu_packed_backward,
)
from tilewright.ops.embedding import (
    embedding_bag_mean,
    embedding_bag_mean_backward,
    embedding_bag_mean_sparse_backward,
)
from tilewright.ops.linear import linear, linear_backward
from tilewright.ops.loss import bce_with_logits, bce_with_logits_backward
from tilewright.ops.norm import (
    add_layer_norm,
    add_layer_norm_,
    add_rms_norm,
    add_rms_norm_,
    l2_norm,
    l2_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_,
    rms_norm_backward,
)
from tilewright.ops.residual import (
    dropout_add,
    dropout_add_backward,
    gated_residual,
    gated_residual_,
    gated_residual_backward,
)
from tilewright.ops.rotary import (
    qkv_split_rope,
    qkv_split_rope_append,
    qkv_split_rope_append_,
    qkv_split_rope_backward,
    rope,
    rope_backward,
)
from tilewright.ops.sampling import (
    softmax,
    softmax_backward,
    top_k_top_p_renorm,
    top_k_top_p_sample,
)

__version__ = "0.1.0"


def _prove(*args: _Any) -> _Any:
    """The conformance engine is above the core, and loaded when a kernel is to be checked."""
    from tilewright.verify.first_use import prove

    return prove(*args)


def _prove_apart(*args: _Any) -> _Any:
    """The same in a process that may die."""
    from tilewright.tune.pool import prove_in_worker

    return prove_in_worker(*args)


def _compare(*args: _Any) -> None:
    from tilewright.verify.first_use import compare

    compare(*args)


_install_prover(_prove)
_install_isolated_prover(_prove_apart)
_install_comparer(_compare)


def __getattr__(name: str) -> _Any:
    """What patches models is imported when it is first asked for."""
    if name not in ("patch", "unpatch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tilewright import models

    found = globals()[name] = getattr(models, name)
    return found


if _TYPE_CHECKING:
    from tilewright.models import patch, unpatch

__all__ = [
    "CheckFailed",
    "InvalidArgument",
    "NoGradient",
    "NoKernel",
    "NotWarm",
    "OutOfRange",
    "TilewrightError",
    "UnknownName",
    "Unsupported",
    "add_layer_norm",
    "add_layer_norm_",
    "add_rms_norm",
    "add_rms_norm_",
    "bce_with_logits",
    "bce_with_logits_backward",
    "bias_act",
    "bias_act_",
    "bias_act_backward",
    "dropout_add",
    "dropout_add_backward",
    "embedding_bag_mean",
    "embedding_bag_mean_backward",
    "embedding_bag_mean_sparse_backward",
    "explain",
    "gated_residual",
    "gated_residual_",
    "gated_residual_backward",
    "geglu",
    "geglu_backward",
    "geglu_packed",
    "geglu_packed_backward",
    "gelu",
    "gelu_",
    "gelu_backward",
    "l2_norm",
    "l2_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "patch",
    "qkv_split_rope",
    "qkv_split_rope_append",
    "qkv_split_rope_append_",
    "qkv_split_rope_backward",
    "rms_norm",
    "rms_norm_",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "scale_bias_add",
    "scale_bias_add_",
    "scale_bias_add_backward",
    "silu",
    "silu_",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_packed",
    "swiglu_packed_backward",
    "top_k_top_p_renorm",
    "top_k_top_p_sample",
    "unpatch",
    "use",
]
