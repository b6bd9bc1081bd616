"""What the CUDA renderer can print: vectors as structs of W elements, and operations over them and over scalars.

`fn` is a device function. What works lane by lane is said once, by `each`. Conversions come in pairs where PTX converts
pairs; all need sm_80 or later. What a CPU does instead is in `x86` and `convert`, and agrees bit for bit.
"""

from __future__ import annotations

from tilewright.tile.instr.record import INTEGERS, SCALARS, Record
from tilewright.tile.instr.x86 import EXTREMES, PHILOX

TYPES = """#define fn static __device__ __forceinline__
#define UNROLL(n) _Pragma("unroll")
#define EACH UNROLL(W) for (int l = 0; l < W; l++)
typedef float f32; typedef signed char i8; typedef unsigned char u8; typedef unsigned short u16; typedef int i32;
typedef unsigned u32; typedef long long i64; typedef unsigned long long u64;
constexpr int W = {lanes};
constexpr i64 INT64_LEAST = -9223372036854775807ll - 1;
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
template <class T> struct itself {{ typedef T type; }};
template <class T> using only = typename itself<T>::type;
template <class E> struct Vec {{
  E at[W];
  fn_member E& operator[](int l) {{ return at[l]; }}
  fn_member E operator[](int l) const {{ return at[l]; }}
  template <class F> fn_member explicit operator Vec<F>() const {{
    Vec<F> r; EACH r[l] = __builtin_bit_cast(F, at[l]); return r; }}
}};
typedef Vec<f32> f32v; typedef Vec<i32> i32v; typedef Vec<u32> u32v; typedef Vec<i64> i64v; typedef Vec<u16> u16v;
typedef Vec<u8> u8v; typedef Vec<i8> i8v;
template <class E> struct ReadOnly {{  // what nobody writes while the kernel runs
  const E* p;
  fn_member E operator[](i64 i) const {{ return __ldg(p + i); }}
  fn_member ReadOnly operator+(i64 i) const {{ return {{p + i}}; }}
}};
template <class F, class E> fn Vec<E> each(F f, Vec<E> a) {{ EACH a[l] = f(a[l]); return a; }}
template <class F, class E> fn Vec<E> each(F f, Vec<E> a, Vec<E> b) {{ EACH a[l] = f(a[l], b[l]); return a; }}
template <class F, class E> fn E each(F f, E a) {{ return f(a); }}
template <class F, class E> fn E each(F f, E a, E b) {{ return f(a, b); }}
template <class E> fn Vec<E> every(E x) {{ Vec<E> r; EACH r[l] = x; return r; }}
fn u32 wraps(i32 x) {{ return (u32)x; }}  // signed overflow is defined here, and is not in C++
fn u64 wraps(i64 x) {{ return (u64)x; }}
template <class E> fn E wraps(E x) {{ return x; }}
{operators}
template <class E> fn Vec<E> operator-(Vec<E> a) {{
  if constexpr ((E)0.5f == 0) return every((E)0) - a; else {{ EACH a[l] = -a[l]; return a; }} }}
template <class E> fn Vec<E> operator~(Vec<E> a) {{ EACH a[l] = (E)~a[l]; return a; }}
fn i64v places() {{ i64v r; EACH r[l] = l; return r; }}
#define PLACES places()""".replace("fn_member", "__device__ __forceinline__")

_BINARY = """template <class E> fn {of} operator{op}(Vec<E> a, Vec<E> b) {{ {of} r; EACH r[l] = {value}; return r; }}
template <class E> fn {of} operator{op}(Vec<E> a, only<E> b) {{ return a {op} every<E>(b); }}
template <class E> fn {of} operator{op}(only<E> a, Vec<E> b) {{ return every<E>(a) {op} b; }}"""
_INFIX = ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>", "<", "<=", ">", ">=", "==", "!=")


