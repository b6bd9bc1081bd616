"""Inputs for checks: what the op declares as probes, bent by adversarial generators.

A `Case` is data, small enough to print in a script that reproduces it. The generators know dimensions, strides, dtypes
and values, and no op by name: adding an op or a kernel adds nothing here.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts, contiguous_strides
from tilewright.core.op import Op
from tilewright.core.probes import Extent, Maker

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
HUGE_STRIDE = (1 << 32) + 64
"""A row stride, in elements, that int32 arithmetic takes for 64: a wrong row, not a wild address."""


@dataclass(frozen=True)
class Case:
    """One check of an op. `dtypes` names tensors of another dtype than `dtype`; `layouts` bend tensors by name ("*" for
    every row tensor); `values` name a distribution."""

    name: str
    op: str
    lead: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    values: str = "normal"
    seed: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)
    """Dimensions of parameters that have not their usual ones."""

    def __str__(self) -> str:
        rows = [*self.lead, self.columns]
        extra = [f"{k}={v}" for k, v in {**self.layouts, **self.options}.items()]
        extra += [f"{n} {str(d).removeprefix('torch.')}" for n, d in self.dtypes.items()]
        extra += [f"{n}={size}" for n, size in self.sizes.items()]
        extra += [f"{n} [{form}]" for n, form in self.forms.items()]
        extra += [f"no {n}" for n in self.absent] + ([self.values] if self.values != "normal" else [])
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{rows} {' '.join(extra)}".strip()


def build(case: Case, op: Op[Any], device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
    """The case's tensors by name, in the op's order."""
    return make_inputs(
        op, Extent(case.lead, case.columns, {**op.probes.sizes, **case.sizes}), case.dtype,
        options=case.options, absent=case.absent, seed=case.seed, device=device,
        dtypes=case.dtypes, layouts=case.layouts, values=case.values, forms=case.forms,
    )  # fmt: skip


def make_inputs(
    op: Op[Any],
    size: Extent | Sequence[int],
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    absent: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtypes: Mapping[str, torch.dtype] | None = None,
    layouts: Mapping[str, str] | None = None,
    values: str = "normal",
    forms: Mapping[str, str] | None = None,
    makers: Mapping[str, Maker] | None = None,
) -> dict[str, Tensor | None]:
    """Seeded inputs of `op`, as large as `size` says: a shape is [..., C]. No global generator advances. `makers` are a
    workload's own for what is no plain number."""
    extent = size if isinstance(size, Extent) else Extent(tuple(size[:-1]), size[-1], dict(op.probes.sizes))
    layouts, dtypes, probes = layouts or {}, dtypes or {}, op.probes
    extent = probes.sized(extent, {**op.usual, **(options or {})})
    found: dict[str, Any] = {}
    for name in op.tensors:
        if name in absent:
            found[name] = None
            continue
        shape = probes.shape(name, extent, (forms or {}).get(name))
        generator = torch.Generator(device=device).manual_seed(_seed(seed, name))
        if name in probes.values:
            tensor = {**probes.values, **(makers or {})}[name](shape, generator, device, extent.sizes)
            tensor = tensor.to(dtypes.get(name, tensor.dtype))
        else:
            kind = values if probes.is_rows(name) else "normal"
            tensor = _values(kind, shape, generator, device).to(dtypes.get(name, dtype))
        found[name] = _bend(tensor, _layout_of(name, op, layouts))
    if probes.derive is not None:
        given = dict(found)
        probes.derive(found, {**op.usual, **(options or {})})
        for name in op.tensors:  # what was derived is fresh memory, and asked for in a layout all the same
            if found[name] is not None and found[name] is not given[name]:
                found[name] = _bend(found[name], _layout_of(name, op, layouts))
    return found


def other_dtypes(call: Call) -> dict[str, torch.dtype]:
    """The parameters of `call` that are not in the dtype of its row tensors, and what is no plain number."""
    op = registry.op(call.op)
    main = main_of(call)
    found = {n: f.dtype for n in (*op.probes.either, *op.probes.values) if (f := call.tensors[n]) is not None}
    return {n: dtype for n, dtype in found.items() if dtype != main.dtype}


def main_of(call: Call) -> TensorFacts:
    """The tensor whose dtype is that of the call: the first of its row tensors, else of its tensors of numbers."""
    op = registry.op(call.op)
    apart = (*op.probes.values, *op.probes.by_option)
    given = [facts for n in op.tensors if (facts := call.tensors[n]) is not None and n not in apart]
    return next((facts for facts in given if op.probes.is_rows(facts.name)), given[0])


def extent_of(call: Call) -> Extent:
    """How large the call is, in the words of the op's probes."""
    op = registry.op(call.op)
    shapes = {n: None if (f := call.tensors[n]) is None else f.shape for n in op.tensors}
    return op.probes.extent_of(shapes, call.options)


