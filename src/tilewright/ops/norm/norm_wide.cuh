// What the kernels for wide rows share: packets of 16 bytes, rounding, sums and moments over a block, the exchange
// between the blocks of a cluster, and copies in bulk into shared memory. No kernel lives here. sm_90 and later.
//
// It includes nothing, so that NVRTC compiles it without a toolkit's headers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// ---- element types: a packet is 16 bytes of them, and all arithmetic is in float ------------------------------------

struct fp32 {
    static constexpr int bytes = 4;
    static __device__ __forceinline__ void unpack(const u32 (&words)[4], float (&out)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = __uint_as_float(words[i]);
    }
    static __device__ __forceinline__ void pack(const float (&in)[4], u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = __float_as_uint(in[i]);
    }
};

struct bf16 {
    static constexpr int bytes = 2;
    static __device__ __forceinline__ void unpack(const u32 (&words)[4], float (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ void pack(const float (&in)[8], u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(in[2 * i + 1]), "f"(in[2 * i]));
        }
    }
};

struct fp16 {
    static constexpr int bytes = 2;
    static __device__ __forceinline__ void unpack(const u32 (&words)[4], float (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(out[2 * i]), "=f"(out[2 * i + 1])
                : "r"(words[i]));
        }
    }
    static __device__ __forceinline__ void pack(const float (&in)[8], u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(in[2 * i + 1]), "f"(in[2 * i]));
        }
    }
};

struct Packet {
    u32 words[4];
};

template <class T>
constexpr int PER_PACKET = 16 / T::bytes;

template <class T>
__device__ __forceinline__ void round_to(float (&values)[PER_PACKET<T>]) {
    Packet packet;
    T::pack(values, packet.words);
    T::unpack(packet.words, values);
}

// ---- global memory --------------------------------------------------------------------------------------------------

// Read once: past the L1, which is left to the weights.
__device__ __forceinline__ Packet load_streaming(const char* at) {
    Packet p;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
                 : "l"(at));
    return p;
}

// Read by every row and never written by the kernel.
__device__ __forceinline__ Packet load_constant(const char* at) {
    Packet p;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
        : "l"(at));
    return p;
}

__device__ __forceinline__ void store(char* at, const Packet& p) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.words[0]), "r"(p.words[1]),
                 "r"(p.words[2]), "r"(p.words[3])
                 : "memory");
}

// A packet at an address that allows only accesses of `PIECE` bytes, and of which `left` bytes exist: the rest is 0.
template <int PIECE>
__device__ __forceinline__ Packet load_pieces(const char* at, long long left) {
    Packet p = {{0, 0, 0, 0}};
#pragma unroll
    for (int i = 0; i < 16 / PIECE; i++) {
        if (i * PIECE >= left) break;
        if constexpr (PIECE == 8) {
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(p.words[2 * i]), "=r"(p.words[2 * i + 1])
                         : "l"(at + 8 * i));
        } else if constexpr (PIECE == 4) {
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(p.words[i]) : "l"(at + 4 * i));
        } else {
            unsigned short half;
            asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(at + 2 * i));
            p.words[i / 2] |= (u32)half << (16 * (i % 2));
        }
    }
    return p;
}

template <int PIECE>
__device__ __forceinline__ void store_pieces(char* at, const Packet& p, long long left) {
#pragma unroll
    for (int i = 0; i < 16 / PIECE; i++) {
        if (i * PIECE >= left) break;
        if constexpr (PIECE == 8) {
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at + 8 * i), "r"(p.words[2 * i]),
                         "r"(p.words[2 * i + 1])
                         : "memory");
        } else if constexpr (PIECE == 4) {
            asm volatile("st.global.u32 [%0], %1;" ::"l"(at + 4 * i), "r"(p.words[i]) : "memory");
        } else {
            unsigned short half = (unsigned short)(p.words[i / 2] >> (16 * (i % 2)));
            asm volatile("st.global.u16 [%0], %1;" ::"l"(at + 2 * i), "h"(half) : "memory");
        }
    }
}

