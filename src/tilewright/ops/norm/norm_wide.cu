// Forward of rms_norm, add_rms_norm, layer_norm and add_layer_norm for wide rows: one kernel, shaped by defines. Which
// defines go with which call is settled in cuda.py; the backward is in norm_wide_backward.cu.
//
// A cluster of CLUSTER blocks normalises a row; each block owns a slice of the columns and keeps it, packed, in
// registers from the one read to the one write. A block meets once a row; a cluster exchanges its sums once a row,
// through distributed shared memory. STAGES = 0: a cluster a row, loads straight into registers, and the overlap comes
// from other blocks on the multiprocessor. STAGES > 0: clusters stay and walk over the rows, and the copy engine brings
// the next STAGES rows into shared memory meanwhile. REREAD: a cluster a row, which stays in shared memory instead of
// registers, so that more blocks share a multiprocessor and more bytes are on their way.
//
// Defines: ELEMENT, WEIGHT, BIAS and PRE_BIAS (fp32, fp16, bf16: the type of x and y, and of each parameter),
// COLUMNS, VECTOR (elements that one access may take), THREADS, CLUSTER, STAGES, REREAD (STAGES is 1 then), CTAS (blocks
// a multiprocessor), CENTER, HAS_RESIDUAL, HAS_PRE_BIAS, HAS_WEIGHT, HAS_BIAS, CAST_BEFORE_WEIGHT, SAVE.
#include "norm_wide.cuh"

using Element = ELEMENT;
using Weight = WEIGHT;
using Bias = BIAS;
using PreBias = PRE_BIAS;

