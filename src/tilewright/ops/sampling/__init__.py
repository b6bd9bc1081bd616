"""The sampling family: softmax and its gradient, top_k_top_p_renorm and top_k_top_p_sample.

The ops are in `softmax` and `top`, which tokens are kept in `selection`, the functions that users call in `calls`.
Kernels are declared in `kernels.py` and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.sampling.calls import softmax, top_k_top_p_renorm, top_k_top_p_sample
from tilewright.ops.sampling.kernels import KERNELS
from tilewright.ops.sampling.softmax import softmax_backward

registry.add_kernels(KERNELS)

__all__ = ["softmax", "softmax_backward", "top_k_top_p_renorm", "top_k_top_p_sample"]
