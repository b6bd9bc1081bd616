// Attention where every query sees the same keys (no causal mask, window or prefix; key lengths are fine), for Hopper, by
// hand. What it has over the kernels in Triton: descriptors that the host made, so that copies are asked for at once;
// heads of 72 in products of 72; parts of the keys that are joined through the shared memory of a neighbour, not by a
// second launch; and a start that overlaps with the end of the launch before.
//
// A block has M rows of queries: PACK heads that read the same keys, side by side for each query. Each of its two
// warpgroups has half of them, and they take turns: while one multiplies, scores of a tile of keys and the values of the
// tile before, the other is at its exponentials. Tiles of N keys or values come by hardware copies (TMA), and a warp of
// its own has them brought. The PARTS blocks of a cluster have the same queries and half of the keys each; each finishes
// half of the columns.
//
// AT_ONCE: there are at most two tiles of keys, all is asked for at once, and a warpgroup has all its scores before the
// first exponential.
//
// Defines: TYPE ("bf16", "f16"), WIDTH and V_WIDTH (columns of a head, multiples of 8), PACK, N (keys a tile: 64, 128,
// 256), SLOTS (tiles of keys or values at a time; AT_ONCE: in all), PARTS (1, 2), LENGTHS (keys end where kv_len says),
// SIGN (of the scale), AT_ONCE. Which go with which call is settled in cuda.py.
#include "attention_full.cuh"

constexpr int M = 128;
constexpr int THREADS = AT_ONCE ? 256 : 384;
constexpr int TILES = AT_ONCE ? SLOTS / 2 : 1;  // of scores that a thread has

constexpr int D = (WIDTH + 63) / 64, DV = (V_WIDTH + 63) / 64;  // panels of 64 columns
constexpr int STEPS = (WIDTH + 15) / 16;                        // of a product of scores
// A hardware copy takes as long for a row of 16 bytes as for one of 128: where all is asked for at once, threads bring
// up to 16 columns that whole panels leave.
__device__ constexpr bool beside(int width) { return AT_ONCE && width > 64 && width % 64 > 0 && width % 64 <= 16; }
constexpr bool BESIDE = beside(WIDTH), V_BESIDE = beside(V_WIDTH);
constexpr int Q_BYTES = M * D * 128, K_BYTES = N * D * 128, V_BYTES = N * DV * 128;
constexpr int SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES;

constexpr int EIGHTS = product_of(V_WIDTH) / 8;                    // columns of the output, by 8
constexpr int SHARE = ((EIGHTS + 3) / 4 + PARTS - 1) / PARTS * 4;  // of which a block of the cluster finishes so many
constexpr int GIVEN = PARTS > 1 ? SHARE * 4 * 256 * 4 : 0;         // bytes, from one block to the other,
constexpr int RING = Q_BYTES > GIVEN ? Q_BYTES : GIVEN;            // which go where queries were

#define INFINITE __int_as_float(0x7f800000)

struct Sums {
    float out[EIGHTS * 4];
    float top[2], sum[2];
};

struct Shared {
    u64 q_full[2], full[SLOTS], empty[SLOTS];
    float top[M], sum[M];  // of the other part
};

// Scores become weights, and by `shrink` the sums so far shrink to the new largest score. `left`: how many of the keys
// are there.
__device__ __forceinline__ void soften(
    float (&s)[N / 2], Sums& sums, float (&shrink)[2], float factor, float power, int left) {
    if constexpr (SIGN != 1) {
#pragma unroll
        for (float& x : s) x *= SIGN;
    }
    if (left < N) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= left) s[i] = -INFINITE;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = sums.top[half];
#pragma unroll
        for (int i = 2 * half; i < N / 2; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == -INFINITE ? 0.0f : top;  // no key yet: exp2(-Inf - 0) is 0, of -Inf + Inf it is NaN
        // One multiply-add a score; beyond 2^26 by a power of 2, which rounds no product (`rates` in triton_tiles.py).
        const float rate = fabsf(base * factor) < 67108864.0f ? factor : power;
        const float level = base * rate;
        shrink[half] = power_of_2((sums.top[half] - base) * factor);
        sums.top[half] = top;
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < N / 2; i += 4) {
            s[i] = power_of_2(fmaf(s[i], rate, -level));
            s[i + 1] = power_of_2(fmaf(s[i + 1], rate, -level));
            sum += s[i] + s[i + 1];
        }
        sums.sum[half] = sums.sum[half] * shrink[half] + sum;
    }
}

