// sums: out += x, for sums of gradients whose bits must be those of NCCL and of the CPU.
//
// Kernels:  add             out[i] += x[i]
//
// Idea. Everything here is compiled with -ftz=true: a sum below 1.2e-38 would become 0. NCCL and NumPy keep it, so the
// float32 addition is spelled out in PTX, where the flag does not reach.
// Grid: a thread for each element. Block: 256 threads.
// Bound by memory: 12 bytes an element in float32.
//
// compile: SCALAR=double|float
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;

__device__ double added(double a, double b) { return a + b; }

__device__ float added(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) add(T *out, const T *x, i64 count) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i < count) out[i] = added(out[i], x[i]);
}
