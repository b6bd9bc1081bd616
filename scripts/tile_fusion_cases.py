"""What `tile_fusion.py` runs: kernels, fragments, and the tensors of a case. A case is a kernel with one fragment, run
fused, and apart: the fragment as a kernel of its own, made of the same pieces, with a tensor in between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tile_fusion_kernels import (
    BLOCK,
    CHUNK,
    ROWS,
    add,
    add_kept,
    add_turned,
    decoded,
    dropped,
    embedded,
    gated,
    gated_pair,
    gelu,
    heads,
    norm,
    norm_blocks,
    norm_in_chunks,
    quantized,
    scaled,
    scaled_blocks,
    softmax,
    store_dropped,
    store_gated,
    store_gelu,
    store_pair,
    store_softmax,
    store_sum,
    store_turned,
    thrice,
)
from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lang.apart import apart
from tilewright.tile.lang.kernel import Fragment, Kernel
from tilewright.tile.schedule import Schedule, worth_timing

Tensor = torch.Tensor
HEADS = 8
BF16, F32, INT8, FP8 = tile.bfloat16, tile.float32, tile.int8, tile.float8_e4m3fn
TORCH = {BF16: torch.bfloat16, F32: torch.float32, INT8: torch.int8, FP8: torch.float8_e4m3fn, tile.int64: torch.int64}


@dataclass(frozen=True)
class Spec:
    """A tensor of a case. `shape` of "m" rows, "n" columns, "p" twice as many, "h" heads. `layout`: "dense", "offset"
    (by one element, so that nothing is known of the address), "turned" (stored by columns), or the last axis's stride.
    """

    dtype: Any = BF16
    shape: str = "mn"
    layout: str | int = "dense"
    output: bool = False

    def sizes(self, rows: int, columns: int) -> tuple[int, ...]:
        return tuple({"m": rows, "n": columns, "p": 2 * columns, "h": HEADS}[c] for c in self.shape)

    def type(self, rows: int, columns: int) -> ViewType:
        item = self.dtype.itemsize
        align = (
            16 if self.layout == "dense" else math.gcd(16, item * self.layout) if isinstance(self.layout, int) else item
        )
        unit = self.layout in ("dense", "offset")
        return ViewType(self.dtype, self.sizes(rows, columns), unit, align=align)

    def tensor(self, rows: int, columns: int, generator: torch.Generator, device: str) -> Tensor:
        sizes, dtype = self.sizes(rows, columns), TORCH[self.dtype]
        made = _placed(sizes, self.layout, dtype, device)
        if self.output:
            return made
        if self.dtype == tile.int64:
            return made.copy_(torch.randint(0, rows, sizes, generator=generator, device=device))
        if self.dtype == INT8:
            return made.copy_(torch.randint(-127, 128, sizes, generator=generator, device=device))
        size = 0.02 if self.shape == "m" else 1.0
        return made.copy_((size * torch.randn(sizes, generator=generator, device=device)).to(dtype))


def _placed(sizes: tuple[int, ...], layout: str | int, dtype: torch.dtype, device: str) -> Tensor:
    if isinstance(layout, int):
        return torch.zeros(*sizes[:-1], sizes[-1] * layout, dtype=dtype, device=device)[..., ::layout]
    if layout == "turned":
        return torch.zeros(sizes[::-1], dtype=dtype, device=device).t()
    if layout == "offset":
        return torch.zeros(math.prod(sizes) + 8, dtype=dtype, device=device)[1 : 1 + math.prod(sizes)].view(sizes)
    return torch.zeros(sizes, dtype=dtype, device=device)


# Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`own`: the kernel's tensors; `views`: the fragment's; `between`: the element type of the tensor in between."""

    name: str
    kernel: Kernel
    place: str
    piece: Fragment
    own: dict[str, Spec]
    views: dict[str, Spec]
    rows: int
    columns: int
    between: Any = BF16
    block: tuple[int, int] = (1, 0)
    """Rows of an instance, and columns; 0 are all."""

    @property
    def text(self) -> str:
        return f"{self.name} [{self.rows}, {self.columns}]"

    @property
    def specs(self) -> dict[str, Spec]:
        mine = {f"{self.place}_{n}": s for n, s in self.views.items()}
        return {**self.own, **mine, f"{self.place}_between": Spec(self.between, output=True)}

    @cached_property
    def programs(self) -> dict[str, Program]:
        """By form: "fused", "staged", and "first" and "second" of those apart."""
        bound = self.piece(**{n: object() for n in self.views})
        fused = self.kernel.bind(**{self.place: bound})
        own, rest = (apart(fused, self.place, form, object()) for form in ("own", "rest"))
        first, second = (own, rest) if self.place == "prologue" else (rest, own)
        types: dict[str, Any] = {n: s.type(self.rows, self.columns) for n, s in self.specs.items()}
        found = {"first": first.trace(types), "second": second.trace(types)}
        del types[f"{self.place}_between"]
        return {"fused": fused.trace(types), "staged": apart(fused, self.place, "staged").trace(types), **found}

    def grid(self, form: str) -> tuple[int, int, int]:
        """What is bound before a kernel of several heads is computed once for all of them where it runs apart."""
        across = HEADS if self.kernel.function is heads.function and form != "first" else 1
        return self.rows // self.block[0], self.columns // self.block[1] if self.block[1] else across, 1

    def schedules(self, form: str) -> tuple[Schedule, ...]:
        return worth_timing(self.programs[form], self.columns)[:3]

    def tensors(self, seed: int, device: str = "cuda") -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        return {n: s.tensor(self.rows, self.columns, generator, device) for n, s in self.specs.items()}


