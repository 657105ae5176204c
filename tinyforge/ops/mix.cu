// mix: y = a x + b x0, with two learned numbers.
//
// Kernels:  mix_fwd    y
//           mix_bwd    dx = a dy, dx0 = b dy or dx0 += b dy, partial[block] = (the sum of dy x, of dy x0)
//
// Grid: mix_fwd a thread for each vector; mix_bwd the same up to a number of blocks that does not depend on the GPU, whose
// threads take several. Block: 256. Shared memory: 32 numbers. Bound by memory: 3 arrays, and up to 6.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

extern "C" __global__ void __launch_bounds__(256) mix_fwd(
    T *y, const T *x, const T *first, const T *a, const T *b, u32 total
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const i64 at = i64(i) * VEC;
    Vector p = load<VEC>(x + at);
    const Vector q = load<VEC>(first + at);
    const A of_x = widen(*a), of_first = widen(*b);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(of_x * widen(p.v[j]) + of_first * widen(q.v[j]), p.v[j]);
    store(y + at, p);
}

// add: whether dfirst has numbers already.
extern "C" __global__ void __launch_bounds__(256) mix_bwd(
    T *dx, T *dfirst, A *partial, const T *dy, const T *x, const T *first, const T *a, const T *b, u32 total, u32 add
) {
    __shared__ A scratch[32];
    const A of_x = widen(*a), of_first = widen(*b);
    A along_x = 0, along_first = 0;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        const i64 at = i64(i) * VEC;
        Vector d = load<VEC>(dy + at), sum = {};
        const Vector p = load<VEC>(x + at), q = load<VEC>(first + at);
        if (add) sum = load<VEC>(dfirst + at);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A slope = widen(d.v[j]);
            along_x += slope * widen(p.v[j]);
            along_first += slope * widen(q.v[j]);
            narrow((add ? widen(sum.v[j]) : A(0)) + of_first * slope, sum.v[j]);
            narrow(of_x * slope, d.v[j]);
        }
        store(dx + at, d);
        store(dfirst + at, sum);
    }
    along_x = block_sum(along_x, scratch);
    along_first = block_sum(along_first, scratch);
    if (threadIdx.x == 0) {
        partial[2 * blockIdx.x] = along_x;
        partial[2 * blockIdx.x + 1] = along_first;
    }
}
