// gemm_hopper: matrix products of bf16, summed in float32, with Hopper's wgmma and TMA (sm_90a). docs/kernels/gemm.md
// builds it up step by step.
//
// Kernels:  gemm_hopper    out = a b^T; with float32 results out += a b^T; or what an epilogue makes of it
//
// Idea. A persistent kernel: a block stays on its multiprocessor and takes unit after unit (gemm.cuh), a tile of ROWS x
// COLUMNS over all steps of the sum or a part of them. It is warp-specialised, with three warpgroups.
//   producer    one thread of the first warpgroup. It copies pieces of both factors, DEPTH steps of the sum long, by
//               TMA into a ring of STAGES buffers, and runs ahead into the next unit.
//   consumers   the other two warpgroups multiply, in one of two schedules.
//     PINGPONG=0   both work on one tile, ROWS / 2 rows each
//     PINGPONG=1   each has every second tile to itself: while one writes its tile, the other multiplies. A barrier for
//                  each says whose turn it is to multiply. It is needed: parities only tell neighbouring rounds of the
//                  ring apart, and a warpgroup that waited early for its next tile could be two rounds ahead.
// CLUSTER=2: two blocks, on neighbouring multiprocessors, take tiles one above the other. Each copies its own rows of
// a, and half of the piece of b, which both need, to both blocks: a third less to read from the L2 cache at 128 x 256. A
// buffer is then empty when the consumers of both blocks have read it.
//
// A factor is stored along, with the steps of the sum adjacent in memory, or across (hopper.cuh). It is copied as it
// is, and transposed on its way into the tensor cores:
//   PRODUCT=FORWARD    y = x W^T       both along
//   PRODUCT=INPUT      dx = dy W       dy along, W across
//   PRODUCT=WEIGHT     dW += dy^T x    both across; in float32
// TMA fills the part of a box outside its array with 0, so that the last piece of a sum and the last tiles need no other
// code; stores outside of `out` are left out. With `splits` parts of the sum, `out` has a float32 plane for each, which
// gemm_sum (gemm.cu) adds up in order.
//
// EPILOGUE: an elementwise pass is fused into the store of a tile, while it is in registers, and, with PINGPONG, while
// the other warpgroup multiplies. Sums are rounded to bf16 first, so that the bits are those of the separate pass:
//   SWIGLU             of gate|up = x W^T, with h = silu(gate) up beside it. A tile has COLUMNS / 2 columns of the gate
//                      and the same columns of up: two boxes of W.
//   SWIGLU_BACKWARD    of dh = dy W: dgate|dup and h, from gate|up; dh itself is not written. A thread of its own
//                      prefetches a tile's gate|up, in pieces of 64 rows and 64 columns, into buffers of their own.
//   ROPE               of q|k|v = x W^T, heads of 64: each pair of q and k is rotated by the angle of its position
//
// Grid: a multiple of CLUSTER blocks, one for each multiprocessor. Block: THREADS. Shared memory: STAGES x (ROWS +
// COLUMNS) x 128 bytes, a tile's gate|up, and the barriers. Bound by tensor cores.

#include "ops/gemm.cuh"
#include "ops/hopper.cuh"
#include "ops/rope.cuh"
#include "ops/swiglu.cuh"
#include "ops/fp8.cuh"

#define DEPTH 64
#define THREADS 384
#define LINE 128      // bytes of a line: 64 numbers along the sum, or across it
#define BARRIERS 256  // bytes: full and empty of each stage, the turns, and of gate|up
#define PIECE 16384   // bytes of 64 rows and 64 columns of gate|up
#define PIECES 4      // of a tile of SWIGLU_BACKWARD
#define HEAD 64       // width of a head of ROPE

#define FORWARD 0
#define INPUT 1
#define WEIGHT 2
#define NONE 0
#define SWIGLU 1
#define SWIGLU_BACKWARD 2
#define ROPE 3
#ifndef EPILOGUE
#define EPILOGUE NONE
#endif
#define BF16 0
#define E4M3 1
#define E5M2 2
#ifndef FACTORS
#define FACTORS BF16
#endif
#if PRODUCT == WEIGHT
typedef float Result;
#else
typedef SCALAR Result;
#endif

