"""The rotary family: rope and qkv_split_rope, and their gradients.

The ops are in `rope` and `split`, what they share in `angles`. Their kernels are declared in `kernels.py` and written
in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.ops.rotary.kernels import KERNELS
from tilewright.ops.rotary.rope import rope, rope_backward
from tilewright.ops.rotary.split import qkv_split_rope, qkv_split_rope_backward

registry.add_kernels(KERNELS)

__all__ = ["qkv_split_rope", "qkv_split_rope_backward", "rope", "rope_backward"]
