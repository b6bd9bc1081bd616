"""The embedding family: embedding_bag_mean and its gradient.

The ops are in `bag`. Their kernels are declared in `kernels.py` and written in one file a backend and pass; how a call
is cut into programs is in `configs.py`, the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.embedding.bag import embedding_bag_mean, embedding_bag_mean_backward
from tilewright.ops.embedding.kernels import KERNELS

registry.add_kernels(KERNELS)

__all__ = ["embedding_bag_mean", "embedding_bag_mean_backward"]
