// fp8: rows and weights rounded to e4m3 (fp8.cuh), each with the scale of its largest magnitude.
//
// Kernels:  quantise_rows       bits and scale of each row: where the kernel that made them has not rounded them itself
//           largest_scale       of the scales of all rows
//           turn_rows, turn_rows_coarse    rows in e4m3, or e5m2, by one scale, turned: their axis last
//           swiglu_bwd_turned   dgate|dup in e5m2, as they lie and turned, and h, from dh and gate|up (swiglu.cuh)
//           largest_of_weights  the largest magnitude of each block's part of each weight
//           quantise_weights    weights, straight and turned
//
// Idea. Rows: a warp takes one and keeps it in registers (rows.cuh). What is turned goes by way of shared memory, in tiles
// of DOWN rows: a thread reads 4 columns of 16 rows, a word for 4 numbers of a row, and writes 16 bytes for each column,
// so that 8 threads fill a line of 128. Weights: all of a model's by two launches, a list in memory says where they are;
// each block of the second finds the scale again from the maxima of the first.
// Grid: a warp for each row; one block; tiles; (PARTS, weights); (tiles of the largest weight, weights). Block: 32 x WARPS;
// 1,024; 256.
// Bound by memory.
//
// compile: arch=sm_90a SCALAR=bf16 VEC=1 PER=0
// compile: arch=sm_90a SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/rows.cuh"
#include "ops/fp8.cuh"
#include "ops/swiglu.cuh"

#define DOWN 128    // rows of a tile that is turned
#define ACROSS 64   // and columns
#define PITCH 17    // words of a row of it in shared memory, one more than there are numbers for
#define PARTS 32

extern "C" __global__ void quantise_rows(byte *bits, A *scales, const T *x, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    const Row in(x + at, vectors);
    A most = 0;
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) most = largest<A>(fabs(widen(p.v[j])), most);
    });
    const A scale = scale_of(warp_max(most));
    if (threadIdx.x == 0) scales[row] = scale;
    each_vector(vectors, [&](int i, int v) { store(bits + at + v * VEC, bytes_of<true>(in(i, v), 1 / scale)); });
}

extern "C" __global__ void __launch_bounds__(1024) largest_scale(float *found, const float *scales, int count) {
    __shared__ float scratch[32];
    float most = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += 1024) most = largest(scales[i], most);
    most = block_max(most, scratch);
    if (threadIdx.x == 0) *found = count ? most : 1.0f;
}

typedef Pack<T, 8> Eight;

__device__ __forceinline__ Eight eight_or_zeros(const T *from, bool there) {
    Eight found = {};
    if (there) found = load<8>(from);
    return found;
}

// Eight numbers of a row of the tile, `v` counts eights.
__device__ __forceinline__ void put(u32 (&tile)[DOWN][PITCH], int row, int v, const Pack<byte, 8> &bits) {
    const uint2 words = reinterpret_cast<const uint2 &>(bits);
    tile[row][2 * v] = words.x, tile[row][2 * v + 1] = words.y;
}

// Writes columns of the tile as lines of `to`, `pitch` bytes apart. By 128 threads, t counts them; top: the tile's first
// row; columns: how many there are.
__device__ __forceinline__ void write_turned(
    byte *to, const u32 (&tile)[DOWN][PITCH], int t, int top, int columns, int pitch
) {
    const int row = t % 8 * 16, quad = t / 8;
    if (top + row >= pitch) return;
    u32 lines[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = tile[row + 4 * i + j][quad];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            lines[c][i] = (w[0] >> 8 * c & 255) | (w[1] >> 8 * c & 255) << 8 | (w[2] >> 8 * c & 255) << 16 |
                          (w[3] >> 8 * c & 255) << 24;
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (4 * quad + c >= columns) continue;
        *reinterpret_cast<uint4 *>(to + i64(4 * quad + c) * pitch + top + row) =
            make_uint4(lines[c][0], lines[c][1], lines[c][2], lines[c][3]);
    }
}

