// linear: what a bias adds to the matrix products of cuBLAS.
//
// Kernels:  linear_fwd_bias    y[n, o] = b[o]: the matrix product is then added to it
//           linear_bwd_bias    partial sums of db[o] += sum over n of dy[n, o]; columns.cu adds them up
//
// Idea. Forward, cuBLASLt adds the bias to the product (backends/cublaslt.py) where it has an algorithm for the case;
// in float64 it has none. Then y = b first and y += x W^T, not the other way round: cuBLAS adds in float32, so that in
// bf16 the sum is rounded once. That writes and reads y one more time.
// Backward: block (c, p) sums 32 vectors of columns over every P-th share of the rows; the order of the sum does not
// depend on which block ends first.
// Grid: forward a thread for each vector of y; backward (columns / (32 VEC), partial rows). Block: 256; 32 x 8.
// Shared memory: backward, the eight warps' sums. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

// total and width count vectors.
extern "C" __global__ void __launch_bounds__(256) linear_fwd_bias(T *y, const T *bias, u32 total, u32 width) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    store(y + i64(i) * VEC, load<VEC>(bias + (i % width) * VEC));
}

// Thread (c, y) adds every eighth row of its block's share, a vector of columns.
extern "C" __global__ void __launch_bounds__(256) linear_bwd_bias(A *partial, const T *dy, int rows, int width) {
    __shared__ A sums[8][32 * VEC];
    const int vector = blockIdx.x * 32 + threadIdx.x;
    Pack<A, VEC> sum = {};
    if (vector < width / VEC) {
#pragma unroll 4
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const Pack<T, VEC> p = load<VEC>(dy + i64(row) * width + vector * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) sum.v[j] += widen(p.v[j]);
        }
    }
    store_column_sums(partial, sums, sum, width);
}
