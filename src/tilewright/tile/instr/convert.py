"""Conversions between element types as records: `<target>_of_<source>`, for scalars and vectors. See `x86`."""

from __future__ import annotations

from tilewright.tile.dtypes import ALL
from tilewright.tile.instr.record import INTEGERS, SCALARS, Record
from tilewright.tile.instr.x86 import AVX2, AVX512, F16C, both

NARROW = (
    Record("narrow16", """static inline u16v narrow16(u32v x) {
  u16v r; asm("vpmovdw %1, %0" : "=v"(r) : "v"(x)); return r; }""", AVX512, 16),
    Record("narrow16", """static inline u16v narrow16(u32v x) { u32v r;
  asm("vpackusdw %1, %1, %0\\n\\tvpermq $0xd8, %0, %0" : "=x"(r) : "x"(x));
  u16v lower; __builtin_memcpy(&lower, &r, sizeof lower); return lower; }""", AVX2, 8),
    Record("narrow16", "static inline u16v narrow16(u32v x) { return __builtin_convertvector(x, u16v); }"),
    Record("narrow8", """static inline u8v narrow8(i32v x) {
  u8v r; asm("vpmovdb %1, %0" : "=v"(r) : "v"(x)); return r; }""", AVX512, 16),
    Record("narrow8", """static inline u8v narrow8(i32v x) {
  u16v h = narrow16((u32v)(x & 0xff)), r; asm("vpackuswb %1, %1, %0" : "=x"(r) : "x"(h));
  u8v lower; __builtin_memcpy(&lower, &r, sizeof lower); return lower; }""", AVX2, 8),
    Record("narrow8", "static inline u8v narrow8(i32v x) { return __builtin_convertvector(x, u8v); }"),
)  # fmt: skip


_WIDER = "return __builtin_bit_cast(f32, (u32)x << 16);"
_TO_HALF = ("float16_of_float32", "f32", "u16", "return __builtin_bit_cast(u16, (_Float16)x);")
_OF_HALF = ("float32_of_float16", "u16", "f32", "return (f32)__builtin_bit_cast(_Float16, x);")
_F16C = ((F16C | AVX512, 16), (F16C, 8))

FLOATS = (
    both("bfloat16_of_float32", "f32", "u16", """u32 u = __builtin_bit_cast(u32, x);
  return (u16)((x != x ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16);""", """u32v u = (u32v)x;
  u32v r = u + 0x7fff + (u >> 16 & 1); r = x != x ? u | 0x400000 : r; return narrow16(r >> 16);"""),
    both("float32_of_bfloat16", "u16", "f32", _WIDER, """
  u32v r; asm("vpmovzxwd %1, %0" : "=v"(r) : "vm"(x)); return (f32v)(r << 16);""", AVX2),
    both("float32_of_bfloat16", "u16", "f32", _WIDER, "return (f32v)(__builtin_convertvector(x, u32v) << 16);"),
    *(both(*_TO_HALF, """
  u16v r; asm("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(x)); return r;""", *how) for how in _F16C), both(*_TO_HALF),
    *(both(*_OF_HALF, """
  f32v r; asm("vcvtph2ps %1, %0" : "=v"(r) : "v"(x)); return r;""", *how) for how in _F16C), both(*_OF_HALF),
    both("float8_e4m3fn_of_float32", "f32", "u8", vector="""
  f32v a = abs_of(x); a = a > 448.0f ? splat(448.0f) : a; u32v u = (u32v)a;
  i32v normal = (i32v)((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
  i32v small = (i32v)(a * 512.0f + 12582912.0f) - 0x4b400000;
  i32v code = a < 0.015625f ? small : normal; code = x != x ? splat(0x7f) : code;
  return narrow8(code | ((i32v)((u32v)x >> 24) & 0x80));"""),
    both("float32_of_float8_e4m3fn", "u8", "f32", vector="""i32v b = __builtin_convertvector(x, i32v);
  i32v size = b & 0x7f; f32v normal = (f32v)((size << 20) + (120 << 23));
  f32v small = __builtin_convertvector(size, f32v) * 0.001953125f;
  f32v r = size < 8 ? small : normal; r = size == 0x7f ? (f32v)splat(0x7fc00000) : r;
  return (f32v)((i32v)r | (b & 0x80) << 24);"""),
)  # fmt: skip


def _plain(target: str, source: str) -> Record:
    """Between integers and bool, or from one of those to float32."""
    to, of = SCALARS[target], SCALARS[source]
    if to in ("i8", "u8") and of in ("i32", "u32"):
        vector = f"return ({to}v)narrow8((i32v)x);"
    elif of == "bool":  # a mask: -1 where it is set
        vector = "return narrow8(x & 1);" if to == "u8" else f"return __builtin_convertvector(-x, {to}v);"
    else:
        vector = f"return __builtin_convertvector(x, {to}v);"
    return both(f"{target}_of_{source}", of, to, f"return ({to})x;", vector)


def _of_float(target: str, nearest: bool) -> Record:
    """Saturating; NaN gives 0. What is rounded to even beforehand lies below 2^23."""
    to, (low, high) = SCALARS[target], ALL[target].bounds
    rounding, wide = "x = round_even(x);" if nearest else "", "i32" if to in ("i8", "u8") else "i64"
    scalar = f"""{rounding} if (x != x) return 0;
  x = x < {low}.0f ? {low}.0f : x; return x >= {high + 1}.0f ? ({to}){high}ull : ({to})({wide})x;"""
    vector = ""
    if to == "i32":
        vector = f"""{rounding} i32v r = __builtin_convertvector(x, i32v);
  r = x >= 2147483648.0f ? splat(0x7fffffff) : r; return x != x ? splat(0) : r;"""
    elif wide == "i32":
        vector = f"""x = x != x ? splat(0.0f) : x; x = x < {low}.0f ? splat({low}.0f) : x;
  x = x > {high}.0f ? splat({high}.0f) : x; {rounding} return ({to}v)narrow8(__builtin_convertvector(x, i32v));"""
    return both(f"{target}_of_float32_{'nearest' if nearest else 'zero'}", "f32", to, scalar, vector)


CASTS = (
    both("round_even", "f32", "f32", vector="""
  i32v sign = (i32v)x & (i32)0x80000000; f32v a = abs_of(x), r = a + 8388608.0f - 8388608.0f;
  r = (f32v)((i32v)r | sign); return a < 8388608.0f ? r : x;"""),
    *(_plain(a, b) for a in (*INTEGERS, "float32") for b in (*INTEGERS, "bool") if a != b),
    *(_of_float(a, nearest) for a in INTEGERS for nearest in (True, False)),
)  # fmt: skip

RECORDS = (*NARROW, *FLOATS, *CASTS)
