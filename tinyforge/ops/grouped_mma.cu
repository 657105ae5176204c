// grouped_mma: rows times their expert's matrix on tensor cores, in bf16, for widths that are multiples of 8.
//
// Kernels:  grouped_fwd           y_r = W_e x_t(r)                                         W: (E, O, I), t: tokens
//           grouped_bwd_input     dx_r = W_e^T dy_t(r)
//           grouped_bwd_weight    dW_e += sum over the rows r of expert e of dy_t(r) x_t(r)^T, in float32
//
// Idea. A block computes a tile of ROWS x COLUMNS of one expert's product. It finds the expert and its rows on the
// device (grouped.cuh): the host never learns how many rows an expert has. The grid has a block for the most tiles that
// there can be, R / ROWS + E; those past the last return at once.
//   pipeline   Pieces of the two factors, DEPTH long in the direction that is summed over, go through STAGES buffers in
//              shared memory by cp.async. A copy moves 16 bytes, and takes its row from tokens[r]: rows are gathered
//              where they are read, and no sorted copy of x or dy exists.
//   products   Four warps compute 64 x 64 each, so that a fragment loaded from shared memory is used in 8 products, or
//              4. Two blocks share a multiprocessor: one fills its pipeline, or stores, while the other multiplies.
//   layout     The direction that is summed over runs along a factor's rows (x and W in the forward product), or across
//              them (W in the product for dx; both factors in dW). A factor is copied as it is; where it is TRANSPOSED,
//              ldmatrix transposes it.
// Grid: (columns / COLUMNS, tiles); grouped_bwd_weight (I / COLUMNS, O / ROWS, E). Block: THREADS. Shared memory:
// STAGES x 32 KB. Bound by tensor cores.

#include "ops/grouped.cuh"

typedef SCALAR T;

#define ROWS 128
#define COLUMNS 128
#define DEPTH 64
#define STAGES 3
#define THREADS 128
#define FACTOR 16384  // bytes of a factor's piece: 128 x 64, or 64 x 128 if it is TRANSPOSED
#define PITCH 136     // of a row of results in shared memory: 16 bytes more than 128, which spreads rows over banks

extern __shared__ uint4 room[];  // STAGES x 2 x FACTOR bytes

// A factor: 128 rows or columns of the product, and as deep as the sum. A thread copies 8 of a piece's 1,024 vectors.
// TRANSPOSED: the array's rows are steps of the sum. Otherwise they are rows or columns of the product. In both cases
// `tokens`, unless null, maps them to rows of the array.
template <bool TRANSPOSED>
struct Factor {
    static constexpr int PIECES = TRANSPOSED ? 16 : 8;     // of 16 bytes, in a row of a piece
    static constexpr int APART = THREADS / PIECES;         // rows between those that a thread copies
    const T *from;
    const int *tokens;
    int stride, wide, deep;  // elements between array rows; how much of the 128, and of the sum, there is
    int ids[8];              // array rows of this thread's copies

    __device__ __forceinline__ Factor(const T *from, const int *tokens, int stride, int wide, int deep)
        : from(from), tokens(tokens), stride(stride), wide(wide), deep(deep) {
        look(0);
    }

    __device__ __forceinline__ static int row(int i) { return threadIdx.x / PIECES + i * APART; }

    // Looks up the array rows for the piece at k; once is enough where they do not depend on k.
    __device__ __forceinline__ void look(int k) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = TRANSPOSED ? k + row(i) : row(i);
            const bool there = r < (TRANSPOSED ? deep : wide);
            ids[i] = !there ? -1 : tokens ? tokens[r] : r;
        }
    }

    // Starts the copies of the piece at k; elements outside the factor become 0.
    __device__ __forceinline__ void fetch(u32 to, int k) {
        const int piece = threadIdx.x % PIECES, column = (TRANSPOSED ? 0 : k) + piece * 8;
        const bool inside = column < (TRANSPOSED ? wide : deep);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool there = inside && ids[i] >= 0;
            copy_async(to + place(row(i), piece), there ? from + i64(ids[i]) * stride + column : from, there);
        }
        if (TRANSPOSED) look(k + DEPTH);  // for the next fetch, when the numbers will have arrived
    }

    // The byte of a piece in shared memory. The exclusive or puts the same column of 8 rows into different banks.
    __device__ __forceinline__ static u32 place(int row, int piece) {
        return (row * PIECES + (piece ^ (row % 8))) * 16;
    }

    // A of mma.m16n8k16 (see common.cuh): rows m to m + 15, steps k to k + 15 of the piece.
    __device__ __forceinline__ static void left(u32 (&a)[4], u32 at, int m, int k) {
        const int lane = threadIdx.x % 32, low = lane % 8, odd = lane / 8 % 2, high = lane / 16;
        if (TRANSPOSED) load_matrix_transposed(a, at + place(k + low + high * 8, m / 8 + odd));
        else load_matrix(a, at + place(m + low + odd * 8, k / 8 + high));
    }

    // B of two products: columns n to n + 7 in b[0..1], n + 8 to n + 15 in b[2..3].
    __device__ __forceinline__ static void right(u32 (&b)[4], u32 at, int n, int k) {
        const int lane = threadIdx.x % 32, low = lane % 8, odd = lane / 8 % 2, high = lane / 16;
        if (TRANSPOSED) load_matrix_transposed(b, at + place(k + low + odd * 8, n / 8 + high));
        else load_matrix(b, at + place(n + low + high * 8, k / 8 + odd));
    }
};

// The sums of a warp: 64 x 64, of rows 64 (warp / 2) and columns 64 (warp % 2) of the tile on.
struct Tile {
    float sum[4][8][4] = {};

