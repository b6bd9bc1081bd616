// What hand-written attention for Hopper is built of: barriers, copies, what blocks of a cluster tell each other, tiles
// as the tensor cores read them, and their products. No kernel lives here. sm_90a.
//
// It includes nothing, so that NVRTC compiles it without a toolkit's headers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {  // CUtensorMap: made by the host, passed by value
    char opaque[128];
};

// ---- barriers, a cluster, copies --------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the block `rank` of the cluster of what lies at `at` in this one.
__device__ __forceinline__ u32 address_in(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

__device__ __forceinline__ void put(u32 at, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

__device__ __forceinline__ void put_4(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// Programmatic dependent launch: the launch behind may start; wait until the one before is done and seen.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The two warpgroups that multiply, at the barrier of that number; `tell`: without waiting.
__device__ __forceinline__ void meet(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
__device__ __forceinline__ void tell(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }

__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of `map` that begins at these elements, innermost axis first.
__device__ __forceinline__ void copy_box(
    const TensorMap& map, u32 to, u32 barrier, int column, int head, int row, int panel, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(&map), "r"(column), "r"(head), "r"(row), "r"(panel),
        "r"(batch), "r"(barrier)
        : "memory");
}

// 16 bytes, or 0 where they are not there.
__device__ __forceinline__ void copy_unit(u32 to, const char* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// The barrier hears of it when all units that this thread has asked for are there.
__device__ __forceinline__ void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- tiles and products -----------------------------------------------------------------------------------------

// A tile lies in panels of 128 bytes a row, whose units of 16 bytes are exchanged by the row (the swizzle of 128 bytes).
// `leap`: bytes to the next panel, which is read where rows are what is summed over.
__device__ __forceinline__ u64 tile_at(u32 address, int leap = 16) {
    constexpr u64 EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
    return (u64)(address >> 4 & 0x3fff) | (u64)(leap >> 4) << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define NUMBERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_36 NUMBERS_32 ", %32, %33, %34, %35"
#define NUMBERS_40 NUMBERS_36 ", %36, %37, %38, %39"
#define NUMBERS_48 NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_64 NUMBERS_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_96 NUMBERS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NUMBERS_128 NUMBERS_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_8(d, i) OUT_4(d, i), OUT_4(d, i + 4)
#define OUT_16(d, i) OUT_8(d, i), OUT_8(d, i + 8)
#define OUT_32(d, i) OUT_16(d, i), OUT_16(d, i + 16)
#define OUT_36(d, i) OUT_32(d, i), OUT_4(d, i + 32)
#define OUT_40(d, i) OUT_32(d, i), OUT_8(d, i + 32)
#define OUT_48(d, i) OUT_32(d, i), OUT_16(d, i + 32)
#define OUT_64(d, i) OUT_32(d, i), OUT_32(d, i + 32)
#define OUT_96(d, i) OUT_64(d, i), OUT_32(d, i + 64)
#define OUT_128(d, i) OUT_64(d, i), OUT_64(d, i + 64)

// scores[64, N] = or += queries[64, 16] keys[N, 16]^T, both tiles in shared memory with rows as they came.
#define SCORES(N, COUNT, NEXT, LAST)                                                                                \
    __device__ __forceinline__ void add_scores(float (&d)[COUNT], u64 queries, u64 keys, int add) {                 \
        asm volatile(                                                                                               \
            "{\n.reg .pred add;\nsetp.ne.b32 add, %" #LAST ", 0;\n"                                                 \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NUMBERS_##COUNT "}, "              \
            NEXT ", add, 1, 1, 0, 0;\n}"                                                                            \
            : OUT_##COUNT(d, 0)                                                                                     \
            : "l"(queries), "l"(keys), "r"(add));                                                                   \
    }
SCORES(64, 32, "%32, %33", 34)
SCORES(128, 64, "%64, %65", 66)
SCORES(256, 128, "%128, %129", 130)

// out[64, N] += weights[64, 16], in registers, values[16, N].
#define WEIGHTED(N, COUNT, NEXT)                                                                                    \
    __device__ __forceinline__ void add_weighted(float (&d)[COUNT], const u32 (&weights)[4], u64 values) {          \
        asm volatile(                                                                                               \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NUMBERS_##COUNT "}, "              \
            NEXT ", 1, 1, 1, 1;"                                                                                    \
            : OUT_##COUNT(d, 0)                                                                                     \
            : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));                     \
    }
WEIGHTED(64, 32, "{%32, %33, %34, %35}, %36")
WEIGHTED(72, 36, "{%36, %37, %38, %39}, %40")
WEIGHTED(80, 40, "{%40, %41, %42, %43}, %44")
WEIGHTED(96, 48, "{%48, %49, %50, %51}, %52")
WEIGHTED(128, 64, "{%64, %65, %66, %67}, %68")
WEIGHTED(192, 96, "{%96, %97, %98, %99}, %100")
WEIGHTED(256, 128, "{%128, %129, %130, %131}, %132")

// The width of a product that has these columns.
constexpr int product_of(int columns) {
    return columns <= 64 ? 64 : columns <= 72 ? 72 : columns <= 80 ? 80 : columns <= 96 ? 96 : columns <= 128 ? 128
         : columns <= 192 ? 192 : 256;
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
