// class_token: y[b, 0] = c, y[b, 1 + t] = x[b, t].
//
// Kernels:  class_token_fwd     y
//           class_token_bwd     dx; and the first row of each sequence's dy, which linear.cu sums up for dc
//
// Idea. A copy that leaves room for one row. Backward stores the rows that belong to c contiguously: adding them up is
// then the same as for the bias of a linear map, in a fixed order.
// Grid: a thread for each vector of y or dy. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;

// length: rows of a sequence of y; vectors: of a row.
extern "C" __global__ void __launch_bounds__(256) class_token_fwd(
    T *y, const T *x, const T *token, u32 total, u32 length, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 column = i % vectors, row = i / vectors, t = row % length, b = row / length;
    const T *from = t ? x + (i64(row - b - 1) * vectors + column) * VEC : token + i64(column) * VEC;
    store(y + i64(i) * VEC, load<VEC>(from));
}

extern "C" __global__ void __launch_bounds__(256) class_token_bwd(
    T *dx, T *first, const T *dy, u32 total, u32 length, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 column = i % vectors, row = i / vectors, t = row % length, b = row / length;
    T *to = t ? dx + (i64(row - b - 1) * vectors + column) * VEC : first + (i64(b) * vectors + column) * VEC;
    store(to, load<VEC>(dy + i64(i) * VEC));
}
