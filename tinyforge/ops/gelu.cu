// gelu: y = x Phi(x), by the error function or by GPT-2's tanh formula (EXACT = 1 or 0).
//
// Kernels:  gelu_fwd     y
//           gelu_bwd     dx = dy (Phi(x) + x Phi'(x)); and y again, where the caller gives room for it: the linear map
//                        that follows needs it, and x is at hand
//
// Idea. Elementwise: one thread takes one vector of VEC elements, nothing is shared.
// Grid: a thread for each vector. Block: 256 threads. No shared memory.
// Bound by memory (two arrays of traffic forward, three backward), with erf in float close to arithmetic.
//
// compile: SCALAR=double VEC=1|2 EXACT=0|1
// compile: SCALAR=float VEC=1|4 EXACT=0|1
// compile: SCALAR=bf16 VEC=1|8 EXACT=0|1
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define SQRT_2_OVER_PI A(0.7978845608028654)
#define CUBIC A(0.044715)

__device__ __forceinline__ A phi(A x) {
#if EXACT
    return A(0.5) * (A(1) + erf(x * A(0.7071067811865476)));
#else
    // (1 + tanh u) / 2 = 1 / (1 + exp(-2u)): an exponential and a quotient, which bf16 has from the hardware.
    return inverse_for<T>(A(1) + exp_for<T>(A(-2) * SQRT_2_OVER_PI * (x + CUBIC * x * x * x)));
#endif
}

__device__ __forceinline__ A slope_of_phi(A x, A p) {
#if EXACT
    return exp(A(-0.5) * x * x) * (A(0.5) * SQRT_2_OVER_PI);
#else
    // Phi = (1 + tanh u) / 2, and 1 - tanh^2 u = 4 Phi (1 - Phi)
    return A(2) * p * (A(1) - p) * SQRT_2_OVER_PI * (A(1) + A(3) * CUBIC * x * x);
#endif
}

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
