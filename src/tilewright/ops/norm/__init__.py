"""The norm family: rms_norm, add_rms_norm, layer_norm, add_layer_norm, l2_norm and their gradients.

Here are the ops: signature, definition, gradient, contract checks, costs, probes. Their kernels are declared in
`kernels.py` and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.core.in_place import in_place
from tilewright.ops.norm.backward import l2_norm_backward, layer_norm_backward, rms_norm_backward
from tilewright.ops.norm.forward import add_layer_norm, add_rms_norm, l2_norm, layer_norm, rms_norm
from tilewright.ops.norm.kernels import KERNELS

registry.add_kernels(KERNELS)

add_layer_norm_ = in_place(add_layer_norm, h="residual")
add_rms_norm_ = in_place(add_rms_norm, h="residual")
rms_norm_ = in_place(rms_norm, y="x")

__all__ = [
    "add_layer_norm",
    "add_layer_norm_",
    "add_rms_norm",
    "add_rms_norm_",
    "l2_norm",
    "l2_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_",
    "rms_norm_backward",
]
