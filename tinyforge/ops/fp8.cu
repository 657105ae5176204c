// fp8: rows and weights rounded to e4m3 (fp8.cuh), each with the scale of its largest magnitude.
//
// Kernels:  quantise_rows       bits and scale of each row: where the kernel that made them has not rounded them itself
//           largest_of_weights  the largest magnitude of each block's part of each weight
//           quantise_weights    weights, straight and turned
//
// Idea. Rows: a warp takes one and keeps it in registers (rows.cuh). Weights: all of a model's by two launches, a list in
// memory says where they are. A block of quantise_weights takes 64 x 64 numbers by way of shared memory, so that both
// orders are written in whole lines; each finds the scale again from the maxima of the launch before.
// Grid: a warp for each row; (PARTS, weights); (tiles of the largest weight, weights). Block: 32 x WARPS; 256; 256.
// Bound by memory.
//
// compile: arch=sm_90a SCALAR=bf16 VEC=1 PER=0
// compile: arch=sm_90a SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/rows.cuh"
#include "ops/fp8.cuh"

#define PARTS 32
#define SIDE 64

extern "C" __global__ void quantise_rows(byte *bits, A *scales, const T *x, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    const Row in(x + at, vectors);
    A most = 0;
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) most = largest(fabs(widen(p.v[j])), most);
    });
    const A scale = scale_of(warp_max(most));
    if (threadIdx.x == 0) scales[row] = scale;
    each_vector(vectors, [&](int i, int v) { store(bits + at + v * VEC, bytes_of<true>(in(i, v), 1 / scale)); });
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
        for (int j = 0; j < VEC; j++) most = largest(fabs(widen(p.v[j])), most);
    }
    for (i64 i = count / VEC * VEC + blockIdx.x * 256 + threadIdx.x; i < count; i += PARTS * 256)
#else
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < count; i += PARTS * 256)
#endif
        most = largest(fabs(widen(w.from[i])), most);
    most = block_max(most, scratch);
    if (threadIdx.x == 0) partial[blockIdx.y * PARTS + blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(256) quantise_weights(const float *partial, const Weight *weights) {
    __shared__ byte tile[SIDE][SIDE + 4];
    const Weight w = weights[blockIdx.y];
    const int across = ceil_div(w.columns, SIDE);
    if (blockIdx.x >= across * ceil_div(w.rows, SIDE)) return;
    const float scale = scale_of(warp_max(partial[blockIdx.y * PARTS + threadIdx.x % 32]));
    if (blockIdx.x == 0 && threadIdx.x == 0) *w.scale = scale;
    const int top = blockIdx.x / across * SIDE, left = blockIdx.x % across * SIDE;
    const int fast = threadIdx.x % 16 * 4, slow = threadIdx.x / 16;
    const float factor = 1 / scale;
#pragma unroll
    for (int line = slow; line < SIDE; line += 16) {
        Pack<T, 4> four = {};
        const bool there = top + line < w.rows && left + fast < w.columns;
        const i64 at = i64(top + line) * w.columns + left + fast;
        if (there) four = load<4>(w.from + at);
        const Pack<byte, 4> bits = bytes_of<true>(four, factor);
        if (there && w.straight) store(w.straight + at, bits);
        store(&tile[line][fast], bits);
    }
    if (!w.turned) return;
    __syncthreads();
#pragma unroll
    for (int line = slow; line < SIDE; line += 16) {
        if (left + line >= w.columns || top + fast >= w.rows) continue;
        const Pack<byte, 4> bits = {tile[fast][line], tile[fast + 1][line], tile[fast + 2][line], tile[fast + 3][line]};
        store(w.turned + i64(left + line) * w.rows + top + fast, bits);
    }
}
