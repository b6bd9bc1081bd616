"""The norm family: rms_norm, add_rms_norm, layer_norm, add_layer_norm, l2_norm and their gradients.

Here are the ops: signature, definition, gradient, contract checks, costs, probes. Their kernels are declared in
`kernels.py` and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.norm.backward import l2_norm_backward, layer_norm_backward, rms_norm_backward
from tilewright.ops.norm.forward import add_layer_norm, add_rms_norm, l2_norm, layer_norm, rms_norm
from tilewright.ops.norm.kernels import KERNELS

registry.add_kernels(KERNELS)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "l2_norm",
    "l2_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]
