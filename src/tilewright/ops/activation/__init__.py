"""The activation family: gated and plain activations, scale_bias_add, bias_act, and their gradients.

The ops are in `gated` (a gate and a value), `packed` (both in one tensor), `unary` (one input), `biased` (bias_act) and
`affine` (scale_bias_add), the functions that they share in `functions`. Their kernels are declared in `kernels.py` and
written in one file a backend, what has parameters by column in a second one; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.core.in_place import in_place
from tilewright.ops.activation.affine import scale_bias_add, scale_bias_add_backward
from tilewright.ops.activation.biased import bias_act, bias_act_backward
from tilewright.ops.activation.gated import geglu, geglu_backward, swiglu, swiglu_backward
from tilewright.ops.activation.kernels import KERNELS
from tilewright.ops.activation.packed import (
    geglu_packed,
    geglu_packed_backward,
    swiglu_packed,
    swiglu_packed_backward,
)
from tilewright.ops.activation.unary import gelu, gelu_backward, silu, silu_backward

registry.add_kernels(KERNELS)

bias_act_ = in_place(bias_act, y="x")
gelu_ = in_place(gelu, y="x")
scale_bias_add_ = in_place(scale_bias_add, y=("residual", "x"))
silu_ = in_place(silu, y="x")

__all__ = [
    "bias_act",
    "bias_act_",
    "bias_act_backward",
    "geglu",
    "geglu_backward",
    "geglu_packed",
    "geglu_packed_backward",
    "gelu",
    "gelu_",
    "gelu_backward",
    "scale_bias_add",
    "scale_bias_add_",
    "scale_bias_add_backward",
    "silu",
    "silu_",
    "silu_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_packed",
    "swiglu_packed_backward",
]