def _operator(op: str) -> str:
    if op in ("<", "<=", ">", ">=", "==", "!="):
        return _BINARY.format(op=op, of="i32v", value=f"-(i32)(a[l] {op} b[l])")
    value = f"(E)(wraps(a[l]) {op} wraps(b[l]))" if op in "+-*" else f"(E)(a[l] {op} b[l])"
    return _BINARY.format(op=op, of="Vec<E>", value=value)


def types(lanes: int) -> str:
    """What every source starts with."""
    return TYPES.format(lanes=lanes, operators="\n".join(map(_operator, _INFIX)))


def _each(name: str, arguments: str, value: str) -> Record:
    """A function of scalars and of vectors, which works lane by lane."""
    given, autos, names = (", ".join(kind + a for a in arguments.split()) for kind in ("T ", "auto ", ""))
    return Record(name, f"template <class T> fn T {name}({given}) {{\n"
                        f"  return each([]({autos}) {{ {value} }}, {names}); }}")  # fmt: skip


def _lanes(name: str, of: str, to: str, scalar: str, vector: str = "") -> Record:
    """A scalar function of another type, and its vector."""
    source, lane = ("i32v", "x[l] != 0") if of == "bool" else (f"{of}v", "x[l]")
    body = vector or f"{to}v r; EACH r[l] = {name}({lane}); return r;"
    return Record(name, f"fn {to} {name}({of} x) {{ {scalar} }}\nfn {to}v {name}({source} x) {{ {body} }}")


def _fast(kind: str, instruction: str, of: str = "a", result: str = "r", ftz: str = "") -> Record:
    """A function of float32 by one approximate instruction. Without `ftz` it keeps denormal numbers, by three more."""
    return _each(f"{kind}_fast", "a", f'f32 r; asm("{instruction}.approx{ftz}.f32 %0, %1;" : "=f"(r) : "f"({of})); '
                                      f"return {result};")  # fmt: skip


FAST = (
    _fast("exp", "ex2", "a * 1.44269504f"),
    _fast("exp2", "ex2"),
    _fast("log", "lg2", result="r * 0.693147181f"),
    _fast("sqrt", "sqrt"),
    _fast("rsqrt", "rsqrt"),
    _fast("reciprocal", "rcp", ftz=".ftz"),
    _each("sigmoid_fast", "a", """f32 r = __fmaf_rn(a, -1.44269504f, -24.0f);  // 2^-24 of everything: no result
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(r)); r += 0x1p-24f;                  // is denormal before the last product
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(r)); return r * 0x1p-24f;"""),
)  # fmt: skip

