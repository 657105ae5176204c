// activations: elementwise functions and their gradients.
//
// Kernels:  relu_fwd, relu_bwd          y = max(x, 0)       dx = dy where y > 0, else 0
//           relu2_fwd, relu2_bwd        y = max(x, 0)^2     dx = 2 dy max(x, 0)
//           sigmoid_fwd, sigmoid_bwd    y = s(x)            dx = dy y (1 - y)
//           silu_fwd, silu_bwd          y = x s(x)          dx = dy s (1 + x (1 - s))
//           tanh_fwd, tanh_bwd          y = tanh x          dx = dy (1 - y^2)
//
// Grid: a thread for each vector of VEC elements. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

template <class F>
__device__ __forceinline__ void each(T *y, const T *x, u32 total, F function) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(function(widen(p.v[j])), p.v[j]);
    store(y + i64(i) * VEC, p);
}

template <class F>
__device__ __forceinline__ void each_two(T *dx, const T *dy, const T *saved, u32 total, F function) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(dy + i64(i) * VEC);
    const Pack<T, VEC> q = load<VEC>(saved + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(function(widen(p.v[j]), widen(q.v[j])), p.v[j]);
    store(dx + i64(i) * VEC, p);
}

// Written so that a NaN stays one.
extern "C" __global__ void __launch_bounds__(256) relu_fwd(T *y, const T *x, u32 total) {
    each(y, x, total, [](A v) { return v < A(0) ? A(0) : v; });
}

extern "C" __global__ void __launch_bounds__(256) relu_bwd(T *dx, const T *dy, const T *y, u32 total) {
    each_two(dx, dy, y, total, [](A d, A v) { return v > A(0) ? d : A(0); });
}

extern "C" __global__ void __launch_bounds__(256) relu2_fwd(T *y, const T *x, u32 total) {
    each(y, x, total, [](A v) { return v < A(0) ? A(0) : v * v; });
}

extern "C" __global__ void __launch_bounds__(256) relu2_bwd(T *dx, const T *dy, const T *x, u32 total) {
    each_two(dx, dy, x, total, [](A d, A v) { return v < A(0) ? A(0) : A(2) * d * v; });
}

extern "C" __global__ void __launch_bounds__(256) sigmoid_fwd(T *y, const T *x, u32 total) {
    each(y, x, total, [](A v) { return sigmoid<T>(v); });
}

extern "C" __global__ void __launch_bounds__(256) sigmoid_bwd(T *dx, const T *dy, const T *y, u32 total) {
    each_two(dx, dy, y, total, [](A d, A v) { return d * v * (A(1) - v); });
}

extern "C" __global__ void __launch_bounds__(256) silu_fwd(T *y, const T *x, u32 total) {
    each(y, x, total, [](A v) { return v * sigmoid<T>(v); });
}

extern "C" __global__ void __launch_bounds__(256) silu_bwd(T *dx, const T *dy, const T *x, u32 total) {
    each_two(dx, dy, x, total, [](A d, A v) { return d * silu_slope(v, sigmoid<T>(v)); });
}

extern "C" __global__ void __launch_bounds__(256) tanh_fwd(T *y, const T *x, u32 total) {
    each(y, x, total, [](A v) { return tanh(v); });
}

extern "C" __global__ void __launch_bounds__(256) tanh_bwd(T *dx, const T *dy, const T *y, u32 total) {
    each_two(dx, dy, y, total, [](A d, A v) { return d * (A(1) - v * v); });
}
