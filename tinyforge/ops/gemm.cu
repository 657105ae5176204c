// gemm: a matrix product the plain way, and the end of one whose sum was cut into parts.
//
// Kernels:  gemm_naive    out = a b^T, or out += a b^T: out[r, c] = sum over k of a[r, k] b[c, k]
//           gemm_sum      out = the sum over the parts, or out += it, in their order
//
// Idea. gemm_hopper.cu is the fast sibling; both walk through the units of work of gemm.cuh. Here a block has SIDE x
// SIDE threads, and each adds up one number of a tile. The steps of the sum are adjacent in memory, or a row apart in a
// transposed factor: `step_a` and `step_b` are the distances.
// With more than one part, each part stores its sums in a plane of its own, and gemm_sum adds the planes up. The order
// of a sum depends only on the shape and the number of parts.
// Grid: any number of blocks; a thread for each VEC numbers. Block: SIDE x SIDE; 256. Bound by loads; by memory.

#include "ops/gemm.cuh"

#define SIDE 16

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void __launch_bounds__(SIDE *SIDE) gemm_naive(
    RESULT *out, A *parts, const T *a, const T *b, i64 row_a, i64 step_a, i64 row_b, i64 step_b, int rows, int columns,
    int depth, int stride, int band, int splits, int slice, int accumulate
) {
    const Tiling tiling{ceil_div(rows, SIDE), ceil_div(columns, SIDE), band, splits, ceil_div(depth, slice)};
    for (int number = blockIdx.x; number < tiling.units(); number += gridDim.x) {
        const Unit unit = tiling.unit(number);
        const int row = unit.down * SIDE + threadIdx.x / SIDE, column = unit.across * SIDE + threadIdx.x % SIDE;
        if (row >= rows || column >= columns) continue;
        A sum = 0;
        for (int k = unit.first * slice; k < min(unit.stop * slice, depth); k++) {
            sum += widen(a[row * row_a + k * step_a]) * widen(b[column * row_b + k * step_b]);
        }
        if (splits > 1) {
            parts[(i64(unit.split) * rows + row) * columns + column] = sum;
        } else {
            RESULT &to = out[i64(row) * stride + column];
            narrow(accumulate ? A(widen(to)) + sum : sum, to);
        }
    }
}

// parts: (splits, rows, columns), of which a plane has `total` vectors and a row `width`. stride: of out, in vectors.
extern "C" __global__ void __launch_bounds__(256) gemm_sum(
    RESULT *out, const A *parts, u32 total, u32 width, u32 stride, int splits, int accumulate
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    RESULT *to = out + i64(i / width * u64(stride) + i % width) * VEC;
    Pack<A, VEC> sum = load<VEC>(parts + i64(i) * VEC);
    for (int part = 1; part < splits; part++) {
        const Pack<A, VEC> next = load<VEC>(parts + (i64(part) * total + i) * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += next.v[j];
    }
    Pack<RESULT, VEC> result;
    if (accumulate) result = load<VEC>(to);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(accumulate ? A(widen(result.v[j])) + sum.v[j] : sum.v[j], result.v[j]);
    store(to, result);
}