ARITHMETIC = (
    Record("splat", "\n".join([*(f"fn {t}v splat({t} x) {{ return every(x); }}" for t in ("f32", "i32", "u32", "i64")),
                               "fn i32v splat(bool x) { return every(-(i32)x); }"])),
    Record("fma_of", """fn f32 fma_of(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
fn f32v fma_of(f32v a, f32v b, f32v c) { EACH a[l] = __fmaf_rn(a[l], b[l], c[l]); return a; }"""),
    _each("sqrt_of", "a", "return __fsqrt_rn(a);"),
    Record("ldexp_of", """fn f32 ldexp_of(f32 a, f32 n) { i32 k = (i32)n, h = k >> 1;
  return a * __int_as_float((h + 127) << 23) * __int_as_float((k - h + 127) << 23); }
fn f32v ldexp_of(f32v a, f32v n) { EACH a[l] = ldexp_of(a[l], n[l]); return a; }"""),
    Record("abs_of", """fn f32 abs_of(f32 a) { return fabsf(a); }
fn f32v abs_of(f32v a) { EACH a[l] = fabsf(a[l]); return a; }
template <class T> fn T abs_of(T a) {
  return each([](auto x) { return (decltype(x))(x < 0 ? 0 - wraps(x) : wraps(x)); }, a); }"""),
    *(_each(name, "a b", f"auto r = a {sign} b ? a : b; return {result};") for name, sign, result in EXTREMES),
    _each("floor_div", "a b", """typedef decltype(a) E; if (b == 0) return (E)0;
    if constexpr ((E)-1 < (E)0) if (b == (E)-1) return (E)(0 - wraps(a));
    E q = a / b, r = a % b; return (E)(q - (r != 0 && (r ^ b) < 0));"""),
    _each("floor_mod", "a b", """typedef decltype(a) E; if (b == 0) return (E)0;
    if constexpr ((E)-1 < (E)0) if (b == (E)-1) return (E)0;
    E r = a % b; return (E)(r != 0 && (r ^ b) < 0 ? r + b : r);"""),
    Record("shift_left", """template <class T, class E> fn T shift_left(T a, T by) {
  return each([](E x, E n) { return n >= 0 && n < (E)(8 * sizeof(E)) ? (E)(wraps(x) << n) : (E)0; }, a, by); }"""),
    Record("shift_right", """template <class T, class E> fn T shift_right(T a, T by) {
  return each([](E x, E n) {
    return n >= 0 && n < (E)(8 * sizeof(E)) ? (E)(x >> n) : (E)(x < 0 ? -1 : 0); }, a, by); }"""),
    Record("mask_of", "fn i32v mask_of(i32v m) { return m; }"),
    Record("select_of", """template <class V> fn V select_of(i32v m, V a, V b) {
  EACH a[l] = m[l] ? a[l] : b[l]; return a; }"""),
    Record("select_bits", """fn f32 select_of_bits(bool m, f32 a, f32 b) {  // ptxas takes 1 and -0 for 1 and 0
  u32 r; asm("{ .reg .pred p; setp.ne.s32 p, %3, 0; selp.b32 %0, %1, %2, p; }"
    : "=r"(r) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"((i32)m)); return __uint_as_float(r); }
template <class V> fn f32 select_bits(bool m, f32 a, f32 b) { return select_of_bits(m, a, b); }
template <class V> fn f32v select_bits(i32v m, f32v a, f32v b) {
  EACH a[l] = select_of_bits(m[l] != 0, a[l], b[l]); return a; }"""),
    Record("lanes_below", "fn i32v lanes_below(i64 n) { i32v r; EACH r[l] = -(i32)(l < n); return r; }"),
    Record("philox", PHILOX.replace("static inline", "fn") + """
fn u32v philox(i64v seed, i64v counter, i64v row, i64v word) {
  u32v r; EACH r[l] = philox(seed[l], counter[l], row[l], word[l]); return r; }"""),
    Record("shuffle_xor", """template <class T> fn T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask); }
fn bool shuffle_xor(bool x, int mask) { return __shfl_xor_sync(0xffffffffu, (i32)x, mask) != 0; }"""),
    Record("print_line", "#define print_line(...) printf(__VA_ARGS__)"),
    Record("warp_barrier", "fn void warp_barrier() { __syncwarp(); }"),
    Record("block_barrier", "fn void block_barrier() { __syncthreads(); }"),
)  # fmt: skip


def _fold(name: str, step: str) -> Record:
    """By halves; a loop over halves is not unrolled where there are 16 lanes, and the vector would lie in memory."""
    return Record(f"fold_{name}", f"""template <int N = W, class E> fn E fold_{name}(Vec<E> a) {{
  if constexpr (N == 1) return a[0]; else {{
    UNROLL(N) for (int l = 0; l < N / 2; l++) {{ E x = a[l], y = a[l + N / 2]; a[l] = {step}; }}
    return fold_{name}<N / 2>(a); }} }}""")  # fmt: skip


_STEPS = {"sum": "(E)(wraps(x) + wraps(y))", "prod": "(E)(wraps(x) * wraps(y))", "max": "max_nan(x, y)",
          "min": "min_nan(x, y)", "and": "x & y", "or": "x | y"}  # fmt: skip
FOLDS = tuple(map(_fold, _STEPS, _STEPS.values()))

