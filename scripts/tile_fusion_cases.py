"""What `tile_fusion.py` runs: kernels, fragments, and the tensors of a case. A case is a kernel with one fragment, run
fused, and apart: the fragment as a kernel of its own, made of the same pieces, with a tensor in between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lang.apart import apart
from tilewright.tile.lang.kernel import Fragment, Kernel
from tilewright.tile.schedule import Schedule, worth_timing

Tensor = torch.Tensor
CHUNK, HEADS = 1024, 8
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


# Kernels ---------------------------------------------------------------------------------------------------------


@tile.kernel(static={"x": (1,)})
def norm(t: Any, x: Any, w: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    v = prologue(t, v, at) if prologue else v
    epilogue(t, v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[at[1]]).f32(), at)


@tile.kernel(static={"x": (1,)})
def softmax(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    epilogue(t, tile.softmax(t, prologue(t, v, at) if prologue else v, accuracy="fast"), at)


@tile.kernel(static={"x": (1,)})
def scaled(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    epilogue(t, (prologue(t, v, at) if prologue else v) * 1.5, at)


@tile.kernel(static={"x": (1,)})
def norm_in_chunks(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    """Two passes over a row that no block holds: what is bound before it is computed in both."""
    row, total = t.program_id(0), t.var(0.0)
    for k in t.range(0, x.most(1), CHUNK):
        at = row, k + t.arange(CHUNK)
        v = prologue(t, t.load(x[at]).f32(), at)
        total.set(total.get() + t.sum(v * v))
    root = t.rsqrt(total.get() / x.most(1) + 1e-6)
    for k in t.range(0, x.most(1), CHUNK):
        at = row, k + t.arange(CHUNK)
        epilogue(t, prologue(t, t.load(x[at]).f32(), at) * root, at)


@tile.kernel(static={"x": (1,)})
def heads(t: Any, x: Any, w: Any, y: Any, prologue: Any = None) -> None:
    """A row times each of a few vectors, an instance each: what is bound before it is computed by all of them."""
    row, head = t.program_id(0), t.program_id(1)
    at = row, t.arange(x.shape[1])
    v = prologue(t, t.load(x[at]).f32(), at)
    t.store(y[row, head], t.sum(v * t.load(w[head, at[1]]).f32()))


# Prologues -------------------------------------------------------------------------------------------------------


def gelu_of(t: Any, v: Any, accuracy: str) -> Any:
    return v * t.sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v), accuracy)


@tile.fragment
def add(t: Any, v: Any, at: Any, other: Any) -> Any:
    return v + t.load(other[at]).f32()


@tile.fragment
def add_kept(t: Any, v: Any, at: Any, other: Any, total: Any) -> Any:
    s = (v + t.load(other[at]).f32()).to(total.dtype)
    t.store(total[at], s)
    return s.f32()


@tile.fragment
def gated(t: Any, v: Any, at: Any, up: Any) -> Any:
    return v * t.sigmoid(v, "fast") * t.load(up[at]).f32()


@tile.fragment
def gated_pair(t: Any, v: Any, at: Any, pair: Any) -> Any:
    """Gate and value in turn."""
    gate, up = (t.load(pair[at[0], at[1] * 2 + i]).f32() for i in (0, 1))
    return v + gate * t.sigmoid(gate, "fast") * up


@tile.fragment
def decoded(t: Any, v: Any, at: Any, codes: Any, unit: Any) -> Any:
    code = t.load(codes[at])
    return v + (code.i32().f32() if codes.dtype.integer else code.f32()) * t.load(unit[at[0]])


@tile.fragment
def embedded(t: Any, v: Any, at: Any, table: Any, token: Any) -> Any:
    return v + t.load(table[t.load(token[at[0]]), at[1]]).f32()


@tile.fragment
def gelu(t: Any, v: Any, at: Any, accuracy: str) -> Any:
    return gelu_of(t, v, accuracy)


@tile.fragment
def dropped(t: Any, v: Any, at: Any) -> Any:
    word = t.random(7, at[1], at[0], 0)
    return t.where((word >> 8).i32().f32() < 0.9 * 16777216.0, v / 0.9, 0.0)


@tile.fragment
def thrice(t: Any, v: Any, at: Any) -> Any:
    """Three exact functions one after the other."""
    return t.log(1.0 + t.exp(t.sqrt(t.abs(v))))


# Epilogues -------------------------------------------------------------------------------------------------------


@tile.fragment
def quantized(t: Any, v: Any, at: Any, codes: Any, unit: Any) -> None:
    most = 127.0 if codes.dtype.integer else 448.0
    s = t.maximum(t.max(t.abs(v)) / most, 1e-10)
    t.store(unit[at[0]], s)
    t.store(codes[at], (v / s).to(codes.dtype, round="nearest_even" if codes.dtype.integer else "", saturate=True))


@tile.fragment
def store_gelu(t: Any, v: Any, at: Any, y: Any, accuracy: str) -> None:
    t.store(y[at], gelu_of(t, v, accuracy).to(y.dtype))


@tile.fragment
def store_gated(t: Any, v: Any, at: Any, up: Any, y: Any) -> None:
    t.store(y[at], (v * t.sigmoid(v, "fast") * t.load(up[at]).f32()).to(y.dtype))


@tile.fragment
def store_sum(t: Any, v: Any, at: Any, other: Any, y: Any) -> None:
    t.store(y[at], (v + t.load(other[at]).f32()).to(y.dtype))


@tile.fragment
def store_dropped(t: Any, v: Any, at: Any, y: Any) -> None:
    word = t.random(7, at[1], at[0], 0)
    t.store(y[at], t.where((word >> 8).i32().f32() < 0.9 * 16777216.0, v / 0.9, 0.0).to(y.dtype))


@tile.fragment
def store_pair(t: Any, v: Any, at: Any, y: Any) -> None:
    """A value and its negative in turn."""
    t.store(y[at[0], at[1] * 2], v.to(y.dtype))
    t.store(y[at[0], at[1] * 2 + 1], (-v).to(y.dtype))


@tile.fragment
def store_softmax(t: Any, v: Any, at: Any, y: Any) -> None:
    t.store(y[at], tile.softmax(t, v, accuracy="fast").to(y.dtype))


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

    @property
    def text(self) -> str:
        return f"{self.name} [{self.rows}, {self.columns}]"

    @property
    def specs(self) -> dict[str, Spec]:
        mine = {f"{self.place}_{n}": s for n, s in self.views.items()}
        return {**self.own, **mine, f"{self.place}_between": Spec(self.between, output=True)}

    @cached_property
    def programs(self) -> dict[str, Program]:
        """By form: "fused", and "first" and "second" of those apart."""
        bound = self.piece(**{n: object() for n in self.views})
        fused = self.kernel.bind(**{self.place: bound})
        own, rest = (apart(fused, self.place, form, object()) for form in ("own", "rest"))
        first, second = (own, rest) if self.place == "prologue" else (rest, own)
        types: dict[str, Any] = {n: s.type(self.rows, self.columns) for n, s in self.specs.items()}
        found = {"first": first.trace(types), "second": second.trace(types)}
        del types[f"{self.place}_between"]
        return {"fused": fused.trace(types), **found}

    def grid(self, form: str) -> tuple[int, int, int]:
        """What is bound before a kernel of several heads is computed once for all of them where it runs apart."""
        return self.rows, HEADS if self.kernel.function is heads.function and form != "first" else 1, 1

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


def _before(name: str, kernel: str, function: Kernel, own: dict[str, Spec], rows: int, columns: int) -> Case:
    piece, views = BEFORE[name]
    made = function.bind(epilogue=tile.store_as(object()))
    return Case(f"{name} > {kernel}", made, "prologue", piece, {**own, "epilogue_y": Y}, views, rows, columns)


def tiny(case: Case) -> Case:
    """The case at a size for the emulator."""
    return replace(case, rows=2, columns=2 * CHUNK if "chunks" in case.name else 272)
