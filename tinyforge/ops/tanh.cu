// tanh: y = tanh x, dx = dy (1 - y^2).
//
// Kernels:  tanh_fwd, tanh_bwd
//
// Grid: a thread for each vector of VEC elements. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void __launch_bounds__(256) tanh_fwd(T *y, const T *x, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(tanh(widen(p.v[j])), p.v[j]);
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) tanh_bwd(T *dx, const T *dy, const T *y, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(dy + i64(i) * VEC);
    const Pack<T, VEC> q = load<VEC>(y + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A t = widen(q.v[j]);
        narrow(widen(p.v[j]) * (A(1) - t * t), p.v[j]);
    }
    store(dx + i64(i) * VEC, p);
}
