"""The embedding family: embedding_bag_mean and its gradients, dense and sparse.

The ops are in `bag` and `sparse`. Their kernels are declared in `kernels.py` and written in one file a backend and
pass; how a call is cut into programs is in `configs.py` and `sparse_configs.py`, the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.embedding.bag import embedding_bag_mean, embedding_bag_mean_backward
from tilewright.ops.embedding.kernels import KERNELS
from tilewright.ops.embedding.sparse import embedding_bag_mean_sparse_backward

registry.add_kernels(KERNELS)

__all__ = ["embedding_bag_mean", "embedding_bag_mean_backward", "embedding_bag_mean_sparse_backward"]
