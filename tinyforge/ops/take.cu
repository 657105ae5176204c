// take: y[b, m] = x[b, where[b, m]], 0 where it is -1.
//
// Kernels:  take_fwd     y
//           take_bwd     dx[b, where[b, m]] = dy[b, m]; the launcher has filled dx with zeros
//
// Idea. Copies of rows. No position of a sequence is taken twice, so backward writes and adds up nothing.
// Grid: a thread for each vector of y. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;

// count: rows taken of a sequence; length: its rows; vectors: of a row.
extern "C" __global__ void __launch_bounds__(256) take_fwd(
    T *y, const T *x, const int *where, u32 total, u32 count, u32 length, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / vectors;
    const int t = where[row];
    Pack<T, VEC> p = {};
    if (t >= 0) p = load<VEC>(x + ((i64(row / count) * length + t) * vectors + i % vectors) * VEC);
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) take_bwd(
    T *dx, const T *dy, const int *where, u32 total, u32 count, u32 length, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / vectors;
    const int t = where[row];
    if (t >= 0) store(dx + ((i64(row / count) * length + t) * vectors + i % vectors) * VEC, load<VEC>(dy + i64(i) * VEC));
}
