// Backward of rms_norm, add_rms_norm, layer_norm and add_layer_norm for wide rows. Which defines go with which call is
// settled in cuda.py; the forward is in norm_wide.cu.
//
// A cluster of CLUSTER blocks walks over rows; each block owns a slice of the columns, and with it the column sums for
// the weight gradients, in float registers across all its rows. The copy engine brings the next STAGES rows into shared
// memory. A row is read twice from there: for its sums (which the cluster exchanges) and the weight gradients, then for
// dx. The column sums leave once a cluster, and `norm_wide_weights`, which is launched meanwhile and waits, adds up those
// of all clusters in a fixed order.
//
// Defines of norm_wide_backward: ELEMENT, WEIGHT (fp32, fp16, bf16), COLUMNS (whole packets of 16 bytes), THREADS,
// CLUSTER, STAGES, CTAS (blocks a multiprocessor), CENTER, HAS_WEIGHT, HAS_DH, CAST_BEFORE_WEIGHT, NEEDS_DX,
// NEEDS_DWEIGHT, NEEDS_DBIAS, NEEDS_DPRE_BIAS. Of norm_wide_weights: COLUMNS, and OUTPUT0, OUTPUT1, OUTPUT2 (types of
// the gradients).
#include "norm_wide.cuh"

#ifdef OUTPUT0

constexpr int ADDERS = 16;  // warps, each of which adds up every 16th part

template <class T>
__device__ __forceinline__ void store_one(char* to, long long column, float value) {
    float values[PER_PACKET<T>] = {value};
    Packet packet;
    T::pack(values, packet.words);
    if constexpr (T::bytes == 4) {
        reinterpret_cast<u32*>(to)[column] = packet.words[0];
    } else {
        reinterpret_cast<unsigned short*>(to)[column] = (unsigned short)packet.words[0];
    }
}

