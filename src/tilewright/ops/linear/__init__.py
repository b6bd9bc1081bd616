"""The linear family: linear, a matrix product with its epilogue, and its gradient.

The ops are in `linear`, their workloads in `workloads.py`. Their kernels are declared in `kernels.py` and written in
one file a backend; how products are cut into tiles is in `configs`.
"""

from tilewright.core import registry
from tilewright.ops.linear.kernels import KERNELS
from tilewright.ops.linear.linear import linear, linear_backward

registry.add_kernels(KERNELS)

__all__ = ["linear", "linear_backward"]
