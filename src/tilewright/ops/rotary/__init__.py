"""The rotary family: rope and qkv_split_rope, their gradients, and qkv_split_rope_append.

The ops are in `rope`, `split` and `append`, what they share in `angles`. Their kernels are declared in `kernels.py`
and written in one file a backend; the workloads are in `workloads.py`.
"""

from tilewright.core import registry
from tilewright.core.in_place import in_place
from tilewright.ops.rotary.append import qkv_split_rope_append
from tilewright.ops.rotary.kernels import KERNELS
from tilewright.ops.rotary.rope import rope, rope_backward
from tilewright.ops.rotary.split import qkv_split_rope, qkv_split_rope_backward

registry.add_kernels(KERNELS)

qkv_split_rope_append_ = in_place(qkv_split_rope_append, anywhere=True, k_cached="k_cache", v_cached="v_cache")

__all__ = [
    "qkv_split_rope",
    "qkv_split_rope_append",
    "qkv_split_rope_append_",
    "qkv_split_rope_backward",
    "rope",
    "rope_backward",
]