constexpr bool ACROSS_A = PRODUCT == WEIGHT && FACTORS == BF16, ACROSS_B = PRODUCT != FORWARD && FACTORS == BF16;
constexpr bool IN_PARTS = PRODUCT == WEIGHT;  // the sum may be cut; elsewhere there are enough tiles
constexpr int LEFT = ROWS * LINE, RIGHT = COLUMNS * LINE;  // bytes of a piece of a factor, 64 numbers by so many
constexpr int SHARERS = PINGPONG ? 1 : 2;                  // warpgroups that work on one tile
constexpr int BLOCKS = ROWS / SHARERS / 64;                // products of 64 rows for each of them
constexpr int WIDE = EPILOGUE == SWIGLU ? COLUMNS / 2 : COLUMNS;  // columns of the result from one tile to the next
constexpr int GATES = STAGES * (LEFT + RIGHT);             // offset of gate|up in shared memory
constexpr int BEHIND = GATES + (EPILOGUE == SWIGLU_BACKWARD ? PIECES * PIECE : 0);  // and of the barriers

static_assert(ROWS % (64 * SHARERS) == 0 && (CLUSTER == 1 || CLUSTER == 2), "");
static_assert((2 * STAGES + 2 + 3 * PIECES) * 8 <= BARRIERS, "");
static_assert(FACTORS == BF16 || PRODUCT != INPUT, "FP8 factors are along");
static_assert(EPILOGUE == NONE || CLUSTER == 1, "clusters were slower at the shapes that end with SwiGLU");
static_assert(EPILOGUE != SWIGLU_BACKWARD || (PINGPONG && ROWS / 64 * (COLUMNS / 64) == PIECES), "");

extern __shared__ __align__(1024) unsigned char room[];  // the stages, gate|up, the barriers

// A warp's position in the ring of buffers. The phase flips each time round.
struct Ring {
    u32 base, slot = 0, phase = 0;

    __device__ Ring() : base(shared_address(room)) {}
    __device__ __forceinline__ u32 left() const { return base + slot * (LEFT + RIGHT); }
    __device__ __forceinline__ u32 right() const { return left() + LEFT; }
    __device__ __forceinline__ u32 full() const { return base + BEHIND + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + STAGES * 8; }
    // The barrier that lets warpgroup 0 or 1 multiply.
    __device__ __forceinline__ u32 turn(int group) const { return base + BEHIND + (2 * STAGES + group) * 8; }
    // The barriers of a piece of gate|up: full, one for each warpgroup, and empty. A buffer serves both warpgroups in
    // turn; with one full barrier for both, a parity could belong to the other's round.
    __device__ __forceinline__ u32 gates_full(int group, int piece) const { return turn(2 + group * PIECES + piece); }
    __device__ __forceinline__ u32 gates_empty(int piece) const { return turn(2 + 2 * PIECES + piece); }
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    __device__ __forceinline__ void skip(int steps) {
        slot += steps;
        phase ^= slot / STAGES & 1;
        slot %= STAGES;
    }
};

// Arrivals. Full: the copying thread, and TMA's bytes. Empty: the four warps of each warpgroup that reads the buffer,
// in each block. A turn: the four warps of the other warpgroup. For gate|up the same with a single warpgroup.
__device__ __forceinline__ void make_barriers() {
    if (threadIdx.x == 0) {
        Ring ring;
        for (int s = 0; s < STAGES; s++, ring.next()) {
            barrier_make(ring.full(), 1);
            barrier_make(ring.empty(), 4 * SHARERS * CLUSTER);
        }
        for (int group = 0; group < 2; group++) barrier_make(ring.turn(group), 4);
        if constexpr (EPILOGUE == SWIGLU_BACKWARD) {
            for (int piece = 0; piece < PIECES; piece++) {
                barrier_make(ring.gates_full(0, piece), 1);
                barrier_make(ring.gates_full(1, piece), 1);
                barrier_make(ring.gates_empty(piece), 4);
            }
        }
        barriers_made();
    }
    if constexpr (CLUSTER > 1) cluster_sync();
    else __syncthreads();
}