    __device__ __forceinline__ static int m() { return threadIdx.x / 64 * 64; }
    __device__ __forceinline__ static int n() { return threadIdx.x / 32 % 2 * 64; }

    template <bool LEFT, bool RIGHT>
    __device__ __forceinline__ void multiply(Factor<LEFT> &left, Factor<RIGHT> &right, int deep) {
        const u32 base = shared_address(room);
        const int steps = ceil_div(deep, DEPTH);
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < steps) fetch(left, right, base, s, s);
            copy_commit();  // empty groups past the last: the number of groups is the number of steps
        }
        for (int step = 0, slot = 0; step < steps; step++) {
            copy_wait<STAGES - 2>();
            __syncthreads();  // this step's pieces have arrived for all, and no thread still reads the last step's
            const int ahead = step + STAGES - 1;
            if (ahead < steps) fetch(left, right, base, ahead, slot == 0 ? STAGES - 1 : slot - 1);
            copy_commit();
            const u32 at = base + slot * 2 * FACTOR;
#pragma unroll
            for (int k = 0; k < DEPTH; k += 16) {
                u32 a[4][4];
#pragma unroll
                for (int i = 0; i < 4; i++) Factor<LEFT>::left(a[i], at, m() + 16 * i, k);
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    u32 b[4];
                    Factor<RIGHT>::right(b, at + FACTOR, n() + 8 * j, k);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        multiply_add(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                        multiply_add(sum[i][j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
                    }
                }
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        copy_wait<0>();
        __syncthreads();
    }

    template <bool LEFT, bool RIGHT>
    __device__ __forceinline__ static void fetch(
        Factor<LEFT> &left, Factor<RIGHT> &right, u32 base, int step, int slot
    ) {
        left.fetch(base + slot * 2 * FACTOR, step * DEPTH);
        right.fetch(base + slot * 2 * FACTOR + FACTOR, step * DEPTH);
    }

    // Calls use(row, column, two adjacent sums) for all that this thread holds.
    template <class Use>
    __device__ __forceinline__ void each(Use use) const {
        const int row = m() + threadIdx.x % 32 / 4, column = n() + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                use(row + 16 * i, column + 8 * j, sum[i][j][0], sum[i][j][1]);
                use(row + 16 * i + 8, column + 8 * j, sum[i][j][2], sum[i][j][3]);
            }
        }
    }

    // Stores the rounded sums by way of shared memory, 16 bytes at a time. out: the tile's first number.
    __device__ __forceinline__ void write(T *out, int stride, int rows, int columns) const {
        T *shared = reinterpret_cast<T *>(room);
        each([&](int row, int column, float x, float y) {
            Pack<T, 2> p;
            narrow(x, p.v[0]);
            narrow(y, p.v[1]);
            store(shared + row * PITCH + column, p);
        });
        __syncthreads();
        const int column = threadIdx.x % 16 * 8;
        if (column >= columns) return;
        for (int row = threadIdx.x / 16; row < ROWS && row < rows; row += THREADS / 16) {
            store(out + i64(row) * stride + column, load<8>(shared + row * PITCH + column));
        }
    }
};

// out (R, columns): row r is the row t(r) of x, (., depth), times the matrix of its expert, which has `depth` as its
// last axis, or, TRANSPOSED, as its middle one.
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply(
    T *out, const T *x, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    int expert, first, stop;
    if (!find_tile(blockIdx.y, starts, experts, ROWS, expert, first, stop)) return;
    const int column = blockIdx.x * COLUMNS;
    const T *matrix = weight + i64(expert) * columns * depth;
    const int rows = stop - first;
    Factor<false> left(tokens ? x : x + i64(first) * depth, tokens ? tokens + first : tokens, depth, rows, depth);
    Factor<TRANSPOSED> right(TRANSPOSED ? matrix + column : matrix + i64(column) * depth, nullptr,
                             TRANSPOSED ? columns : depth, columns - column, depth);
    Tile tile;
    tile.multiply(left, right, depth);
    tile.write(out + i64(first) * columns + column, columns, rows, columns - column);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_fwd(
    T *y, const T *x, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    multiply<false>(y, x, weight, tokens, starts, columns, depth, experts);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_bwd_input(
    T *dx, const T *dy, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    multiply<true>(dx, dy, weight, tokens, starts, columns, depth, experts);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_bwd_weight(
    float *dweight, const T *dy, const T *x, const int *dy_tokens, const int *x_tokens, const int *starts, int outs,
    int ins
) {
    const int expert = blockIdx.z, first = starts[expert], rows = starts[expert + 1] - first;
    if (rows == 0) return;
    const int out = blockIdx.y * ROWS, in = blockIdx.x * COLUMNS;
    // Without tokens the rows begin at `first`; with them, the tokens do.
    Factor<true> left(dy + out + (dy_tokens ? 0 : i64(first) * outs), dy_tokens ? dy_tokens + first : dy_tokens,
                      outs, outs - out, rows);
    Factor<true> right(x + in + (x_tokens ? 0 : i64(first) * ins), x_tokens ? x_tokens + first : x_tokens,
                       ins, ins - in, rows);
    Tile tile;
    tile.multiply(left, right, rows);
    float *to = dweight + (i64(expert) * outs + out) * ins + in;
    tile.each([&](int row, int column, float x, float y) {
        if (row >= outs - out || column >= ins - in) return;
        float *at = to + i64(row) * ins + column;
        Pack<float, 2> p = load<2>(at);
        p.v[0] += x;
        p.v[1] += y;
        store(at, p);
    });
}
