"""Linear layers that call the library's `linear`, and which of a stranger's are ones.

Nothing is kept beside the weight: kernels read it as it is, so that it may change in any way at any time. What all
replacements share is in `replacing.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tilewright.core.call import DTYPE_NAMES
from tilewright.core.contract import FLOATING
from tilewright.core.reason import Reason
from tilewright.models.replacing import Replacement, own_forward, share, stranger
from tilewright.ops.linear import linear


class Linear(Replacement, nn.Linear):
    """`torch.nn.Linear` served by `tilewright.linear`; under autocast, which picks the dtype of a product, by torch."""

    _tilewright_op = "linear"

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def replacement(module: nn.Module) -> Linear | Reason | None:
    """The module that would serve in the place of `module`, a reason why there is none, or None where `module` is no
    linear layer at all."""
    if not isinstance(module, nn.Linear):
        return None
    reason = own_forward(module, nn.Linear) or stranger(module, {"weight", "bias"}) or _unlike(module)
    return reason or share(module, Linear)


def _unlike(module: nn.Linear) -> Reason | None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return Reason(type(module).__name__, "torch.nn.MultiheadAttention multiplies by its weight itself")
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dtype not in FLOATING:
            dtype = DTYPE_NAMES.get(parameter.dtype, str(parameter.dtype))
            return Reason(name, f"dtype {dtype}", "takes fp32, fp16, bf16")
    return None
