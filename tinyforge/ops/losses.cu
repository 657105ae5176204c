// losses: the mean over each row of a loss of x and its target t.
//
// Kernels:  mse_fwd, mse_bwd    (x - t)^2                                     dx = 2 dy (x - t) / n,   dt = -dx
//           binary_cross_entropy_fwd, binary_cross_entropy_bwd
//                               max(x, 0) - x t + log(1 + exp(-|x|))          dx = dy (s(x) - t) / n,  dt = -dy x / n
//
// Idea. Forward a block takes a row: each thread adds every 256th number, then the block adds its threads' sums in a
// fixed order. Backward is elementwise, with dy of the row. Grid: forward a block for each row, backward a thread for
// each number. Block: 256 threads. Shared memory: forward, the warps' sums. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

template <class F>
__device__ __forceinline__ void row_mean(A *y, const T *x, const T *target, int width, F loss) {
    __shared__ A scratch[32];
    const i64 start = i64(blockIdx.x) * width;
    A sum = 0;
    for (int i = threadIdx.x; i < width; i += 256) sum += loss(widen(x[start + i]), widen(target[start + i]));
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[blockIdx.x] = sum / A(width);
}

extern "C" __global__ void __launch_bounds__(256) mse_fwd(A *y, const T *x, const T *target, int width) {
    row_mean(y, x, target, width, [](A v, A t) { return (v - t) * (v - t); });
}

extern "C" __global__ void __launch_bounds__(256) mse_bwd(
    T *dx, T *dtarget, const A *dy, const T *x, const T *target, u32 total, u32 width
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const A d = A(2) * dy[i / width] * (widen(x[i]) - widen(target[i])) / A(width);
    narrow(d, dx[i]);
    narrow(-d, dtarget[i]);
}

extern "C" __global__ void __launch_bounds__(256) binary_cross_entropy_fwd(
    A *y, const T *x, const T *target, int width
) {
    row_mean(y, x, target, width, [](A v, A t) {
        return (v < A(0) ? A(0) : v) - v * t + log1p(exp(v < A(0) ? v : -v));
    });
}

extern "C" __global__ void __launch_bounds__(256) binary_cross_entropy_bwd(
    T *dx, T *dtarget, const A *dy, const T *x, const T *target, u32 total, u32 width
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const A v = widen(x[i]), scale = dy[i / width] / A(width);
    narrow(scale * (sigmoid<T>(v) - widen(target[i])), dx[i]);
    narrow(-scale * v, dtarget[i]);
}
