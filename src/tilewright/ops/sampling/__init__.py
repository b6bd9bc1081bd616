"""The sampling family: softmax and its gradient.

Kernels are declared in `kernels.py` and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.sampling.kernels import KERNELS
from tilewright.ops.sampling.softmax import softmax, softmax_backward

registry.add_kernels(KERNELS)

__all__ = ["softmax", "softmax_backward"]
