"""Device code of attention and varlen_attention in TileLang: one tile of queries of one head a block.

Only `tilelang.py` beside this file calls these, when a launch is compiled. A block walks over its keys with an online
softmax in powers of 2; what a query does not see is selected away. Keys and values past the end are 0 in shared memory,
whatever lies there. Queries and keys are counted in their sequence, in 32 bits; where they lie, in 64. Columns are
counted in vectors, so that the compiler sees that an access never crosses the end; strides too. float32 is multiplied
without tensor cores, which would round to TF32. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.residual.philox import MULTIPLIERS, ROUNDS, WEYL
from tilewright.ops.tilelang_rows import F32

LN2 = 0.6931471805599453
U32, U64, I64 = "uint32", "uint64", "int64"


def u32(value: Any) -> Any:
    return T.Cast(U32, value)


def i64(value: Any) -> Any:
    return T.Cast(I64, value)


def i32(value: Any) -> Any:
    return T.Cast("int32", value)


def infinite() -> Any:
    return -T.infinity(F32)


def sees(query: Any, key: Any, there: Any, shift: Any, bounds: tuple[Any, ...], rules: tuple[bool, ...]) -> Any:
    """Whether a query sees a key, as far as numbers tell. `shift`: from a query to its place among the keys."""
    left, right, prefix_rows, prefix = bounds
    has_left, has_right, has_prefix = rules
    seen = key < there
    if has_left:
        seen = seen & (key >= query + shift - left)
    if has_right:
        seen = seen & (key <= query + shift + right)
    if has_prefix:
        seen = seen & ((query >= prefix_rows) | (key < prefix))
    return seen


@T.macro
def find_sequence(ends, slot, starts, sizes, m):
    """ends[0]: the packed sequence of the `slot`-th tile. Sequence n has the slots from starts[n] // m + n on: enough
    for its tiles wherever it starts. sizes[0] is what lies behind the last one; sizes[1] turns halve as many. (A tuple,
    since a macro gives a bare variable the name of its own parameter.)"""
    ends[0] = 0
    ends[1] = sizes[0]
    for _ in T.serial(sizes[1]):
        if ends[0] < ends[1]:
            ends[2] = T.truncdiv(ends[0] + ends[1] + 1, 2)
            if i32(T.truncdiv(i64(starts[ends[2]]), T.int64(m))) + ends[2] <= slot:
                ends[0] = ends[2]
            else:
                ends[1] = ends[2] - 1


@T.macro
def load_rows(to, source, place, first, sizes, vec):
    """Rows from `first` on of a head that starts at vector place[0], in steps of place[1]; what lies past row sizes[0]
    or vector sizes[1] is 0."""
    T.clear(to)
    for i, c in T.Parallel(*to.shape):
        if (first + i < sizes[0]) & (c // vec < sizes[1]):
            to[i, c] = source[(place[0] + i64(first + i) * place[1]) * vec + c]


@T.macro
def draw(kept, c0, c1, c2, c3, numbers, number, first):
    """kept[i, j]: whether Philox4x32-10 keeps the weight of row `number` + i and column `first` + j, where `first` is a
    multiple of 4. `numbers`: seed, offset, limit."""
    for i, g in T.Parallel(*c0.shape):
        low = numbers[1] + i64(T.truncdiv(first, 4) + g)
        c0[i, g] = u32(low)
        c1[i, g] = u32(T.shift_right(low, T.int64(32)))
        c2[i, g] = u32(number + i)
        c3[i, g] = u32(T.shift_right(number + i, T.int64(32)))
    for turn in T.unroll(ROUNDS):
        for i, g in T.Parallel(*c0.shape):
            k0 = u32(numbers[0]) + T.uint32(WEYL[0]) * u32(turn)
            k1 = u32(T.shift_right(numbers[0], T.int64(32))) + T.uint32(WEYL[1]) * u32(turn)
            one = T.Cast(U64, c0[i, g]) * T.uint64(MULTIPLIERS[0])
            two = T.Cast(U64, c2[i, g]) * T.uint64(MULTIPLIERS[1])
            a = u32(T.shift_right(two, T.uint64(32))) ^ c1[i, g] ^ k0
            b = u32(T.shift_right(one, T.uint64(32))) ^ c3[i, g] ^ k1
            c0[i, g] = a
            c1[i, g] = u32(two)
            c2[i, g] = b
            c3[i, g] = u32(one)
    for i, g in T.Parallel(*c0.shape):
        kept[i, g * 4] = T.Cast("uint8", c0[i, g] > u32(numbers[2]))
        kept[i, g * 4 + 1] = T.Cast("uint8", c1[i, g] > u32(numbers[2]))
        kept[i, g * 4 + 2] = T.Cast("uint8", c2[i, g] > u32(numbers[2]))
        kept[i, g * 4 + 3] = T.Cast("uint8", c3[i, g] > u32(numbers[2]))


def forward(
    *, dtype: str, kv_len_dtype: str, prefix_dtype: str, starts_q_dtype: str, starts_k_dtype: str, m: int, n: int,
    d: int, dv: int, threads: int, unit: int, has_kv_len: bool, packed: bool, has_mask: bool, bottom: bool, left_: bool,
    right_: bool, prefix_: bool, prefix_given: bool, drops: bool, started: bool, saving: bool,
) -> Any:  # fmt: skip
    """o, lse, and a copy of seed and offset where they are saved."""
    size = T.dynamic("size", "int64")
    simple = dtype == F32
    hides = left_ or right_ or prefix_ or has_mask
    rules = (left_, right_, prefix_)

    @T.prim_func
    def attention_forward(
        q: T.Tensor((size,), dtype), k: T.Tensor((size,), dtype), v: T.Tensor((size,), dtype),
        kv_len: T.Tensor((size,), kv_len_dtype), prefix_kv_len: T.Tensor((size,), prefix_dtype),
        cu_seqlens_q: T.Tensor((size,), starts_q_dtype), cu_seqlens_k: T.Tensor((size,), starts_k_dtype),
        mask: T.Tensor((size,), "uint8"), seed: T.Tensor((size,), I64), offset: T.Tensor((size,), I64),
        o: T.Tensor((size,), dtype), lse: T.Tensor((size,), F32), state: T.Tensor((size,), I64),
        q_batch: T.int64, q_row: T.int64, q_head: T.int64, k_batch: T.int64, k_row: T.int64, k_head: T.int64,
        v_batch: T.int64, v_row: T.int64, v_head: T.int64,
        mask_batch: T.int64, mask_head: T.int64, mask_row: T.int64, mask_step: T.int64,
        left: T.int32, right: T.int32, prefix_rows: T.int32, prefix: T.int32, count: T.int32, turns: T.int32,
        rows: T.int64, keys: T.int64, tiles: T.int32, heads: T.int32, group: T.int32,
        vectors: T.int32, v_vectors: T.int32, programs: T.int32, factor: T.float32, limit: T.int64,
        kept_scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as program:
            slot, unit_ = T.alloc_var("int32"), T.alloc_var("int32")
            batch, head = T.alloc_var(I64), T.alloc_var(I64)
            low = T.alloc_var("int32")
            first, queries, there, shift, most = (
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
                T.alloc_var("int32"),
            )  # fmt: skip
            first_query, first_key = T.alloc_var(I64), T.alloc_var(I64)
            start, end, at = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            q_start, k_start, v_start, mask_start, number = (
                T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64),
            )  # fmt: skip
            q_tile = T.alloc_shared((m, d), dtype)
            k_tile = T.alloc_shared((n, d), dtype)
            v_tile = T.alloc_shared((n, dv), dtype)
            scores = T.alloc_fragment((m, n), F32)
            total = T.alloc_fragment((m, dv), F32)
            top, before, sums, part = (
                T.alloc_fragment((m,), F32), T.alloc_fragment((m,), F32), T.alloc_fragment((m,), F32),
                T.alloc_fragment((m,), F32),
            )  # fmt: skip
            weights = T.alloc_shared((m, n), F32) if simple else T.alloc_fragment((m, n), dtype)
            used = T.alloc_shared((n,), "int32")
            if drops:
                kept = T.alloc_shared((m, n), "uint8")
                c0, c1 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
                c2, c3 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)

            # Tiles of one head follow each other; the last ones, which see the most, go first.
            slot = tiles - 1 - T.truncmod(program, tiles)
            unit_ = T.truncdiv(program, tiles)
            batch = i64(T.truncdiv(unit_, heads))
            head = i64(T.truncmod(unit_, heads))
            first_query = T.int64(0)
            first_key = T.int64(0)
            if packed:
                ends = T.alloc_local((3,), "int32")
                find_sequence(ends, slot, cu_seqlens_q, (count, turns), m)
                low = ends[0]
                first_query = i64(cu_seqlens_q[low])
                first_key = i64(cu_seqlens_k[low])
                first = (slot - i32(T.truncdiv(first_query, T.int64(m))) - low) * m
                queries = i32(rows - first_query)
                there = 0
                if low < count:
                    queries = i32(i64(cu_seqlens_q[low + 1]) - first_query)
                    there = i32(i64(cu_seqlens_k[low + 1]) - first_key)
            else:
                first = slot * m
                queries = i32(rows)
                there = i32(T.max(T.min(i64(kv_len[batch]), keys), T.int64(0))) if has_kv_len else i32(keys)
            shift = there - queries if bottom else 0
            most = i32(T.min(T.max(i64(prefix_kv_len[batch]), T.int64(0)), keys)) if prefix_given else prefix

            # Keys [start, end) are seen by some query of the tile.
            start = 0
            end = there
            if left_:
                start = T.truncdiv(T.max(first + shift - left, 0), n) * n
            if right_:
                end = T.min(end, T.min(first + m, queries) + shift + right)
            if first >= queries:  # a slot that no tile has
                end = start
            k_head_of = T.truncdiv(head, i64(group))
            q_start = batch * q_batch + first_query * q_row + head * q_head
            k_start = batch * k_batch + first_key * k_row + k_head_of * k_head
            v_start = batch * v_batch + first_key * v_row + k_head_of * v_head
            mask_start = batch * mask_batch + head * mask_head
            number = (batch * heads + head) * rows + first_query  # of the first row: of lse, and of dropout

            load_rows(q_tile, q, (q_start, q_row), first, (queries, vectors), unit)
            T.clear(total)
            T.clear(sums)
            T.fill(top, infinite())
            for step in T.serial(T.truncdiv(T.max(end - start, 0) + (n - 1), n)):
                at = start + step * n
                load_rows(k_tile, k, (k_start, k_row), at, (there, vectors), unit)
                load_rows(v_tile, v, (v_start, v_row), at, (there, v_vectors), unit)
                T.clear(scores)
                if simple:
                    for i, j in T.Parallel(m, n):
                        for s in T.serial(d):
                            scores[i, j] += q_tile[i, s] * k_tile[j, s]
                else:
                    T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(m, n):
                    if sees(first + i, at + j, there, shift, (left, right, prefix_rows, most), rules):
                        scores[i, j] = scores[i, j] * factor
                    else:
                        scores[i, j] = infinite()
                if has_mask:
                    for i, j in T.Parallel(m, n):
                        if (first + i < queries) & (at + j < there):
                            if mask[mask_start + i64(first + i) * mask_row + i64(at + j) * mask_step] == T.uint8(0):
                                scores[i, j] = infinite()
                if hides:  # values that no row of the tile sees are put to 0: a weight of 0 times NaN is NaN
                    T.clear(used)
                    for i, j in T.Parallel(m, n):
                        if (first + i < queries) & (scores[i, j] != infinite()):
                            used[j] = 1
                    for j, c in T.Parallel(n, dv):
                        if used[j] == 0:
                            v_tile[j, c] = T.Cast(dtype, 0)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i, j in T.Parallel(m, n):  # no key yet: exp2(-Inf - 0) is 0, of -Inf + Inf it is NaN
                    scores[i, j] = T.exp2(scores[i, j] - T.Select(top[i] == infinite(), T.float32(0), top[i]))
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(m):
                    before[i] = T.exp2(before[i] - T.Select(top[i] == infinite(), T.float32(0), top[i]))
                    sums[i] = sums[i] * before[i] + part[i]
                for i, c in T.Parallel(m, dv):
                    total[i, c] *= before[i]
                if drops:
                    start_ = offset[0] if started else T.int64(0)
                    draw(kept, c0, c1, c2, c3, (seed[0], start_, limit), number + i64(first), at)
                    for i, j in T.Parallel(m, n):
                        if kept[i, j] == T.uint8(0):
                            scores[i, j] = T.float32(0)
                for i, j in T.Parallel(m, n):
                    weights[i, j] = T.Cast(F32 if simple else dtype, scores[i, j])
                if simple:
                    for i, c in T.Parallel(m, dv):
                        for s in T.serial(n):
                            total[i, c] += weights[i, s] * v_tile[s, c]
                else:
                    T.gemm(weights, v_tile, total, policy=T.GemmWarpPolicy.FullRow)
            for i in T.Parallel(m):
                part[i] = kept_scale / sums[i]
            for i, c in T.Parallel(m, dv):
                if (first + i < queries) & (c // unit < v_vectors):
                    o[(((batch * rows + first_query + i64(first + i)) * heads + head) * v_vectors) * unit + c] = T.Cast(
                        dtype, T.Select(sums[i] == T.float32(0), T.float32(0), total[i, c] * part[i])
                    )
            for i in T.Parallel(m):
                if first + i < queries:
                    lse[number + i64(first + i)] = (top[i] + T.log2(sums[i])) * T.float32(LN2)
            if saving:
                if program == 0:
                    for i in T.Parallel(2):
                        if i == 0:
                            state[0] = seed[0]
                        else:
                            state[1] = offset[0] if started else T.int64(0)

    return attention_forward