// A tile of x, (rows, columns), times `factor`: to bits as it lies, and turned, to (columns, pitch), where what lies behind
// `rows` becomes 0. Either may be null.
template <bool FINE>
__device__ __forceinline__ void turn(
    byte *bits, byte *turned, const T *x, float factor, int across, int down, int rows, int columns, int pitch
) {
    __shared__ u32 tile[DOWN][PITCH];
    const int left = across * ACROSS, top = down * DOWN, v = threadIdx.x % 8, column = left + 8 * v;
#pragma unroll
    for (int line = threadIdx.x / 8; line < DOWN; line += 32) {
        const bool there = top + line < rows && column < columns;
        const i64 at = i64(top + line) * columns + column;
        const Pack<byte, 8> eight = bytes_of<FINE>(eight_or_zeros(x + at, there), factor);
        if (bits && there) store(bits + at, eight);
        put(tile, line, v, eight);
    }
    if (!turned) return;
    __syncthreads();
    if (threadIdx.x < 128) write_turned(turned + i64(left) * pitch, tile, threadIdx.x, top, columns - left, pitch);
}

extern "C" __global__ void __launch_bounds__(256) turn_rows(
    byte *bits, byte *turned, const T *x, const float *scale, int rows, int columns, int pitch
) {
    turn<true>(bits, turned, x, 1 / *scale, blockIdx.x, blockIdx.y, rows, columns, pitch);
}

extern "C" __global__ void __launch_bounds__(256) turn_rows_coarse(
    byte *bits, byte *turned, const T *x, const float *scale, int rows, int columns, int pitch
) {
    turn<false>(bits, turned, x, 1 / *scale, blockIdx.x, blockIdx.y, rows, columns, pitch);
}

// columns: of h. hidden: null, or room for h, which may be that of dh.
extern "C" __global__ void __launch_bounds__(256) swiglu_bwd_turned(
    byte *bits, byte *turned, T *hidden, const T *dh, const T *gu, const float *scale, int rows, int columns, int pitch
) {
    __shared__ u32 tiles[2][DOWN][PITCH];
    const int left = blockIdx.x * ACROSS, top = blockIdx.y * DOWN, v = threadIdx.x % 8, column = left + 8 * v;
    const float factor = 1 / *scale;
#pragma unroll
    for (int line = threadIdx.x / 8; line < DOWN; line += 32) {
        const bool there = top + line < rows && column < columns;
        const i64 row = top + line, at = row * columns + column, first = 2 * row * columns + column;
        const Eight gate = eight_or_zeros(gu + first, there), up = eight_or_zeros(gu + first + columns, there);
        const Eight d = eight_or_zeros(dh + at, there);
        Eight dgate, dup, h;
        swiglu_gradient(dgate, dup, h, d, gate, up);
        const Pack<byte, 8> eight = bytes_of<false>(dgate, factor), more = bytes_of<false>(dup, factor);
        if (there) {
            store(bits + first, eight);
            store(bits + first + columns, more);
            if (hidden) store(hidden + at, h);
        }
        put(tiles[0], line, v, eight);
        put(tiles[1], line, v, more);
    }
    __syncthreads();
    const int half = threadIdx.x / 128;
    write_turned(
        turned + i64(half * columns + left) * pitch, tiles[half], threadIdx.x % 128, top, columns - left, pitch
    );
}

// A weight, (rows, columns), and where its bits go; null where they are not wanted.
struct Weight {
    const T *from;
    byte *straight, *turned;
    float *scale;
    i64 rows, columns;
};

// partial: (weights, PARTS)
extern "C" __global__ void __launch_bounds__(256) largest_of_weights(float *partial, const Weight *weights) {
    __shared__ float scratch[32];
    const Weight w = weights[blockIdx.y];
    const i64 count = w.rows * w.columns;
    float most = 0;
#if VEC > 1
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < count / VEC; i += PARTS * 256) {
        const Vector p = load<VEC>(w.from + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) most = largest<A>(fabs(widen(p.v[j])), most);
    }
    for (i64 i = count / VEC * VEC + blockIdx.x * 256 + threadIdx.x; i < count; i += PARTS * 256)
#else
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < count; i += PARTS * 256)
#endif
        most = largest<A>(fabs(widen(w.from[i])), most);
    most = block_max(most, scratch);
    if (threadIdx.x == 0) partial[blockIdx.y * PARTS + blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(256) quantise_weights(const float *partial, const Weight *weights) {
    const Weight w = weights[blockIdx.y];
    const int across = ceil_div(w.columns, ACROSS);
    if (blockIdx.x >= across * ceil_div(w.rows, DOWN)) return;
    const float scale = scale_of(warp_max(partial[blockIdx.y * PARTS + threadIdx.x % 32]));
    if (blockIdx.x == 0 && threadIdx.x == 0) *w.scale = scale;
    turn<true>(w.straight, w.turned, w.from, 1 / scale, blockIdx.x % across, blockIdx.x / across, w.rows, w.columns, w.rows);
}
