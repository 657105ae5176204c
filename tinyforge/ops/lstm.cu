// lstm: one position of c[t] = f c[t-1] + i g, h[t] = o tanh(c[t]), elementwise, between two matrix products.
//
// Kernels:  lstm_step_fwd      the gates act; h and c move on
//           lstm_step_bwd      the gradients of the gates' sums at a position, and of c before it
//           lstm_fwd_naive, lstm_bwd_naive     all positions of a row by one thread: read them first; tests compare
//
// Idea. The inputs' part of the gates is one product over all positions, computed before. What is left for a position
// is the product of h[t-1] with the recurrent weights, which cuBLAS adds to the gates in place, and this kernel. Time
// is sequential: two launches for each position and direction, which dominate the cost of small layers.
// Grid: a thread for each number of h. Block: 128 threads. No shared memory.
// Bound by the latency of launches for few rows, by the products for many.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

__device__ __forceinline__ A sigmoid(A x) { return A(1) / (A(1) + exp(-x)); }

// Whether the state before position t of a row is kept: 1, or 0 where a text begins.
__device__ __forceinline__ A stays(const int *fresh, int row, int t, int length) {
    return fresh && t < length && fresh[i64(row) * length + t] ? A(0) : A(1);
}

// gates: (B, T, 4 H), sums in, activations out. c: (B, H), before position t, and after it as position t + 1 sees it; h
// likewise, out alone.
extern "C" __global__ void __launch_bounds__(128) lstm_step_fwd(
    T *y, T *cells, T *h, T *gates, A *c, const int *fresh, int t, int rows, int length, int width
) {
    const int n = blockIdx.x * 128 + threadIdx.x, row = n / width, j = n % width;
    if (row >= rows) return;
    const i64 at = i64(row) * length + t;
    T *now = gates + at * 4 * width + j;
    const A i = sigmoid(widen(now[0])), f = sigmoid(widen(now[width]));
    const A g = tanh(widen(now[2 * width])), o = sigmoid(widen(now[3 * width]));
    const A cell = f * c[n] + i * g, out = o * tanh(cell), kept = stays(fresh, row, t + 1, length);
    narrow(i, now[0]), narrow(f, now[width]), narrow(g, now[2 * width]), narrow(o, now[3 * width]);
    narrow(cell, cells[at * width + j]);
    narrow(out, y[at * width + j]);
    c[n] = cell * kept;
    narrow(out * kept, h[n]);
}

// dh: (B, H), what h[t] gets from position t + 1. dc: (B, H), what c[t] gets from there; then what c[t-1] gets from
// here. first: c before the first position.
extern "C" __global__ void __launch_bounds__(128) lstm_step_bwd(
    T *dgates, A *dc, const T *dy, const A *dh, const T *gates, const T *cells, const T *first, const int *fresh, int t,
    int rows, int length, int width
) {
    const int n = blockIdx.x * 128 + threadIdx.x, row = n / width, j = n % width;
    if (row >= rows) return;
    const i64 at = i64(row) * length + t;
    const T *now = gates + at * 4 * width + j;
    const A i = widen(now[0]), f = widen(now[width]), g = widen(now[2 * width]), o = widen(now[3 * width]);
    const A kept = stays(fresh, row, t + 1, length), squashed = tanh(widen(cells[at * width + j]));
    const A up = widen(dy[at * width + j]) + dh[n] * kept;
    const A cell = dc[n] * kept + up * o * (A(1) - squashed * squashed);
    const A last = widen(t ? cells[(at - 1) * width + j] : first[n]) * stays(fresh, row, t, length);
    T *to = dgates + at * 4 * width + j;
    narrow(cell * g * i * (A(1) - i), to[0]);
    narrow(cell * last * f * (A(1) - f), to[width]);
    narrow(cell * i * (A(1) - g * g), to[2 * width]);
    narrow(up * squashed * o * (A(1) - o), to[3 * width]);
    dc[n] = cell * f;
}

// A thread for each row. scratch: (B, 2, H), of h and c.
extern "C" __global__ void lstm_fwd_naive(
    T *y, T *cells, A *scratch, T *gates, const T *h, const T *c, const T *weight, const int *fresh, int rows,
    int length, int width
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    A *hs = scratch + i64(row) * 2 * width, *cs = hs + width;
    for (int j = 0; j < width; j++) hs[j] = widen(h[row * width + j]), cs[j] = widen(c[row * width + j]);
    for (int t = 0; t < length; t++) {
        const i64 at = i64(row) * length + t;
        const A kept = stays(fresh, row, t, length);
        for (int k = 0; k < 4 * width; k++) {
            A sum = widen(gates[at * 4 * width + k]);
            for (int j = 0; j < width; j++) sum += widen(weight[i64(k) * width + j]) * hs[j] * kept;
            narrow(k / width == 2 ? tanh(sum) : sigmoid(sum), gates[at * 4 * width + k]);
        }
        for (int j = 0; j < width; j++) {
            const T *now = gates + at * 4 * width + j;
            cs[j] = widen(now[width]) * cs[j] * kept + widen(now[0]) * widen(now[2 * width]);
            hs[j] = widen(now[3 * width]) * tanh(cs[j]);
            narrow(cs[j], cells[at * width + j]);
            narrow(hs[j], y[at * width + j]);
        }
    }
}

// A thread for each row. dh, dc: (B, H), of the state before the first position; dc holds that of the last cell before.
extern "C" __global__ void lstm_bwd_naive(
    T *dgates, A *dh, A *dc, const T *dy, const T *gates, const T *cells, const T *c, const T *weight, const int *fresh,
    int rows, int length, int width
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    A *dhs = dh + i64(row) * width, *dcs = dc + i64(row) * width;
    for (int j = 0; j < width; j++) dhs[j] = 0;
    for (int t = length - 1; t >= 0; t--) {
        const i64 at = i64(row) * length + t;
        const A kept = stays(fresh, row, t, length);
        for (int j = 0; j < width; j++) {
            const T *now = gates + at * 4 * width + j;
            const A i = widen(now[0]), f = widen(now[width]), g = widen(now[2 * width]), o = widen(now[3 * width]);
            const A squashed = tanh(widen(cells[at * width + j])), up = widen(dy[at * width + j]) + dhs[j];
            const A last = widen(t ? cells[(at - 1) * width + j] : c[row * width + j]) * kept;
            dcs[j] += up * o * (A(1) - squashed * squashed);
            T *to = dgates + at * 4 * width + j;
            narrow(dcs[j] * g * i * (A(1) - i), to[0]);
            narrow(dcs[j] * last * f * (A(1) - f), to[width]);
            narrow(dcs[j] * i * (A(1) - g * g), to[2 * width]);
            narrow(up * squashed * o * (A(1) - o), to[3 * width]);
            dcs[j] *= f * kept;
        }
        for (int j = 0; j < width; j++) {
            A sum = 0;
            for (int k = 0; k < 4 * width; k++) {
                sum += widen(dgates[at * 4 * width + k]) * widen(weight[i64(k) * width + j]);
            }
            dhs[j] = sum * kept;
        }
    }
}