// Starts the copies into a buffer: DEPTH steps of the sum from k on, of a tile's rows and columns. half: columns of the
// gate.
__device__ __forceinline__ void copy_pieces(
    const Ring &ring, const TensorMap *a, const TensorMap *b, int row, int column, int k, u32 rank, int half
) {
    const u32 full = ring.full();
    barrier_expect(full, LEFT + RIGHT);
    if constexpr (ACROSS_A) {
#pragma unroll
        for (int c = 0; c < ROWS; c += 64) copy_box(ring.left() + c * LINE, a, row + c, k, 0, full);
    } else {
        copy_box(ring.left(), a, k, row, 0, full);
    }
    if constexpr (CLUSTER == 1) {
        if constexpr (ACROSS_B) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 64) copy_box(ring.right() + c * LINE, b, column + c, k, 0, full);
        } else {
            copy_box(ring.right(), b, k, column, 0, full);
            if constexpr (EPILOGUE == SWIGLU) copy_box(ring.right() + WIDE * LINE, b, k, half + column, 0, full);
        }
    } else {  // this block's half, to both blocks
        constexpr int LINES = (ACROSS_B ? DEPTH : COLUMNS) / CLUSTER;
        const int first = rank * LINES;
        const u32 to = ring.right() + first * LINE;
        if constexpr (ACROSS_B) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 64) copy_box_to(to + c * LINE, b, column + c, k + first, 0, full, 3);
        } else {
            copy_box_to(to, b, k, column + first, 0, full, 3);
        }
    }
    barrier_arrive(full);
}

// Copies gate|up of a tile; the epilogues of the two warpgroups read tiles in turn. parity: of the phase of
// `gates_empty` that this tile waits for. half: columns of the gate.
__device__ __forceinline__ void copy_gates(
    const TensorMap *gu, int group, u32 parity, int row, int column, int half
) {
    const Ring ring;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const u32 full = ring.gates_full(group, piece), to = ring.base + GATES + piece * PIECE;
        const int x = column + piece % (COLUMNS / 64) * 64, y = row + piece / (COLUMNS / 64) * 64;
        barrier_wait(ring.gates_empty(piece), parity);
        barrier_expect(full, PIECE);
        copy_box(to, gu, x, y, 0, full);
        copy_box(to + PIECE / 2, gu, half + x, y, 0, full);
        barrier_arrive(full);
    }
}

// A warpgroup that multiplies.
struct Products {
    Ring ring;
    float sum[BLOCKS][COLUMNS / 8][4] = {};
    int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    int top = PINGPONG ? 0 : group * (ROWS / 2);  // this warpgroup's first row of the tile

    __device__ __forceinline__ void release(u32 empty) const {
        if constexpr (CLUSTER > 1) {
            if (lane < CLUSTER) barrier_arrive_at(empty, lane);
        } else {
            if (lane == 0) barrier_arrive(empty);
        }
    }

