// Attention where every query sees the same keys (no causal mask, window or prefix; key lengths are fine), for Hopper, by
// hand. What it has over the kernels in Triton: descriptors that the host made, so that copies are asked for at once,
// and parts of the keys that are joined through the shared memory of neighbours, not by a second launch.
//
// A block has M rows of queries: PACK heads that read the same keys, side by side for each query. Each of its two
// warpgroups has half of them. Keys and values come in tiles of N by hardware copies (TMA). The PARTS blocks of a cluster
// have the same queries and share the keys; each finishes a share of the columns.
//
// Defines: TYPE ("bf16", "f16"), WIDTH and V_WIDTH (columns of a head), PACK, N (keys a tile: 64, 128, 256), SLOTS (tiles
// of keys or values at a time), PARTS, LENGTHS (keys end where kv_len says), SIGN (of the scale), REGISTERS (of a
// multiplying thread, where a warp of its own brings tiles; 0: all tiles have a slot and are asked for at once), REST
// (only then: up to 16 columns that panels of 64 leave have a panel of their own). Which go with which call is settled
// in cuda.py.
#include "attention_full.cuh"

constexpr int M = 128;
constexpr int THREADS = REGISTERS ? 384 : 256;

constexpr int panels(int width) { return width / 64 + (width % 64 > 16 * REST); }
constexpr int D = panels(WIDTH), D_REST = WIDTH > D * 64;
constexpr int DV = panels(V_WIDTH), DV_REST = V_WIDTH > DV * 64;
constexpr int tile_bytes(int rows, int whole, int rest) { return rows * (whole * 128 + rest * 32); }
constexpr int Q_BYTES = tile_bytes(M, D, D_REST);
constexpr int K_BYTES = tile_bytes(N, D, D_REST), V_BYTES = tile_bytes(N, DV, DV_REST);
constexpr int SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES;

constexpr int CHUNK = DV % 4 == 0 ? 4 : DV % 2 == 0 ? 2 : 1;  // panels of values a product takes
constexpr int EIGHTS = 8 * DV + 2 * DV_REST;                  // columns of the output, by 8
constexpr int SHARE = ((EIGHTS + 3) / 4 + PARTS - 1) / PARTS * 4;  // of which a block of the cluster finishes so many
constexpr int GIVEN = SHARE * 4 * 256 * 4;                         // bytes, from one block to another

static_assert(!REST || !REGISTERS, "panels of 16 columns come at once or not at all");
static_assert(PARTS == 1 || SLOTS * SLOT_BYTES >= (PARTS - 1) * GIVEN, "blocks exchange sums where tiles were");

#define INFINITE __int_as_float(0x7f800000)

struct Sums {
    float out[EIGHTS * 4];
    float top[2], sum[2];
};

struct Shared {
    u64 q_full, full[SLOTS], empty[SLOTS];
    float top[PARTS][M], sum[PARTS][M];
};

// Scores become weights, and the sums so far shrink to the new largest score. `left`: how many of the keys are there.
__device__ __forceinline__ void soften(float (&s)[N / 2], Sums& sums, float factor, float power, int left) {
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
    float shrink[2];
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
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) sums.out[i] *= shrink[i % 4 / 2];
}

#if REST
// The 16-byte units of a panel of 16 columns, 0 from `lines` and from `columns` on; neighbours in a row are exchanged as
// the swizzle of 32 bytes has them.
__device__ __forceinline__ void bring_rest(
    char* to, const char* from, long long step, int rows, int lines, int columns, int pack, long long pack_step) {
    for (int i = threadIdx.x; i < rows * 2; i += 256) {
        const int row = i / 2, unit = i % 2, line = row / pack;
        uint4 got = make_uint4(0, 0, 0, 0);
        if (line < lines && unit * 8 < columns) {
            got = *(const uint4*)(from + (line * step + row % pack * pack_step) * 2 + unit * 16);
        }
        *(uint4*)(to + row * 32 + (unit ^ (row / 4 % 2)) * 16) = got;
    }
}
#endif

// Lanes whose bit `bit` is not set give `high` for the neighbour's `low`.
__device__ __forceinline__ void exchange(u32& low, u32& high, int bit) {
    const bool set = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, set ? low : high, bit);
    if (set) low = got;
    else high = got;
}

// Writes the columns by 8 from FROM to TO of two rows.
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

