// softmax: y = exp(x - max x) / sum exp(x - max x) over a row; dx = y (dy - sum dy y).
//
// Kernels:  softmax_fwd, softmax_bwd
//
// Idea. A warp takes a row and keeps it in registers (rows.cuh): the maximum, the sum and the quotient need three
// passes, of which only the first and last touch memory. The exponential is computed twice, which takes less time
// than memory does: keeping it would take twice the registers in bf16.
// Grid: a warp for each row. Block: 32 x 8 threads. No shared memory. Bound by memory: two rows of traffic forward,
// three backward.

#include "ops/rows.cuh"

extern "C" __global__ void softmax_fwd(T *y, const T *x, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    const Row in(x + at, vectors);
    A top = -INFINITY, sum = 0;
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) top = largest(top, widen(p.v[j]));
    });
    top = warp_max(top);
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += exp_for<T>(widen(p.v[j]) - top);
    });
    const A scale = A(1) / warp_sum(sum);
    each_vector(vectors, [&](int i, int v) {
        Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(exp_for<T>(widen(p.v[j]) - top) * scale, p.v[j]);
        store(y + at + v * VEC, p);
    });
}

extern "C" __global__ void softmax_bwd(T *dx, const T *dy, const T *y, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    const Row up(dy + at, vectors), share(y + at, vectors);
    A along = 0;
    each_vector(vectors, [&](int i, int v) {
        const Vector d = up(i, v), p = share(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) along += widen(d.v[j]) * widen(p.v[j]);
    });
    along = warp_sum(along);
    each_vector(vectors, [&](int i, int v) {
        const Vector d = up(i, v), p = share(i, v);
        Vector out;
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) * (widen(d.v[j]) - along), out.v[j]);
        store(dx + at + v * VEC, out);
    });
}