    // The sums of a unit of `steps` steps. `meanwhile` runs while the tensor cores work on the first buffer.
    template <class Function>
    __device__ __forceinline__ void multiply(int steps, Function meanwhile) {
        u32 last = 0;  // the barrier of the buffer that is being read
        for (int step = 0; step < steps; step++) {
            barrier_wait(ring.full(), ring.phase);
            const u64 a = matrix(ring.left() + top * LINE), b = matrix(ring.right(), ACROSS_B ? 64 * LINE : 1024);
            multiply_fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
#pragma unroll
                for (int i = 0; i < BLOCKS; i++) {
                    const u64 part = a + i * (64 * LINE >> 4);
#if FACTORS == BF16
                    multiply_wide<ACROSS_A, ACROSS_B>(
                        sum[i], ACROSS_A ? rows(part, k) : columns(part, k), ACROSS_B ? rows(b, k) : columns(b, k),
                        step > 0 || k > 0
                    );
#else
                    multiply_fp8<FACTORS == E5M2>(sum[i], columns(part, k), columns(b, k), step > 0 || k > 0);
#endif
                }
            }
            multiply_commit();
            if (step == 0) meanwhile();
            multiply_wait<1>();
            if (last) release(last);
            last = ring.empty();
            ring.next();
        }
        // All buffers of this unit have arrived: the next ones are the other warpgroup's.
        if (PINGPONG && lane == 0) barrier_arrive(ring.turn(group ^ 1));
        multiply_wait<0>();
        release(last);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) settled(sum[i]);
    }

    // Multiplies the sums by their rows' scales: scales[i][0] for the first row of block i, scales[i][1] for the other.
    __device__ __forceinline__ void rescale(const float (&scales)[BLOCKS][2]) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][n][j] *= scales[i][j / 2];
            }
        }
    }

    // The row of the tile of this thread's first sums in block i; its other row is 8 below.
    __device__ __forceinline__ int row_of(int i) const { return top + i * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4; }

    // out: the tile's first number; rows, columns: what is left of `out` from there on.
    template <class R>
    __device__ __forceinline__ void write(R *out, int stride, int rows, int columns, bool accumulate) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if constexpr (sizeof(R) == 4) write_sums<8>(out, sum[i], row_of(i), stride, rows, columns, accumulate);
            else write_sums(out, sum[i], row_of(i), stride, rows, columns);
        }
    }

    // gate|up, and h beside it. gu, hidden: the tile's first numbers; half: columns of the gate, of up, and of h.
    template <class R>
    __device__ __forceinline__ void write_swiglu(
        R *gu, R *hidden, int stride, int half, int rows, int columns
    ) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = row_of(i) + 8 * below, first = lane % 4 * 8;
                R *to = gu + i64(row) * stride + first, *h = hidden + i64(row) * half + first;
#pragma unroll
                for (int n = 0; n < WIDE / 8; n += 4) {
                    const Pack<bf16, 8> gate = rounded_row(sum[i], n, below);
                    const Pack<bf16, 8> up = rounded_row(sum[i], n + WIDE / 8, below);
                    if (row < rows && 8 * n + first < columns) {
                        store_streaming(to + 8 * n, gate);  // backward reads them
                        store_streaming(to + half + 8 * n, up);
                        store(h + 8 * n, swiglu(gate, up));
                    }
                }
            }
        }
    }

    // The sums of block i, rounded, with 8 adjacent columns of a row in one thread: half of the registers. The sums are
    // set to 0, because the next product formally reads them, though it does not use them: they would stay in
    // registers.
    template <class R>
    __device__ __forceinline__ void take_rounded(Pack<R, 8> (&taken)[2][COLUMNS / 32], int i) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 32; n++) {
#pragma unroll
            for (int below = 0; below < 2; below++) {
                taken[below][n] = rounded_row(sum[i], 4 * n, below);
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][4 * n + j][2 * below] = sum[i][4 * n + j][2 * below + 1] = 0;
            }
        }
    }

    // dgate|dup, and h unless `hidden` is null, from the sums dh and from gate|up, which copy_gates loads. parity: of
    // the phase of `gates_full` that it waits for. Other arguments as above.
    template <class R>
    __device__ __forceinline__ void write_swiglu_backward(
        R *dgu, R *hidden, u32 parity, int stride, int half, int rows, int columns
    ) {
        Pack<R, 8> dh[BLOCKS][2][COLUMNS / 32];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) take_rounded(dh[i], i);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int i = piece / (COLUMNS / 64), across = piece % (COLUMNS / 64) * 64;
            barrier_wait(ring.gates_full(group, piece), parity);
            Pack<R, 8> gate[2][2], up[2][2];  // of rows 8 apart, and columns 32 apart
