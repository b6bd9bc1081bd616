"""Conversions between element types as records: `<target>_of_<source>`, for scalars and vectors. See `x86`."""

from __future__ import annotations

from tilewright.tile.instr.record import INTEGERS, SCALARS, Record
from tilewright.tile.instr.x86 import AVX2, AVX512, F16C

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

_BF16 = """static inline u16 bfloat16_of_float32(f32 x) { u32 u = __builtin_bit_cast(u32, x);
  return (u16)((x != x ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16); }
static inline u16v bfloat16_of_float32(f32v x) { u32v u = (u32v)x; u32v r = u + 0x7fff + (u >> 16 & 1);
  r = x != x ? u | 0x400000 : r; return narrow16(r >> 16); }"""

_OF_BF16 = """static inline f32 float32_of_bfloat16(u16 x) { return __builtin_bit_cast(f32, (u32)x << 16); }
static inline f32v float32_of_bfloat16(u16v x) {"""

_E4M3 = """static inline u8v float8_e4m3fn_of_float32(f32v x) {
  f32v a = abs_of(x); a = a > 448.0f ? splat(448.0f) : a; u32v u = (u32v)a;
  i32v normal = (i32v)((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
  i32v small = (i32v)(a * 512.0f + 12582912.0f) - 0x4b400000;
  i32v code = a < 0.015625f ? small : normal; code = x != x ? splat(0x7f) : code;
  return narrow8(code | ((i32v)((u32v)x >> 24) & 0x80)); }
static inline u8 float8_e4m3fn_of_float32(f32 x) { return float8_e4m3fn_of_float32(splat(x))[0]; }"""

_FROM_E4M3 = """static inline f32v float32_of_float8_e4m3fn(u8v x) { i32v b = __builtin_convertvector(x, i32v);
  i32v size = b & 0x7f; f32v normal = (f32v)((size << 20) + (120 << 23));
  f32v small = __builtin_convertvector(size, f32v) * 0.001953125f;
  f32v r = size < 8 ? small : normal; r = size == 0x7f ? (f32v)splat(0x7fc00000) : r;
  return (f32v)((i32v)r | (b & 0x80) << 24); }
static inline f32 float32_of_float8_e4m3fn(u8 x) { return float32_of_float8_e4m3fn(u8v{} + x)[0]; }"""


def _half(needs: frozenset[str], lanes: int) -> tuple[Record, Record]:
    to = """static inline u16 float16_of_float32(f32 x) { return __builtin_bit_cast(u16, (_Float16)x); }
static inline u16v float16_of_float32(f32v x) {
  u16v r; asm("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(x)); return r; }"""
    back = """static inline f32 float32_of_float16(u16 x) { return (f32)__builtin_bit_cast(_Float16, x); }
static inline f32v float32_of_float16(u16v x) {
  f32v r; asm("vcvtph2ps %1, %0" : "=v"(r) : "v"(x)); return r; }"""
    return Record("float16_of_float32", to, needs, lanes), Record("float32_of_float16", back, needs, lanes)


FLOATS = (
    Record("bfloat16_of_float32", _BF16),
    Record("float32_of_bfloat16", _OF_BF16 + """
  u32v r; asm("vpmovzxwd %1, %0" : "=v"(r) : "vm"(x)); return (f32v)(r << 16); }""", AVX2),
    Record("float32_of_bfloat16", _OF_BF16 + " return (f32v)(__builtin_convertvector(x, u32v) << 16); }"),
    *_half(F16C | AVX512, 16), *_half(F16C, 8),
    Record("float16_of_float32", """static inline u16 float16_of_float32(f32 x) {
  return __builtin_bit_cast(u16, (_Float16)x); }
static inline u16v float16_of_float32(f32v x) {
  u16v r; for (int l = 0; l < W; l++) r[l] = float16_of_float32(x[l]); return r; }"""),
    Record("float32_of_float16", """static inline f32 float32_of_float16(u16 x) {
  return (f32)__builtin_bit_cast(_Float16, x); }
static inline f32v float32_of_float16(u16v x) {
  f32v r; for (int l = 0; l < W; l++) r[l] = float32_of_float16(x[l]); return r; }"""),
    Record("float8_e4m3fn_of_float32", _E4M3),
    Record("float32_of_float8_e4m3fn", _FROM_E4M3),
)  # fmt: skip