// Of the last panel of a tile of ROWS rows COUNT units of 16 bytes each are under way, as the swizzle of 128 bytes has
// them; 0 from `lines` and from HAVE on. PACKED lines, `pack_step` apart, make a row of `step`.
template <int ROWS, int COUNT, int HAVE, int PACKED>
__device__ __forceinline__ void bring_last(u32 to, const char* from, long long step, long long pack_step, int lines) {
#pragma unroll
    for (int begin = 0; begin < ROWS * COUNT; begin += 256) {
        const int i = begin + threadIdx.x, row = i / COUNT, unit = i % COUNT, line = row / PACKED;
        if (begin + 256 > ROWS * COUNT && i >= ROWS * COUNT) break;
        const bool there = line < lines && unit < HAVE;
        const long long place = line * step + row % PACKED * pack_step + unit * 8;
        copy_unit(to + row * 128 + (unit ^ row % 8) * 16, from + (there ? place * 2 : 0), there);
    }
}

// Lanes whose bit `bit` is not set give `high` for the neighbour's `low`.
__device__ __forceinline__ void exchange(u32& low, u32& high, int bit) {
    const bool set = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, set ? low : high, bit);
    if (set) low = got;
    else high = got;
}

// Writes the columns by 8 from FROM to TO of two rows, of what a thread has.
template <int FROM, int TO>
__device__ __forceinline__ void write(const float (&out)[EIGHTS * 4], char* (&to)[2], const bool (&there)[2]) {
    const int quad = threadIdx.x % 4;
    // Of four neighbours each has 2 columns of every 8: they exchange until each has 8 columns, 16 bytes, of one.
    constexpr int WHOLE = FROM + (TO - FROM) / 4 * 4;
#pragma unroll
    for (int b = FROM; b < WHOLE; b += 4) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* x = out + 4 * b + 2 * half;
            u32 w0 = pair(x[0], x[1]), w1 = pair(x[4], x[5]), w2 = pair(x[8], x[9]), w3 = pair(x[12], x[13]);
            exchange(w0, w2, 2);
            exchange(w1, w3, 2);
            exchange(w0, w1, 1);
            exchange(w2, w3, 1);
            const int column = (b + quad) * 8;
            if (there[half] && column < V_WIDTH) *(uint4*)(to[half] + column * 2) = make_uint4(w0, w1, w2, w3);
        }
    }
#pragma unroll
    for (int b = WHOLE; b < TO; b++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* x = out + 4 * b + 2 * half;
            const int column = b * 8 + quad * 2;
            if (there[half] && column < V_WIDTH) *(u32*)(to[half] + column * 2) = pair(x[0], x[1]);
        }
    }
}

