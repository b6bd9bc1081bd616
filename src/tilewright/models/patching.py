"""`patch(model)`: replaces modules of somebody's model in place by such that call the library's ops.

Which module is which is decided in `norms.py` and `linears.py`; here is the walk, the way back, and the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from tilewright.core.errors import InvalidArgument
from tilewright.core.reason import Reason
from tilewright.models import linears as linears_
from tilewright.models import norms as norms_
from tilewright.models.replacing import Replacement, original_of

Recogniser = Callable[[nn.Module], Replacement | Reason | None]


@dataclass(frozen=True)
class Patched:
    """A replaced module: where it is, what it was, the op that serves it, and in which convention."""

    name: str
    kind: str
    op: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """A module of a kind that was asked for, left as it is, and why."""

    name: str
    kind: str
    reason: Reason


@dataclass
class Report:
    """What `patch` did. `already` names modules that an earlier call had replaced."""

    replaced: list[Patched] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    already: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{count} x {kind} -> {op}" + (f"   {note}" if note else "")
            for (kind, op, note), count in Counter((p.kind, p.op, p.note) for p in self.replaced).items()
        ]
        kept = Counter((k.kind, k.reason) for k in self.kept)
        lines += [f"{count} x {kind} kept: {reason}" for (kind, reason), count in kept.items()]
        if self.already:
            lines.append(f"{len(self.already)} x patched before")
        return "\n".join(lines) or "nothing found to replace"


def patch(model: nn.Module, *, norms: bool = True, linears: bool = False) -> Report:
    """Replace modules of `model` in place by such that call the library's ops.

    Parameters are shared and not copied, and `state_dict` keys stay, so checkpoints and optimisers made before or after
    go on working; training does too. What is not surely one of our ops is kept, with the reason in the report. Patching
    twice changes nothing; a second call may replace what the first was not asked for.

    Args:
        model: any module that holds those named below; shared modules stay shared. Not itself one of them.
        norms: replace `torch.nn.LayerNorm`, `torch.nn.RMSNorm`, and RMS norms of modelling code such as Hugging
            Face's.
        linears: replace `torch.nn.Linear`. Off by default: it pays where the shapes that the model meets are tuned.

    Returns:
        What was replaced, what was kept and why. It prints as a few lines.

    Raises:
        InvalidArgument: `model` is no module, or is itself to be replaced and so has no place to be replaced in.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument("patch", "model", f"a {type(model).__name__}", "a torch.nn.Module is needed")
    kinds: dict[Recogniser, bool] = {norms_.replacement: norms, linears_.replacement: linears}
    asked = [recognise for recognise, wanted in kinds.items() if wanted]
    if isinstance(_replacement(model, asked), nn.Module):
        raise InvalidArgument("patch", "model", f"is itself a {type(model).__name__}", "patch the module that holds it")
    report = Report()
    made: dict[nn.Module, Replacement | Reason | None] = {}
    for parent, attribute, name, child in list(_places(model)):
        if isinstance(child, Replacement):
            report.already.append(name)
            continue
        if child not in made:
            made[child] = _replacement(child, asked)
        found = made[child]
        if isinstance(found, Reason):
            report.kept.append(Kept(name, type(child).__name__, found))
        elif found is not None:
            parent._modules[attribute] = found
            note = found._tilewright_note()
            report.replaced.append(Patched(name, type(child).__name__, found._tilewright_op, note))
    return report


def _replacement(module: nn.Module, asked: list[Recogniser]) -> Replacement | Reason | None:
    return next((found for recognise in asked if (found := recognise(module)) is not None), None)


def unpatch(model: nn.Module) -> int:
    """Put the original modules back, with the parameters as they are now. Returns how many places were restored."""
    count = 0
    for parent, attribute, _, child in list(_places(model)):
        if isinstance(child, Replacement):
            original = original_of(child)
            original.training = child.training  # the only state of a module that is not shared
            parent._modules[attribute] = original
            count += 1
    return count


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """(parent, attribute, full name, child) of every place that holds a module; a shared child comes once a place."""
    for prefix, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                yield parent, attribute, f"{prefix}.{attribute}" if prefix else attribute, child
