"""What any replacement of a module is, and what keeps a stranger's module from having one.

A replacement shares its original's `__dict__` entries, parameter table and hooks included: both are views of one state,
so checkpoints, optimisers, `.to()` and hooks see no difference. The replacements themselves are in `norms.py` and
`linears.py`; walking a model is in `patching.py`.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from torch import nn

from tilewright.core.reason import Reason

ORIGINAL = "_tilewright_original"


class Replacement(nn.Module):
    """A module that an op serves, in the place of another."""

    _tilewright_op: ClassVar[str]

    def _tilewright_note(self) -> str:
        """What a report says beside the op."""
        return ""


R = TypeVar("R", bound=Replacement)


def share(module: nn.Module, cls: type[R]) -> R:
    """A module of `cls` over the very state of `module`."""
    made = cls.__new__(cls)
    made.__dict__.update(module.__dict__)
    made.__dict__[ORIGINAL] = module  # not by attribute: that would register a submodule
    return made


def original_of(module: Replacement) -> nn.Module:
    found = module.__dict__[ORIGINAL]
    assert isinstance(found, nn.Module)
    return found


def stranger(module: nn.Module, parameters: set[str]) -> Reason | None:
    """What keeps a module of any kind from being replaced: more on it or in it than `parameters`, which ops take."""
    if "forward" in module.__dict__:
        return Reason("forward", "replaced on the instance (a hook of accelerate, or another patch)", "patch first")
    inner = next((name for name, _ in module.named_children()), None)
    if inner is not None:
        return Reason(inner, "a module inside it (a parametrization, an adapter)", "patch before adding it")
    strange = sorted(n for n, p in module._parameters.items() if p is not None and n not in parameters)
    strange += sorted(n for n, b in module._buffers.items() if b is not None)
    if strange:
        return Reason(strange[0], "state that no op here takes")
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return Reason(name, f"a {type(parameter).__name__}", "takes a plain Parameter; patch before sharding")
    return None


def own_forward(module: nn.Module, base: type[nn.Module]) -> Reason | None:
    """A subclass of a module of torch may compute anything."""
    if type(module).forward is base.forward:
        return None
    return Reason(type(module).__name__, f"its forward is not that of {base.__name__}")