// A row's parameter (weight, bias) of type W beside packets of type T: as many values, so one packet or two.
template <class T, class W>
struct Parameters {
    static constexpr int COUNT = PER_PACKET<T> / PER_PACKET<W>;
    static_assert(COUNT >= 1, "a parameter is as wide as the elements or wider");
    Packet packets[COUNT];

    // Reads those of a packet from `column` on; `Vector` elements may be taken in one access, of `columns` that exist.
    template <int Vector>
    __device__ __forceinline__ void load(const char* from, int column, int columns) {
        const char* at = from + (long long)column * W::bytes;
        constexpr int PIECE = Vector * W::bytes < 16 ? Vector * W::bytes : 16;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if constexpr (PIECE == 16 && Vector >= PER_PACKET<T>) {
                packets[i] = load_constant(at + 16 * i);
            } else {
                const long long bytes = (long long)(columns - column) * W::bytes - 16 * i;
                if constexpr (PIECE == 16) {
                    packets[i] = bytes > 0 ? load_constant(at + 16 * i) : Packet{{0, 0, 0, 0}};
                } else {
                    packets[i] = load_pieces<PIECE>(at + 16 * i, bytes);
                }
            }
        }
    }
    __device__ __forceinline__ void unpack(float (&out)[PER_PACKET<T>]) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float values[PER_PACKET<W>];
            W::unpack(packets[i].words, values);
#pragma unroll
            for (int j = 0; j < PER_PACKET<W>; j++) out[i * PER_PACKET<W> + j] = values[j];
        }
    }
};

// ---- shared memory, barriers with a transaction count, bulk copies --------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ Packet load_shared(const char* at) {
    Packet p;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
                 : "r"(shared_address(at)));
    return p;
}

__device__ __forceinline__ void store_shared(char* at, const Packet& p) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(p.words[0]),
                 "r"(p.words[1]), "r"(p.words[2]), "r"(p.words[3])
                 : "memory");
}

__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            shared_address(barrier)),
        "r"(phase)
        : "memory");
}

// One thread asks for `bytes` (a multiple of 16, below 2^20) from global memory; both addresses are 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, in block `rank` of the cluster, of what lies at `p` in this block's shared memory.
__device__ __forceinline__ u32 remote_address(const void* p, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}

// Every block tells every block of its cluster two numbers a row. Two slots are enough without any other cluster-wide
// barrier: a block sends for row i + 2 only after it has heard from all about row i + 1, which each sends after all
// its threads have read row i.
template <int Cluster>
struct Exchange {
    float2 slots[2][Cluster];
    u64 barriers[2];

    __device__ __forceinline__ void init() {
        barrier_init(&barriers[0]);
        barrier_init(&barriers[1]);
    }
    // Called by all threads of a block, which all hold the same pair.
    __device__ __forceinline__ void send(u32 row_number, u32 rank, float first, float second) {
        u32 slot = row_number & 1;
        if (threadIdx.x == 0) barrier_expect(&barriers[slot], Cluster * 8);
        if (threadIdx.x < Cluster) {
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                             remote_address(&slots[slot][rank], threadIdx.x)),
                         "f"(first), "f"(second), "r"(remote_address(&barriers[slot], threadIdx.x))
                         : "memory");
        }
    }
    __device__ __forceinline__ const float2* receive(u32 row_number) {
        barrier_wait(&barriers[row_number & 1], (row_number >> 1) & 1);
        return slots[row_number & 1];
    }
};

// ---- launches that overlap ------------------------------------------------------------------------------------------

// Lets the next launch start when it was launched for that: its blocks take what room there is, and wait.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the launch before has ended and what it wrote can be seen.
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- sums over a block ----------------------------------------------------------------------------------------------

// Sums `values` over the block, in an order that the block's size fixes; every thread gets the sums. `slots` must not
// be read any more by a slower thread: alternate between two. `meet` runs as soon as the block has met.
template <int Threads, int Count, class Meet>
__device__ __forceinline__ void block_sum(float (&values)[Count], float (*slots)[Count], Meet meet) {
    constexpr int WARPS = Threads / 32;
#pragma unroll
    for (int i = 0; i < Count; i++)
#pragma unroll
        for (int step = 16; step > 0; step /= 2) values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < Count; i++) slots[threadIdx.x / 32][i] = values[i];
    __syncthreads();
    meet();
