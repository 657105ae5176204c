// mixture_biased: what experts with biases and a clamped SwiGLU add to mixture.cu.
//
// Kernels:  clamped_fwd        h_r = w_r c s(1.702 c) (1 + u), c and u clamped, of gu_r + bias_e: g and u in turn
//           clamped_bwd        dgu, h again, and dw_r = dh_r . (h_r / w_r)
//           expert_bias_fwd    rows_r += w_r bias_e
//           expert_bias_bwd    dw_r += dy_n . bias_e
//           sum_by_expert      dbias_e += the sum of its rows, each times its weight
//
// Grid: a warp for each row, which finds its expert by bisection; sum_by_expert a thread for each column of an expert,
// which adds its rows in order. Block: 32 x 8, sum_by_expert 256. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, 2> Pair;

#define ALPHA A(1.702)

// The last expert that begins at or before the row.
__device__ __forceinline__ int expert_of(const int *starts, int experts, int row) {
    int low = 0, high = experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256) clamped_fwd(
    T *hidden, const T *gu, const T *bias, const A *weights, const int *slots, const int *starts, A limit, int rows,
    int half, int experts
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const A weight = weights[slots[row]];
    const T *mine = gu + i64(row) * 2 * half, *added = bias + i64(expert_of(starts, experts, row)) * 2 * half;
    for (int c = threadIdx.x; c < half; c += 32) {
        const Pair p = load<2>(mine + 2 * c), b = load<2>(added + 2 * c);
        const A g = min(widen(p.v[0]) + widen(b.v[0]), limit);
        const A u = min(max(widen(p.v[1]) + widen(b.v[1]), -limit), limit);
        narrow(weight * g * sigmoid<T>(ALPHA * g) * (u + A(1)), hidden[i64(row) * half + c]);
    }
}

extern "C" __global__ void __launch_bounds__(256) clamped_bwd(
    T *dgu, T *hidden, A *dweights, const T *dh, const T *gu, const T *bias, const A *weights, const int *slots,
    const int *starts, A limit, int rows, int half, int experts
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const int slot = slots[row];
    const A weight = weights[slot];
    const i64 at = i64(row) * half;
    const T *added = bias + i64(expert_of(starts, experts, row)) * 2 * half;
    A along = 0;
    for (int c = threadIdx.x; c < half; c += 32) {
        const Pair p = load<2>(gu + 2 * (at + c)), b = load<2>(added + 2 * c);
        const A gate = widen(p.v[0]) + widen(b.v[0]), up = widen(p.v[1]) + widen(b.v[1]);
        const A g = min(gate, limit), u = min(max(up, -limit), limit) + A(1);
        const A s = sigmoid<T>(ALPHA * g), glu = g * s, d = widen(dh[at + c]), upstream = weight * d;
        Pair out;
        narrow(gate <= limit ? upstream * u * (s + ALPHA * glu * (A(1) - s)) : A(0), out.v[0]);
        narrow(up <= limit && up >= -limit ? upstream * glu : A(0), out.v[1]);
        store(dgu + 2 * (at + c), out);
        along += d * glu * u;
        narrow(weight * glu * u, hidden[at + c]);
    }
    along = warp_sum(along);
    if (threadIdx.x == 0) dweights[slot] = along;
}

extern "C" __global__ void __launch_bounds__(256) expert_bias_fwd(
    T *to, const T *bias, const A *weights, const int *slots, const int *starts, int rows, int width, int experts
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const A weight = weights[slots[row]];
    T *mine = to + i64(row) * width;
    const T *added = bias + i64(expert_of(starts, experts, row)) * width;
    for (int c = threadIdx.x; c < width; c += 32) narrow(widen(mine[c]) + weight * widen(added[c]), mine[c]);
}

extern "C" __global__ void __launch_bounds__(256) expert_bias_bwd(
    A *dweights, const T *dy, const T *bias, const int *slots, const int *tokens, const int *starts, int rows, int width,
    int experts
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const T *d = dy + i64(tokens[row]) * width, *added = bias + i64(expert_of(starts, experts, row)) * width;
    A along = 0;
    for (int c = threadIdx.x; c < width; c += 32) along += widen(d[c]) * widen(added[c]);
    along = warp_sum(along);
    if (threadIdx.x == 0) dweights[slots[row]] += along;
}

// tokens, weights: or null.
extern "C" __global__ void __launch_bounds__(256) sum_by_expert(
    A *dbias, const T *x, const int *tokens, const A *weights, const int *slots, const int *starts, int width
) {
    const int c = blockIdx.x * 256 + threadIdx.x, e = blockIdx.y;
    if (c >= width) return;
    A sum = 0;
    for (int row = starts[e]; row < starts[e + 1]; row++) {
        const A value = widen(x[i64(tokens ? tokens[row] : row) * width + c]);
        sum += weights ? weights[slots[row]] * value : value;
    }
    dbias[i64(e) * width + c] += sum;
}
