// columns: the second half of a sum over rows.
//
// Kernels:  add_columns    out[c] += sum over i of partial[i, c]; the columns from `width` on go to `second`, from `upto`
//                          on to `third`
//
// Idea. The gradient of a norm's gain is a sum over all tokens. The kernels that make it leave one partial sum per
// block; this one adds those in a fixed order, where atomics would add them in the order in which blocks happen to end.
// LayerNorm's two, of gain and bias, are adjacent and take one launch: at this size the cost is that of a launch. Where
// `second` or `third` is null, its columns are dropped.
// Grid: a block for 32 columns. Block: 32 x 32 threads; warp y takes rows y, y + 32, ..., then warp 0 adds the 32 sums.
// Shared memory: 32 x 33 numbers (the 33rd column keeps a column's numbers in different banks).
// Bound by latency: a megabyte or two, microseconds. So a thread has BATCH loads in flight at a time.

#include "ops/common.cuh"

typedef SCALAR A;

#define BATCH 9

extern "C" __global__ void __launch_bounds__(1024) add_columns(
    A *out, A *second, A *third, const A *partial, int count, int columns, int width, int upto
) {
    __shared__ A sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (column < columns) {
        for (int first = threadIdx.y; first < count; first += 32 * BATCH) {
            A some[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = first + 32 * k;
                some[k] = i < count ? partial[i64(i) * columns + column] : A(0);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) sum += some[k];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Transposed, each column's 32 sums are in one warp.
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    const int mine = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < columns) {
        A *const array = mine < width ? out : mine < upto ? second : third;
        if (array) array[mine < width ? mine : mine < upto ? mine - width : mine - upto] += sum;
    }
}
