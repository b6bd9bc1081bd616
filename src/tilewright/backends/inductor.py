"""The inductor backend: torch.compile of the op's definition. Every op has it free.

One compiled function for each op, option set, saving and form of the tensors; sizes are dynamic. Hitting the
recompile limit is an error that selection shows as a reason, never silent eager.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch

from tilewright.core import registry
from tilewright.core.backend import Backend
from tilewright.core.call import Call, TensorFacts
from tilewright.core.errors import NotWarm
from tilewright.core.kernel import Kernel
from tilewright.core.reason import Reason


class InductorBackend(Backend):
    """Needs a C++ compiler for CPU calls and Triton for GPU calls."""

    name = "inductor"
    launches = False

    def missing(self, kind: str = "") -> Reason | None:
        if torch.cuda.is_available():
            if importlib.util.find_spec("triton") is None:
                return Reason("package", "triton is not installed", "pip install 'tilewright[triton]'")
        elif shutil.which("g++") is None and shutil.which("c++") is None and shutil.which("clang++") is None:
            return Reason("package", "no C++ compiler is on the PATH", "install g++")
        return None

    def version(self, kind: str = "") -> str:
        return torch.__version__

    def bind(self, kernel: Kernel, call: Call) -> Callable[..., list[Any]]:
        names = tuple(n for n, facts in call.tensors.items() if facts is not None and n not in call.outputs)
        form = tuple(_form(facts) for n in names if (facts := call.tensors[n]) is not None)
        compiled = _compiled(call.op, tuple(call.options.items()), names, form, call.saving)
        op = registry.op(call.op)
        places = [op.tensors.index(n) for n in names]
        # A definition compiled to overwrite its input need not give the bits of the other: a C++ compiler contracts
        # other products where loads and stores may meet. So there is one function, and its result is copied.
        into = [(list(op.out).index(output), op.tensors.index(name)) for output, name in call.aliased.items()]
        warm = False

        def run(*tensors: Any) -> list[Any]:
            nonlocal warm
            if not warm and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise NotWarm(f"{call.op}: the inductor kernel is cold; run this call once before capturing")
            with torch.no_grad():
                results: list[Any] = compiled(*[tensors[i].detach() for i in places])
                for output, place in into:
                    tensors[place].detach().copy_(results[output])
                    results[output] = None
            warm = True
            return results

        return run


def _form(facts: TensorFacts) -> tuple[Any, ...]:
    """What torch would recompile for: dtype, dimensions, sizes of one, the kind of each stride."""
    kinds = None if facts.contiguous else tuple(min(s, 2) for s in facts.stride)
    return facts.dtype, tuple(n == 1 for n in facts.shape), kinds


@functools.cache
def _compiled(
    name: str,
    options: tuple[tuple[str, Any], ...],
    present: tuple[str, ...],
    form: tuple[Any, ...],
    saving: bool,
) -> Callable[..., list[Any]]:
    """The definition with these options and tensors of this form, compiled for any size."""
    op, chosen = registry.op(name), dict(options)

    def definition(*tensors: torch.Tensor) -> list[Any]:
        known: dict[str, torch.Tensor | None] = dict.fromkeys(op.tensors)
        known.update(zip(present, tensors, strict=True))
        results = op.define(known, chosen, saving)
        # a result that a definition passes through (dx = dh) must not alias its input
        dense = torch.contiguous_format
        return [
            None if r is None else r.clone(memory_format=dense) if any(r is t for t in tensors) else r.contiguous()
            for r in results
        ]

    # torch counts recompilations by code object, which all of these would share
    definition.__code__ = definition.__code__.replace()
    # left to itself inductor drops a rounding that is widened again at once, as of h in add_rms_norm
    return torch.compile(definition, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})
