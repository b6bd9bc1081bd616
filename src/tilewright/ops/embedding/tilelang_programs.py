"""Device code of the embedding family in TileLang: one bag, chunk or row of the table a block.

Only `tilelang.py` beside this file calls these, when a launch is compiled. The threads of a block share the columns of
one sum, in vectors, and keep it in registers; what they add up is said by numbers that every thread works out for
itself. `ahead` rows are asked for before the first is added. The columns are compiled in, every other size is not.

Loads sit in `if` statements, not in `T.if_then_else`: there TileLang 0.1.15 hoists the vector load of a converted
operand out of the condition, which reads past the end of the tensor. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.tilelang_rows import F32, f32, row_start, tile

NAN_BITS = 0x7FC00000


def wide(value: Any) -> Any:
    return T.Cast("int64", value)


def row_tile(ahead: int, width: int, vec: int, threads: int, dtype: str) -> Any:
    """Registers for the block's columns of `ahead` rows, each beside the element of `tile` that it is added to."""
    made = T.alloc_fragment((ahead, width), dtype)
    each = width // threads
    layout = T.Fragment(
        (ahead, width),
        forward_fn=lambda a, j: ((j // vec) % threads, a * each + (j // (vec * threads)) * vec + j % vec),
    )
    T.annotate_layout({made: layout})
    return made


def bag_mean(
    *, dtype: str, ids_dtype: str, columns: int, width: int, vec: int, threads: int, ahead: int, unit: int, levels: int,
    has_padding: bool, nan: bool, save: bool,
) -> Any:  # fmt: skip
    """out = the mean over a bag; count = how many of its ids count. nan: a bad id makes its bag NaN."""
    n = T.dynamic("n", "int64")
    blocks = -(-columns // width)

    @T.prim_func
    def embedding_bag_mean(
        weight: T.Tensor((n,), dtype), indices: T.Tensor((n,), ids_dtype), out: T.Tensor((n,), dtype),
        count: T.Tensor((n,), F32), weight_stride: T.int64, indices_inner: T.int64, indices_outer: T.int64,
        indices_stride: T.int64, indices_step: T.int64, ids: T.int64, table_rows: T.int64, padding: T.int64,
        programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            bag = wide(T.truncdiv(block, blocks))
            first = T.truncmod(block, blocks) * width
            start = row_start(levels, 1, bag, (indices_inner, indices_outer, indices_stride))
            total = tile(vec, threads, width // (vec * threads))
            rows = row_tile(ahead, width, vec, threads, dtype)
            one = T.alloc_local((ahead,), "int64")
            state = T.alloc_local((2,), "int32")  # ids that count, and whether one is bad
            T.clear(total)
            state[0] = 0
            state[1] = 0
            for step in T.serial(T.truncdiv(ids + (ahead - 1), T.int64(ahead))):
                for a in T.unroll(ahead):
                    one[a] = T.int64(-1)
                    if step * ahead + a < ids:
                        found = wide(indices[start + (step * ahead + a) * indices_step])
                        if (not has_padding) or found != padding:
                            if (found >= 0) & (found < table_rows):
                                one[a] = found
                                state[0] = state[0] + 1
                            else:
                                state[1] = 1
                T.clear(rows)
                for a in T.unroll(ahead):
                    if one[a] >= 0:
                        for j in T.Parallel(width):
                            if first + j < columns:
                                rows[a, j] = weight[one[a] * (weight_stride * unit) + (first + j)]
                for a in T.unroll(ahead):
                    for j in T.Parallel(width):
                        total[j] = total[j] + f32(rows[a, j])
            many = T.max(f32(state[0]), T.float32(1.0))
            for j in T.Parallel(width):
                if first + j < columns:
                    mean = total[j] / many
                    if nan:
                        mean = T.if_then_else(state[1] != 0, T.reinterpret(F32, T.int32(NAN_BITS)), total[j] / many)
                    out[bag * columns + (first + j)] = T.Cast(dtype, mean)
            if save:
                if (first == 0) & (T.get_thread_binding() == 0):
                    count[bag] = f32(state[0])

    return embedding_bag_mean


@T.macro
def add_shares(total, rows, dout, count, order, many, bags, one, columns, first, unit, levels, at, place):
    """Add what the bags at `ahead` positions of the sorted order give to each of their ids; a position below 0 is none.

    `at` works out the positions, (a) to int64. Scalars come in a tuple: a macro renames one that it is given alone, and
    the launch finds arguments by name.
    """
    for a in T.unroll(rows.shape[0]):
        one[a] = at(a)
        many[a] = T.float32(1.0)
        bags[a] = T.int64(0)
        if one[a] >= 0:
            bags[a] = T.truncdiv(order[one[a]], place[3])
            many[a] = count[bags[a]]
    T.clear(rows)
    for a in T.unroll(rows.shape[0]):
        if one[a] >= 0:
            for j in T.Parallel(rows.shape[1]):
                if first + j < columns:
                    rows[a, j] = dout[row_start(levels, unit, bags[a], place) + (first + j) * place[4]]
    for a in T.unroll(rows.shape[0]):
        for j in T.Parallel(rows.shape[1]):
            total[j] = total[j] + f32(rows[a, j]) / many[a]


def chunk_sums(
    *, dtype: str, key_dtype: str, columns: int, width: int, vec: int, threads: int, ahead: int, chunk: int, unit: int,
    levels: int,
) -> Any:  # fmt: skip
    """The sum over each whole chunk of the sorted order that belongs to one row of the table."""
    n = T.dynamic("n", "int64")
    blocks = -(-columns // width)

    @T.prim_func
    def embedding_chunk_sums(
        dout: T.Tensor((n,), dtype), count: T.Tensor((n,), F32), keys: T.Tensor((n,), key_dtype),
        order: T.Tensor((n,), "int64"), partials: T.Tensor((n,), F32), dout_inner: T.int64, dout_outer: T.int64,
        dout_stride: T.int64, dout_step: T.int64, ids: T.int64, table_rows: T.int64, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            index = wide(T.truncdiv(block, blocks))
            first = T.truncmod(block, blocks) * width
            begin = index * chunk
            key = keys[begin]
            if (key == keys[begin + (chunk - 1)]) & (wide(key) < table_rows):
                total = tile(vec, threads, width // (vec * threads))
                rows = row_tile(ahead, width, vec, threads, dtype)
                one = T.alloc_local((ahead,), "int64")
                bags = T.alloc_local((ahead,), "int64")
                many = T.alloc_local((ahead,), F32)
                T.clear(total)
                for step in T.serial(chunk // ahead):
                    add_shares(
                        total, rows, dout, count, order, many, bags, one, columns, first, unit, levels,
                        lambda a: begin + step * ahead + a,
                        (dout_inner, dout_outer, dout_stride, ids, 1 if unit > 1 else dout_step),
                    )  # fmt: skip
                for j in T.Parallel(width):
                    if first + j < columns:
                        partials[index * columns + (first + j)] = total[j]

    return embedding_chunk_sums


def segment_sums(
    *, dtype: str, start_dtype: str, columns: int, width: int, vec: int, threads: int, ahead: int, chunk: int,
    unit: int, levels: int, chunked: bool,
) -> Any:  # fmt: skip
    """dweight: of each row what of its segment lies outside whole chunks, then the chunks, in the sorted order each."""
    n = T.dynamic("n", "int64")
    blocks = -(-columns // width)

    @T.prim_func
    def embedding_segment_sums(
        dout: T.Tensor((n,), dtype), count: T.Tensor((n,), F32), order: T.Tensor((n,), "int64"),
        starts: T.Tensor((n,), start_dtype), partials: T.Tensor((n,), F32), dweight: T.Tensor((n,), dtype),
        dout_inner: T.int64, dout_outer: T.int64, dout_stride: T.int64, dout_step: T.int64, ids: T.int64,
        programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row = wide(T.truncdiv(block, blocks))
            first = T.truncmod(block, blocks) * width
            begin = wide(starts[row])
            end = wide(starts[row + 1])
            chunk_first = T.truncdiv(begin + (chunk - 1), T.int64(chunk))
            chunks = T.max(T.truncdiv(end, T.int64(chunk)) - chunk_first, T.int64(0))
            head = T.if_then_else(chunks > 0, chunk_first * chunk, end) - begin
            singles = end - begin - chunks * chunk
            total = tile(vec, threads, width // (vec * threads))
            rows = row_tile(ahead, width, vec, threads, dtype)
            one = T.alloc_local((ahead,), "int64")
            bags = T.alloc_local((ahead,), "int64")
            many = T.alloc_local((ahead,), F32)
            T.clear(total)
            for step in T.serial(T.truncdiv(singles + (ahead - 1), T.int64(ahead))):
                add_shares(
                    total, rows, dout, count, order, many, bags, one, columns, first, unit, levels,
                    lambda a: T.if_then_else(
                        step * ahead + a < singles,
                        begin + step * ahead + a + T.if_then_else(step * ahead + a < head, T.int64(0), chunks * chunk),
                        T.int64(-1),
                    ),
                    (dout_inner, dout_outer, dout_stride, ids, 1 if unit > 1 else dout_step),
                )  # fmt: skip
            if chunked:
                for step in T.serial(chunks):
                    for j in T.Parallel(width):
                        if first + j < columns:
                            total[j] = total[j] + partials[(chunk_first + step) * columns + (first + j)]
            for j in T.Parallel(width):
                if first + j < columns:
                    dweight[row * columns + (first + j)] = T.Cast(dtype, total[j])

    return embedding_segment_sums
