// Hopper's instructions (sm_90a): products by a warpgroup (wgmma), mbarriers, copies by the Tensor Memory Accelerator
// (TMA), and clusters of blocks that share their copies. Needs common.cuh, included before it. Used by
// attention_hopper.cu, attention_tma.cu, gemm_hopper.cu and grouped_hopper.cu.
//
// wgmma reads a factor from shared memory, in lines of 128 bytes, 64 numbers of bf16, under the 128-byte swizzle: the
// 16-byte column c of line r is at r * 128 + (c ^ r % 8) * 16 from a multiple of 1024. TMA writes this layout; copies
// of single pieces must follow it. A factor is stored in one of two ways, n being the direction that stays (rows or
// columns of the product) and k the one that is summed over:
//   along    a line is one n, and 64 steps of k: x and W in x W^T (K-major)
//   across   a line is one k, and 64 of n (MN-major); more than 64 of n are several such arrays of lines, `chunk` bytes
//            apart
//
// The order that makes memory right: ordinary stores or cp.async, then shared_fence() by each thread that wrote, then a
// barrier, then wgmma. TMA's writes need no fence; their barrier counts bytes.

// wgmma's descriptor of a factor: its address, the distance to the next chunk, the distance from 8 lines to the next 8
// (1024 bytes), and the 128-byte swizzle.
__device__ __forceinline__ u64 matrix(u32 address, u32 chunk = 1024) {
    return 1ull << 62 | 64ull << 32 | u64(chunk >> 4) << 16 | (address & 0x3ffff) >> 4;
}
// The descriptor of the next 16 steps of k: 32 bytes further if the factor is along, 16 lines further if across.
__device__ __forceinline__ u64 columns(u64 matrix, int step) { return matrix + step * 2; }
__device__ __forceinline__ u64 rows(u64 matrix, int step) { return matrix + step * 128; }

// A product begins with multiply_fence and ends with multiply_commit. It is asynchronous: until multiply_wait returns,
// neither its factors nor its sums may be touched. multiply_wait<n> waits until at most the last n products are
// pending.
__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Tells the compiler that the products have changed d: reads of d are not moved above this.
template <int N>
__device__ __forceinline__ void settled(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[n][i])::"memory");
    }
}
#include "ops/barriers.cuh"

// The sums of a warpgroup, 64 rows of 8 N columns. With r = 16 (t / 32) + t % 32 / 4 and c = 2 (t % 4), thread t of it
// holds d[n][0..1] = (r, 8 n + c..c+1) and d[n][2..3] = (r + 8, 8 n + c..c+1). As operands of an instruction:
#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SIXTEEN(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3)
// and the names of the operands:
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d (+)= a b for one warpgroup: d is 64 x 256, 64 x 192, 64 x 128 or 64 x 64, over 16 steps of k. `add` 0 overwrites d.
// A_ACROSS, B_ACROSS: 1 for a factor that is stored across, 0 for along.
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply_wide(float (&d)[32][4], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        NAMES_128 "}, %128, %129, p, 1, 1, %131, %132;}"
        : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12), SIXTEEN(16), SIXTEEN(20), SIXTEEN(24), SIXTEEN(28)
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));
}
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply_wide(float (&d)[24][4], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        NAMES_96 "}, %96, %97, p, 1, 1, %99, %100;}"
        : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12), SIXTEEN(16), SIXTEEN(20)
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));
}
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply_wide(float (&d)[16][4], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;}"
        : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));
}
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply_wide(float (&d)[8][4], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;}"
        : SIXTEEN(0), SIXTEEN(4)
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));
}

// The same in FP8, over 32 steps of k. Both factors are along, and a line is 128 steps: TMA and the swizzle treat two
// FP8 numbers as one of bf16. a is in e5m2 or e4m3, b in e4m3.
#define MULTIPLY_FP8(N, KINDS, SUMS, A, B, ADD, ...)                                   \
    asm volatile(                                                                      \
        "{.reg .pred p;\n"                                                             \
        "setp.ne.b32 p, " ADD ", 0;\n"                                                 \
        "wgmma.mma_async.sync.aligned.m64n" N "k32.f32." KINDS " {"                    \
        SUMS "}, " A ", " B ", p, 1, 1;}"                                              \
        : __VA_ARGS__                                                                  \
        : "l"(a), "l"(b), "r"(add))
#define MULTIPLY_FP8_256(KINDS) \
    MULTIPLY_FP8("256", KINDS, NAMES_128, "%128", "%129", "%130", SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), \
                 SIXTEEN(12), SIXTEEN(16), SIXTEEN(20), SIXTEEN(24), SIXTEEN(28))
template <bool IS_E5M2>
__device__ __forceinline__ void multiply_fp8(float (&d)[32][4], u64 a, u64 b, int add) {
    if constexpr (IS_E5M2) MULTIPLY_FP8_256("e5m2.e4m3");
    else MULTIPLY_FP8_256("e4m3.e4m3");
}
#define MULTIPLY_FP8_192(KINDS) \
    MULTIPLY_FP8("192", KINDS, NAMES_96, "%96", "%97", "%98", SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), \
                 SIXTEEN(12), SIXTEEN(16), SIXTEEN(20))
template <bool IS_E5M2>
__device__ __forceinline__ void multiply_fp8(float (&d)[24][4], u64 a, u64 b, int add) {
    if constexpr (IS_E5M2) MULTIPLY_FP8_192("e5m2.e4m3");
    else MULTIPLY_FP8_192("e4m3.e4m3");
}
#define MULTIPLY_FP8_128(KINDS) \
    MULTIPLY_FP8("128", KINDS, NAMES_64, "%64", "%65", "%66", SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12))