// Finishes the columns of a part, with what the other part `gave` of them.
template <int PART>
__device__ __forceinline__ void finish(
    Sums& sums, const float4* given, const float (&own)[2], const float (&other)[2], const bool (&seen)[2],
    char* (&to)[2], const bool (&there)[2]) {
    constexpr int FROM = PART * SHARE < EIGHTS ? PART * SHARE : EIGHTS;
    constexpr int TO = FROM + SHARE < EIGHTS ? FROM + SHARE : EIGHTS;
#pragma unroll
    for (int b = FROM; b < TO; b++) {
        float* x = sums.out + 4 * b;
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (PARTS > 1) {
            y = given[(b - FROM) * 256 + threadIdx.x];
            y.x *= other[0], y.y *= other[0], y.z *= other[1], y.w *= other[1];
        }
        // Where nothing was seen it is 0 times whatever values were.
        x[0] = seen[0] ? x[0] * own[0] + y.x : 0.0f, x[1] = seen[0] ? x[1] * own[0] + y.y : 0.0f;
        x[2] = seen[1] ? x[2] * own[1] + y.z : 0.0f, x[3] = seen[1] ? x[3] * own[1] + y.w : 0.0f;
    }
    write<FROM, TO>(sums.out, to, there);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_full(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
#if AT_ONCE
    const char* q, const char* k, const char* v, long long q_batch, long long q_row, long long q_head,
    long long k_batch, long long k_row, long long k_head, long long v_batch, long long v_row, long long v_head,
#endif
    const int* kv_len, char* o, float* lse, long long rows, long long keys, long long tiles, long long heads,
    long long group, float factor) {
    launch_dependents();
    extern __shared__ __align__(1024) char memory[];
    char* const ring = memory + RING;
    Shared& shared = *(Shared*)(ring + SLOTS * SLOT_BYTES);
    const u32 q_at = shared_address(memory), ring_at = shared_address(ring);
    const u32 q_full = shared_address(shared.q_full), full = shared_address(shared.full);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int part = blockIdx.x % PARTS, number = blockIdx.x / PARTS;

    const int tile = number % (int)tiles, both = number / (int)tiles;
    const int packs = (int)heads / PACK, batch = both / packs, head = both % packs * PACK;
    const int key_head = head / (int)group, first = tile * (M / PACK);  // query
    const int bringer = AT_ONCE ? 0 : 256;  // thread
    if (thread == bringer) {
        prefetch(q_map);
        prefetch(k_map);
        prefetch(v_map);
        barrier_init(q_full, 1 + 256 * BESIDE);
        barrier_init(q_full + 8, 1 + 256 * BESIDE);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full + slot * 8, 1 + 256 * (slot % 2 ? V_BESIDE : BESIDE));
            if constexpr (!AT_ONCE) barrier_init(shared_address(&shared.empty[slot]), 8);
        }
        barrier_init_fence();
    }
    wait_for_launch_before();  // from here on memory is what it left
    const int all = LENGTHS ? min(max(kv_len[batch], 0), (int)keys) : (int)keys;
    const int mine = ((all + N - 1) / N + PARTS - 1) / PARTS * N;  // keys of a part
    const int start = min(part * mine, all), there = min(mine, all - start), blocks = (there + N - 1) / N;

    const u32 empty = shared_address(shared.empty);
    // One copy where columns are whole panels, else one a panel, which ends where the columns do.
    auto ask = [&](const TensorMap& map, u32 to, u32 barrier, int width, int height, int which, int row) {
        const int whole = width / 64, copies = width % 64 && !beside(width) ? whole + 1 : 1;
        barrier_expect(barrier, height * 128 * max(whole, copies));
#pragma unroll
        for (int p = 0; p < copies; p++) copy_box(map, to + p * height * 128, barrier, p * 64, which, row, 0, batch);
    };
    auto bring_queries = [&](int half) {
        ask(q_map, q_at + half * (Q_BYTES / 2), q_full + half * 8, WIDTH, M / 2, head,
            first + half * (M / 2 / PACK));
    };
    // Keys are tile 2 b and values tile 2 b + 1 of block b.
    auto bring = [&](int n) {
        const u32 to = ring_at + n % SLOTS * SLOT_BYTES, barrier = full + n % SLOTS * 8;
        const int row = start + n / 2 * N;
        if (n % 2) ask(v_map, to, barrier, V_WIDTH, N, key_head, row);
        else ask(k_map, to, barrier, WIDTH, N, key_head, row);
        if (n == 0) bring_queries(1);
    };
    if (AT_ONCE && thread == bringer && blocks > 0) {
        bring_queries(0);
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {  // keys first
            const int n = i < TILES ? 2 * i : 2 * (i - TILES) + 1;
            if (n / 2 < blocks) bring(n);
        }
    }
#if AT_ONCE
    q += (batch * q_batch + first * q_row + head * q_head + WIDTH / 64 * 64) * 2;
    k += (batch * k_batch + start * k_row + key_head * k_head + WIDTH / 64 * 64) * 2;
    v += (batch * v_batch + start * v_row + key_head * v_head + V_WIDTH / 64 * 64) * 2;
    constexpr int LAST = STEPS * 2 - D * 8 + 8, HAVE = WIDTH % 64 / 8, V_HAVE = V_WIDTH % 64 / 8;
    if constexpr (BESIDE) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int skipped = half * (M / 2 / PACK);
            bring_last<M / 2, LAST, HAVE, PACK>(q_at + half * (Q_BYTES / 2) + (D - 1) * (M / 2) * 128,
                                                q + skipped * q_row * 2, q_row, q_head, (int)rows - first - skipped);
        }
