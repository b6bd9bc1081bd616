"""The vendor backend: kernels that come with torch (aten, cuDNN). A kernel is a function of the op's own arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.core.backend import Backend
from tilewright.core.call import Call
from tilewright.core.kernel import Kernel
from tilewright.core.reason import Reason


class VendorBackend(Backend):
    """As present as torch is."""

    name = "vendor"
    launches = False

    def missing(self, kind: str = "") -> Reason | None:
        return None

    def version(self, kind: str = "") -> str:
        return torch.__version__

    def bind(self, kernel: Kernel, call: Call) -> Callable[..., list[Any]]:
        function = kernel.load()
        options, saving = dict(call.options), call.saving

        def run(*tensors: Any) -> list[Any]:
            return list(function(*tensors, **options, saving=saving))

        return run
