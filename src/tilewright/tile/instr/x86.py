"""What the CPU renderer can print: operations as C++ over vector extensions, and as x86 instructions where the compiler
makes poor ones (it converts float16 lane by lane, and narrows integers badly).

`W` is the number of lanes; `f32v`, `i32v`, `u32v`, `i64v`, `u16v`, `u8v`, `i8v` are vectors of so many. Scalars and
vectors share names by overloading.
"""

from __future__ import annotations

from tilewright.tile.instr.record import Record

AVX512 = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq"))
F16C = frozenset(("avx", "f16c"))
FMA = frozenset(("avx", "fma"))
AVX, AVX2 = frozenset(("avx",)), frozenset(("avx", "avx2"))

PHILOX = """static inline u32 philox(i64 seed, i64 counter, i64 row, i64 word) {
  u32 x[4] = {(u32)counter, (u32)(counter >> 32), (u32)row, (u32)(row >> 32)}, k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int i = 0; i < 10; i++) {
    u64 a = 0xD2511F53ull * x[0], b = 0xCD9E8D57ull * x[2];
    x[0] = (u32)(b >> 32) ^ x[1] ^ k0; x[1] = (u32)b; x[2] = (u32)(a >> 32) ^ x[3] ^ k1; x[3] = (u32)a;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
  return x[word]; }"""


EXTREMES = tuple(
    (f"{name}_{kind}", sign, result) for name, sign in (("max", ">"), ("min", "<"))
    for kind, result in (("nan", "a != a ? a : r"), ("any", "b != b ? a : r"), ("of", "r"))
)  # fmt: skip
"""(name, r is a where it is so to b, result)"""


def _extreme(name: str, sign: str, result: str) -> list[Record]:
    """Of a and b, with r = a if it is the more extreme, else b: what vmaxps gives, of zeros and NaN too."""
    base, found = name[:3], f"a {sign} b ? a : b" if name.endswith("_of") else f"{name[:3]}_of<T>(a, b)"
    text = f"template <class T> static inline T {name}(T a, T b) {{ T r = {found}; return {result}; }}"
    vectors = f"""
template <> inline f32v {name}(f32v a, f32v b) {{ asm("v{base}ps %1, %0, %0" : "+v"(a) : "vm"(b)); return a; }}"""
    return [*([Record(name, text + vectors, AVX)] if name.endswith("_of") else []), Record(name, text)]


def both(
    name: str, of: str, to: str, scalar: str = "", vector: str = "", needs: frozenset[str] = frozenset(), lanes: int = 0
) -> Record:
    """A function of a scalar `x`, and of a vector. What is not said is made of the other one, lane by lane."""
    vector = vector or f"{to}v r; for (int l = 0; l < W; l++) r[l] = {name}(x[l]); return r;"
    texts = [f"static inline {to} {name}({of} x) {{ {scalar or f'return {name}(x - {of}v{{}})[0];'} }}",
             f"static inline {to}v {name}({'i32' if of == 'bool' else of}v x) {{ {vector} }}"]  # fmt: skip
    return Record(name, "\n".join(texts if scalar else texts[::-1]), needs, lanes)


_FMA = """static inline f32 fma_of(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
static inline f32v fma_of(f32v a, f32v b, f32v c) {"""
_SQRT = ("sqrt_of", "f32", "f32", "return __builtin_sqrtf(x);")

