"""The family of attention by SiLU: silu_attention and hstu_attention with their gradients.

The ops are in `dense` and `jagged`, what users call in `functions`; the mask is in `masks`, the mathematics in
`pointwise`.
"""

from tilewright.core import registry
from tilewright.ops.hstu.dense import silu_attention, silu_attention_backward
from tilewright.ops.hstu.functions import hstu_attention
from tilewright.ops.hstu.jagged import hstu_attention_backward
from tilewright.ops.hstu.kernels import KERNELS

registry.add_kernels(KERNELS)

__all__ = ["hstu_attention", "hstu_attention_backward", "silu_attention", "silu_attention_backward"]
