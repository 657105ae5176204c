// What the kernels of attention.cu, attention_hopper.cu and attention_tf32.cu share: the pieces of FlashAttention on
// tensor cores.
//
// A worker (one warp with mma.sync, a warpgroup of four with wgmma) owns OWN rows, and each of its warps WARP_ROWS of
// them. Macros: HEAD_DIM, WORKERS of a block, WORKER_WARPS, ROW_TILES (16 rows each) of a warp, TILE rows streamed;
// TF32 for numbers in float, else they are bf16.

using i64 = long long;
using u32 = unsigned int;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ inline int min_int(int a, int b) { return a < b ? a : b; }
__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

constexpr int D = HEAD_DIM;

#ifndef REAL
#define FORWARD 1
#define BACKWARD_Q 2
#define BACKWARD_KV 3

struct bf16 { // only moved; numbers are unpacked from pairs
    unsigned short bits;
};

#ifdef TF32
using Number = float;
#else
using Number = bf16;
#endif

constexpr int THREADS = WORKERS * WORKER_WARPS * 32;
constexpr int WARP_ROWS = ROW_TILES * 16;          // rows that a warp owns
constexpr int OWN = WORKER_WARPS * WARP_ROWS;      // rows that a worker owns
constexpr int ROW_BYTES = D * sizeof(Number);
constexpr int STEPS = ROW_BYTES / 32;              // products along a row: each takes 32 bytes of it
constexpr int CHUNKS = ROW_BYTES / 16;             // pieces of 16 bytes of a row
constexpr int CHUNK = 16 / sizeof(Number);         // numbers of such a piece
constexpr int TILE_BYTES = TILE * ROW_BYTES;       // of a streamed tile
constexpr int WARP_BYTES = WARP_ROWS * ROW_BYTES;  // of a warp's rows
constexpr int OWN_BYTES = OWN * ROW_BYTES;         // of a worker's
constexpr float LOG2E = 1.4426950408889634f;

// A row of A or of transposed B is 8 pieces of 16 bytes at the same column of 8 rows. Exclusive or with the row puts
// the 8 into different banks, for stores as well; it needs no padding.
__device__ inline u32 swizzled(int row, int chunk) {
    const int turn = ROW_BYTES == 64 ? row / 2 % 4 : row % 8;
    return row * ROW_BYTES + ((chunk ^ turn) << 4);
}

__device__ inline void copy_async(u32 to, const void *from, bool there) { // zeros where nothing is there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void copy_async_8(u32 to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void load_matrix(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Where a lane finds its row of the piece of 16 rows x 32 bytes at (row, 32 * step); row is a multiple of 8, so that
// the turn is the lane's alone and a step is one exclusive or.
// As A, or transposed as two B side by side: rows by lane % 16, then the columns.
__device__ inline u32 piece(u32 tile, int row, int step, int lane) {
    return tile + row * ROW_BYTES + (swizzled(lane % 16, lane / 16) ^ (step * 32));
}
// As B of a product with the transpose: columns are rows of the tile, two B one after the other.
__device__ inline u32 piece_of_rows(u32 tile, int row, int step, int lane) {
    return tile + row * ROW_BYTES + (swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ (step * 32));
}

// COUNT rows from row `first` on into a swizzled tile, zeros from row `stop` on.
template <int COUNT, int BY>
__device__ inline void load_rows(u32 tile, const Number *from, int token, int first, int stop, int thread) {
    static_assert(BY % CHUNKS == 0, "whole rows");
    const int row = thread / CHUNKS, chunk = thread % CHUNKS;
    const u32 to = tile + swizzled(row, chunk);
    int offset = (first + row) * token + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < ceil_div(COUNT * CHUNKS, BY); ++i) {
        constexpr int ROWS = BY / CHUNKS; // in one go
        if (COUNT % ROWS != 0 && row + i * ROWS >= COUNT) break;
        const bool there = first + row + i * ROWS < stop;
        // Above a multiple of 8 rows the swizzle repeats.
        const u32 place = ROWS % 8 == 0 ? to + i * ROWS * ROW_BYTES : tile + swizzled(row + i * ROWS, chunk);
        copy_async(place, from + (there ? offset : 0), there);
        offset += ROWS * token;
    }
}

// Queries are dealt to workers as units: OWN positions of one head, the heads of a group one after the other at the
// same positions. A block's workers then need nearly the same keys, whatever the group: little is wasted at the
// diagonal, and the keys and values of a group are fetched once for all its heads.
struct Unit {
    int batch, kv_head, head, first; // first: of its positions
    int last_of_block;               // the highest position in the block
    bool idle;                       // more workers than units: only helps to load
    __device__ Unit(int queries, int heads, int kv_heads, int worker) {
        const int group = heads / kv_heads, units = ceil_div(queries, OWN) * group;
        const int start = (gridDim.y - 1 - blockIdx.y) * WORKERS; // longest blocks first
        batch = blockIdx.x / kv_heads;
        kv_head = blockIdx.x % kv_heads;
        head = kv_head * group + (start + worker) % group;
        first = (start + worker) / group * OWN;
        last_of_block = min_int(queries, (min_int(start + WORKERS, units) - 1) / group * OWN + OWN) - 1;
        idle = start + worker >= units;
    }
};

#ifndef TF32
__device__ inline void load_matrix_transposed(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ inline u32 pack(float low, float high) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ inline float low(u32 x) { return __uint_as_float(x << 16); }
__device__ inline float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// Sums of a warp's rows, scaled, as bf16: through the warp's own part of shared memory, so that 16-byte stores result.
__device__ inline void store_rows(bf16 *to, i64 token, int first, int stop, const float (&x)[ROW_TILES][D / 8][4],
                                  const float (&scale)[ROW_TILES][2], u32 tile, int lane) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 pair = pack(x[m][n][2 * half] * scale[m][half], x[m][n][2 * half + 1] * scale[m][half]);
                const u32 place = tile + swizzled(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(pair) : "memory");
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WARP_ROWS * CHUNKS / 32; ++i) {
        const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        uint4 line;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
                     : "r"(tile + swizzled(row, chunk))
                     : "memory");
        if (first + row < stop) *reinterpret_cast<uint4 *>(to + (first + row) * token + chunk * 8) = line;
    }
}

// Sum over a row of products of 8 numbers in shared memory and 8 in registers, by the CHUNKS lanes that hold the row.
__device__ inline float row_product(u32 place, uint4 y) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place)
                 : "memory");
    float sum = low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y) +
                low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
#pragma unroll
    for (int lane = 1; lane < CHUNKS; lane *= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}
#endif
#endif
