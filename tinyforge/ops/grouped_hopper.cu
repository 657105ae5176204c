// grouped_hopper: grouped_mma.cu's products with Hopper's instructions, wgmma and TMA (sm_90a). Read that one first.
//
// Kernels:  grouped_fwd           y_r = W_e x_t(r)                                         W: (E, O, I), t: tokens
//           grouped_bwd_input     dx_r = W_e^T dy_t(r)
//           grouped_bwd_weight    dW_e += sum over the rows r of expert e of dy_t(r) x_t(r)^T, in float32
//
// Idea. A persistent kernel: a block takes tile after tile, ROWS x COLUMNS of an expert's product, until there are no
// more. It has three warpgroups.
//   producer    The first. It copies pieces of both factors, DEPTH long in the direction that is summed over, into a
//               ring of STAGES buffers, and runs ahead into the next tile. Rows that are gathered by tokens are copied
//               by cp.async, 16 bytes at a time, since TMA on Hopper cannot gather, and missing rows must become 0.
//               Weights are copied by TMA: one thread starts a copy of 32 KB.
//   consumers   The other two multiply, each 64 rows of the tile, 128 sums a thread. Results are stored from registers:
//               those in bf16 are exchanged among the four threads of a row, so that each writes 16 bytes; those of dW
//               are added to float32, 32 bytes for four threads.
//   barriers    Each buffer has two, full and empty.
// In dW both factors are rows, and the sum ends where the expert's rows end: zeros after them keep it exact. TMA copies
// rows that are not gathered, up to the expert's last whole buffer.
// Grid: a block for each multiprocessor. Block: THREADS. Shared memory: STAGES x 48 KB, and the barriers. Bound by
// tensor cores.

#include "ops/grouped.cuh"
#include "ops/hopper.cuh"

typedef SCALAR T;

#define ROWS 128
#define COLUMNS 256
#define DEPTH 64
#define STAGES 4
#define THREADS 384
#define LEFT 16384   // bytes of the left factor's piece: 128 x 64
#define RIGHT 32768  // of the right one's: 256 x 64
#define CHUNK 8192   // of 64 lines; where lines are steps of the sum, 64 of the 128 or 256 rows or columns
#define BARRIERS 64  // bytes: full and empty of each stage

extern __shared__ __align__(1024) unsigned char room[];  // the stages, then the barriers

// A warp's position in the ring of buffers. The phase flips each time round.
struct Ring {
    u32 base, slot = 0, phase = 0;