def forms_of(call: Call) -> dict[str, str]:
    """The forms of the call's parameters that have not their usual one."""
    op = registry.op(call.op)
    return op.probes.unusual({n: None if (f := call.tensors[n]) is None else f.shape for n in op.tensors})


def _layout_of(name: str, op: Op[Any], layouts: Mapping[str, str]) -> str:
    """The layout asked for; "*" speaks of row tensors alone."""
    return layouts.get(name, layouts.get("*", "") if op.probes.is_rows(name) else "")


def _seed(seed: int, name: str) -> int:
    return seed * 1000003 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def _values(kind: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Tensor:
    v = torch.randn(shape, generator=generator, device=device)
    if kind == "normal" or not v.numel():
        return v
    if kind == "large":
        return v.sign() * 300 + v  # squares leave fp16
    if kind == "huge":
        return v * 20000  # near fp16's largest
    if kind == "tiny":
        return v * 1e-6
    if kind == "offset":
        return v + 2000  # mean^2 dwarfs the variance
    if kind == "wild":
        return v * torch.exp(4 * torch.randn(shape, generator=generator, device=device))
    if kind == "constant rows":
        return torch.ones_like(v) * v[..., :1]
    if kind == "zero rows":
        return (
            torch.where(
                torch.arange(v[..., 0].numel(), device=v.device).reshape(v.shape[:-1]) % 2 == 0, 0.0, 1.0
            ).unsqueeze(-1)
            * v
        )
    if kind in ("nan", "inf"):
        flat = v.reshape(-1, shape[-1])
        flat[flat.shape[0] // 2, shape[-1] // 2] = math.nan if kind == "nan" else math.inf
        flat[-1, -1] = math.nan if kind == "nan" else -math.inf
        return v
    raise ValueError(f"unknown values {kind!r}")


def _bend(tensor: Tensor, layout: str) -> Tensor:
    """The same values in other strides. Memory between the rows is NaN, so that reading it shows; between integers it
    is the least there is."""
    if not layout or tensor.dim() == 0:
        return tensor
    kind, _, number = layout.partition(" ")
    shape, columns = tuple(tensor.shape), tensor.shape[-1]
    whole = tensor.dtype != torch.bool and not tensor.is_floating_point()
    nothing = torch.iinfo(tensor.dtype).min if whole else False if tensor.dtype == torch.bool else math.nan
    if kind == "expanded":
        return tensor.flatten()[:1].reshape([1] * tensor.dim()).expand(shape) if tensor.numel() else tensor
    if kind == "columns":  # every second column
        wide = tensor.new_full((*shape[:-1], columns * 2), nothing)
        bent = wide[..., ::2]
    elif kind == "padded":  # rows further apart
        bent = tensor.new_full((*shape[:-1], columns + int(number)), nothing)[..., :columns]
    elif kind == "offset":  # not at the start of its storage
        flat = tensor.new_full((tensor.numel() + 16,), nothing)
        bent = flat[int(number) : int(number) + tensor.numel()].view(shape)
    elif kind == "heads" and tensor.dim() >= 3:  # one part of a fused projection: two row strides
        bent = tensor.new_full((*shape[:-2], 3, *shape[-2:]), nothing).select(-3, 1)
    elif kind == "swapped" and tensor.dim() >= 3:  # the leading dimensions in another order
        return tensor.transpose(0, -2).contiguous().transpose(0, -2)
    elif kind == "broadcast rows":
        return tensor[..., :1, :].expand(shape)
    elif kind == "huge" and tensor.dim() >= 2:  # row 1 lies beyond 2^32 elements; memory between is never touched
        row = tensor[:1].numel()
        bent = torch.empty(HUGE_STRIDE * (shape[0] - 1) + row, dtype=tensor.dtype, device=tensor.device)
        bent = bent.as_strided(shape, (HUGE_STRIDE, *contiguous_strides(shape[1:])))
    else:
        return tensor
    bent.copy_(tensor)
    return bent


MOST_ELEMENTS = 1 << 25
"""Of a workload's tensor in a check: float64 copies of everything are made."""
WIDTHS = (1, 3, 96, 127, 192, 229, 384, 769, 1024, 2049, 5125)
WIDE = (8192, 16384, 24576, 32768, 65536, 131072)
ROWS = (1, 2, 4, 8, 33)
SIZES = ("tiny", "small", "full")


def cases(op: Op[Any], dtype: torch.dtype, *, size: str = "small") -> Iterator[Case]:
    """Every case of one op and dtype.

    size: "tiny" (an interpreter runs them), "small" (a CPU), "full" (a GPU: workloads, wide rows and huge strides too).
    """
    probes = op.probes
    row_tensors = [n for n in op.tensors if probes.is_rows(n)]
    base: dict[str, Any] = {"op": op.name, "dtype": dtype, "absent": probes.absent[0], "options": probes.options[0]}
    widths = {"tiny": (1, 96, 229, 1024), "small": WIDTHS, "full": (*WIDTHS, *WIDE)}[size]
    counts = itertools.cycle({"tiny": (1, 3)}.get(size, ROWS))
    for columns in widths:
        yield Case("width", lead=(next(counts),), columns=columns, **base)
    for count in () if size == "tiny" else (131, 132, 133, 1000):
        yield Case("rows", lead=(count,), columns=128, **base)
    yield Case("leading dimensions", lead=(2, 1, 3), columns=96, **base)
    yield Case("vector", lead=(), columns=96, **base)
    for lead in ((0,), (2, 0)):
        yield Case("empty", lead=lead, columns=64, **base)
    for absent, options in itertools.product(probes.absent, probes.options):
        yield Case("options", **{**base, "absent": absent, "options": options}, lead=(5,), columns=160)
    everything: dict[str, Any] = {**base, "absent": min(probes.absent, key=len)}
    if probes.either and dtype != torch.float32:
        wide = dict.fromkeys(probes.either, torch.float32)
        for absent in probes.absent:
            yield Case("fp32 parameters", **{**base, "absent": absent}, lead=(5,), columns=160, dtypes=wide)
        # Each alone, so that of any two either is fp32 beside the other in half precision. Wide rows have kernels of
        # their own.
        several = (160,) if len(probes.either) > 1 else ()
        for name, columns in itertools.product(probes.either, (*several, 16384) if size == "full" else several):
            alone = {name: torch.float32}
            yield Case("one fp32 parameter", lead=(5,), columns=columns, dtypes=alone, **everything)
    for sizes, options in itertools.product(probes.varied, probes.options[:2]):
        yield Case("sizes", **{**base, "options": options}, lead=(2,), columns=160, sizes=sizes)
    for name, others in probes.dtypes.items():
        for other in others:
            yield Case("dtype", lead=(5,), columns=160, dtypes={name: other}, **everything)
    layouts = [
        "padded 8",
        "padded 3",
        "heads",
        "swapped",
        "broadcast rows",
        *[f"offset {k}" for k in (1, 2, 3, 4, 7, 8, 15)],
    ]
    for layout in layouts[:5] + layouts[5::3] if size == "tiny" else layouts:
        yield Case("layout", lead=(2, 3, 2), columns=160, layouts={"*": layout}, **everything)
    served = [g for o in registry.served_by(op.name) for g in o.gradients if g.op == op.name]
    upstream = {param for gradient in served for param in gradient.grads.values()}
    for name in row_tensors:
        for layout in ("padded 1", "expanded", "columns") if name in upstream else ("padded 1",):
            yield Case("one layout", lead=(7,), columns=160, layouts={name: layout}, **everything)
    for name in (n for n in op.tensors if probes.forms(n)[0] == "C"):
        for layout in ("columns", "expanded", "offset 1"):
            yield Case("one layout", lead=(7,), columns=160, layouts={name: layout}, **everything)
    for name in op.tensors:
        for form in probes.forms(name)[1:]:
            yield Case("form", lead=(7,), columns=160, forms={name: form}, **everything)
            yield Case("form", lead=(5,), columns=229, layouts={name: "padded 1"}, forms={name: form}, **everything)
            yield Case("form", lead=(2, 3, 2), columns=96, layouts={name: "heads"}, forms={name: form}, **everything)
    for name in probes.values:
        if len(probes.dims[name].split()) == 2:
            for layout in ("padded 3", "columns", "expanded"):
                yield Case("one layout", lead=(7,), columns=160, layouts={name: layout}, **everything)
    for values in ("large", "huge", "tiny", "offset", "wild", "constant rows", "zero rows", "nan", "inf"):
        yield Case("values", lead=(6,), columns=256 if size == "tiny" else 1000, values=values, **everything)
    if dtype == torch.bfloat16 and row_tensors:
        last = next(n for n in reversed(row_tensors) if n not in base["absent"])
        two = {probes.dims[last].split()[0]: 2} if last in probes.tables else {}
        yield Case("beyond int32", lead=(2,), columns=256, layouts={last: "huge"}, sizes=two, **base)
    for seed in range(1, 3 if size == "tiny" else 5):
        count = 4 if size == "tiny" else 64
        yield Case("pool", lead=(count,), columns=512, seed=seed, **everything)
    if size == "full":
        for workload in op.workloads:
            rows = max(1, min(workload.rows, MOST_ELEMENTS // workload.columns))
            sizes = probes.cut(probes.extent(workload.shape).sizes, max(1, MOST_ELEMENTS // workload.columns))
            part = probes.bearable(Extent((rows,), workload.columns, sizes))
            asked = {**base, "options": {**base["options"], **workload.options}}
            yield Case(
                f"workload: {workload.name}", lead=part.lead, columns=part.columns, sizes=dict(part.sizes), **asked
            )