#pragma unroll
    for (int i = 0; i < Count; i++) {
        values[i] = slots[threadIdx.x % WARPS][i];
#pragma unroll
        for (int step = WARPS / 2; step > 0; step /= 2) values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
    }
}

// Mean of `count` values and the sum of their squared deviations from it. Moments of parts combine without cancellation
// (Chan, Golub and LeVeque, 1979).
struct Moments {
    float mean, squares, count;

    // The sum of squared deviations from another value than the mean.
    __device__ __forceinline__ float about(float value) const {
        const float off = mean - value;
        return squares + count * off * off;  // nothing weighs nothing, however far off
    }
};

constexpr u32 INFINITE = 0x7f800000;

__device__ __forceinline__ bool finite(float value) { return fabsf(value) < __int_as_float(INFINITE); }

// Sums of a thread's values about the mean of the first few: as near to the mean of all as the values themselves are, so
// little cancels. An infinity stays one.
struct Sums {
    float shift, sum, squares, count;

    // Adds the first `have` of some values.
    template <int N>
    __device__ __forceinline__ void add(const float (&values)[N], int have, bool first) {
        if (first) {
            float all = 0.0f;
#pragma unroll
            for (int i = 0; i < N; i++) all += i < have ? values[i] : 0.0f;
            shift = all / (float)have;
            if (!finite(shift)) shift = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float d = i < have ? values[i] - shift : 0.0f;
            sum += d;
            squares += d * d;
        }
        count += (float)have;
    }
    __device__ __forceinline__ Moments moments() const {
        const float off = count > 0.0f ? sum / count : 0.0f;
        // Squares that overflow stay infinite, and those of an infinity are NaN.
        const float about_mean = squares - (finite(squares) ? sum * off : sum - sum);
        return {shift + off, about_mean < 0.0f ? 0.0f : about_mean, count};
    }
};

// Over `Lanes` neighbours, whose moments are each of `count` values; every lane gets the same.
template <int Lanes>
__device__ __forceinline__ Moments equal_moments(Moments own) {
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) {
        const float mean = __shfl_xor_sync(0xffffffffu, own.mean, step);
        const float squares = __shfl_xor_sync(0xffffffffu, own.squares, step);
        const float off = mean - own.mean;
        own.mean = 0.5f * (own.mean + mean);
        own.squares = own.squares + squares + 0.5f * own.count * (off * off);
        own.count *= 2.0f;
    }
    return own;
}

template <int Lanes>
__device__ __forceinline__ Moments any_moments(const Moments& own) {
    Moments all = {own.count > 0.0f ? own.mean * own.count : 0.0f, 0.0f, own.count};
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) {
        all.mean += __shfl_xor_sync(0xffffffffu, all.mean, step);
        all.count += __shfl_xor_sync(0xffffffffu, all.count, step);
    }
    all.mean = all.count > 0.0f ? all.mean / all.count : 0.0f;
    all.squares = own.about(all.mean);
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) all.squares += __shfl_xor_sync(0xffffffffu, all.squares, step);
    return all;
}

// The moments of a block's values. The block meets once. `Each`: how many values every thread has, 0 if that differs;
// `slots` and `meet` as in `block_sum`.
template <int Threads, int Each, class Meet>
__device__ __forceinline__ Moments block_moments(Moments own, Moments* slots, Meet meet) {
    constexpr int WARPS = Threads / 32;
    if constexpr (Each > 0) own.count = (float)Each;
    const Moments warp = Each > 0 ? equal_moments<32>(own) : any_moments<32>(own);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = warp;
    __syncthreads();
    meet();
    Moments one = slots[threadIdx.x % WARPS];
    if constexpr (Each > 0) one.count = 32.0f * Each;
    return Each > 0 ? equal_moments<WARPS>(one) : any_moments<WARPS>(one);
}
