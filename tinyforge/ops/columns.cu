// columns: the second half of a sum over rows.
//
// Kernels:  add_columns    out[c] += sum over i of partial[i, first + c]
//
// Idea. The gradient of a norm's gain is a sum over all tokens. The kernels that make it leave one partial sum per
// block; this one adds those in a fixed order, where atomics would add them in the order in which blocks happen to end.
// Grid: a block for 32 columns. Block: 32 x 32 threads; warp y takes rows y, y + 32, ..., then warp 0 adds the 32 sums.
// Shared memory: 32 x 33 numbers (the 33rd column keeps a column's numbers in different banks).
// Bound by latency: a megabyte or two, microseconds.
//
// compile: SCALAR=double|float
// spills: none

#include "ops/common.cuh"

typedef SCALAR A;

extern "C" __global__ void add_columns(const A *partial, A *out, int count, int stride, int first, int width) {
    __shared__ A sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (column < width) {
#pragma unroll 4
        for (int i = threadIdx.y; i < count; i += 32) sum += partial[i64(i) * stride + first + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Turned by 90 degrees, each column's 32 sums lie in one warp.
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    const int mine = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < width) out[mine] += sum;
}