_PAIRS = """u16v r;  // two in one register, as memory has them
  UNROLL(W) for (int l = 0; l < W; l += 2) {{ constexpr int n = W > 1;
    u32 two; asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(two) : "f"(x[l + n]), "f"(x[l]));
    memcpy(&r[l], &two, 2 << n); }}
  return r;"""

FLOATS = (
    _lanes("bfloat16_of_float32", "f32", "u16", 'u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r;',
           _PAIRS.format(kind="bf16")),
    _lanes("float32_of_bfloat16", "u16", "f32", "return __uint_as_float((u32)x << 16);", """f32v r;
  UNROLL(W) for (int l = 0; l < W; l += 2) { constexpr int n = W > 1; u32 two = 0; memcpy(&two, &x[l], 2 << n);
    r[l + n] = __uint_as_float(two & 0xffff0000); r[l] = __uint_as_float(two << 16); }
  return r;"""),
    _lanes("float16_of_float32", "f32", "u16", 'u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r;',
           _PAIRS.format(kind="f16")),
    _lanes("float32_of_float16", "u16", "f32", 'f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r;'),
    _lanes("float8_e4m3fn_of_float32", "f32", "u8", """f32 a = fabsf(x); a = a > 448.0f ? 448.0f : a;
  u32 u = __float_as_uint(a); i32 normal = (i32)((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
  i32 small = __float_as_int(a * 512.0f + 12582912.0f) - 0x4b400000, code = a < 0.015625f ? small : normal;
  return (u8)((x != x ? 0x7f : code) | (__float_as_uint(x) >> 24 & 0x80));"""),
    _lanes("float32_of_float8_e4m3fn", "u8", "f32", """i32 b = x, size = b & 0x7f;
  f32 r = size < 8 ? (f32)size * 0.001953125f : __int_as_float((size << 20) + (120 << 23));
  r = size == 0x7f ? NOT_A_NUMBER : r; return __int_as_float(__float_as_int(r) | (b & 0x80) << 24);"""),
)  # fmt: skip


def _of_float(target: str, mode: str, way: str) -> Record:
    """Saturating; NaN gives 0."""
    to = SCALARS[target]
    kind, wide, at = to.replace("i", "s"), to.replace("8", "32"), "l" if to == "i64" else "r"
    text = f'{wide} r; asm("cvt.{way}.sat.{kind}.f32 %0, %1;" : "={at}"(r) : "f"(x));'
    return _lanes(f"{target}_of_float32_{mode}", "f32", to, f"{text} return x != x ? ({to})0 : ({to})r;")


CASTS = (
    *(_lanes(f"{a}_of_{b}", SCALARS[b], SCALARS[a], f"return ({SCALARS[a]})x;")
      for a in (*INTEGERS, "float32") for b in (*INTEGERS, "bool") if a != b),
    *(_of_float(a, mode, way) for a in INTEGERS for mode, way in (("nearest", "rni"), ("zero", "rzi"))),
)  # fmt: skip

