// conv2d in bf16: products with windows that are read straight from the images, on tensor cores.
//
// Kernels:  conv2d_gather    y[m, o] = bias[o] + add[m, o] + sum over k of window[m, k] W[o, k], k = (i, j, channel)
//           conv2d_weight    partial[z, (o, k)] = sum over the positions m of part z of dy[m, o] window[m, k], and after
//                            these numbers, where the convolution has a bias, the sums of dy[m, o]
//
// Idea. An implicit matrix product: a block makes a tile of the result, and copies the windows' numbers from the image
// into shared memory 16 bytes at a time, 8 channels of one tap, zeros where a window stands out of the image. A number k
// of 8 aligned channels has one tap, so channels are a multiple of 8 (the launcher pads); rows of k are those of the
// weight as it lies in memory. Copies of STAGES steps are in flight. Lines of 128 bytes are stored with their pieces of
// 16 bytes in an order that depends on the line, so that neither copies nor ldmatrix meet bank conflicts.
// conv2d_gather is also the gradient of x: dy is the image, the weight is flipped, and `spread` is the forward's
// stride. conv2d_weight sums over positions: both factors have positions as lines, ldmatrix transposes. Its parts are
// added up by columns.cu, in order: the same bits every time.
// Grid: conv2d_gather (rows / ROWS, outputs / COLUMNS), conv2d_weight (k / COLUMNS, outputs / ROWS, parts).
// Block: 256 threads, 8 warps as 4 x 2 or 2 x 4. Shared memory: STAGES x (ROWS + COLUMNS) x 128 bytes; conv2d_weight
// STAGES x 64 x (ROWS + COLUMNS) x 2. Bound by tensor cores where channels are many, else by the L2 cache.

#include "ops/common.cuh"

#define THREADS 256
#define DEPTH 64   // of a step: numbers k, or positions in conv2d_weight
#define PIECE 8    // numbers in 16 bytes
#define WARPS_DOWN (ROWS > COLUMNS / 2 ? 4 : 2)  // a warp's tile is 32 x 32 or 32 x 64
#define ROWS_A_WARP (ROWS / WARPS_DOWN)
#define COLUMNS_A_WARP (COLUMNS / (8 / WARPS_DOWN))

extern __shared__ __align__(128) unsigned char room[];

// n / d for n below 2^31, as a product: magic = floor(2^32 (2^shift - d) / d) + 1, shift the bits of d - 1.
struct Divisor {
    u32 magic, shift;
    __device__ __forceinline__ u32 quotient(u32 n) const { return (u32((u64(n) * magic) >> 32) + n) >> shift; }
};

// The images and what a window is. A position is (image, r, c), r below down and c below across.
struct Windows {
    const bf16 *x;
    int high, wide, channels, down, across, height, width, stride, above, before, spread;
    Divisor of_image, of_row;
};
#define SIZES \
    const bf16 *x, int high, int wide, int channels, int down, int across, int height, int width, int stride, int above, \
        int before, int spread, u32 image_magic, u32 image_shift, u32 row_magic, u32 row_shift
#define THE_WINDOWS \
    {x,      high,  wide,   channels, down, across, height, width, stride, above, before, \
     spread, {image_magic, image_shift}, {row_magic, row_shift}}

// Where the window of a position begins, with spread > 1 in numbers of the image spread out.
struct Corner {
    int image;  // -1 past the last position
    int p, q;
};

__device__ __forceinline__ Corner corner_of(const Windows &w, int m, int rows) {
    const int image = w.of_image.quotient(m), rest = m - image * w.down * w.across;
    const int r = w.of_row.quotient(rest), c = rest - r * w.across;
    return {m < rows ? image : -1, r * w.stride - w.above, c * w.stride - w.before};
}

// Copies 8 channels of one tap of a window.
__device__ __forceinline__ void copy_piece(u32 to, const Windows &w, const Corner &from, int i, int j, int k, bool real) {
    int p = from.p + i, q = from.q + j;
    bool inside = real && from.image >= 0 && p >= 0 && q >= 0;
    if (SPREAD) {
        inside = inside && p % w.spread == 0 && q % w.spread == 0;
        p /= w.spread, q /= w.spread;
    }
    inside = inside && p < w.high && q < w.wide;
    const i64 at = inside ? ((i64(from.image) * w.high + p) * w.wide + q) * w.channels + k : 0;
    copy_async(to, w.x + at, inside);
}

// The place of piece `piece` of a line of `pieces` pieces.
__device__ __forceinline__ u32 place(int line, int piece, int pieces) {
    return (line * pieces + (piece & ~7 | (piece ^ line) & 7)) * 16;
}

__device__ __forceinline__ u32 two(float x, float y) {
    bf16 low, high;
    narrow(x, low), narrow(y, high);
    return low.bits | u32(high.bits) << 16;
}

