"""The loss family: bce_with_logits and its gradient.

The ops are in `bce`. Their kernels are declared in `kernels.py` and written in one file a backend; the workloads are in
`workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.loss.bce import bce_with_logits, bce_with_logits_backward
from tilewright.ops.loss.kernels import KERNELS

registry.add_kernels(KERNELS)

__all__ = ["bce_with_logits", "bce_with_logits_backward"]