X, Y, ROW = Spec(), Spec(output=True), Spec(F32, "m")
UNIT = Spec(F32, "m", output=True)
PLAIN: dict[str, tuple[Kernel, dict[str, Spec]]] = {
    "norm": (norm, {"x": X, "w": Spec(shape="n")}), "softmax": (softmax, {"x": X}), "scaled": (scaled, {"x": X}),
}  # fmt: skip
BEFORE: dict[str, tuple[Fragment, dict[str, Spec]]] = {
    "add": (add, {"other": X}), "add fp32": (add, {"other": Spec(F32)}),
    "add misaligned": (add, {"other": Spec(layout="offset")}),
    "add by columns": (add, {"other": Spec(layout="turned")}),
    "add every 2nd": (add, {"other": Spec(layout=2)}), "add every 8th": (add, {"other": Spec(layout=8)}),
    "add fp32 every 4th": (add, {"other": Spec(F32, layout=4)}), "add kept": (add_kept, {"other": X, "total": Y}),
    "gated": (gated, {"up": X}), "gated pair": (gated_pair, {"pair": Spec(shape="mp")}),
    "decode int8": (decoded, {"codes": Spec(INT8), "unit": ROW}),
    "decode fp8": (decoded, {"codes": Spec(FP8), "unit": ROW}),
    "decode int8 misaligned": (decoded, {"codes": Spec(INT8, layout="offset"), "unit": ROW}),
    "embed": (embedded, {"table": X, "token": Spec(tile.int64, "m")}), "gelu fast": (gelu(accuracy="fast"), {}),
    "gelu exact": (gelu(accuracy="exact"), {}), "dropout": (dropped, {}), "three functions": (thrice, {}),
}  # fmt: skip
AFTER: dict[str, tuple[Fragment, dict[str, Spec]]] = {
    "int8 rows": (quantized, {"codes": Spec(INT8, output=True), "unit": UNIT}),
    "fp8 rows": (quantized, {"codes": Spec(FP8, output=True), "unit": UNIT}),
    "int8 rows misaligned": (quantized, {"codes": Spec(INT8, layout="offset", output=True), "unit": UNIT}),
    "gelu fast": (store_gelu(accuracy="fast"), {"y": Y}), "gelu exact": (store_gelu(accuracy="exact"), {"y": Y}),
    "gated": (store_gated, {"up": X, "y": Y}), "add": (store_sum, {"other": X, "y": Y}),
    "add by columns": (store_sum, {"other": Spec(layout="turned"), "y": Y}), "dropout": (store_dropped, {"y": Y}),
    "pair": (store_pair, {"y": Spec(shape="mp", output=True)}), "softmax": (store_softmax, {"y": Y}),
    "by columns": (tile.store_as, {"y": Spec(layout="turned", output=True)}),
    "misaligned": (tile.store_as, {"y": Spec(layout="offset", output=True)}),
    "every 2nd": (tile.store_as, {"y": Spec(layout=2, output=True)}),
    "every 8th": (tile.store_as, {"y": Spec(layout=8, output=True)}),
    "fp32": (tile.store_as, {"y": Spec(F32, output=True)}),
}  # fmt: skip
BIG, LONG, SMALL, SOME = (8192, 4096), (2048, 16384), (64, 4096), (512, 4096)
CHOSEN = {
    "norm": {
        BIG: (list(BEFORE), list(AFTER)),
        LONG: (["add", "add fp32", "add by columns", "gated pair", "dropout", "gelu exact"],
               ["int8 rows", "softmax", "gated"]),
        SMALL: (["add", "gated pair", "add by columns", "dropout"], ["int8 rows", "by columns"]),
    },
    "softmax": {
        BIG: (["add", "add misaligned", "decode int8", "dropout"], ["int8 rows", "add", "misaligned"]),
        LONG: (["add kept", "three functions"], ["int8 rows"]), SMALL: (["add"], ["gelu exact"]),
    },
    "scaled": {
        BIG: (["add", "add misaligned", "gated pair", "decode fp8", "dropout"],
              ["int8 rows", "by columns", "gelu exact"]),
        SOME: (["add", "three functions"], ["pair"]),
    },
}  # fmt: skip
TWICE = ["add", "add by columns", "gated pair", "decode int8", "dropout", "three functions"]
SHARED = ["add", "add by columns", "add every 8th", "gelu exact", "dropout", "three functions", "decode fp8"]