#if PART == 0
// Shared memory: STAGES times ROWS lines of windows, then COLUMNS lines of the weight, each of 64 numbers k.
extern "C" __global__ void __launch_bounds__(THREADS, 2) conv2d_gather(
    bf16 *y, const bf16 *weight, const bf16 *bias, const bf16 *add, int rows, int outs, SIZES
) {
    const Windows w THE_WINDOWS;
    constexpr int STAGE = (ROWS + COLUMNS) * DEPTH * 2, LINES = THREADS / 8;
    const int depth = w.height * w.width * w.channels, steps = ceil_div(depth, DEPTH);
    const int top = blockIdx.x * ROWS, left = blockIdx.y * COLUMNS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int line = threadIdx.x / 8, piece = threadIdx.x % 8;
    const u32 base = shared_address(room);
    Corner corners[ROWS / LINES];
#pragma unroll
    for (int n = 0; n < ROWS / LINES; n++) corners[n] = corner_of(w, top + line + n * LINES, rows);
    const auto fetch = [&](int step) {
        if (step < steps) {
            const int k = step * DEPTH + piece * PIECE, tap = k / w.channels, channel = k - tap * w.channels;
            const int i = tap / w.width, j = tap - i * w.width;
            const u32 to = base + step % STAGES * STAGE;
#pragma unroll
            for (int n = 0; n < ROWS / LINES; n++) {
                copy_piece(to + place(line + n * LINES, piece, 8), w, corners[n], i, j, channel, k < depth);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / LINES; n++) {
                const int o = left + line + n * LINES;
                const bool real = o < outs && k < depth;
                const u32 at = to + ROWS * DEPTH * 2 + place(line + n * LINES, piece, 8);
                copy_async(at, weight + (real ? i64(o) * depth + k : 0), real);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) fetch(step);
    float sums[ROWS_A_WARP / 16][COLUMNS_A_WARP / 8][4] = {};
    const int row = warp % WARPS_DOWN * ROWS_A_WARP, column = warp / WARPS_DOWN * COLUMNS_A_WARP;
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // all copies of the step have arrived, and all warps are done with the one before it
        fetch(step + STAGES - 1);
        const u32 from = base + step % STAGES * STAGE, of_weight = from + ROWS * DEPTH * 2;
#pragma unroll
        for (int k = 0; k < DEPTH / PIECE; k += 2) {
            u32 a[ROWS_A_WARP / 16][4], b[COLUMNS_A_WARP / 16][4];
#pragma unroll
            for (int r = 0; r < ROWS_A_WARP / 16; r++) {
                load_matrix(a[r], from + place(row + r * 16 + lane % 16, k + lane / 16, 8));
            }
#pragma unroll
            for (int c = 0; c < COLUMNS_A_WARP / 16; c++) {
                const int which = column + c * 16 + lane / 16 * 8 + lane % 8;
                load_matrix(b[c], of_weight + place(which, k + lane / 8 % 2, 8));
            }
#pragma unroll
            for (int r = 0; r < ROWS_A_WARP / 16; r++) {
#pragma unroll
                for (int c = 0; c < COLUMNS_A_WARP / 8; c++) {
                    multiply_add(
                        sums[r][c], a[r][0], a[r][1], a[r][2], a[r][3], b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]
                    );
                }
            }
        }
    }
    const bool pairs = outs % 2 == 0;
#pragma unroll
    for (int r = 0; r < ROWS_A_WARP / 16; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS_A_WARP / 8; c++) {
            const int o = left + column + c * 8 + lane % 4 * 2;
            if (o >= outs) continue;
            const bool second = o + 1 < outs;
            const float low = bias ? widen(bias[o]) : 0, high = bias && second ? widen(bias[o + 1]) : 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = top + row + r * 16 + half * 8 + lane / 4;
                if (m >= rows) continue;
                const i64 at = i64(m) * outs + o;
                float u = sums[r][c][half * 2] + low, v = sums[r][c][half * 2 + 1] + high;
                if (pairs) {
                    if (add) {
                        const Pack<bf16, 2> more = load<2>(add + at);
                        u += widen(more.v[0]), v += widen(more.v[1]);
                    }
                    *reinterpret_cast<u32 *>(y + at) = two(u, v);
                } else {
                    narrow(add ? u + widen(add[at]) : u, y[at]);
                    if (second) narrow(add ? v + widen(add[at + 1]) : v, y[at + 1]);
                }
            }
        }
    }
}
#else
// Shared memory: STAGES times 64 lines of dy, each of ROWS outputs, then 64 lines of windows, each of COLUMNS numbers k.
// partial: (parts, outs x taps x real + (biased ? outs : 0)), without the channels that the launcher has added.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 64 ? 2 : 1) conv2d_weight(
    float *partial, const bf16 *dy, int rows, int outs, int pitch, int real, int biased, SIZES
) {
    const Windows w THE_WINDOWS;
    constexpr int STAGE = (ROWS + COLUMNS) * DEPTH * 2;
    constexpr int UP = ROWS / PIECE, SEEN = COLUMNS / PIECE, UP_LINES = THREADS / UP, SEEN_LINES = THREADS / SEEN;
    const int depth = w.height * w.width * w.channels, left = blockIdx.x * COLUMNS, top = blockIdx.y * ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int total = ceil_div(rows, DEPTH), parts = gridDim.z, part = blockIdx.z;
    const int first = int(i64(part) * total / parts), stop = int(i64(part + 1) * total / parts);
    const u32 base = shared_address(room);
    const int up = threadIdx.x % UP, up_line = threadIdx.x / UP, seen = threadIdx.x % SEEN;
    const int seen_line = threadIdx.x / SEEN;
    const int k = left + seen * PIECE, tap = k / w.channels, channel = k - tap * w.channels;
    const int i = tap / w.width, j = tap - i * w.width, o = top + up * PIECE;
    const auto fetch = [&](int step) {
        if (step < stop) {
            const u32 to = base + (step - first) % STAGES * STAGE;
            const int start = step * DEPTH;
#pragma unroll
            for (int n = 0; n < DEPTH / UP_LINES; n++) {
                const int m = start + up_line + n * UP_LINES;
                const bool in = m < rows && o < pitch;
                copy_async(to + place(up_line + n * UP_LINES, up, UP), dy + (in ? i64(m) * pitch + o : 0), in);
            }
#pragma unroll
            for (int n = 0; n < DEPTH / SEEN_LINES; n++) {
                const Corner from = corner_of(w, start + seen_line + n * SEEN_LINES, rows);
                const u32 at = to + ROWS * DEPTH * 2 + place(seen_line + n * SEEN_LINES, seen, SEEN);
                copy_piece(at, w, from, i, j, channel, k < depth);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int n = 0; n < STAGES - 1; n++) fetch(first + n);
    float sums[ROWS_A_WARP / 16][COLUMNS_A_WARP / 8][4] = {};
    const int row = warp % WARPS_DOWN * ROWS_A_WARP, column = warp / WARPS_DOWN * COLUMNS_A_WARP;
    const bool sums_bias = biased && blockIdx.x == 0;  // the blocks of the first columns have all of dy too
    constexpr int SHARERS = THREADS / ROWS;            // threads that add up an output's positions
    const int mine = threadIdx.x % ROWS, share = threadIdx.x / ROWS;
    float bias = 0;
    for (int step = first; step < stop; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        fetch(step + STAGES - 1);
        const u32 from = base + (step - first) % STAGES * STAGE, of_windows = from + ROWS * DEPTH * 2;
        if (sums_bias) {
            const bf16 *lines = reinterpret_cast<const bf16 *>(room + (step - first) % STAGES * STAGE);
            for (int m = share; m < DEPTH; m += SHARERS) {
                bias += widen(lines[place(m, mine / PIECE, UP) / 2 + mine % PIECE]);
            }
        }
#pragma unroll
        for (int m = 0; m < DEPTH; m += 16) {
            u32 a[ROWS_A_WARP / 16][4], b[COLUMNS_A_WARP / 16][4];
            // A matrix of 8 positions x 8 outputs comes transposed: matrices 0 and 1 are 16 outputs, 2 and 3 those of
            // the next 8 positions.
#pragma unroll
            for (int r = 0; r < ROWS_A_WARP / 16; r++) {
                const int which = (row + r * 16) / PIECE + lane / 8 % 2;
                load_matrix_transposed(a[r], from + place(m + lane / 16 * 8 + lane % 8, which, UP));
            }
#pragma unroll
            for (int c = 0; c < COLUMNS_A_WARP / 16; c++) {
                const int which = (column + c * 16) / PIECE + lane / 16;
                load_matrix_transposed(b[c], of_windows + place(m + lane % 16, which, SEEN));
            }
#pragma unroll
            for (int r = 0; r < ROWS_A_WARP / 16; r++) {
#pragma unroll
                for (int c = 0; c < COLUMNS_A_WARP / 8; c++) {
                    multiply_add(
                        sums[r][c], a[r][0], a[r][1], a[r][2], a[r][3], b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]
                    );
                }
            }
        }
    }
    const int taps = w.height * w.width;
    const i64 pitch_of_part = i64(outs) * (taps * real + (biased ? 1 : 0));
#pragma unroll
    for (int r = 0; r < ROWS_A_WARP / 16; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS_A_WARP / 8; c++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int out = top + row + r * 16 + n / 2 * 8 + lane / 4;
                const int at = left + column + c * 8 + lane % 4 * 2 + n % 2;
                const int of_tap = at / w.channels, in = at - of_tap * w.channels;
                if (out >= outs || at >= depth || in >= real) continue;
                partial[part * pitch_of_part + (i64(out) * taps + of_tap) * real + in] = sums[r][c][n];
            }
        }
    }
    if (sums_bias) {
        float *shares = reinterpret_cast<float *>(room);
        copy_wait<0>();
        __syncthreads();
        shares[threadIdx.x] = bias;
        __syncthreads();
        if (share == 0 && top + mine < outs) {
            for (int n = 1; n < SHARERS; n++) bias += shares[n * ROWS + mine];
            partial[part * pitch_of_part + i64(outs) * taps * real + top + mine] = bias;
        }
    }
}
#endif
