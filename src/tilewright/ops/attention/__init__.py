"""The attention family: attention and varlen_attention with their gradients.

The ops are in `dense` and `varlen`, what users call in `functions`; masks, mathematics and tolerances in `masks`,
`softmax` and `scales`. Kernels are declared in `kernels.py` and written in one file a backend.
"""

from tilewright.core import registry
from tilewright.ops.attention.dense import attention_backward
from tilewright.ops.attention.functions import attention
from tilewright.ops.attention.kernels import KERNELS
from tilewright.ops.attention.varlen import varlen_attention, varlen_attention_backward

registry.add_kernels(KERNELS)

__all__ = ["attention", "attention_backward", "varlen_attention", "varlen_attention_backward"]
