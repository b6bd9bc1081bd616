// Attention where every query sees the same keys (no causal mask, window or prefix; key lengths are fine), for Hopper,
// by hand: what cannot be said in Triton is that several blocks share one copy of the keys.
//
// A block has 64 rows of queries: PACK heads that read the same keys, side by side for each query. Its two warpgroups
// take the blocks of N keys in turn, each with sums of its own, so that one multiplies while the other is at its
// exponentials; they join at the end. One more warp brings queries, keys and values by hardware copies (TMA) whose
// descriptors the host made. The CLUSTER blocks of a cluster, neighbours that read the same keys, bring a share of each
// tile to all of them.
//
// Defines: TYPE ("bf16", "f16"), WIDTH and V_WIDTH (columns of a head), PACK, N (keys a tile: 64, 128), SLOTS (tiles of
// keys or values on their way), CLUSTER, LENGTHS (keys end where kv_len says), SIGN (of the scale), RESIDENT (blocks a
// multiprocessor), REGISTERS (of a multiplying thread where a warp of its own brings tiles; 0: all tiles have a slot). Which go with which call is settled in cuda.py.
#include "attention_full.cuh"

constexpr int M = 64;
constexpr int THREADS = REGISTERS ? 384 : 256;
constexpr int ROUNDED = 16;  // columns of the panel for what panels of 64 leave, where that is so little
#define HAS_REST(width) (width % 64 > 0 && width % 64 <= 16)

constexpr int panels(int width) { return width / 64 + (width % 64 > ROUNDED); }
constexpr int D = panels(WIDTH), D_REST = HAS_REST(WIDTH);
constexpr int DV = panels(V_WIDTH), DV_REST = HAS_REST(V_WIDTH);
constexpr int tile_bytes(int rows, int whole, int rest) { return rows * (whole * 128 + rest * 2 * ROUNDED); }
constexpr int Q_BYTES = tile_bytes(M, D, D_REST);
constexpr int K_BYTES = tile_bytes(N, D, D_REST), V_BYTES = tile_bytes(N, DV, DV_REST);
constexpr int SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES;
constexpr int SHARE = N / CLUSTER;  // rows of a tile that a block brings
constexpr int ALL = (1 << CLUSTER) - 1;

constexpr int CHUNK = DV % 4 == 0 ? 4 : DV % 2 == 0 ? 2 : 1;  // panels of values a product takes
constexpr int CHUNKS = DV / CHUNK;
constexpr int EIGHTS = 8 * DV + 2 * DV_REST;  // columns of the output by 8
constexpr int FIRST = EIGHTS / 8 * 4;         // of which the first warpgroup finishes

static_assert(SHARE % 8 == 0 && M % PACK == 0, "shares are whole groups of 8 rows, rows whole queries");
static_assert(SLOTS * SLOT_BYTES >= EIGHTS * 4 * 128 * 4, "the warpgroups exchange sums where tiles were");

#define INFINITE __int_as_float(0x7f800000)

struct Sums {
    float out[EIGHTS * 4];
    float top[2], sum[2];
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

struct Shared {
    u64 q_full, full[SLOTS], empty[SLOTS];
    float top[2][M], sum[2][M];
};

// Lanes whose bit `bit` is not set give `high` for the neighbour's `low`.
__device__ __forceinline__ void exchange(u32& low, u32& high, int bit) {
    const bool set = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, set ? low : high, bit);
    if (set) low = got;
    else high = got;
}