// Adds what the others of the cluster gave of this block's columns, and writes them.
template <int PART>
__device__ __forceinline__ void join(
    Sums& sums, const float4* given, const float (&scale)[PARTS][2], const bool (&seen)[2], char* (&to)[2],
    const bool (&there)[2]) {
    constexpr int FROM = PART * SHARE < EIGHTS ? PART * SHARE : EIGHTS;
    constexpr int TO = FROM + SHARE < EIGHTS ? FROM + SHARE : EIGHTS;
#pragma unroll
    for (int b = FROM; b < TO; b++) {
        float* x = sums.out + 4 * b;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] *= scale[PART][e / 2];
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
            if (other == PART) continue;
            const int slot = other - (other > PART);
            const float4 y = given[(slot * SHARE + b - FROM) * 256 + threadIdx.x];
            x[0] += y.x * scale[other][0], x[1] += y.y * scale[other][0];
            x[2] += y.z * scale[other][1], x[3] += y.w * scale[other][1];
        }
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = seen[e / 2] ? x[e] : 0.0f;  // 0 times whatever it was multiplied by
    }
    write<FROM, TO>(sums.out, to, there);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_full(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
#if REST
    const char* q, const char* k, const char* v, long long q_batch, long long q_row, long long q_head,
    long long k_batch, long long k_row, long long k_head, long long v_batch, long long v_row, long long v_head,
#endif
    const int* kv_len, char* o, float* lse, long long rows, long long keys, long long tiles, long long heads,
    long long group, float factor) {
    extern __shared__ __align__(1024) char memory[];
    char* const ring = memory + Q_BYTES;
    Shared& shared = *(Shared*)(ring + SLOTS * SLOT_BYTES);
    const u32 q_at = shared_address(memory), ring_at = shared_address(ring);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int part = blockIdx.x % PARTS, number = blockIdx.x / PARTS;

    const int tile = number % (int)tiles, both = number / (int)tiles;
    const int packs = (int)heads / PACK, batch = both / packs, head = both % packs * PACK;
    const int key_head = head / (int)group, first = tile * (M / PACK);  // query
    const int all = LENGTHS ? min(max(kv_len[batch], 0), (int)keys) : (int)keys;
    const int mine = ((all + N - 1) / N + PARTS - 1) / PARTS * N;  // keys of a block of the cluster
    const int start = min(part * mine, all), there = min(mine, all - start), blocks = (there + N - 1) / N;

    auto ask = [&](const TensorMap& map, u32 to, u32 barrier, int count, int height, int which, int row) {
#pragma unroll
        for (int p = 0; p < count; p++) copy_box(map, to + p * height * 128, barrier, p * 64, which, row, batch);
    };
    auto bring = [&](int n) {  // tiles come in the order K0 V0 K1 V1
        const u32 barrier = shared_address(&shared.full[n % SLOTS]), to = ring_at + n % SLOTS * SLOT_BYTES;
        const int row = start + n / 2 * N;
        barrier_expect(barrier, N * 128 * (n % 2 ? DV : D));
        if (n % 2) ask(v_map, to, barrier, DV, N, key_head, row);
        else ask(k_map, to, barrier, D, N, key_head, row);
    };
    const int bringer = REGISTERS ? 8 : 0;  // warp
    if (warp == bringer && lane == 0) {
        barrier_init(shared_address(&shared.q_full), 1);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(shared_address(&shared.full[slot]), 1);
            barrier_init(shared_address(&shared.empty[slot]), 8);
        }
        barrier_init_fence();
        const u32 barrier = shared_address(&shared.q_full);
        barrier_expect(barrier, M * 128 * D);
        ask(q_map, q_at, barrier, D, M, head, first);
        for (int n = 0; n < min(SLOTS, 2 * blocks); n++) bring(n);
    }
    __syncwarp();
#if REST
    if constexpr (D_REST) {
        const int left = WIDTH - D * 64;
        q += batch * q_batch * 2 + first * q_row * 2 + head * q_head * 2 + D * 128;
        k += batch * k_batch * 2 + start * k_row * 2 + key_head * k_head * 2 + D * 128;
        bring_rest(memory + D * M * 128, q, q_row, M, (int)rows - first, left, PACK, q_head);
        for (int block = 0; block < blocks; block++) {
            bring_rest(ring + 2 * block * SLOT_BYTES + D * N * 128, k + block * N * k_row * 2, k_row, N,
                       there - block * N, left, 1, 0);
        }
    }
    if constexpr (DV_REST) {
        v += batch * v_batch * 2 + start * v_row * 2 + key_head * v_head * 2 + DV * 128;
        for (int block = 0; block < blocks; block++) {
            bring_rest(ring + (2 * block + 1) * SLOT_BYTES + DV * N * 128, v + block * N * v_row * 2, v_row, N,
                       there - block * N, V_WIDTH - DV * 64, 1, 0);
        }
    }
    fence_for_copies();
#endif
    __syncthreads();

    if constexpr (REGISTERS) {
        if (warp >= 8) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
            if (warp == bringer && lane == 0) {
                for (int n = SLOTS; n < 2 * blocks; n++) {
                    barrier_wait(shared_address(&shared.empty[n % SLOTS]), (n / SLOTS - 1) & 1);
                    bring(n);
                }
            }
            if constexpr (PARTS > 1) {
                __syncwarp();
                cluster_sync();
                cluster_sync();
            }
            return;
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
    }

    const int warpgroup = warp / 4;
    const float power = __int_as_float((__float_as_int(factor) + 0x7fffff) & 0x7f800000);
    Sums sums;