// partial [outputs, parts, COLUMNS]; a block takes 32 columns of one output: grid (COLUMNS / 32 rounded up, outputs).
extern "C" __global__ void __launch_bounds__(32 * ADDERS) norm_wide_weights(
    const float* partial, char* output0, char* output1, char* output2, long long parts) {
    __shared__ float sums[ADDERS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long column = (long long)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    wait_for_launch_before();
    if (column < COLUMNS) {
        const float* from = partial + blockIdx.y * parts * COLUMNS + column;
#pragma unroll 8
        for (long long part = warp; part < parts; part += ADDERS) sum += from[part * COLUMNS];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < COLUMNS) {
        sum = sums[0][lane];
#pragma unroll
        for (int i = 1; i < ADDERS; i++) sum += sums[i][lane];
        if (blockIdx.y == 0) store_one<OUTPUT0>(output0, column, sum);
        if (blockIdx.y == 1) store_one<OUTPUT1>(output1, column, sum);
        if (blockIdx.y == 2) store_one<OUTPUT2>(output2, column, sum);
    }
}

#else

using Element = ELEMENT;
using Weight = WEIGHT;

constexpr int N = PER_PACKET<Element>;
static_assert(COLUMNS % N == 0, "bulk copies need aligned rows");
constexpr int PACKETS = COLUMNS / N;                       // of a row
constexpr int SLICE = (PACKETS + CLUSTER - 1) / CLUSTER;   // packets of a block
constexpr int PER_THREAD = (SLICE + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int STAGE_BYTES = SLICE * 16 * (2 + HAS_DH);     // x, dy, dh
constexpr bool NEEDS_D = NEEDS_DX || NEEDS_DPRE_BIAS;
constexpr int SUMS = CENTER ? 2 : 1;
// What registers suffice for beside the column sums stays in them: the weight, as float, over all rows; then the row's
// deviations and e between its two passes. Else both come again, from the caches and from the stage.
constexpr int VALUES = PER_THREAD * N;
constexpr int SPARE = (65536 / (THREADS * CTAS) < 255 ? 65536 / (THREADS * CTAS) : 255) - 40 -
                      VALUES * (NEEDS_DWEIGHT + NEEDS_DBIAS + NEEDS_DPRE_BIAS);
constexpr bool HOLD_WEIGHT = HAS_WEIGHT && SPARE >= VALUES;
constexpr bool HOLD_ROW = NEEDS_D && SPARE - HOLD_WEIGHT * VALUES >= 2 * VALUES;
static_assert(THREADS % 32 == 0 && (WARPS & (WARPS - 1)) == 0, "sums over a block halve it");

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) norm_wide_backward(
    const char* dy, const char* x, const char* weight, const float* mean_in, const float* rstd_in, const char* dh,
    char* dx, float* partial, long long rows, long long dy_stride, long long x_stride, long long dh_stride,
    float weight_offset) {
    extern __shared__ __align__(128) char stages[];
    __shared__ float slots[2][WARPS][SUMS];
    __shared__ Exchange<CLUSTER> exchange;
    __shared__ u64 full[STAGES];

    launch_dependents();
    const int thread = threadIdx.x;
    const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0;
    const int first = rank * SLICE;  // packet
    const int count = PACKETS % CLUSTER == 0 ? SLICE : max(0, min(SLICE, PACKETS - first));
    const long long clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
    const long long offset = (long long)first * 16;

    auto fetch = [&](long long row, int stage) {  // by one thread
        if (row >= rows || count == 0) return;
        char* to = stages + stage * STAGE_BYTES;
        barrier_expect(&full[stage], count * 16 * (2 + HAS_DH));
        bulk_load(to, x + row * x_stride * Element::bytes + offset, count * 16, &full[stage]);
        bulk_load(to + SLICE * 16, dy + row * dy_stride * Element::bytes + offset, count * 16, &full[stage]);
        if constexpr (HAS_DH) {
            bulk_load(to + 2 * SLICE * 16, dh + row * dh_stride * Element::bytes + offset, count * 16, &full[stage]);
        }
    };

    long long row = cluster;
    if (thread == 0) {
        if constexpr (CLUSTER > 1) exchange.init();
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) barrier_init(&full[stage]);
        barrier_init_fence();
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) fetch(row + stage * clusters, stage);
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_arrive();

    float weights[HOLD_WEIGHT ? PER_THREAD : 1][N];
    auto load_weight = [&](float (&into)[N], int packet) {
        Parameters<Element, Weight> found;
        found.template load<N>(weight, (first + packet) * N, COLUMNS);
        found.unpack(into);
#pragma unroll
        for (int i = 0; i < N; i++) into[i] += weight_offset;
    };
    if constexpr (HOLD_WEIGHT) {
#pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
            if (v * THREADS + thread < count) load_weight(weights[v], v * THREADS + thread);
        }
    }
    // Column sums; one element where they are not asked for.
    float dweight[NEEDS_DWEIGHT ? PER_THREAD : 1][N] = {};
    float dbias[NEEDS_DBIAS ? PER_THREAD : 1][N] = {};
    float dpre_bias[NEEDS_DPRE_BIAS ? PER_THREAD : 1][N] = {};

    // Of packet `v` of the staged row: deviations from the mean, and dy.
    auto read = [&](const char* staged, int v, float mean, float (&d)[N], float (&g)[N]) {
        const int packet = v * THREADS + thread;
        Element::unpack(load_shared(staged + packet * 16).words, d);
        Element::unpack(load_shared(staged + (SLICE + packet) * 16).words, g);
        if constexpr (CENTER) {
#pragma unroll
            for (int i = 0; i < N; i++) d[i] -= mean;
        }
    };
    // e = dy times weight; `g` holds dy on entry.
    auto times_weight = [&](float (&g)[N], int v) {
        if constexpr (HAS_WEIGHT) {
            if constexpr (!HOLD_WEIGHT) load_weight(weights[0], v * THREADS + thread);
#pragma unroll
            for (int i = 0; i < N; i++) g[i] *= weights[HOLD_WEIGHT ? v : 0][i];
        }
    };

    if constexpr (CLUSTER > 1) {
        cluster_wait();
    } else {
        __syncthreads();
    }

    float next_rstd = rstd_in[row], next_mean = 0.0f;
    if constexpr (CENTER) next_mean = mean_in[row];
    u32 number = 0;  // of the row, among those of this cluster
    int stage = 0;
    u32 phase = 0;
    for (; row < rows; row += clusters, number++) {
        const char* staged = stages + stage * STAGE_BYTES;
        const float rstd = next_rstd, mean = next_mean;
        if (row + clusters < rows) {
            next_rstd = rstd_in[row + clusters];
            if constexpr (CENTER) next_mean = mean_in[row + clusters];
        }
        if (count > 0) barrier_wait(&full[stage], phase);

        // ---- the row's sums, and its share of the weight gradients
        float sums[SUMS] = {};
        float row_d[HOLD_ROW ? PER_THREAD : 1][N], row_e[HOLD_ROW ? PER_THREAD : 1][N];
#pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
            if (v * THREADS + thread < count) {
                float(&d)[N] = row_d[HOLD_ROW ? v : 0];
                float(&g)[N] = row_e[HOLD_ROW ? v : 0];
                read(staged, v, mean, d, g);
                if constexpr (NEEDS_DBIAS) {
#pragma unroll
                    for (int i = 0; i < N; i++) dbias[v][i] += g[i];
                }
                if constexpr (NEEDS_DWEIGHT) {
                    float n[N];  // what the weight was multiplied with
#pragma unroll
                    for (int i = 0; i < N; i++) n[i] = d[i] * rstd;
                    if constexpr (CAST_BEFORE_WEIGHT) round_to<Element>(n);
#pragma unroll
                    for (int i = 0; i < N; i++) dweight[v][i] += g[i] * n[i];
                }
                if constexpr (NEEDS_D) {
                    times_weight(g, v);
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        sums[0] += g[i] * (d[i] * rstd);
                        if constexpr (CENTER) sums[1] += g[i];
                    }
                }
            }
        }
        // Once the block has met, nobody reads the row before any more: its stage is free.
        auto refill = [&] {
            if (STAGES > 1 && thread == 0 && number > 0) {
                fetch(row + (STAGES - 1) * clusters, stage == 0 ? STAGES - 1 : stage - 1);
            }
        };
        if constexpr (NEEDS_D) {
            block_sum<THREADS, SUMS>(sums, slots[number & 1], refill);
            if constexpr (CLUSTER > 1) {
                exchange.send(number, rank, sums[0], SUMS > 1 ? sums[SUMS - 1] : 0.0f);
                const float2* slices = exchange.receive(number);
                sums[0] = 0.0f;
                if constexpr (CENTER) sums[1] = 0.0f;
#pragma unroll
                for (int i = 0; i < CLUSTER; i++) {
                    sums[0] += slices[i].x;
                    if constexpr (CENTER) sums[1] += slices[i].y;
                }
            }
            const float along = sums[0] * (1.0f / COLUMNS);  // mean(g n)
            const float level = CENTER ? sums[SUMS - 1] * (1.0f / COLUMNS) : 0.0f;  // mean(g)

            // ---- dx = rstd (e - level - d rstd along)
            const float slope = rstd * (rstd * along), base = rstd * level;
            char* to = dx + row * ((long long)COLUMNS * Element::bytes) + offset;
#pragma unroll
            for (int v = 0; v < PER_THREAD; v++) {
                const int packet = v * THREADS + thread;
                if (packet < count) {
                    float(&d)[N] = row_d[HOLD_ROW ? v : 0];
                    float(&g)[N] = row_e[HOLD_ROW ? v : 0];
                    if constexpr (!HOLD_ROW) {
                        read(staged, v, mean, d, g);
                        times_weight(g, v);
                    }
#pragma unroll
                    for (int i = 0; i < N; i++) g[i] = g[i] * rstd - (CENTER ? d[i] * slope + base : d[i] * slope);
                    if constexpr (HAS_DH) {
                        float other[N];
                        Element::unpack(load_shared(staged + (2 * SLICE + packet) * 16).words, other);
#pragma unroll
                        for (int i = 0; i < N; i++) g[i] += other[i];
                    }
                    if constexpr (NEEDS_DPRE_BIAS) {
#pragma unroll
                        for (int i = 0; i < N; i++) dpre_bias[v][i] += g[i];
                    }
                    if constexpr (NEEDS_DX) {
                        Packet out;
                        Element::pack(g, out.words);
                        store(to + packet * 16, out);
                    }
                }
            }
        } else {
            __syncthreads();
            refill();
        }
        if constexpr (STAGES == 1) {
            __syncthreads();
            if (thread == 0) fetch(row + clusters, 0);
        }
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }

    // ---- this cluster's column sums
    auto write_sums = [&](float* to, const auto& kept) {
#pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
            const int packet = v * THREADS + thread;
            if (packet < count) {
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    Packet four;
                    const float values[4] = {kept[v][i], kept[v][i + 1], kept[v][i + 2], kept[v][i + 3]};
                    fp32::pack(values, four.words);
                    store(reinterpret_cast<char*>(to + (long long)(first + packet) * N + i), four);
                }
            }
        }
    };
    float* part = partial + cluster * COLUMNS;
    if constexpr (NEEDS_DWEIGHT) write_sums(part, dweight);
    if constexpr (NEEDS_DBIAS) write_sums(part + NEEDS_DWEIGHT * clusters * COLUMNS, dbias);
    if constexpr (NEEDS_DPRE_BIAS) write_sums(part + (NEEDS_DWEIGHT + NEEDS_DBIAS) * clusters * COLUMNS, dpre_bias);
}

#endif
