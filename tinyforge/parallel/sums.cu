// sums: out += x, for sums of gradients whose bits must be those of NCCL and of the CPU.
//
// Kernels:  add             out[i] += x[i]
//
// Idea. Everything here is compiled with -ftz=true: a sum below 1.2e-38 would become 0. NCCL and NumPy keep it, so the
// float32 addition is spelled out in PTX, where the flag does not reach.
// Grid: a block for every 1024 elements. Block: 256 threads, each with every 256th of four.
// Bound by memory: 12 bytes an element in float32.

#include "ops/common.cuh"

typedef SCALAR T;

__device__ double added(double a, double b) { return a + b; }

__device__ float added(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

const int PER = 4;  // elements of a thread: enough loads under way to fill the memory's pipe

extern "C" __global__ void __launch_bounds__(256) add(T *out, const T *x, i64 count) {
    const i64 first = i64(blockIdx.x) * (256 * PER) + threadIdx.x;
    T a[PER], b[PER];
    #pragma unroll
    for (int k = 0; k < PER; k++) {
        const i64 i = first + 256 * k;
        if (i < count) a[k] = out[i], b[k] = x[i];
    }
    #pragma unroll
    for (int k = 0; k < PER; k++) {
        const i64 i = first + 256 * k;
        if (i < count) out[i] = added(a[k], b[k]);
    }
}
