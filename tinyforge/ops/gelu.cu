// gelu: y = x Phi(x), by the error function or by GPT-2's tanh formula (EXACT = 1 or 0).
//
// Kernels:  gelu_fwd         y
//           gelu_bwd         dx = dy (Phi(x) + x Phi'(x)); and y again, where the caller gives room for it: the linear
//                            map that follows needs it, and x is at hand
//           gelu_fwd_bias, gelu_bwd_bias    the same of x + b, b one number a column; backward also leaves partial sums
//                            of db = sum over rows of dx, which columns.cu adds up
//
// Idea. Elementwise: one thread takes one vector of VEC elements, nothing is shared. A bias added here costs no pass
// over the product before it. gelu_bwd_bias: a warp owns 32 vectors of columns and walks over rows, two at a time,
// their sums in registers, so that dx, which it writes anyway, is not read again for db.
// Grid: a thread for each vector; gelu_bwd_bias (columns / (32 VEC), partial rows). Block: 256 threads; 32 x 8.
// Shared memory: gelu_bwd_bias, the eight warps' sums.
// Bound by memory (two arrays of traffic forward, three backward), with erf in float close to arithmetic.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#include "ops/gelu.cuh"

#define ROWS 2                    // that a thread of gelu_bwd_bias has in flight
#define RESIDENT (EXACT ? 1 : 4)  // of its blocks, on each multiprocessor; erf takes more registers

extern "C" __global__ void __launch_bounds__(256) gelu_fwd(T *y, const T *x, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A value = widen(p.v[j]);
        narrow(value * phi(value), p.v[j]);
    }
    store(y + i64(i) * VEC, p);
}

// total and width count vectors.
extern "C" __global__ void __launch_bounds__(256) gelu_fwd_bias(
    T *y, const T *x, const T *bias, u32 total, u32 width
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
    const Pack<T, VEC> b = load<VEC>(bias + (i % width) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A value = widen(p.v[j]) + widen(b.v[j]);
        narrow(value * phi(value), p.v[j]);
    }
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) gelu_bwd(T *dx, T *y, const T *dy, const T *x, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC), d = load<VEC>(dy + i64(i) * VEC);
    Pack<T, VEC> out, activated;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A value = widen(p.v[j]), share = phi(value);
        narrow(widen(d.v[j]) * (share + value * slope_of_phi(value, share)), out.v[j]);
        narrow(value * share, activated.v[j]);
    }
    store_streaming(dx + i64(i) * VEC, out);
    if (y) store(y + i64(i) * VEC, activated);
}

// partial: (gridDim.y, width). Thread (c, y) takes every eighth row of its block's share, a vector of columns.
extern "C" __global__ void __launch_bounds__(256, RESIDENT) gelu_bwd_bias(
    T *dx, T *y, A *partial, const T *dy, const T *x, const T *bias, int rows, int width
) {
    __shared__ A sums[8][32 * VEC];
    const int vector = blockIdx.x * 32 + threadIdx.x, step = gridDim.y * 8;
    Pack<A, VEC> sum = {};
    if (vector < width / VEC) {
        const Pack<T, VEC> b = load<VEC>(bias + vector * VEC);
        for (int first = blockIdx.y * 8 + threadIdx.y; first < rows; first += ROWS * step) {
            Pack<T, VEC> p[ROWS], d[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const i64 at = i64(first + k * step) * width + vector * VEC;
                if (first + k * step < rows) p[k] = load<VEC>(x + at), d[k] = load<VEC>(dy + at);
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if (first + k * step >= rows) break;
                const i64 at = i64(first + k * step) * width + vector * VEC;
                Pack<T, VEC> out, activated;
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const A value = widen(p[k].v[j]) + widen(b.v[j]), share = phi(value);
                    const A slope = widen(d[k].v[j]) * (share + value * slope_of_phi(value, share));
                    sum.v[j] += slope;
                    narrow(slope, out.v[j]);
                    narrow(value * share, activated.v[j]);
                }
                store_streaming(dx + at, out);
                if (y) store(y + at, activated);
            }
        }
    }
    store_column_sums(partial, sums, sum, width);
}