// Warpgroup `mine` has joined sums of the columns by 8 from FROM to TO, and writes them.
template <int FROM, int TO>
__device__ __forceinline__ void finish(
    Sums& sums, const float* theirs, const float (&own)[2], const float (&other)[2], char* (&to)[2],
    const bool (&there)[2]) {
    const int thread = threadIdx.x % 128, quad = threadIdx.x % 4;
#pragma unroll
    for (int i = FROM * 4; i < TO * 4; i++) {
        const int half = i % 4 / 2;
        const float x = sums.out[i] * own[half] + theirs[(i - FROM * 4) * 128 + thread] * other[half];
        sums.out[i] = own[half] == 0.0f && other[half] == 0.0f ? 0.0f : x;  // nothing was seen, whatever was multiplied
    }
    // Of four neighbours each has 2 columns of every 8: they exchange until each has 8 columns, 16 bytes, of one.
    constexpr int WHOLE = FROM + (TO - FROM) / 4 * 4;
#pragma unroll
    for (int b = FROM; b < WHOLE; b += 4) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* x = sums.out + 4 * b + 2 * half;
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
            const float* x = sums.out + 4 * b + 2 * half;
            const int column = b * 8 + quad * 2;
            if (there[half] && column < V_WIDTH) *(u32*)(to[half] + column * 2) = pair(x[0], x[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_full(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
#if HAS_REST(WIDTH)
    const __grid_constant__ TensorMap q_rest, const __grid_constant__ TensorMap k_rest,
#endif
#if HAS_REST(V_WIDTH)
    const __grid_constant__ TensorMap v_rest,
#endif
    const int* kv_len, char* o, float* lse, long long rows, long long keys,
    long long tiles, long long heads, long long group, float factor) {
    extern __shared__ __align__(1024) char memory[];
    char* const ring = memory + Q_BYTES;
    Shared& shared = *(Shared*)(ring + SLOTS * SLOT_BYTES);
    const u32 q_at = shared_address(memory), ring_at = shared_address(ring);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;

    const int tile = blockIdx.x % (int)tiles, both = blockIdx.x / (int)tiles;
    const int packs = (int)heads / PACK, batch = both / packs, head = both % packs * PACK;
    const int key_head = head / (int)group, first = tile * (M / PACK);  // query
    const int there = LENGTHS ? min(max(kv_len[batch], 0), (int)keys) : (int)keys;
    const int blocks = (there + N - 1) / N, loads = 2 * blocks;

    const int bringer = REGISTERS ? 8 : 0;  // warp
    if (warp == bringer && lane == 0) {
        barrier_init(shared_address(&shared.q_full), 1);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(shared_address(&shared.full[slot]), 1);
            barrier_init(shared_address(&shared.empty[slot]), 4 * CLUSTER);
        }
        barrier_init_fence();
        const u32 barrier = shared_address(&shared.q_full);
        barrier_expect(barrier, Q_BYTES);
#pragma unroll
        for (int p = 0; p < D; p++) copy_box(q_map, q_at + p * M * 128, barrier, p * 64, head, first, batch, 1);
#if HAS_REST(WIDTH)
        copy_box(q_rest, q_at + D * M * 128, barrier, D * 64, head, first, batch, 1);
#endif
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    } else {
        __syncthreads();
    }

    // Tiles come in the order K0 K1 V0 V1 K2 K3 V2 V3, of an odd count K V last: the two warpgroups go side by side.
    auto bring = [&](int n) {
        const int slot = n % SLOTS, pair = n / 4, of = min(2, blocks - 2 * pair), within = n - 4 * pair;
        const bool values = within >= of;
        const int row = (2 * pair + (values ? within - of : within)) * N + rank * SHARE;
        const u32 barrier = shared_address(&shared.full[slot]), to = ring_at + slot * SLOT_BYTES;
        barrier_expect(barrier, values ? V_BYTES : K_BYTES);
        if (values) {
#pragma unroll
            for (int p = 0; p < DV; p++) {
                copy_box(v_map, to + (p * N + rank * SHARE) * 128, barrier, p * 64, key_head, row, batch, ALL);
            }
#if HAS_REST(V_WIDTH)
            const u32 place = to + DV * N * 128 + rank * SHARE * 2 * ROUNDED;
            copy_box(v_rest, place, barrier, DV * 64, key_head, row, batch, ALL);
#endif
        } else {
#pragma unroll
            for (int p = 0; p < D; p++) {
                copy_box(k_map, to + (p * N + rank * SHARE) * 128, barrier, p * 64, key_head, row, batch, ALL);
            }
#if HAS_REST(WIDTH)
            const u32 place = to + D * N * 128 + rank * SHARE * 2 * ROUNDED;
            copy_box(k_rest, place, barrier, D * 64, key_head, row, batch, ALL);
#endif
        }
    };
    if constexpr (REGISTERS) {
        if (warp >= 8) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
            if (warp == bringer && lane == 0) {
                for (int n = 0; n < loads; n++) {
                    if (n >= SLOTS) barrier_wait(shared_address(&shared.empty[n % SLOTS]), (n / SLOTS - 1) & 1);
                    bring(n);
                }
            }
            return;
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    } else if (warp == bringer && lane == 0) {
        for (int n = 0; n < loads; n++) bring(n);
    }
    __syncwarp();

    const int mine = warp / 4;
    const float power = __int_as_float((__float_as_int(factor) + 0x7fffff) & 0x7f800000);
    Sums sums;
#pragma unroll
    for (float& x : sums.out) x = 0.0f;
    sums.top[0] = sums.top[1] = -INFINITE;
    sums.sum[0] = sums.sum[1] = 0.0f;
    barrier_wait(shared_address(&shared.q_full), 0);
    for (int block = mine; block < blocks; block += 2) {
        const int of = min(2, blocks - (block & ~1));
        const int k_number = 2 * (block & ~1) + mine, v_number = k_number + of;
        const int k_slot = k_number % SLOTS, v_slot = v_number % SLOTS;
        const u32 k_at = ring_at + k_slot * SLOT_BYTES, v_at = ring_at + v_slot * SLOT_BYTES;
        float s[N / 2];
        barrier_wait(shared_address(&shared.full[k_slot]), k_number / SLOTS & 1);
        products_begin();
#pragma unroll
        for (int p = 0; p < D; p++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                add_scores(s, tile_at<128>(q_at + p * M * 128 + k * 32), tile_at<128>(k_at + p * N * 128 + k * 32),
                           p + k);
            }
        }
        if constexpr (D_REST) {
            add_scores(s, tile_at<2 * ROUNDED>(q_at + D * M * 128), tile_at<2 * ROUNDED>(k_at + D * N * 128), D);
        }
        products_end();
        products_wait<0>();
        if (k_number + SLOTS < loads && lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[k_slot]), lane);

        const int left = there - block * N;
        soften(s, sums, factor, power, left);
        barrier_wait(shared_address(&shared.full[v_slot]), v_number / SLOTS & 1);
        if constexpr (LENGTHS) {
            if (left < N) {  // what lies behind the length may be anything, and 0 times NaN is NaN
                for (int i = thread % 128; i < (N - left) * (V_BYTES / N / 16); i += 128) {
                    const int row = left + i / (V_BYTES / N / 16), unit = i % (V_BYTES / N / 16);
                    const int panel = min(unit / 8, DV), within = unit - panel * 8;
                    const int at = panel * N * 128 + row * (panel < DV ? 128 : 2 * ROUNDED) + within * 16;
                    *(uint4*)(ring + v_slot * SLOT_BYTES + at) = make_uint4(0, 0, 0, 0);
                }
                fence_for_copies();
                meet(2 + mine, 128);
            }
        }
        u32 weights[N / 16][4];
#pragma unroll
        for (int i = 0; i < N / 4; i++) weights[i / 4][i % 4] = pair(s[2 * i], s[2 * i + 1]);
        products_begin();
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                add_weighted(numbers<CHUNK * 32>(sums.out, c * CHUNK * 32), weights[k],
                             tile_at<128>(v_at + c * CHUNK * N * 128 + k * 16 * 128, N * 128));
            }
            if constexpr (DV_REST) {
                add_weighted(numbers<8>(sums.out, DV * 32), weights[k],
                             tile_at<2 * ROUNDED>(v_at + DV * N * 128 + k * 16 * 2 * ROUNDED));
            }
        }
        products_end();
        products_wait<0>();
        if (v_number + SLOTS < loads && lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[v_slot]), lane);
    }

    // The warpgroups join: each finishes its half of the columns, and gives the other half away.
    const int line = warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float& sum = sums.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) {
            shared.top[mine][line + 8 * half] = sums.top[half];
            shared.sum[mine][line + 8 * half] = sum;
        }
    }
    float* const given = (float*)ring;  // the first warpgroup's columns, then the second's
    meet(1, 256);                       // nobody reads tiles any more
    if (mine == 0) {
#pragma unroll
        for (int i = FIRST * 4; i < EIGHTS * 4; i++) given[i * 128 + thread % 128] = sums.out[i];
    } else {
#pragma unroll
        for (int i = 0; i < FIRST * 4; i++) given[i * 128 + thread % 128] = sums.out[i];
    }
    meet(1, 256);

    float own[2], other[2];
    char* to[2];
    bool is_there[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = line + 8 * half, query = first + at / PACK, which = head + at % PACK;
        const float theirs = shared.top[1 - mine][at], top = fmaxf(sums.top[half], theirs);
        const float base = top == -INFINITE ? 0.0f : top;
        own[half] = power_of_2((sums.top[half] - base) * factor);
        other[half] = power_of_2((theirs - base) * factor);
        const float sum = sums.sum[half] * own[half] + shared.sum[1 - mine][at] * other[half];
        const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;  // of NaN it is NaN
        own[half] *= scale;
        other[half] *= scale;
        is_there[half] = query < rows;
        to[half] = o + (((long long)batch * rows + query) * heads + which) * (V_WIDTH * 2);
        if (mine == 0 && lane % 4 == 0 && is_there[half]) {  // -Inf where nothing was seen
            lse[((long long)batch * heads + which) * rows + query] = (top * factor + log2f(sum)) * 0.6931471805599453f;
        }
    }
    if (mine == 0) finish<0, FIRST>(sums, given, own, other, to, is_there);
    else finish<FIRST, EIGHTS>(sums, given + FIRST * 512, own, other, to, is_there);
}