template <bool IS_E5M2>
__device__ __forceinline__ void multiply_fp8(float (&d)[16][4], u64 a, u64 b, int add) {
    if constexpr (IS_E5M2) MULTIPLY_FP8_128("e5m2.e4m3");
    else MULTIPLY_FP8_128("e4m3.e4m3");
}

// d += a b with a, 64 x 16, in registers, in the layout of rounded sums: pair(d[n][0], d[n][1]), pair(d[n][2],
// d[n][3]), then those of n + 1. b is across, 16 steps of 64 or 128.
__device__ __forceinline__ void multiply_held(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
        : SIXTEEN(0), SIXTEEN(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_held(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
        : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Tells the compiler that the products read a up to here: its registers are not reused above this.
template <int N>
__device__ __forceinline__ void held(const u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" ::"r"(a[n][i]) : "memory");
    }
}

// Stores of sums. row: of the tile; this thread holds row and row + 8. out: the tile's first number. rows, columns:
// what is left of `out` from there on, columns in multiples of eight.

// Two numbers, rounded to bf16.
__device__ __forceinline__ u32 pair(float x, float y) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));  // the first operand is the upper half
    return two;
}

// Four threads hold a row of four adjacent tiles of 8 columns: each has two columns of every tile, p[0] to p[3]. They
// exchange pairs, and each gets all 8 columns of one tile, number t % 4.
__device__ __forceinline__ Pack<bf16, 8> transposed(const u32 (&p)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const u32 x = __shfl_xor_sync(~0u, odd ? p[0] : p[1], 1), y = __shfl_xor_sync(~0u, odd ? p[2] : p[3], 1);
    const u32 a0 = odd ? x : p[0], a1 = odd ? p[1] : x, b0 = odd ? y : p[2], b1 = odd ? p[3] : y;
    const u32 c0 = __shfl_xor_sync(~0u, high ? a0 : b0, 2), c1 = __shfl_xor_sync(~0u, high ? a1 : b1, 2);
    const uint4 line = high ? make_uint4(c0, c1, b0, b1) : make_uint4(a0, a1, c0, c1);
    return reinterpret_cast<const Pack<bf16, 8> &>(line);
}

// Tiles n to n + 3 of a row (half 0), or of the row 8 below (half 1), rounded to bf16 and transposed among the threads.
template <int N>
__device__ __forceinline__ Pack<bf16, 8> rounded_row(const float (&sum)[N][4], int n, int half) {
    u32 p[4];
#pragma unroll
    for (int j = 0; j < 4; j++) p[j] = pair(sum[n + j][2 * half], sum[n + j][2 * half + 1]);
    return transposed(p);
}

// Stores rounded to bf16; each thread writes 16 bytes at a time.
template <int N>
__device__ __forceinline__ void write_sums(
    bf16 *out, const float (&sum)[N][4], int row, int stride, int rows, int columns
) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16 *to = out + i64(row + 8 * half) * stride;
        const bool there = row + 8 * half < rows;
#pragma unroll
        for (int n = 0; n < N; n += 4) {
            const Pack<bf16, 8> line = rounded_row(sum, n, half);
            const int column = 8 * (n + threadIdx.x % 4);
            if (there && column < columns) store(to + column, line);
        }
    }
}

// Stores in float32. With `accumulate` they are added to `out`, with BATCH loads in flight at a time.
template <int BATCH, int N>
__device__ __forceinline__ void write_sums(
    float *out, const float (&sum)[N][4], int row, int stride, int rows, int columns, bool accumulate
) {
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= rows) continue;
        float *to = out + i64(row + 8 * half) * stride + first;
#pragma unroll
        for (int n = 0; n < N; n += BATCH) {
            Pack<float, 2> there[BATCH] = {};
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                if (accumulate && 8 * (n + j) < columns) there[j] = load<2>(to + 8 * (n + j));
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                there[j].v[0] += sum[n + j][2 * half], there[j].v[1] += sum[n + j][2 * half + 1];
                if (8 * (n + j) < columns) store(to + 8 * (n + j), there[j]);
            }
        }
    }
}

// TMA's descriptor of an array and of the boxes that it copies: written by backends/tensor_map.py, passed by value.
struct alignas(64) TensorMap {
    u64 words[16];
};
// Starts a copy of the box at (x, y, z), x being the fastest index; elements outside the array become 0.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// A cluster: blocks that run at the same time on neighbouring multiprocessors, and can access each other's shared
// memory.

// A barrier of all threads of all blocks of the cluster, warps converged. Needed before another block uses a block's
// barriers, and before a block ends that another one may still access.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the barrier at this address in block `rank`. Without `.release.cluster`, which the assembler turns into a
// fence for all of the GPU's memory, MEMBAR.ALL.GPU, of a microsecond. None is needed: the arrival says that a buffer
// has been read, by products that were waited for, and there are no writes that the other block should see.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(rank)
        : "memory");
}
// copy_box to the same address in each block whose bit is set in `blocks` (multicast); each block's own barrier counts
// the bytes.
__device__ __forceinline__ void copy_box_to(
    u32 to, const TensorMap *map, int x, int y, int z, u32 barrier, unsigned short blocks
) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::
            "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
        : "memory");
}