ARITHMETIC = (
    Record("splat", """static inline f32v splat(f32 x) { return x - f32v{}; }
static inline i32v splat(i32 x) { return i32v{} + x; }
static inline u32v splat(u32 x) { return u32v{} + x; }
static inline i64v splat(i64 x) { return i64v{} + x; }
static inline i32v splat(bool x) { return i32v{} - (i32)x; }"""),
    Record("fma_of", _FMA + """ asm("vfmadd213ps %2, %1, %0" : "+v"(a) : "v"(b), "vm"(c)); return a; }""", FMA),
    Record("fma_of", _FMA + """
  f32v r; for (int l = 0; l < W; l++) r[l] = __builtin_fmaf(a[l], b[l], c[l]); return r; }"""),
    both(*_SQRT, """f32v r; asm("vsqrtps %1, %0" : "=v"(r) : "v"(x)); return r;""", AVX), both(*_SQRT),
    Record("ldexp_of", """static inline f32v ldexp_of(f32v a, f32v n) {
  f32v r; asm("vscalefps %2, %1, %0" : "=v"(r) : "v"(a), "v"(n)); return r; }
static inline f32 ldexp_of(f32 a, f32 n) { return ldexp_of(splat(a), splat(n))[0]; }""", AVX512, 16),
    Record("ldexp_of", """static inline f32v ldexp_of(f32v a, f32v n) {
  i32v k = __builtin_convertvector(n, i32v), h = k >> 1;
  return a * (f32v)((h + 127) << 23) * (f32v)((k - h + 127) << 23); }
static inline f32 ldexp_of(f32 a, f32 n) { return ldexp_of(splat(a), splat(n))[0]; }"""),
    Record("abs_of", """static inline f32 abs_of(f32 a) { return __builtin_fabsf(a); }
static inline f32v abs_of(f32v a) { return (f32v)((i32v)a & 0x7fffffff); }
template <class T> static inline T abs_of(T a) { return a < 0 ? -a : a; }"""),
    *(record for one in EXTREMES for record in _extreme(*one)),
    Record("can_divide", """template <class T> static inline T can_divide(T b) {
  T one = T{} + 1, minus = T{} - 1; auto traps = (b == T{}) | ((b == minus) & (minus < T{}));
  return traps ? one : b; }"""),
    Record("floor_div", """template <class T> static inline T floor_div(T a, T b) {
  T d = can_divide<T>(b), q = a / d, r = a % d, less = q - 1, minus = T{} - a, none = T{};
  auto down = (r != 0) & ((r ^ d) < 0); q = down ? less : q; q = d == b ? q : minus; return b == none ? none : q; }"""),
    Record("floor_mod", """template <class T> static inline T floor_mod(T a, T b) {
  T d = can_divide<T>(b), r = a % d, more = r + d; auto down = (r != 0) & ((r ^ d) < 0); return down ? more : r; }"""),
    Record("shift_left", """template <class T, class E> static inline T shift_left(T a, T by) {
  constexpr E most = 8 * sizeof(E) - 1; T r = a << (by & most), none = T{};
  auto inside = (by >= 0) & (by <= most); return inside ? r : none; }"""),
    Record("shift_right", """template <class T, class E> static inline T shift_right(T a, T by) {
  constexpr E most = 8 * sizeof(E) - 1; T r = a >> (by & most), none = T{}, ones = none - 1, sign = a < 0 ? ones : none;
  auto inside = (by >= 0) & (by <= most); return inside ? r : sign; }"""),
    Record("mulhi", """static inline u32 mulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
static inline u32v mulhi(u32v a, u32v b) {
  u64v low = ((u64v)a & 0xffffffffull) * ((u64v)b & 0xffffffffull), high = ((u64v)a >> 32) * ((u64v)b >> 32);
  return (u32v)(low >> 32 | (high & 0xffffffff00000000ull)); }"""),
    Record("mask_of", """static inline i32v mask_of(i64v m) { return __builtin_convertvector(m, i32v); }
static inline i32v mask_of(i32v m) { return m; }"""),
    Record("wide_mask", "static inline i64v wide_mask(i32v m) { return __builtin_convertvector(m, i64v); }"),
    Record("select_bits", """template <class V, class M> static inline V select_bits(M m, V a, V b) {
  return m ? a : b; }"""),
    Record("select_of", """template <class V> static inline V select_of(i32v m, V a, V b) {
  if constexpr (sizeof(a[0]) == 8) return wide_mask(m) ? a : b;
  else if constexpr (sizeof(a[0]) == 2) return __builtin_convertvector(m, i16v) ? a : b;
  else if constexpr (sizeof(a[0]) == 1) return __builtin_convertvector(m, i8v) ? a : b;
  else return m ? a : b; }"""),
    Record("lanes_below", "static inline i32v lanes_below(i64 n) { return LANES < (i32)n; }"),
    Record("print_line", """extern "C" int printf(const char*, ...); extern "C" int fflush(void*);
#define print_line(...) (printf(__VA_ARGS__), fflush(0))"""),
    Record("philox", PHILOX + """
static inline u32v philox(i64v seed, i64v counter, i64v row, i64v word) {
  u32v c0 = __builtin_convertvector(counter, u32v), c1 = __builtin_convertvector(counter >> 32, u32v);
  u32v c2 = __builtin_convertvector(row, u32v), c3 = __builtin_convertvector(row >> 32, u32v);
  u32v k0 = __builtin_convertvector(seed, u32v), k1 = __builtin_convertvector(seed >> 32, u32v);
  const u32v m0 = u32v{} + 0xD2511F53u, m1 = u32v{} + 0xCD9E8D57u;
  for (int i = 0; i < 10; i++) {
    u32v h0 = mulhi(m0, c0), l0 = m0 * c0, h1 = mulhi(m1, c2), l1 = m1 * c2;
    c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0; k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
  i32v w = __builtin_convertvector(word, i32v);
  return w == 0 ? c0 : w == 1 ? c1 : w == 2 ? c2 : c3; }"""),
)  # fmt: skip


