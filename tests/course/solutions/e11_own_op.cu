// Squared ReLU, backward: dx = 2 dy max(x, 0). Arithmetic is done in A, which is float for bf16.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void __launch_bounds__(256) squared_relu_bwd(T *dx, const T *dy, const T *x, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const A r = widen(x[i]);
    narrow(A(2) * widen(dy[i]) * (r < A(0) ? A(0) : r), dx[i]);
}