#pragma unroll
    for (float& x : sums.out) x = 0.0f;
    sums.top[0] = sums.top[1] = -INFINITE;
    sums.sum[0] = sums.sum[1] = 0.0f;
    barrier_wait(shared_address(&shared.q_full), 0);
    for (int block = 0; block < blocks; block++) {
        const int k_slot = 2 * block % SLOTS, v_slot = (2 * block + 1) % SLOTS;
        const u32 k_at = ring_at + k_slot * SLOT_BYTES, v_at = ring_at + v_slot * SLOT_BYTES;
        float s[N / 2];
        barrier_wait(shared_address(&shared.full[k_slot]), 2 * block / SLOTS & 1);
        products_begin();
#pragma unroll
        for (int p = 0; p < D; p++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                add_scores(s, tile_at<128>(q_at + (p * M + warpgroup * 64) * 128 + k * 32),
                           tile_at<128>(k_at + p * N * 128 + k * 32), p + k);
            }
        }
        if constexpr (D_REST) {
            add_scores(s, tile_at<32>(q_at + D * M * 128 + warpgroup * 64 * 32), tile_at<32>(k_at + D * N * 128), D);
        }
        products_end();
        products_wait<0>();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[k_slot]));

        const int left = there - block * N;
        soften(s, sums, factor, power, left);
        barrier_wait(shared_address(&shared.full[v_slot]), (2 * block + 1) / SLOTS & 1);
        if constexpr (LENGTHS) {
            if (left < N) {  // what lies behind the length may be anything, and 0 times NaN is NaN
                for (int i = thread % 256; i < (N - left) * DV * 8; i += 256) {
                    const int panel = i / 8 % DV, row = left + i / (8 * DV);
                    *(uint4*)(ring + v_slot * SLOT_BYTES + (panel * N + row) * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
                }
                fence_for_copies();
                meet(1, 256);
            }
        }
        u32 weights[N / 16][4];
#pragma unroll
        for (int i = 0; i < N / 4; i++) weights[i / 4][i % 4] = pair(s[2 * i], s[2 * i + 1]);
        products_begin();
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
#pragma unroll
            for (int c = 0; c < DV; c += CHUNK) {
                add_weighted(numbers<CHUNK * 32>(sums.out, c * 32), weights[k],
                             tile_at<128>(v_at + c * N * 128 + k * 16 * 128, N * 128));
            }
            if constexpr (DV_REST) {
                add_weighted(numbers<8>(sums.out, DV * 32), weights[k], tile_at<32>(v_at + DV * N * 128 + k * 16 * 32));
            }
        }
        products_end();
        products_wait<0>();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[v_slot]));
    }

    const int line = warp * 16 + lane / 4;
    float tops[PARTS][2], totals[PARTS][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float& sum = sums.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        tops[0][half] = sums.top[half];
        totals[0][half] = sum;
    }
    if constexpr (PARTS > 1) {
        cluster_sync();  // nobody reads tiles any more
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
            if (lane % 4 == 0) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 at = address_in(shared_address(&shared.top[part][line + 8 * half]), other);
                    const u32 sum_at = address_in(shared_address(&shared.sum[part][line + 8 * half]), other);
                    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(sums.top[half]) : "memory");
                    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(sum_at), "f"(sums.sum[half]) : "memory");
                }
            }
            if (other == part) continue;
            const u32 to = address_in(ring_at, other) + (part - (part > other)) * GIVEN + thread * 16;
#pragma unroll
            for (int b = other * SHARE; b < min((other + 1) * SHARE, EIGHTS); b++) {
                const float* x = sums.out + 4 * b;
                put_4(to + (b - other * SHARE) * 256 * 16, x[0], x[1], x[2], x[3]);
            }
        }
        cluster_sync();
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                tops[other][half] = shared.top[other][line + 8 * half];
                totals[other][half] = shared.sum[other][line + 8 * half];
            }
        }
    }

    float scale[PARTS][2];
    char* to[2];
    bool seen[2], is_there[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = line + 8 * half, query = first + at / PACK, which = head + at % PACK;
        float top = tops[0][half], sum = 0.0f;
#pragma unroll
        for (int other = 1; other < PARTS; other++) top = fmaxf(top, tops[other][half]);
        const float base = top == -INFINITE ? 0.0f : top;
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
            scale[other][half] = power_of_2((tops[other][half] - base) * factor);
            sum += totals[other][half] * scale[other][half];
        }
        seen[half] = sum != 0.0f;
        const float inverse = seen[half] ? 1.0f / sum : 0.0f;  // of NaN it is NaN
#pragma unroll
        for (int other = 0; other < PARTS; other++) scale[other][half] *= inverse;
        is_there[half] = query < rows;
        to[half] = o + (((long long)batch * rows + query) * heads + which) * (V_WIDTH * 2);
        if (part == 0 && lane % 4 == 0 && is_there[half]) {  // -Inf where nothing was seen
            lse[((long long)batch * heads + which) * rows + query] = (top * factor + log2f(sum)) * 0.6931471805599453f;
        }
    }
    const float4* const given = (const float4*)ring;
    if (PARTS == 1 || part == 0) join<0>(sums, given, scale, seen, to, is_there);
#if PARTS > 1
    if (part == 1) join<1>(sums, given, scale, seen, to, is_there);
#endif
#if PARTS > 2
    if (part == 2) join<2>(sums, given, scale, seen, to, is_there);
    if (part == 3) join<3>(sums, given, scale, seen, to, is_there);
#endif
}
