"""What a kernel accepts, as data, and the reasons it gives where a call does not fit.

A capability is evaluated against facts only, so it can be asked without a GPU, before memory exists, and for machines
that are not here. Limits are small named checks that families share; each returns reasons, never a boolean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.device import Device
from tilewright.core.reason import Reason

Limit = Callable[[Call], Iterable[Reason]]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False, repr=False)
class Target:
    """A range of devices: `cuda(80)` is sm_80 and later, `hip("gfx942")` that one, `cpu()` any CPU."""

    kind: str
    least: int = 0
    most: int = 1 << 16
    archs: tuple[str, ...] = ()

    def accepts(self, device: Device) -> bool:
        if device.kind != self.kind:
            return False
        return device.arch in self.archs if self.archs else self.least <= device.sm <= self.most

    def __str__(self) -> str:
        if self.archs:
            return "/".join(self.archs)
        if self.kind == "cuda":
            several = f" to sm_{self.most}" if self.most < 1 << 16 else " or later"
            return f"sm_{self.least}" + ("" if self.most == self.least else several)
        return self.kind


def cuda(least: int = 80, most: int = 1 << 16) -> Target:
    return Target("cuda", least, most)


def hip(*archs: str) -> Target:
    return Target("hip", archs=archs)


def cpu() -> Target:
    return Target("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class Capability:
    """Devices, dtypes, limits on shapes and strides, and features.

    `gradient`: the kernel can emit what forward saves. `deterministic`: the same bits on every run. `capture`: once
    warm it may run inside a CUDA graph. `in_place`: where the op has an in-place form, an output may be the input that
    the form overwrites: each element is read for the last time before anyone writes it. `emulated`: where the backend
    has an interpreter, it runs this kernel too.
    """

    devices: tuple[Target, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    limits: tuple[Limit, ...] = ()
    gradient: bool = True
    deterministic: bool = True
    capture: bool = True
    in_place: bool = False
    emulated: bool = True

    def elsewhere(self, device: Device, emulated: bool = False) -> Reason | None:
        """Why no call on `device` fits."""
        if not self.devices or (emulated and self.emulated) or any(t.accepts(device) for t in self.devices):
            return None
        return Reason("device", f"{device.arch} is not supported", f"needs {' or '.join(map(str, self.devices))}")

    def reasons(self, call: Call, *, emulated: bool = False, capturing: bool = False) -> list[Reason]:
        """Why `call` does not fit; empty when it does. `emulated`: the backend runs its GPU kernels on this device."""
        elsewhere = self.elsewhere(call.device, emulated)
        found = [elsewhere] if elsewhere else []
        for facts in call.tensors.values():
            if facts is None or not facts.dtype.is_floating_point or facts.name in call.outputs:
                continue
            if facts.dtype not in self.dtypes:
                names = ", ".join(DTYPE_NAMES.get(d, str(d)) for d in self.dtypes)
                found.append(Reason(facts.name, f"dtype {DTYPE_NAMES.get(facts.dtype, facts.dtype)}", f"takes {names}"))
        if found:  # limits may assume the dtypes and the device
            return found
        for limit in self.limits:
            found.extend(limit(call))
        if call.saving and not self.gradient:
            found.append(Reason("gradient", "this kernel cannot emit what the gradient needs", "use torch.no_grad()"))
        if call.deterministic and not self.deterministic:
            found.append(Reason("determinism", "not deterministic, and deterministic algorithms are asked for"))
        if call.aliased and not self.in_place:
            places = ", ".join(f"{output} over {name}" for output, name in call.aliased.items())
            found.append(Reason("in place", f"does not declare that it can write {places}", f"{call.op} would do"))
        if capturing and not self.capture:
            found.append(Reason("capture", "cannot run inside a CUDA graph"))
        return found


def columns(name: str, *, least: int = 1, most: int = 1 << 62, multiple: int = 1, why: str = "") -> Limit:
    """The last dimension of tensor `name` lies in [least, most] and is a multiple of `multiple`."""

    def limit(call: Call) -> Iterable[Reason]:
        facts = call.tensors.get(name)
        if facts is None:
            return
        note = f", {why}" if why else ""
        if facts.columns < least:
            yield Reason(name, f"last dimension {facts.columns} is below {least}{note}")
        elif facts.columns > most:
            yield Reason(name, f"last dimension {facts.columns} is above {most}{note}")
        elif facts.columns % multiple:
            yield Reason(name, f"last dimension {facts.columns} is not a multiple of {multiple}{note}")

    return limit


def rows(name: str, *, most: int) -> Limit:
    """Tensor `name` has at most `most` rows."""

    def limit(call: Call) -> Iterable[Reason]:
        facts = call.tensors.get(name)
        if facts is not None and facts.rows > most:
            yield Reason(name, f"{facts.rows} rows; takes {most}", "split the batch")

    return limit


def unit_stride(*names: str) -> Limit:
    """The last dimension of each named tensor is dense."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is not None and facts.column_stride != 1:
                yield Reason(
                    name,
                    f"last dimension has stride {facts.column_stride}; needs 1",
                    f"{name}.contiguous() would do",
                )

    return limit


def row_levels(*names: str, most: int = 2) -> Limit:
    """The leading dimensions of each named tensor merge into at most `most` strides."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is not None and len(facts.row_levels) > most:
                yield Reason(
                    name,
                    f"leading strides {list(facts.stride[:-1])} merge into {len(facts.row_levels)} levels; "
                    f"takes {most}",
                    f"{name}.contiguous() would do",
                )

    return limit


def aligned(*names: str, bytes: int = 16) -> Limit:
    """Every row of each named tensor starts at a multiple of `bytes`."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is None:
                continue
            step = facts.vector_bytes()
            if step < bytes:
                yield Reason(name, f"rows are aligned to {step} bytes; needs {bytes}")
            elif facts.columns * facts.dtype.itemsize % bytes:
                yield Reason(name, f"rows of {facts.columns * facts.dtype.itemsize} bytes; needs a multiple of {bytes}")

    return limit