#pragma unroll
        for (int block = 0; block < TILES; block++) {
            bring_last<N, LAST, HAVE, 1>(ring_at + 2 * block * SLOT_BYTES + (D - 1) * N * 128,
                                         k + block * N * k_row * 2, k_row, 0, there - block * N);
        }
    }
#endif
    __syncthreads();
#if AT_ONCE
    if constexpr (BESIDE) {
        copies_arrive(q_full);
        copies_arrive(q_full + 8);
#pragma unroll
        for (int block = 0; block < TILES; block++) copies_arrive(full + 2 * block * 8);
    }
    if constexpr (V_BESIDE) {
#pragma unroll
        for (int block = 0; block < TILES; block++) {
            bring_last<N, V_HAVE, V_HAVE, 1>(ring_at + (2 * block + 1) * SLOT_BYTES + (DV - 1) * N * 128,
                                             v + block * N * v_row * 2, v_row, 0, there - block * N);
            copies_arrive(full + (2 * block + 1) * 8);
        }
    }
#else
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == bringer && blocks > 0) {
            bring_queries(0);
            for (int n = 0; n < 2 * blocks; n++) {
                if (n >= SLOTS) barrier_wait(empty + n % SLOTS * 8, (n / SLOTS - 1) & 1);
                bring(n);
            }
        }
        if constexpr (PARTS > 1) {
            __syncwarp();
            for (int i = 0; i < 2; i++) cluster_arrive(), cluster_wait();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif

    const int warpgroup = warp / 4;
    const float power = __int_as_float((__float_as_int(factor) + 0x7fffff) & 0x7f800000);
    Sums sums;
#pragma unroll
    for (float& x : sums.out) x = 0.0f;
    sums.top[0] = sums.top[1] = -INFINITE;
    sums.sum[0] = sums.sum[1] = 0.0f;
    float s[TILES][N / 2], shrink[2];
    u32 weights[TILES][N / 16][4];

    auto arrived = [&](int n) {
        barrier_wait(full + n % SLOTS * 8, n / SLOTS & 1);
        if constexpr (BESIDE || V_BESIDE) fence_for_copies();
    };
    auto score = [&](int block, int i) {
        const u32 queries = q_at + warpgroup * (Q_BYTES / 2), at = ring_at + 2 * block % SLOTS * SLOT_BYTES;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            add_scores(s[i], tile_at(queries + k / 4 * (M / 2) * 128 + k % 4 * 32),
                       tile_at(at + k / 4 * N * 128 + k % 4 * 32), k);
        }
    };
    auto weigh = [&](int block, int i) {
        const u32 at = ring_at + (2 * block + 1) % SLOTS * SLOT_BYTES;
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            add_weighted(sums.out, weights[i][k], tile_at(at + k * 16 * 128, N * 128));
        }
    };
    auto soften_block = [&](int block, int i) {
        soften(s[i], sums, shrink, factor, power, there - block * N);
#pragma unroll
        for (int j = 0; j < N / 4; j++) weights[i][j / 4][j % 4] = pair(s[i][2 * j], s[i][2 * j + 1]);
    };
    auto rescale = [&] {
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; i++) sums.out[i] *= shrink[i % 4 / 2];
    };
    auto clear_behind = [&] {  // what lies behind a length may be anything, and 0 times NaN is NaN
        const int left = there - (blocks - 1) * N;
        if (LENGTHS && left < N) {
            char* const values = ring + (2 * blocks - 1) % SLOTS * SLOT_BYTES;
            for (int i = thread; i < (N - left) * DV * 8; i += 256) {
                *(uint4*)(values + (i / 8 % DV * N + left + i / (8 * DV)) * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
            }
            fence_for_copies();
            meet(1);
        }
    };
    auto add_up = [&] {
#pragma unroll
        for (float& sum : sums.sum) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
    };

    if (blocks == 0) {
        if constexpr (PARTS > 1) {
            if constexpr (BESIDE) copies_wait();  // of queries that nobody reads: the other part is to write there
            cluster_arrive();
        }
    } else {
        barrier_wait(q_full + warpgroup * 8, 0);
        arrived(0);
#if AT_ONCE
        products_begin();
        score(0, 0);
        products_end();
        if constexpr (TILES > 1) {
            if (blocks > 1) {
                arrived(2);
                products_begin();
                score(1, 1);
            }
            products_end();
        }
        products_wait<TILES - 1>();
        soften_block(0, 0);
        products_wait<0>();
        if constexpr (PARTS > 1) cluster_arrive();  // done with queries
        arrived(1);
        if (blocks == 1) clear_behind();
        products_begin();
        weigh(0, 0);
        products_end();
        if (TILES > 1 && blocks > 1) {
            soften_block(1, TILES - 1);
            products_wait<0>();
            rescale();
            arrived(3);
            clear_behind();
            products_begin();
            weigh(1, TILES - 1);
            products_end();
        }
#else
        auto done_with = [&](int n) {
            if (lane == 0) barrier_arrive(empty + n % SLOTS * 8);
        };
        if (warpgroup == 1) tell(2);  // the first has the first turn
        meet(2 + warpgroup);
        products_begin();
        score(0, 0);
        products_end();
        products_wait<0>();
        tell(3 - warpgroup);
        done_with(0);
        soften_block(0, 0);
        for (int block = 1; block < blocks; block++) {
            arrived(2 * block);
            arrived(2 * block - 1);
            meet(2 + warpgroup);
            products_begin();
            score(block, 0);
            weigh(block - 1, 0);
            products_end();
            products_wait<0>();
            tell(3 - warpgroup);
            done_with(2 * block);
            done_with(2 * block - 1);
            soften_block(block, 0);
            rescale();
        }
        if constexpr (PARTS > 1) cluster_arrive();  // done with queries
        arrived(2 * blocks - 1);
        clear_behind();
        meet(2 + warpgroup);
        products_begin();
        weigh(blocks - 1, 0);
        products_end();
        if (warpgroup == 0) tell(3);
#endif
        add_up();
        products_wait<0>();
    }

    const int line = warp * 16 + lane / 4;
    if constexpr (PARTS > 1) {
        const int other = 1 - part;
        cluster_wait();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (lane % 4 == 0) {
                put(address_in(shared_address(&shared.top[line + 8 * half]), other), sums.top[half]);
                put(address_in(shared_address(&shared.sum[line + 8 * half]), other), sums.sum[half]);
            }
        }
        const u32 to = address_in(q_at, other) + thread * 16;
        auto give = [&](int from) {
#pragma unroll
            for (int b = 0; b < SHARE; b++) {
                const float* x = sums.out + 4 * (from + b);
                if (from + b < EIGHTS) put_4(to + b * 256 * 16, x[0], x[1], x[2], x[3]);
            }
        };
        if (part == 0) give(SHARE);
        else give(0);
        cluster_arrive();
        cluster_wait();
    }

    float own[2], other[2];
    char* to[2];
    bool seen[2], is_there[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = line + 8 * half, query = first + at / PACK, which = head + at % PACK;
        const float their_top = PARTS > 1 ? shared.top[at] : -INFINITE, their_sum = PARTS > 1 ? shared.sum[at] : 0.0f;
        const float top = fmaxf(sums.top[half], their_top), base = top == -INFINITE ? 0.0f : top;
        own[half] = PARTS > 1 ? power_of_2((sums.top[half] - base) * factor) : 1.0f;
        other[half] = PARTS > 1 ? power_of_2((their_top - base) * factor) : 0.0f;
        const float sum = sums.sum[half] * own[half] + their_sum * other[half];
        seen[half] = sum != 0.0f;
        const float scale = 1.0f / sum;  // of NaN it is NaN
        own[half] *= scale;
        other[half] *= scale;
        is_there[half] = query < rows;
        to[half] = o + (((long long)batch * rows + query) * heads + which) * (V_WIDTH * 2);
        if (part == 0 && lane % 4 == 0 && is_there[half]) {  // -Inf where nothing was seen
            lse[((long long)batch * heads + which) * rows + query] = (top * factor + log2f(sum)) * 0.6931471805599453f;
        }
    }
    const float4* const given = (const float4*)memory;
    if (PARTS == 1 || part == 0) finish<0>(sums, given, own, other, seen, to, is_there);
    else finish<PARTS - 1>(sums, given, own, other, seen, to, is_there);
}