#pragma unroll
            for (int below = 0; below < 2; below++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int line = row_of(i) - 64 * i + 8 * below, column = (4 * j + lane % 4 ^ line % 8) * 16;
                    const unsigned char *from = room + GATES + piece * PIECE + line * LINE + column;
                    gate[below][j] = load<8>(reinterpret_cast<const R *>(from));
                    up[below][j] = load<8>(reinterpret_cast<const R *>(from + PIECE / 2));
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.gates_empty(piece));
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = row_of(i) + 8 * below;
                const i64 line = i64(row) * stride;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int n = across / 32 + j, column = 32 * n + 8 * (lane % 4);
                    Pack<R, 8> dgate, dup, y;
                    swiglu_gradient(dgate, dup, y, dh[i][below][n], gate[below][j], up[below][j]);
                    if (row < rows && column < columns) {
                        store_streaming(dgu + line + column, dgate);
                        store_streaming(dgu + line + half + column, dup);
                        if (hidden) store(hidden + i64(row) * half + column, y);
                    }
                }
            }
        }
    }

    // q|k|v with q and k rotated. out: the tile's first number; token: of the tile's first row, at position token %
    // positions; rotated_columns: how many columns of q and k are left from there on.
    template <class R>
    __device__ __forceinline__ void write_rope(
        R *out, int stride, int rows, int columns, const float *cosines, const float *sines, int token, int positions,
        int rotated_columns
    ) {
        const int first = lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            Pack<R, 8> taken[2][COLUMNS / 32];
            take_rounded(taken, i);
            asm volatile("" ::: "memory");  // loads the angles when their registers are free, and before any store
            Pack<float, 8> c[2], s[2];
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const i64 angle = i64((token + row_of(i) + 8 * below) % positions) * (HEAD / 2) + first;
                c[below] = load<8>(cosines + angle), s[below] = load<8>(sines + angle);
            }
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = row_of(i) + 8 * below;
                R *to = out + i64(row) * stride + first;
#pragma unroll
                for (int n = 0; n < COLUMNS / 32; n += 2) {
                    Pack<R, 8> &left = taken[below][n], &right = taken[below][n + 1];
                    if (32 * n < rotated_columns) rotate(left, right, c[below], s[below]);
                    if (row < rows && 32 * n < columns) {
                        store(to + 32 * n, left);
                        store(to + 32 * n + HEAD / 2, right);
                    }
                }
            }
        }
    }
};

#define IN_CLUSTERS(n) __cluster_dims__(n, 1, 1)

// In FP8, maps and `depth` count pairs of numbers. scales: of a, one per row if by_row, else one. weight_scale: of b.
#if FACTORS == BF16
#define FP8_ARGUMENTS
#else
#define FP8_ARGUMENTS , const float *scales, const float *weight_scale, int by_row
#endif

// With an epilogue of SwiGLU, `columns` are those of h, which `hidden` stores without gaps; out and gu have rows of 2 x
// columns. With ROPE, the first `rotated_columns` are q and k; a row is a token, at position row % positions.
#if EPILOGUE == SWIGLU
#define MORE_ARGUMENTS , Result *hidden
#elif EPILOGUE == SWIGLU_BACKWARD
#define MORE_ARGUMENTS , Result *hidden, const __grid_constant__ TensorMap gu
#elif EPILOGUE == ROPE
#define MORE_ARGUMENTS , const float *cosines, const float *sines, int positions, int rotated_columns
#else
#define MORE_ARGUMENTS
#endif
extern "C" __global__ void __launch_bounds__(THREADS, 1) IN_CLUSTERS(CLUSTER) gemm_hopper(
    Result *out, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int rows, int columns, int depth,
    int stride, int band, int splits, int accumulate MORE_ARGUMENTS FP8_ARGUMENTS
) {
    make_barriers();
    const Tiling tiling{ceil_div(rows, ROWS * CLUSTER), ceil_div(columns, WIDE), band, splits, ceil_div(depth, DEPTH)};
    const int units = tiling.units(), stride_of_units = gridDim.x / CLUSTER;
    const u32 rank = blockIdx.x % CLUSTER;
    if (threadIdx.x < 128) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            Ring ring;
            for (int number = blockIdx.x / CLUSTER; number < units; number += stride_of_units) {
                const Unit unit = tiling.unit(number);
                const int row = (unit.down * CLUSTER + rank) * ROWS, column = unit.across * WIDE;
                for (int step = unit.first; step < unit.stop; step++, ring.next()) {
                    barrier_wait(ring.empty(), ring.phase ^ 1);
                    copy_pieces(ring, &a, &b, row, column, step * DEPTH, rank, columns);
                }
            }
        }