MEMORY = (
    Record("at_once", """template <int N> struct Bytes;
template <> struct Bytes<1> { typedef u8 type; }; template <> struct Bytes<2> { typedef u16 type; };
template <> struct Bytes<4> { typedef u32 type; }; template <> struct Bytes<8> { typedef uint2 type; };
template <> struct Bytes<16> { typedef uint4 type; };
__device__ constexpr int at_once(int align, int item, int all) {
  int n = align > item ? align : item; n = n < all ? n : all; return n < 16 ? n : 16; }"""),
    Record("load", """template <class T, class E> fn T piece(const E* p, int i) { return ((const T*)p)[i]; }
template <class T, class E> fn T piece(ReadOnly<E> p, int i) { return __ldg((const T*)p.p + i); }
template <class V, int A = 0, class P> fn V load(P p) {
  constexpr int n = at_once(A, sizeof(p[0]), sizeof(V)); typedef typename Bytes<n>::type T; V v;
  UNROLL(W) for (int i = 0; i < (int)sizeof(V) / n; i++) {
    T t = piece<T>(p, i); memcpy((char*)&v + i * n, &t, n); }
  return v; }"""),
    Record("store", """template <class V, int A = 0, class E> fn void store(E* p, V v) {
  constexpr int n = at_once(A, sizeof(E), sizeof(V)); typedef typename Bytes<n>::type T;
  UNROLL(W) for (int i = 0; i < (int)sizeof(V) / n; i++) {
    T t; memcpy(&t, (const char*)&v + i * n, n); ((T*)p)[i] = t; } }"""),
    Record("load_some", """template <class V, int A = 0, class P> fn V load_some(P p, i64 n) {
  if (n >= W) return load<V, A>(p); V v; EACH { v[l] = 0; if (l < n) v[l] = p[l]; } return v; }"""),
    Record("store_some", """template <class V, int A = 0, class E> fn void store_some(E* p, V v, i64 n) {
  if (n >= W) return store<V, A>(p, v); EACH if (l < n) p[l] = v[l]; }"""),
    Record("load_where", """template <class V, class P, class E> fn V load_where(P p, i64 step, i32v m, E other) {
  V v; EACH { v[l] = other; if (m[l]) v[l] = p[l * step]; } return v; }"""),
    Record("store_where", """template <class V, class E> fn void store_where(E* p, i64 step, i32v m, V v) {
  EACH if (m[l]) p[l * step] = v[l]; }"""),
    Record("load_every", """template <class V, class P> fn V load_every(P p, i64 step) {
  V v; EACH v[l] = p[l * step]; return v; }"""),
    Record("store_every", """template <class V, class E> fn void store_every(E* p, i64 step, V v) {
  EACH p[l * step] = v[l]; }"""),
    Record("load_at", """template <class V, class P> fn V load_at(P p, i64v at) {
  V v; EACH v[l] = p[at[l]]; return v; }"""),
    Record("load_at_where", """template <class V, class P, class E> fn V load_at_where(P p, i64v at, i32v m, E other) {
  V v; EACH { v[l] = other; if (m[l]) v[l] = p[at[l]]; } return v; }"""),
    Record("store_at", "template <class V, class E> fn void store_at(E* p, i64v at, V v) { EACH p[at[l]] = v[l]; }"),
    Record("store_at_where", """template <class V, class E> fn void store_at_where(E* p, i64v at, i32v m, V v) {
  EACH if (m[l]) p[at[l]] = v[l]; }"""),
    Record("copy_async", """template <int A, class E> fn void copy_async(E* to, ReadOnly<E> from, i64 n = W) {
  constexpr int all = W * sizeof(E), b = A < all ? A : all; u32 at = (u32)__cvta_generic_to_shared(to);
  i64 left = n * (i64)sizeof(E);  // what is beyond becomes 0
  UNROLL(W) for (int i = 0; i < all; i += b) {
    u32 some = left < i ? 0 : left - i < b ? (u32)(left - i) : b; const char* p = (const char*)from.p + (some ? i : 0);
    if constexpr (b == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"(at + i), "l"(p), "r"(some) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
      :: "r"(at + i), "l"(p), "n"(b), "r"(some) : "memory"); } }"""),
    Record("copies_wait", "fn void copies_wait() { asm volatile(\"cp.async.wait_all;\" ::: \"memory\"); }"),
    Record("mask_of_bytes", "fn i32v mask_of_bytes(u8v x) { i32v r; EACH r[l] = -(i32)(x[l] != 0); return r; }"),
    Record("bytes_of_mask", "fn u8v bytes_of_mask(i32v m) { u8v r; EACH r[l] = (u8)(m[l] & 1); return r; }"),
)  # fmt: skip

RECORDS = (*ARITHMETIC, *FAST, *FOLDS, *FLOATS, *CASTS, *MEMORY)
