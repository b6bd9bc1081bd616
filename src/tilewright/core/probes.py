"""What an op declares so that inputs of it can be made: for checks, tuning and benchmarks alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Shape = tuple[int, ...]
Maker = Callable[[Shape, torch.Generator, torch.device | str, Mapping[str, int]], torch.Tensor]
"""(shape, generator, device, named sizes) to a tensor, in a dtype of its own."""


@dataclass(frozen=True)
class Extent:
    """How large a call is: leading shape M, columns C, and the sizes that the op names beside them."""

    lead: Shape
    columns: int
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Probes:
    """How to make inputs of an op.

    `dims` names the dimensions of each tensor, as "M C": M stands for any leading shape and C for the columns; "2C" is
    twice as many, a number is itself, any other word a size that `sizes` names, with its usual value; "" is one number.
    "M*L" is one dimension of up to M times L, as many as `derive` finds: a vector along rows, as "M" alone is; "N*C" is
    one of N times C. `told` names sizes that options tell, and how; `capped` sizes that columns limit, and to what.
    A parameter that comes in several shapes names each, the usual one first: "C | M C".
    `options` are option sets worth telling apart, of which the first is the usual one, `absent` are sets of optional
    tensors to leave out together, `either` names tensors that may be float32 beside a half-precision call, `values`
    makes tensors that are no plain numbers (ids, seeds), `dtypes` names further dtypes that these may have, `derive`
    fills in tensors that depend on others (what forward saved). `by_option` names tensors of numbers whose dtype an
    option tells, so that it is not the call's. `tables` names tensors of rows whose leading size is one of `sizes`;
    `long` names sizes that are numbers of rows, which checks cut to what fits.
    `varied` are sets of named sizes worth telling apart from the usual ones (head dimensions, heads in groups).
    `flat`: M is exactly one dimension, whatever leading shape is asked for, and need not be the first. `small` makes an
    extent that a check can bear of one that it cannot, where the work is more than the memory of the tensors
    (attention).
    """

    dims: Mapping[str, str]
    options: Sequence[Mapping[str, Any]] = ({},)
    absent: Sequence[tuple[str, ...]] = ((),)
    either: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    told: Mapping[str, Callable[[Mapping[str, Any]], int]] = field(default_factory=dict)
    capped: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    values: Mapping[str, Maker] = field(default_factory=dict)
    dtypes: Mapping[str, Sequence[torch.dtype]] = field(default_factory=dict)
    by_option: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    derive: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None
    varied: Sequence[Mapping[str, int]] = ()
    flat: bool = False
    small: Callable[[Extent], Extent] | None = None

    def extent(self, shape: Sequence[int]) -> Extent:
        """The extent that a shape written [..., M, C] or, all named sizes following, [M, C, sizes...] stands for."""
        named = len(self.sizes)
        if named and len(shape) == 2 + named:
            return Extent((shape[0],), shape[1], dict(zip(self.sizes, shape[2:], strict=True)))
        return Extent(tuple(shape[:-1]), shape[-1], dict(self.sizes))

    def sized(self, extent: Extent, options: Mapping[str, Any]) -> Extent:
        """`extent` with the sizes that these options tell, and no more of others than its columns allow."""
        found = {**extent.sizes, **{name: tell(options) for name, tell in self.told.items()}}
        found |= {name: min(found[name], most(extent.columns)) for name, most in self.capped.items()}
        return replace(extent, sizes=found)

    def forms(self, name: str) -> tuple[str, ...]:
        """The dimensions that tensor `name` may have, as they are named; the usual ones first."""
        return tuple(form.strip() for form in self.dims[name].split("|"))

    def shape(self, name: str, extent: Extent, form: str | None = None) -> Shape:
        """The shape of tensor `name`, in its usual form or in another."""
        found: list[int] = []
        for word in (self.forms(name)[0] if form is None else form).split():
            factors = [math.prod(extent.lead) if f == "M" else self._size(f, extent) for f in word.split("*")]
            found += extent.lead if word == "M" and not self.flat else (math.prod(factors),)
        return tuple(found)

    def unusual(self, shapes: Mapping[str, Shape | None]) -> dict[str, str]:
        """The form of each tensor, among those that are given, that has not its usual one."""
        several = {n: shape for n in self.dims if len(self.forms(n)) > 1 and (shape := shapes.get(n)) is not None}
        if not several:
            return {}
        extent = self.extent_of(shapes)
        found = {
            name: next((form for form in self.forms(name) if self.shape(name, extent, form) == shape), "")
            for name, shape in several.items()
        }
        return {name: form for name, form in found.items() if form and form != self.forms(name)[0]}

    def extent_of(self, shapes: Mapping[str, Shape | None], options: Mapping[str, Any] | None = None) -> Extent:
        """The extent of a call, from the shapes of the tensors that are given, and the options that tell sizes."""
        lead: Shape = ()
        columns, sizes = 1, dict(self.sizes)
        told = {name: tell(options) for name, tell in self.told.items()} if options is not None else {}
        for name, dims in self.dims.items():
            shape, words = shapes.get(name), dims.split()
            if shape is None or (not shape and words) or "|" in words:
                continue
            many = len(shape) - len(words) + 1  # leading dimensions
            if "M" in words:
                at = words.index("M")
                lead, shape = shape[at : at + many], shape[:at] + shape[at + many :]
                del words[at]
            for word, size in zip(words, shape, strict=True):
                if word.endswith("*C"):
                    columns = size // told.get(word[:-2], size or 1)
                elif word.endswith("C"):
                    columns = size // int(word[:-1] or 1)
                elif word in sizes:
                    sizes[word] = size
        return Extent(lead, columns, {**sizes, **told})

    def is_rows(self, name: str) -> bool:
        """Whether it is a tensor of rows of numbers, of any width, in two dimensions or more."""
        words = self.forms(name)[0].split()
        wide = len(words) == 2 or (len(words) > 2 and (self.flat or words[-1].endswith("C")))
        return wide and (words[0] == "M" or name in self.tables) and name not in self.values

    def bearable(self, extent: Extent) -> Extent:
        """`extent`, or a smaller one of its kind where the op says that checks need one."""
        return extent if self.small is None else self.small(extent)

    def is_vector(self, name: str) -> bool:
        """Whether it is a vector along rows, which has no columns: its length is a number of rows."""
        return self.dims.get(name) == "M" or "M*" in self.dims.get(name, "")

    def cut(self, sizes: Mapping[str, int], most: int) -> dict[str, int]:
        """`sizes` with no more than `most` rows in any table."""
        return {name: min(size, most) if name in self.long else size for name, size in sizes.items()}

    def rows(self, given: Mapping[str, Any]) -> list[str]:
        """The row tensors among those that are given."""
        return [name for name in self.dims if self.is_rows(name) and given.get(name) is not None]

    def faults(self) -> list[str]:
        """Words of `dims` that mean nothing."""
        found = []
        for dims in dict.fromkeys(form for name in self.dims for form in self.forms(name)):
            for place, word in enumerate(dims.split()):
                sizes = ("C", *self.sizes, *self.told)
                known = word in sizes or word.isdigit() or (word.endswith("C") and word[:-1].isdigit())
                known = known or ("*" in word and all(factor in ("M", *sizes) for factor in word.split("*")))
                if not known and (word != "M" or (place and not self.flat)):
                    names = ", ".join(["M (first)", "C", "2C", "1", *self.sizes, *self.told])
                    found.append(f'probes.dims: "{word}" in "{dims}" is none of {names}')
        return found

    def _size(self, word: str, extent: Extent) -> int:
        if word.endswith("C") and word not in extent.sizes:
            return int(word[:-1] or 1) * extent.columns
        return int(word) if word.isdigit() else extent.sizes[word]


@dataclass(frozen=True, eq=False, repr=False)
class Workload:
    """A named set of inputs from a real model: leading rows and columns, the usual dtype, and the op's named sizes,
    options and makers of `Probes.values` where they differ from the usual."""

    name: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    sizes: Shape = ()
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    values: Mapping[str, Maker] = field(default_factory=dict, compare=False)

    @property
    def shape(self) -> Shape:
        """As `--shape` takes it."""
        return (self.rows, self.columns, *self.sizes)