def _fold(name: str, step: str) -> Record:
    return Record(f"fold_{name}", f"""template <class V> static inline auto fold_{name}(V a) {{
  for (int n = W / 2; n; n /= 2) {{ V b = __builtin_shuffle(a, (LANES + n) & (W - 1)); a = {step}; }}
  return a[0]; }}""")  # fmt: skip


_STEPS = {"sum": "a + b", "prod": "a * b", "max": "max_nan(a, b)", "min": "min_nan(a, b)", "and": "a & b",
          "or": "a | b"}  # fmt: skip
FOLDS = tuple(map(_fold, _STEPS, _STEPS.values()))

_MOVES = {"f32v": 32, "i32v": 32, "u32v": 32, "u16v": 16, "u8v": 8, "i8v": 8}
_LOAD = """static inline void load_into({v}& r, const void* p, u32 m) {{
  asm("vmovdqu{bits} %1, %0%{{%2%}}%{{z%}}" : "=v"(r) : "m"(*(const loose<{v}>*)p), "Yk"((u16)m)); }}"""
_STORE = """static inline void store_from({v} x, void* p, u32 m) {{
  asm("vmovdqu{bits} %1, %0%{{%2%}}" : "+m"(*(loose<{v}>*)p) : "v"(x), "Yk"((u16)m)); }}"""
_LOAD_SOME = """template <class V, int A = 0, class E> static inline V load_some(const E* p, i64 n) { V r{};
  if constexpr (sizeof *p == 8) __builtin_memcpy(&r, p, 8 * n); else load_into(r, p, (1u << n) - 1); return r; }"""
_STORE_SOME = """template <class V, int A = 0, class E> static inline void store_some(E* p, V x, i64 n) {
  if constexpr (sizeof *p == 8) __builtin_memcpy(p, &x, 8 * n); else store_from(x, p, (1u << n) - 1); }"""
_LOADS_512 = "\n".join([*(_LOAD.format(v=v, bits=bits) for v, bits in _MOVES.items()), _LOAD_SOME])
_STORES_512 = "\n".join([*(_STORE.format(v=v, bits=bits) for v, bits in _MOVES.items()), _STORE_SOME])


def _apart(name: str, given: str, place: str) -> tuple[Record, Record]:
    """A load and a store of elements that are not neighbours; with a mask, of those where it is set."""
    more, value, test = "", f"p[{place}]", ""
    if given.endswith("i32v m"):
        more, value, test = ", E other", f"m[l] ? {value} : other", "if (m[l]) "
    return (
        Record(f"load_{name}", f"""template <class V, class E> static inline V load_{name}(const E* p, {given}{more}) {{
  V v; for (int l = 0; l < W; l++) v[l] = {value}; return v; }}"""),
        Record(f"store_{name}", f"""template <class V, class E> static inline void store_{name}(E* p, {given}, V v) {{
  for (int l = 0; l < W; l++) {test}p[{place}] = v[l]; }}"""),
    )  # fmt: skip


MEMORY = (
    Record("load", """template <class V, int A = 0, class E> static inline V load(const E* p) {
  V v; __builtin_memcpy(&v, p, sizeof v); return v; }"""),
    Record("store", """template <class V, int A = 0, class E> static inline void store(E* p, V v) {
  __builtin_memcpy(p, &v, sizeof v); }"""),
    Record("load_some", _LOADS_512, AVX512, 16),
    Record("load_some", "template <class V, int A = 0, class E> static inline V load_some(const E* p, i64 n) {\n"
                        "  V v{}; if (n == W) return load<V>(p); for (i64 l = 0; l < n; l++) v[l] = p[l]; return v; }"),
    Record("store_some", _STORES_512, AVX512, 16),
    Record("store_some", "template <class V, int A = 0, class E> static inline void store_some(E* p, V v, i64 n) {\n"
                         "  if (n == W) return store<V>(p, v); for (i64 l = 0; l < n; l++) p[l] = v[l]; }"),
    *(record for name, given, place in (("every", "i64 step", "l * step"), ("where", "i64 step, i32v m", "l * step"),
      ("at", "i64v at", "at[l]"), ("at_where", "i64v at, i32v m", "at[l]")) for record in _apart(name, given, place)),
    Record("mask_of_bytes", """static inline i32v mask_of_bytes(u8v x) {
  return __builtin_convertvector(x, i32v) != 0; }"""),
    Record("bytes_of_mask", "static inline u8v bytes_of_mask(i32v m) { return narrow8(m & 1); }"),
)  # fmt: skip