TURNED, OUT = Spec(shape="nm"), Spec(shape="nm", output=True)
BLOCKS: dict[str, tuple[str, Fragment, dict[str, Spec]]] = {
    "add": ("prologue", add, {"other": X}), "add turned": ("prologue", add_turned, {"other": TURNED}),
    "add fp32 turned": ("prologue", add_turned, {"other": Spec(F32, "nm")}),
    "add int8 turned": ("prologue", add_turned, {"other": Spec(INT8, "nm")}),
    "stored": ("epilogue", tile.store_as, {"y": Y}), "stored turned": ("epilogue", store_turned, {"y": OUT}),
    "stored fp32 turned": ("epilogue", store_turned, {"y": Spec(F32, "nm", output=True)}),
}  # fmt: skip


def cases() -> Iterator[Case]:
    for kernel, sizes in CHOSEN.items():
        function, own = PLAIN[kernel]
        for (rows, columns), (before, after) in sizes.items():
            for name in before:
                yield _before(name, kernel, function, own, rows, columns)
            for name in after:
                piece, views = AFTER[name]
                yield Case(f"{kernel} > {name}", function, "epilogue", piece, own, views, rows, columns)
    for rows, columns in ((1024, 32768), (16, 32768)):
        for name in TWICE:
            yield _before(name, "norm in chunks", norm_in_chunks, {"x": X}, rows, columns)
    for rows, columns in ((8192, 4096), (256, 4096)):
        for name in SHARED:
            piece, views = BEFORE[name]
            own = {"x": X, "w": Spec(shape="hn"), "y": Spec(F32, "mh", output=True)}
            yield Case(f"{name} > heads", heads, "prologue", piece, own, views, rows, columns)
    function, own = PLAIN["norm"]
    for name in ("int8 rows", "softmax"):
        piece, views = AFTER[name]
        yield Case(f"norm > {name}, fp32 between", function, "epilogue", piece, own, views, *BIG, F32)
    for name in ("gelu exact", "dropout"):
        case = _before(name, "norm", function, own, *BIG)
        yield replace(case, name=f"{case.name}, fp32 between", between=F32)
    for rows, columns in ((8192, 2048), (512, 2048)):
        for name, (place, piece, views) in BLOCKS.items():
            for kernel, function, own, block in (("scaled blocks", scaled_blocks, {"x": X}, BLOCK),
                                                 ("norm blocks", norm_blocks, PLAIN["norm"][1], (ROWS, 0))):
                if place == "prologue":
                    function, own = function.bind(epilogue=tile.store_as(object())), {**own, "epilogue_y": Y}
                text = f"{name} > {kernel}" if place == "prologue" else f"{kernel} > {name}"
                yield Case(text, function, place, piece, own, views, rows, columns, block=block)


def _before(name: str, kernel: str, function: Kernel, own: dict[str, Spec], rows: int, columns: int) -> Case:
    piece, views = BEFORE[name]
    made = function.bind(epilogue=tile.store_as(object()))
    return Case(f"{name} > {kernel}", made, "prologue", piece, {**own, "epilogue_y": Y}, views, rows, columns)


def tiny(case: Case) -> Case:
    """The case at a size for the emulator."""
    columns = 2 * CHUNK if "chunks" in case.name else 2 * case.block[1] or 272
    return replace(case, rows=2 * case.block[0], columns=columns)
