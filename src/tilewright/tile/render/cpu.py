"""A whole C++ file for one CPU kernel: types, the records that it uses, its arguments, and the loop over instances.

The generated code includes no header: neither libc's nor a vendor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.tile.instr import convert, x86
from tilewright.tile.instr.record import SCALARS, needed
from tilewright.tile.ir.thread_ir import Function, Parameter
from tilewright.tile.render.c import element, statements, symbol_of

RECORDS = (*x86.ARITHMETIC, *x86.FOLDS, *convert.RECORDS, *x86.MEMORY)
TYPES = """typedef float f32; typedef signed char i8; typedef unsigned char u8; typedef unsigned short u16;
typedef int i32; typedef unsigned u32; typedef long long i64; typedef unsigned long long u64;
constexpr int W = {lanes};
typedef f32 f32v __attribute__((vector_size(W * 4))); typedef i32 i32v __attribute__((vector_size(W * 4)));
typedef u32 u32v __attribute__((vector_size(W * 4))); typedef i64 i64v __attribute__((vector_size(W * 8)));
typedef u64 u64v __attribute__((vector_size(W * 4))); typedef short i16v __attribute__((vector_size(W * 2)));
typedef u16 u16v __attribute__((vector_size(W * 2))); typedef i8 i8v __attribute__((vector_size(W)));
typedef u8 u8v __attribute__((vector_size(W)));
template <class V> struct loose_of {{ typedef V type __attribute__((aligned(1), may_alias)); }};
template <class V> using loose = typename loose_of<V>::type;
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(n) PRAGMA(GCC unroll n)
#define INFINITE __builtin_inff()
#define NOT_A_NUMBER __builtin_nanf("")
constexpr i64 INT64_LEAST = -9223372036854775807ll - 1;
static const i32v LANES = {{{counts}}};
static const i64v PLACES = {{{counts}}};"""
ARENA = """extern "C" void* aligned_alloc(unsigned long, unsigned long); extern "C" void free(void*);
struct Arena_{symbol} {{
  char* p = (char*)aligned_alloc(64, {size});
  ~Arena_{symbol}() {{ free(p); }}
}};
static thread_local Arena_{symbol} arena_{symbol};
"""


def lanes_of(features: Iterable[str]) -> int:
    """Float32 lanes of the target's vectors."""
    have = set(features)
    return 16 if have >= x86.AVX512 else 8 if "avx2" in have else 4


def source(function: Function, features: Iterable[str]) -> tuple[str, str]:
    """(C++ source, symbol) of one kernel."""
    text, symbols = sources([function], features)
    return text, symbols[0]


def sources(functions: Sequence[Function], features: Iterable[str]) -> tuple[str, list[str]]:
    """(C++ source, symbols) of several kernels in one file. Comments name the author's lines."""
    lanes = functions[0].lanes
    bodies, plain = (["\n".join(statements(f.body, 6, where)) for f in functions] for where in (True, False))
    counts = ", ".join(map(str, range(lanes)))
    head = [TYPES.format(lanes=lanes, counts=counts)]
    head += [r.text for r in needed("\n".join(plain), RECORDS, sorted(features), lanes)]
    parts, symbols = list(head), []
    for function, body, code in zip(functions, bodies, plain, strict=True):
        # Comments name lines, which move while the kernel stays the same, and so does its place in the store.
        symbol = symbol_of(function.name, "".join([*head, repr(function.parameters), repr(function.arrays), code]))
        if symbol not in symbols:
            fields = [f"{_field(p)} {p.name};" for p in function.parameters if p.kind != "builtin"]
            arguments = f"struct Args_{symbol} {{ {' '.join(fields)} }};"
            parts += ["", arguments, "", *_driver(function, symbol, body)]
        symbols.append(symbol)
    return "\n".join(["// made by tilewright.tile", *parts, ""]), symbols


def _field(p: Parameter) -> str:
    """Every field is 8 bytes: a float32 travels as a double, which holds it exactly."""
    if p.kind == "pointer":
        return f"{element(p.dtype)}*"
    return "double" if p.dtype.name == "float32" else SCALARS[p.dtype.name]


def _driver(function: Function, symbol: str, body: str) -> list[str]:
    size, places = 0, []
    for array in function.arrays:
        kind = element(array.dtype)
        places.append(f"      {kind}* const {array.name} = ({kind}*)(scratch + {size});")
        size += -(-array.elements * array.dtype.itemsize // 64) * 64
    out = [ARENA.format(symbol=symbol, size=size)] if size else []
    out.append(f'extern "C" void {symbol}(const Args_{symbol}* args, i64 grid0, i64 grid1, i64 grid2, int threads) {{')
    for p in function.parameters:
        if p.kind == "pointer":
            const = "const " if p.of in function.read_only else ""
            out.append(f"  {const}{element(p.dtype)}* const {p.name} = args->{p.name};")
        elif p.kind != "builtin":
            out.append(f"  const {SCALARS[p.dtype.name]} {p.name} = ({SCALARS[p.dtype.name]})args->{p.name};")
    out += ["#pragma omp parallel num_threads(threads) if(threads > 1)", "  {"]
    if size:
        out += [f"    char* const scratch = arena_{symbol}.p;", *places]
    out.append("#pragma omp for schedule(static) collapse(3)")
    for axis in (0, 1, 2):  # the last one fastest: where axis 0 counts rows, axis 1 goes along memory
        out.append(f"    for (i64 pid{axis} = 0; pid{axis} < grid{axis}; pid{axis}++)")
    return [*out, "    {", body, "    }", "  }", "}"]