constexpr int N = PER_PACKET<Element>;
constexpr bool ALIGNED = VECTOR == N;
constexpr int PACKETS = (COLUMNS + N - 1) / N;             // of a row
constexpr int SLICE = (PACKETS + CLUSTER - 1) / CLUSTER;   // packets of a block
constexpr int PER_THREAD = (SLICE + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int STAGE_BYTES = SLICE * 16 * (1 + HAS_RESIDUAL);
// Parameters stay in registers across the rows, or are at least fetched before the sums, where registers suffice.
constexpr int PARAMETER_PACKETS =
    PER_THREAD * (HAS_WEIGHT * Parameters<Element, Weight>::COUNT + HAS_BIAS * Parameters<Element, Bias>::COUNT);
constexpr int ROW_PACKETS = REREAD ? 1 : PER_THREAD * (HAS_RESIDUAL && STAGES == 0 ? 2 : 1);
constexpr bool EARLY = 65536 / (THREADS * CTAS) - 4 * (ROW_PACKETS + PARAMETER_PACKETS) >= 28;
// Else those of the next packet are fetched before this one is written.
constexpr bool AHEAD = !EARLY && (STAGES == 0 || REREAD);
static_assert(STAGES == 0 || ALIGNED, "bulk copies need aligned rows");
static_assert(!REREAD || STAGES == 1, "a row that is read twice lies in one stage");
static_assert(THREADS % 32 == 0 && (WARPS & (WARPS - 1)) == 0, "sums over a block halve it");

__device__ __forceinline__ Packet load_row(const char* at, int left) {
    if constexpr (ALIGNED) {
        return load_streaming(at);
    } else {
        return load_pieces<VECTOR * Element::bytes>(at, (long long)left * Element::bytes);
    }
}

__device__ __forceinline__ void store_row(char* at, const Packet& packet, int left) {
    if constexpr (ALIGNED) {
        store(at, packet);
    } else {
        store_pieces<VECTOR * Element::bytes>(at, packet, (long long)left * Element::bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) norm_wide(
    const char* x, const char* residual, const char* pre_bias, const char* weight, const char* bias, char* y, char* h,
    float* mean_out, float* rstd_out, long long rows, long long x_stride, long long residual_stride, float eps,
    float weight_offset) {
    extern __shared__ __align__(128) char stages[];
    __shared__ float sums[2][CENTER ? 1 : WARPS][1];
    __shared__ Moments moments[2][CENTER ? WARPS : 1];
    __shared__ Exchange<CLUSTER> exchange;
    __shared__ u64 full[STAGES > 0 ? STAGES : 1];

    const int thread = threadIdx.x;
    const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0;
    const int first = rank * SLICE;  // packet
    const int count = PACKETS % CLUSTER == 0 ? SLICE : max(0, min(SLICE, PACKETS - first));
    // of this block, in elements
    const int size = COLUMNS % (N * CLUSTER) == 0 ? SLICE * N : max(0, min(SLICE * N, COLUMNS - first * N));
    const long long clusters = gridDim.x / CLUSTER;
    const long long row_bytes = (long long)COLUMNS * Element::bytes;
    x += (long long)first * 16;
    residual += (long long)first * 16;
    y += (long long)first * 16;
    h += (long long)first * 16;

    auto fetch = [&](long long row, int stage) {  // by one thread
        if (row >= rows || count == 0) return;
        char* to = stages + stage * STAGE_BYTES;
        barrier_expect(&full[stage], count * 16 * (1 + HAS_RESIDUAL));
        bulk_load(to, x + row * x_stride * Element::bytes, count * 16, &full[stage]);
        if constexpr (HAS_RESIDUAL) {
            bulk_load(to + SLICE * 16, residual + row * residual_stride * Element::bytes, count * 16, &full[stage]);
        }
    };

    long long row = blockIdx.x / CLUSTER;
    if (thread == 0) {
        if constexpr (CLUSTER > 1) exchange.init();
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) barrier_init(&full[stage]);
        if constexpr (CLUSTER > 1 || STAGES > 0) barrier_init_fence();
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) fetch(row + stage * clusters, stage);
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_arrive();
    if constexpr (CLUSTER == 1 && STAGES > 0) __syncthreads();

    constexpr int SLOTS = EARLY ? PER_THREAD : AHEAD ? 2 : 1;  // packets of parameters in registers
    Parameters<Element, Weight> weights[SLOTS];
    Parameters<Element, Bias> biases[SLOTS];
    auto parameters = [&](auto& into, const char* from, int packet) {
        into.template load<VECTOR>(from, (first + packet) * N, COLUMNS);
    };
    auto load_parameters = [&](int v) {
        const int packet = v * THREADS + thread;
        if (packet < count) {
            if constexpr (HAS_WEIGHT) parameters(weights[v % SLOTS], weight, packet);
            if constexpr (HAS_BIAS) parameters(biases[v % SLOTS], bias, packet);
        }
    };
    auto first_parameters = [&] {
#pragma unroll
        for (int v = 0; v < (EARLY ? PER_THREAD : AHEAD); v++) load_parameters(v);
    };
    if constexpr (EARLY && STAGES > 0) first_parameters();
    if constexpr (CLUSTER > 1 && STAGES > 0) cluster_wait();

    u32 number = 0;  // of the row, among those of this cluster
    int stage = 0;
    u32 phase = 0;
    do {
        Packet data[REREAD ? 1 : PER_THREAD];
        const char* x_row = x + row * x_stride * Element::bytes;
        const char* residual_row = residual + row * residual_stride * Element::bytes;
        char* y_row = y + row * row_bytes;
        char* h_row = h + row * row_bytes;
        char* staged = stages + stage * STAGE_BYTES;

        // ---- read: every load is issued before the first value is used
        if constexpr (STAGES > 0) {
            if (count > 0) barrier_wait(&full[stage], phase);
        }
        Packet added[HAS_RESIDUAL && STAGES == 0 ? PER_THREAD : 1];
#pragma unroll
        for (int v = 0; v < (REREAD ? 0 : PER_THREAD); v++) {
            const int packet = v * THREADS + thread;
            data[v] = Packet{{0, 0, 0, 0}};
            if (packet < count) {
                const int left = size - packet * N;
                if constexpr (STAGES > 0) {
                    data[v] = load_shared(staged + packet * 16);
                } else {
                    data[v] = load_row(x_row + packet * 16, left);
                    if constexpr (HAS_RESIDUAL) added[v] = load_row(residual_row + packet * 16, left);
                }
            }
        }
        if constexpr (STAGES == 0 || (REREAD && !EARLY)) first_parameters();

        // ---- add the residual; sum
        float total[1] = {0.0f};
        Sums own = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
            const int packet = v * THREADS + thread;
            if (packet < count) {
                float values[N];
                Packet& mine = data[REREAD ? 0 : v];
                if constexpr (REREAD) mine = load_shared(staged + packet * 16);
                Element::unpack(mine.words, values);
                if constexpr (HAS_RESIDUAL) {
                    float other[N];
                    if constexpr (HAS_PRE_BIAS) {
                        Parameters<Element, PreBias> extra;
                        parameters(extra, pre_bias, packet);
                        extra.unpack(other);
#pragma unroll
                        for (int i = 0; i < N; i++) values[i] += other[i];
                    }
                    if constexpr (STAGES > 0) {
                        Element::unpack(load_shared(staged + (SLICE + packet) * 16).words, other);
                    } else {
                        Element::unpack(added[v].words, other);
                    }
#pragma unroll
                    for (int i = 0; i < N; i++) values[i] += other[i];
                    Element::pack(values, mine.words);
                    Element::unpack(mine.words, values);
                    store_row(h_row + packet * 16, mine, size - packet * N);
                    if constexpr (REREAD) store_shared(staged + packet * 16, mine);
                }
                if constexpr (CENTER) {
                    own.add(values, COLUMNS % N == 0 ? N : min(N, size - packet * N), v == 0);
                } else {
#pragma unroll
                    for (int i = 0; i < N; i++) total[0] += values[i] * values[i];
                }
            }
        }
        auto meet = [&] {  // everybody holds the row in registers: its stage is free
            if constexpr (STAGES > 0 && !REREAD) {
                if (thread == 0) fetch(row + STAGES * clusters, stage);
            }
        };

        // ---- mean and rstd, of the slice and then of the row
        float mean = 0.0f, square;
        if constexpr (CENTER) {
            constexpr int EACH = COLUMNS % (N * CLUSTER * THREADS) == 0 ? PER_THREAD * N : 0;
            const Moments slice = block_moments<THREADS, EACH>(own.moments(), moments[number & 1], meet);
            mean = slice.mean;
            square = slice.squares;
        } else {
            block_sum<THREADS, 1>(total, sums[number & 1], meet);
            square = total[0];
        }
        if constexpr (CLUSTER > 1) {
            if (STAGES == 0) cluster_wait();  // the others' barriers are ready
            exchange.send(number, rank, CENTER ? mean : square, square);
            const float2* slices = exchange.receive(number);
            float all = 0.0f, squares_all = 0.0f;
#pragma unroll
            for (int i = 0; i < CLUSTER; i++) {
                const float n = (float)max(0, min(SLICE * N, COLUMNS - i * SLICE * N));
                all += CENTER ? slices[i].x * n : slices[i].x;
            }
            if constexpr (CENTER) {
                mean = all / (float)COLUMNS;
#pragma unroll
                for (int i = 0; i < CLUSTER; i++) {
                    const float n = (float)max(0, min(SLICE * N, COLUMNS - i * SLICE * N));
                    const float d = slices[i].x - mean;
                    squares_all += slices[i].y + n * (d * d);
                }
                square = squares_all;
            } else {
                square = all;
            }
        }
        const float rstd = rsqrtf(square * (1.0f / COLUMNS) + eps);
        if (SAVE && thread == 0 && rank == 0) {
            rstd_out[row] = rstd;
            if constexpr (CENTER) mean_out[row] = mean;
        }

        // ---- write
#pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
            const int packet = v * THREADS + thread;
            if (!EARLY && v + AHEAD < PER_THREAD) load_parameters(v + AHEAD);
            if (packet < count) {
                float values[N], parameter[N];
                if constexpr (REREAD) data[0] = load_shared(staged + packet * 16);
                Element::unpack(data[REREAD ? 0 : v].words, values);
#pragma unroll
                for (int i = 0; i < N; i++) values[i] = (values[i] - mean) * rstd;
                if constexpr (CAST_BEFORE_WEIGHT) round_to<Element>(values);
                if constexpr (HAS_WEIGHT) {
                    weights[v % SLOTS].unpack(parameter);
#pragma unroll
                    for (int i = 0; i < N; i++) values[i] *= CENTER ? parameter[i] : parameter[i] + weight_offset;
                }
                if constexpr (HAS_BIAS) {
                    biases[v % SLOTS].unpack(parameter);
#pragma unroll
                    for (int i = 0; i < N; i++) values[i] += parameter[i];
                }
                Packet out;
                Element::pack(values, out.words);
                store_row(y_row + packet * 16, out, size - packet * N);
            }
        }
        if constexpr (STAGES == 0 || REREAD) break;
        row += clusters;
        number++;
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    } while (row < rows);
}
