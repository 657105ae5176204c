// fp8: quantises rows and weights to FP8 (fp8.cuh), scaled by their largest magnitude.
//
// Kernels:  quantise_rows                  codes and scale of each row, if no other kernel quantises it
//           largest_scale                  the largest of all rows' scales
//           quantise_transposed(_e5m2)     rows in e4m3 (e5m2) by one scale, transposed
//           swiglu_bwd_fp8                 dgate|dup in e5m2, both as rows and transposed, and h (swiglu.cuh)
//           largest_of_weights             the largest magnitude of each block's share of each weight
//           quantise_weights               weights, both as rows and transposed
//
// Idea. A warp takes a row and keeps it in registers (rows.cuh). Transposing goes through shared memory, in tiles of
// DOWN rows: a thread reads 4 columns of 16 rows, one word for 4 numbers of a row, and writes 16 bytes for each column,
// so that 8 threads fill a line of 128 bytes. Two launches quantise all weights of a model, from a list in device
// memory: the first finds maxima of parts of each weight, and each block of the second computes the scale from them.
// Grid: a warp for each row; one block; tiles; (PARTS, weights); (tiles of the largest weight, weights). Block: 32 x
// WARPS; 1,024; 256.
// Bound by memory.

#include "ops/rows.cuh"
#include "ops/fp8.cuh"
#include "ops/swiglu.cuh"

#define DOWN 128    // rows of a tile to transpose
#define ACROSS 64   // and columns
#define PITCH 17    // words of a row of it in shared memory, one more than its numbers take
#define PARTS 32

// The largest of a block's numbers; every thread gets it. scratch: 32 numbers in shared memory.
__device__ __forceinline__ float block_max(float x, float *scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_max(scratch[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}

extern "C" __global__ void quantise_rows(byte *codes, A *scales, const T *x, int rows, int width) {
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
    each_vector(vectors, [&](int i, int v) { store(codes + at + v * VEC, bytes_of<true>(in(i, v), 1 / scale)); });
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

// Stores eight codes of a row of the tile; v: which eight.
__device__ __forceinline__ void put(u32 (&tile)[DOWN][PITCH], int row, int v, const Pack<byte, 8> &codes) {
    const uint2 words = reinterpret_cast<const uint2 &>(codes);
    tile[row][2 * v] = words.x, tile[row][2 * v + 1] = words.y;
}

// Writes the tile's columns as rows of `to`, `pitch` bytes apart, by 128 threads. t: the thread's number; top: the
// tile's first row; columns: how many are left.
__device__ __forceinline__ void write_transposed(
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

// Quantises a tile of x, (rows, columns), times `factor`: to `codes`, (rows, columns), and to `transposed`, (columns,
// pitch), padded with zeros after `rows`. Either may be null.
template <bool IS_E4M3>
__device__ __forceinline__ void transpose(
    byte *codes, byte *transposed, const T *x, float factor, int across, int down, int rows, int columns, int pitch
) {
    __shared__ u32 tile[DOWN][PITCH];
    const int left = across * ACROSS, top = down * DOWN, v = threadIdx.x % 8, column = left + 8 * v;
#pragma unroll
    for (int line = threadIdx.x / 8; line < DOWN; line += 32) {
        const bool there = top + line < rows && column < columns;
        const i64 at = i64(top + line) * columns + column;
        const Pack<byte, 8> eight = bytes_of<IS_E4M3>(eight_or_zeros(x + at, there), factor);
        if (codes && there) store(codes + at, eight);
        put(tile, line, v, eight);
    }
    if (!transposed) return;
    __syncthreads();
    if (threadIdx.x < 128) {
        write_transposed(transposed + i64(left) * pitch, tile, threadIdx.x, top, columns - left, pitch);
    }
}

extern "C" __global__ void __launch_bounds__(256) quantise_transposed(
    byte *codes, byte *transposed, const T *x, const float *scale, int rows, int columns, int pitch
) {
    transpose<true>(codes, transposed, x, 1 / *scale, blockIdx.x, blockIdx.y, rows, columns, pitch);
}

extern "C" __global__ void __launch_bounds__(256) quantise_transposed_e5m2(
    byte *codes, byte *transposed, const T *x, const float *scale, int rows, int columns, int pitch
) {
    transpose<false>(codes, transposed, x, 1 / *scale, blockIdx.x, blockIdx.y, rows, columns, pitch);
}

// columns: of h. hidden: where h goes, which may be dh's memory, or null.
extern "C" __global__ void __launch_bounds__(256) swiglu_bwd_fp8(
    byte *codes, byte *transposed, T *hidden, const T *dh, const T *gu, const float *scale, int rows, int columns,
    int pitch
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
            store(codes + first, eight);
            store(codes + first + columns, more);
            if (hidden) store(hidden + at, h);
        }
        put(tiles[0], line, v, eight);
        put(tiles[1], line, v, more);
    }
    __syncthreads();
    const int half = threadIdx.x / 128;
    write_transposed(
        transposed + i64(half * columns + left) * pitch, tiles[half], threadIdx.x % 128, top, columns - left, pitch
    );
}

// A weight, (rows, columns), and where its codes go; null if nothing reads them.
struct Weight {
    const T *from;
    byte *codes, *transposed;
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
    const u32 tile = blockIdx.x;
    transpose<true>(
        w.codes, w.transposed, w.from, 1 / scale, tile % across, tile / across, w.rows, w.columns, w.rows
    );
}
