// adamw: one optimizer step over the flat buffer of all parameters, and the norm of the gradient before it.
//
// Kernels:  square_sums     sums of squares of pieces of the gradient, a part of one for each block, in float64
//           finish_norm     the norm from the partial sums, and the factor that clips the gradient to it
//           adamw           moments, master weights and the weights as the ops read them, in one pass
//
// Idea. All parameters lie in one buffer, so a step is one launch and not one for each tensor, and every array is read
// and written once, 16 bytes a thread. Master weights, moments and gradients are in Wide<SCALAR>; the weights that the
// ops read are stored as SCALAR, rounded from the master in the same pass (a separate array for bf16 only).
// What changes from step to step is read from device memory: the learning rate and the corrections of the moments, so
// that a launch is the same in every step; and the factor that clips the gradient, so that the host does not wait. If the norm is
// not finite the factor is NaN, and so stays: that step and all after it change nothing, so that the host, which looks
// at the loss only now and then, finds the weights as they were before the step that failed.
// Sums: a block's threads stride over its piece, a fixed tree adds them, and one block adds the partial sums in order.
// Grid: adamw a thread for each 4 elements; square_sums a fixed number of blocks a piece; finish_norm one. Block: 256 threads.
// Bound by memory: bf16 30 bytes an element (read gradient, master, m, v; write master, m, v and the rounded weight).

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define VEC 4

// partial: (pieces, gridDim.x). bounds: (pieces, 2), in elements: multiples of VEC, as the buffer is padded.
extern "C" __global__ void __launch_bounds__(256) square_sums(double *partial, const A *grads, const i64 *bounds) {
    __shared__ double scratch[32];
    double sum = 0;
    const i64 first = bounds[2 * blockIdx.y] / VEC, stop = bounds[2 * blockIdx.y + 1] / VEC;
#pragma unroll 4
    for (i64 i = first + i64(blockIdx.x) * 256 + threadIdx.x; i < stop; i += i64(gridDim.x) * 256) {
        const Pack<A, VEC> g = load<VEC>(grads + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += double(g.v[j]) * double(g.v[j]);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[i64(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// state[0]: the norm. state[1]: min(1, limit / norm), or 1 where limit is 0; NaN if the norm is not finite, or if the
// factor of the step before (null: none) was NaN already.
extern "C" __global__ void finish_norm(
    double *state, const double *partial, const double *before, int count, double limit
) {
    __shared__ double scratch[32];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const double norm = sqrt(sum);
        double factor = limit > 0 && norm > limit ? limit / norm : 1.0;
        if (!isfinite(norm) || (before && isnan(*before))) factor = NAN;
        state[0] = norm;
        state[1] = factor;
    }
}

// rates: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr decay. weights: null where it is the master. CAUTIOUS: decay
// only where the update moves the weight towards 0.
extern "C" __global__ void __launch_bounds__(256) adamw(
    T *weights, A *master, A *m, A *v, const A *grads, const double *clip, const A *rates, i64 vectors, A beta1,
    A beta2, A eps
) {
    const i64 i = (i64(blockIdx.x) * 256 + threadIdx.x);
    const double factor = *clip;
    if (i >= vectors || isnan(factor)) return;
    const A scale = A(factor), rate = rates[0], root = rates[1], shrink = rates[2];
    const Pack<A, VEC> g = load<VEC>(grads + i * VEC);
    Pack<A, VEC> w = load<VEC>(master + i * VEC), m1 = load<VEC>(m + i * VEC), m2 = load<VEC>(v + i * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A d = g.v[j] * scale;
        m1.v[j] = beta1 * m1.v[j] + (A(1) - beta1) * d;
        m2.v[j] = beta2 * m2.v[j] + (A(1) - beta2) * d * d;
#if CAUTIOUS
        const A keep = m1.v[j] * w.v[j] < 0 ? A(1) : shrink;
#else
        const A keep = shrink;
#endif
        w.v[j] = w.v[j] * keep - rate * m1.v[j] / (sqrt(m2.v[j]) * root + eps);
    }
    store(m + i * VEC, m1);
    store(v + i * VEC, m2);
    store(master + i * VEC, w);
    if (weights) {
        Pack<T, VEC> rounded_weights;
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(w.v[j], rounded_weights.v[j]);
        store(weights + i * VEC, rounded_weights);
    }
}