#if EPILOGUE == SWIGLU_BACKWARD
        if (threadIdx.x == 32) {
            int group = 0;
            for (int number = blockIdx.x; number < units; number += stride_of_units, group ^= 1) {
                const Unit unit = tiling.unit(number);
                copy_gates(&gu, group, group ^ 1, unit.down * ROWS, unit.across * WIDE, columns);
            }
        }
#endif
    } else {
        more_registers<232>();
        Products products;
        u32 parity = products.group == 0;  // the first tile is warpgroup 0's
        u32 gates_parity = 0;
        bool mine = products.group == 0;
        int number = blockIdx.x / CLUSTER;
        Unit unit = tiling.unit(number);
        while (number < units) {
            const int steps = IN_PARTS ? unit.stop - unit.first : tiling.steps;
            const bool others = PINGPONG && !mine;
            mine = !mine;
            if (others) {
                products.ring.skip(steps);
                unit = tiling.unit(number += stride_of_units);
                continue;
            }
            if constexpr (PINGPONG) {
                barrier_wait(products.ring.turn(products.group), parity);
                parity ^= 1;
            }
            int row, column, split = 0;
#if FACTORS != BF16
            float of_rows[BLOCKS][2];
#endif
            // The place of this tile, and the next unit. Divisions take some hundred clocks; the empty instruction
            // keeps the compiler from moving them past the product.
            products.multiply(steps, [&] {
                row = (unit.down * CLUSTER + rank) * ROWS, column = unit.across * WIDE;
                if constexpr (IN_PARTS) split = unit.split;
#if FACTORS != BF16
#pragma unroll
                for (int i = 0; i < 2 * BLOCKS; i++) {
                    const int at = row + products.row_of(i / 2) + i % 2 * 8;
                    of_rows[i / 2][i % 2] = at < rows ? scales[by_row ? at : 0] * *weight_scale : 0.0f;
                }
#endif
                unit = tiling.unit(number += stride_of_units);
                asm volatile("" : "+r"(row), "+r"(column), "+r"(unit.down), "+r"(unit.across));
                if constexpr (IN_PARTS) {
                    asm volatile("" : "+r"(split), "+r"(unit.split), "+r"(unit.first), "+r"(unit.stop));
                }
            });
#if FACTORS != BF16
            products.rescale(of_rows);
#endif
            Result *to = out + (i64(split) * rows + row) * stride + column;
            const int below = rows - row, beside = columns - column;
            const i64 at = i64(row) * columns + column;
#if EPILOGUE == NONE
            products.write(to, stride, below, beside, accumulate);
#elif EPILOGUE == SWIGLU
            products.write_swiglu(to, hidden + at, stride, columns, below, beside);
#elif EPILOGUE == SWIGLU_BACKWARD
            products.write_swiglu_backward(to, hidden ? hidden + at : nullptr, gates_parity, stride, columns, below, beside);
            gates_parity ^= 1;
#else
            products.write_rope(to, stride, below, beside, cosines, sines, row, positions, rotated_columns - column);
#endif
        }
    }
    if constexpr (CLUSTER > 1) {  // the other block copies and arrives here until it is done too
        __syncwarp();
        cluster_sync();
    }
}
