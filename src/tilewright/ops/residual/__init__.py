"""The residual family: gated_residual, dropout_add and their gradients.

The ops are in `gated` and `dropout`, random numbers in `philox`, the function that draws a seed in `random`. Their
kernels are declared in `kernels.py` and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.core.in_place import in_place
from tilewright.ops.residual.dropout import dropout_add_backward
from tilewright.ops.residual.gated import gated_residual, gated_residual_backward
from tilewright.ops.residual.kernels import KERNELS
from tilewright.ops.residual.random import dropout_add

registry.add_kernels(KERNELS)

gated_residual_ = in_place(gated_residual, y="residual")

__all__ = ["dropout_add", "dropout_add_backward", "gated_residual", "gated_residual_", "gated_residual_backward"]