def _plain(target: str, source: str) -> Record:
    s, v = SCALARS[target], SCALARS[target] + "v"
    body = f"return __builtin_convertvector(x, {v});"
    if target in ("int8", "uint8") and source in ("int32", "uint32"):
        body = f"return ({v})narrow8((i32v)x);"
    name = f"{target}_of_{source}"
    return Record(name, f"static inline {s} {name}({SCALARS[source]} x) {{ return ({s})x; }}\n"
                        f"static inline {v} {name}({SCALARS[source]}v x) {{ {body} }}")  # fmt: skip


def _of_bool(target: str) -> Record:
    s, v, name = SCALARS[target], SCALARS[target] + "v", f"{target}_of_bool"
    body = f"return __builtin_convertvector(-m, {v});" if target != "uint8" else "return narrow8(m & 1);"
    return Record(name, f"static inline {s} {name}(bool x) {{ return ({s})x; }}\n"
                        f"static inline {v} {name}(i32v m) {{ {body} }}")  # fmt: skip


def _of_float(target: str, bits: int, signed: bool, nearest: bool) -> Record:
    """Saturating; NaN gives 0. What is rounded to even beforehand lies below 2^23."""
    s, v = SCALARS[target], SCALARS[target] + "v"
    low = -(2.0 ** (bits - 1)) if signed else 0.0
    high = 2.0 ** (bits - 1) - 1 if signed else 2.0**bits - 1
    name = f"{target}_of_float32_{'nearest' if nearest else 'zero'}"
    wide = "i64" if bits >= 32 else "i32"
    top, bottom = (
        (f"{2**bits - 1}u", "0") if not signed else (f"(i64){2 ** (bits - 1) - 1}ll", f"(-{2 ** (bits - 1) - 1}ll - 1)")
    )
    rounding = "x = round_even(x);" if nearest else ""
    scalar = (f"static inline {s} {name}(f32 x) {{ {rounding} if (x != x) return 0;\n"
              f"  if (x >= {high + 1.0:.1f}f) return ({s}){top}; if (x < {low:.1f}f) return ({s}){bottom};"
              f" return ({s})({wide})x; }}")  # fmt: skip
    if bits >= 32:
        lanes = f"{v} r; for (int l = 0; l < W; l++) r[l] = {name}((f32)x[l]); return r;"
        vector = f"static inline {v} {name}(f32v x) {{ {lanes} }}"
        if target == "int32":
            vector = (f"static inline {v} {name}(f32v x) {{ {rounding} i32v r = __builtin_convertvector(x, i32v);\n"
                      "  r = x >= 2147483648.0f ? splat(0x7fffffff) : r; return x != x ? splat(0) : r; }")  # fmt: skip
    else:
        vector = (f"static inline {v} {name}(f32v x) {{ x = x != x ? splat(0.0f) : x;\n"
                  f"  x = x < {low:.1f}f ? splat({low:.1f}f) : x;\n"
                  f"  x = x > {high:.1f}f ? splat({high:.1f}f) : x; {rounding}\n"
                  f"  return ({v})narrow8(__builtin_convertvector(x, i32v)); }}")  # fmt: skip
    return Record(name, f"{scalar}\n{vector}")


CASTS = (
    Record("round_even", """static inline f32v round_even(f32v x) {
  i32v sign = (i32v)x & (i32)0x80000000; f32v a = abs_of(x), r = a + 8388608.0f - 8388608.0f;
  r = (f32v)((i32v)r | sign); return a < 8388608.0f ? r : x; }
static inline f32 round_even(f32 x) { return round_even(splat(x))[0]; }"""),
    *(_plain(a, b) for a in (*INTEGERS, "float32") for b in INTEGERS if a != b),
    *(_of_bool(a) for a in (*INTEGERS, "float32")),
    *(_of_float(a, bits, signed, nearest) for a, bits, signed in (("int32", 32, True), ("uint32", 32, False),
      ("int64", 64, True), ("int8", 8, True), ("uint8", 8, False)) for nearest in (True, False)),
)  # fmt: skip

RECORDS = (*NARROW, *FLOATS, *CASTS)