    __device__ Ring() : base(shared_address(room)) {}
    __device__ __forceinline__ u32 left() const { return base + slot * (LEFT + RIGHT); }
    __device__ __forceinline__ u32 right() const { return left() + LEFT; }
    __device__ __forceinline__ u32 full() const { return base + STAGES * (LEFT + RIGHT) + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + STAGES * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// Arrivals. Full: each of the 128 copying threads, and TMA's bytes. Empty: each of the 8 multiplying warps.
__device__ __forceinline__ void make_barriers() {
    if (threadIdx.x == 0) {
        Ring ring;
        for (int s = 0; s < STAGES; s++, ring.next()) {
            barrier_make(ring.full(), 128);
            barrier_make(ring.empty(), 8);
        }
        barriers_made();
    }
    __syncthreads();
}

// The producer. It arrives at a buffer's full barrier when the copies have arrived: one buffer after it started them.
struct Copies {
    Ring ring;
    u32 started = 0;  // the full barrier of the buffer in flight

    __device__ __forceinline__ void begin() { barrier_wait(ring.empty(), ring.phase ^ 1); }
    __device__ __forceinline__ void end() {
        copy_commit();
        if (started) announce<1>();
        started = ring.full();
        ring.next();
    }
    __device__ __forceinline__ void finish() {
        if (started) announce<0>();
    }
    template <int PENDING>
    __device__ __forceinline__ void announce() {
        copy_wait<PENDING>();
        shared_fence();
        barrier_arrive(started);
    }
};

// A warpgroup that multiplies.
struct Products {
    Ring ring;
    float sum[32][4] = {};
    int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    int row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // this thread holds row and row + 8 of the tile

    // The sums of a tile, over `steps` buffers.
    template <int A_ACROSS, int B_ACROSS>
    __device__ __forceinline__ void multiply(int steps) {
        u32 last = 0;  // the barrier of the buffer that is being read
        for (int step = 0; step < steps; step++) {
            barrier_wait(ring.full(), ring.phase);
            const u64 a = matrix(ring.left() + group * CHUNK), b = matrix(ring.right(), B_ACROSS ? CHUNK : 1024);
            multiply_fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                multiply_wide<A_ACROSS, B_ACROSS>(
                    sum, A_ACROSS ? rows(a, k) : columns(a, k), B_ACROSS ? rows(b, k) : columns(b, k), step > 0 || k > 0
                );
            }
            multiply_commit();
            multiply_wait<1>();
            if (last && lane == 0) barrier_arrive(last);
            last = ring.empty();
            ring.next();
        }
        multiply_wait<0>();
        if (lane == 0) barrier_arrive(last);
        settled(sum);
    }
};

// out (R, columns): row r is the row t(r) of x, (., depth), times the matrix of its expert, which has `depth` as its
// last axis, or, ACROSS, as its middle one.
template <bool ACROSS>
__device__ __forceinline__ void multiply(
    T *out, const T *x, const TensorMap *weight, const int *tokens, const int *starts, int columns, int depth,
    int experts
) {
    make_barriers();
    const int across = ceil_div(columns, COLUMNS);  // tiles next to each other
    int tile = blockIdx.x, expert, first, stop;
    if (threadIdx.x < 128) {
        Copies copies;
        const int line = threadIdx.x / 8, piece = threadIdx.x % 8;  // of lines line, line + 16, ...
        const u32 place = line * 128 + (piece ^ line % 8) * 16;
        for (; find_tile(tile / across, starts, experts, ROWS, expert, first, stop); tile += gridDim.x) {
            int ids[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int row = first + line + 16 * i;
                ids[i] = row >= stop ? -1 : tokens ? tokens[row] : row;
            }
            const int column = tile % across * COLUMNS;
            for (int k = 0; k < depth; k += DEPTH) {
                copies.begin();
                const u32 full = copies.ring.full(), right = copies.ring.right(), to = copies.ring.left() + place;
                if (threadIdx.x == 0) {
                    barrier_expect(full, RIGHT);
                    if (ACROSS) {
#pragma unroll
                        for (int c = 0; c < COLUMNS / 64; c++) {
                            copy_box(right + c * CHUNK, weight, column + 64 * c, k, expert, full);
                        }
                    } else {
                        copy_box(right, weight, k, column, expert, full);
                    }
                }
                const int at = k + piece * 8;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const bool there = ids[i] >= 0 && at < depth;
                    copy_async(to + i * 2048, there ? x + i64(ids[i]) * depth + at : x, there);
                }
                copies.end();
            }
        }
        copies.finish();
    } else {
        Products products;
        for (; find_tile(tile / across, starts, experts, ROWS, expert, first, stop); tile += gridDim.x) {
            products.multiply<0, ACROSS>(ceil_div(depth, DEPTH));
            const int column = tile % across * COLUMNS;
            write_sums(
                out + i64(first) * columns + column, products.sum, products.row, columns, stop - first, columns - column
            );
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_fwd(
    T *y, const T *x, const __grid_constant__ TensorMap weight, const int *tokens, const int *starts, int columns,
    int depth, int experts
) {
    multiply<false>(y, x, &weight, tokens, starts, columns, depth, experts);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_bwd_input(
    T *dx, const T *dy, const __grid_constant__ TensorMap weight, const int *tokens, const int *starts, int columns,
    int depth, int experts
) {
    multiply<true>(dx, dy, &weight, tokens, starts, columns, depth, experts);
}

// Rows of one array as steps of the sum, WIDE of its columns: 128 or 256. A buffer is copied by TMA where its rows are
// contiguous and all belong to the expert, else row by row: a copying thread takes line, line + 8, ...
template <int WIDE>
struct Steps {
    const T *from;
    const TensorMap *map;
    const int *tokens;
    int width, first, stop;  // first: this thread's first row of the next buffer
    int ids[8];

    __device__ __forceinline__ Steps(const T *from, const TensorMap *map, const int *tokens, int width)
        : from(from), map(map), tokens(tokens), width(width) {}
    // The rows of an expert, from this thread's first on.
    __device__ __forceinline__ void begin(int row, int end) {
        first = row, stop = end;
        look(ids);
    }
    __device__ __forceinline__ void look(int (&found)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = first + 8 * i;
            found[i] = row >= stop ? -1 : tokens ? tokens[row] : row;
        }
    }
    // Starts the copies of a buffer that begins at row k, to `to`. column: of the tile. The rows of the next buffer are
    // looked up first, so that they are in registers when they are needed.
    __device__ __forceinline__ void copy(u32 to, u32 full, int k, int column) {
        first += DEPTH;
        if (!tokens && k + DEPTH <= stop) {
            if (threadIdx.x == 0) {
                barrier_expect(full, WIDE * DEPTH * 2);
#pragma unroll
                for (int c = 0; c < WIDE; c += 64) copy_box(to + c / 64 * CHUNK, map, column + c, k, 0, full);
            }
            if (k + 2 * DEPTH > stop) look(ids);  // the last buffer is copied row by row
            return;
        }
        int next[8];
        look(next);
        const int line = threadIdx.x / 16, piece = threadIdx.x % 16;
        const u32 place = to + piece / 8 * CHUNK + line * 128 + (piece % 8 ^ line) * 16;
#pragma unroll
        for (int c = 0; c < WIDE; c += 128) {
            const int at = column + piece * 8 + c;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const bool there = ids[i] >= 0 && at < width;
                copy_async(place + c / 64 * CHUNK + i * 1024, there ? from + i64(ids[i]) * width + at : from, there);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) ids[i] = next[i];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_bwd_weight(
    float *dweight, const T *dy, const T *x, const __grid_constant__ TensorMap dy_map,
    const __grid_constant__ TensorMap x_map, const int *dy_tokens, const int *x_tokens, const int *starts, int outs,
    int ins, int experts
) {
    make_barriers();
    const int down = ceil_div(outs, ROWS), across = ceil_div(ins, COLUMNS), tiles = experts * down * across;
    if (threadIdx.x < 128) {
        Copies copies;
        Steps<ROWS> left(dy, &dy_map, dy_tokens, outs);
        Steps<COLUMNS> right(x, &x_map, x_tokens, ins);
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = tile / (down * across), first = starts[expert], stop = starts[expert + 1];
            const int out = tile / across % down * ROWS, in = tile % across * COLUMNS, mine = first + threadIdx.x / 16;
            left.begin(mine, stop);
            right.begin(mine, stop);
            for (int k = first; k < stop; k += DEPTH) {
                copies.begin();
                left.copy(copies.ring.left(), copies.ring.full(), k, out);
                right.copy(copies.ring.right(), copies.ring.full(), k, in);
                copies.end();
            }
        }
        copies.finish();
    } else {
        Products products;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = tile / (down * across), steps = ceil_div(starts[expert + 1] - starts[expert], DEPTH);
            if (steps == 0) continue;
            products.multiply<1, 1>(steps);
            const int out = tile / across % down * ROWS, in = tile % across * COLUMNS;
            float *to = dweight + (i64(expert) * outs + out) * ins + in;
            write_sums<4>(to, products.sum, products.row, ins, outs - out, ins - in, true);
        }
    }
}
