// swiglu: y = silu(g) u, by the formulas of swiglu.cuh.
//
// Kernels:  swiglu_fwd     y from gate and up, the two halves of a row
//           swiglu_bwd     dgate and dup from dy, gate and up; s is recomputed, not kept. Also recomputes y, where
//                          the caller passes an array for it, which may be that of dy: the linear map that follows
//                          needs it, and gate and up are in registers
//
// Idea. One thread takes one vector of VEC elements: of the gate, and of up at the same place in the other half.
// Nothing is shared between threads. Grid: a thread for each vector of y. Block: 256 threads. No shared memory.
// Bound by memory: 3 halves of a row of traffic forward, 5 backward; the exponential and the quotient of each element
// are the hardware's approximations for bf16.
//
// Tried, backward, on an H200 (2048 wide, 16,384 rows, bf16; a copy of 2 GiB moves 4,280 GB/s). Ordinary stores of 16
// bytes: 111 us, 3,020 GB/s, the same without any exponential, so it was not arithmetic. Streaming stores: 81 us, 4,130
// GB/s. Accesses of 8 bytes: 80 us. Fewer blocks that walk over many vectors: 115 us.

#include "ops/common.cuh"
#include "ops/swiglu.cuh"

typedef SCALAR T;

extern "C" __global__ void __launch_bounds__(256) swiglu_fwd(T *y, const T *gu, u32 total, u32 half) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / half;  // total and half count vectors
    const T *at = gu + (i64(i) + i64(row) * half) * VEC;
    const Pack<T, VEC> gate = load<VEC>(at), up = load<VEC>(at + i64(half) * VEC);
    store(y + i64(i) * VEC, swiglu(gate, up));
}

extern "C" __global__ void __launch_bounds__(256) swiglu_bwd(
    T *dgu, T *y, const T *dy, const T *gu, u32 total, u32 half
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / half;
    const i64 at = (i64(i) + i64(row) * half) * VEC, beside = at + i64(half) * VEC;
    const Pack<T, VEC> gate = load<VEC>(gu + at), up = load<VEC>(gu + beside), d = load<VEC>(dy + i64(i) * VEC);
    Pack<T, VEC> dgate, dup, out;
    swiglu_gradient(dgate, dup, out, d, gate, up);
    store_streaming(dgu + at, dgate);
    store_streaming(dgu + beside, dup);
    if (y) store(y + i64(i) * VEC, out);
}
