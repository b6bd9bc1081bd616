"""The residual family: gated_residual and its gradient.

The ops are in `gated`. Their kernels are declared in `kernels.py` and written in one file a backend; the workloads are
in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.residual.gated import gated_residual, gated_residual_backward
from tilewright.ops.residual.kernels import KERNELS

registry.add_kernels(KERNELS)

__all__ = ["gated_residual", "gated_residual_backward"]
