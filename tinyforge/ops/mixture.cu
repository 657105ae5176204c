// mixture: rows sorted by expert, SwiGLU with a weight for each row, and the rows of a token added up again.
//
// Kernels:  sort_count             counts[e, b]: slots of block b that chose expert e
//           sort_scan              counts becomes, in place, where each (e, b) begins among all rows; starts, by expert
//           sort_place             slots, tokens, places: a stable counting sort
//           weighted_swiglu_fwd    h_r = w_r silu(gate_r) up_r
//           weighted_swiglu_bwd    dgu, h again, and dw_r = dh_r . silu(gate_r) up_r
//           sum_of_rows            y_n = the sum of token n's rows, and of a row more
//
// Idea of the sort. An expert is a digit, so one pass of a radix sort is enough: count by block, scan the counts in
// the order (expert, block), and put each slot where its block begins plus its rank in the block. Ranks come from a
// vote of the warp and counts of the warps before it; nothing depends on which block ends first, and no count leaves
// the device.
// Grid: sort_count and sort_place a thread for each slot, sort_scan one block; the others a warp for each row. Block:
// SLOTS, 1024, 32 x 8. Shared memory: counts by expert, and by warp in sort_place. Bound by latency, the others by
// memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

#define SLOTS 256  // of a block of the sort

extern __shared__ int shelf[];  // sort_count: (experts); sort_place: (warps, experts)

extern "C" __global__ void __launch_bounds__(SLOTS) sort_count(int *counts, const int *chosen, int rows, int experts) {
    const int slot = blockIdx.x * SLOTS + threadIdx.x;
    for (int e = threadIdx.x; e < experts; e += SLOTS) shelf[e] = 0;
    __syncthreads();
    if (slot < rows) atomicAdd(shelf + chosen[slot], 1);  // of whole numbers: the order does not matter
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += SLOTS) counts[i64(e) * gridDim.x + blockIdx.x] = shelf[e];
}

// One block. parts: the blocks of the other two.
extern "C" __global__ void __launch_bounds__(1024) sort_scan(int *counts, int *starts, int parts, int experts) {
    __shared__ int sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, total = parts * experts;
    int before = 0;
    for (int first = 0; first < total; first += 1024) {
        const int i = first + threadIdx.x;
        const int mine = i < total ? counts[i] : 0, left = sum_before(mine);
        if (lane == 31) sums[warp] = left + mine;
        __syncthreads();
        if (warp == 0) sums[lane] = sum_before(sums[lane]) + sums[lane];
        __syncthreads();
        const int at = before + (warp ? sums[warp - 1] : 0) + left;
        if (i < total) {
            counts[i] = at;
            if (i % parts == 0) starts[i / parts] = at;
        }
        before += sums[31];
        __syncthreads();
    }
    if (threadIdx.x == 0) starts[experts] = before;
}

extern "C" __global__ void __launch_bounds__(SLOTS) sort_place(
    int *slots, int *tokens, int *places, const int *counts, const int *chosen, int rows, int experts, int active
) {
    const int slot = blockIdx.x * SLOTS + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < SLOTS / 32 * experts; i += SLOTS) shelf[i] = 0;
    __syncthreads();
    const int expert = slot < rows ? chosen[slot] : -1;
    const u32 same = __match_any_sync(~0u, expert), earlier = same & ((1u << lane) - 1);
    if (expert >= 0 && earlier == 0) shelf[warp * experts + expert] = __popc(same);
    __syncthreads();
    if (expert < 0) return;
    int row = counts[i64(expert) * gridDim.x + blockIdx.x] + __popc(earlier);
    for (int w = 0; w < warp; w++) row += shelf[w * experts + expert];
    slots[row] = slot;
    tokens[row] = slot / active;
    places[slot] = row;
}

extern "C" __global__ void __launch_bounds__(256) weighted_swiglu_fwd(
    T *hidden, const T *gu, const A *weights, const int *slots, int rows, int half
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const A weight = weights[slots[row]];
    const T *gate = gu + i64(row) * 2 * half, *up = gate + half;
    for (int c = threadIdx.x * VEC; c < half; c += 32 * VEC) {
        const Vector g = load<VEC>(gate + c), u = load<VEC>(up + c);
        Vector out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A x = widen(g.v[j]);
            narrow(weight * x * sigmoid<T>(x) * widen(u.v[j]), out.v[j]);
        }
        store(hidden + i64(row) * half + c, out);
    }
}

extern "C" __global__ void __launch_bounds__(256) weighted_swiglu_bwd(
    T *dgu, T *hidden, A *dweights, const T *dh, const T *gu, const A *weights, const int *slots, int rows, int half
) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const int slot = slots[row];
    const A weight = weights[slot];
    const i64 at = i64(row) * half;
    A along = 0;
    for (int c = threadIdx.x * VEC; c < half; c += 32 * VEC) {
        const Vector g = load<VEC>(gu + 2 * at + c), u = load<VEC>(gu + 2 * at + half + c), d = load<VEC>(dh + at + c);
        Vector dgate, dup, out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A x = widen(g.v[j]), s = sigmoid<T>(x), silu = x * s, y = silu * widen(u.v[j]);
            const A upstream = weight * widen(d.v[j]);
            along += widen(d.v[j]) * y;
            narrow(upstream * widen(u.v[j]) * silu_slope(x, s), dgate.v[j]);
            narrow(upstream * silu, dup.v[j]);
            narrow(weight * y, out.v[j]);
        }
        store(dgu + 2 * at + c, dgate);
        store(dgu + 2 * at + half + c, dup);
        store(hidden + at + c, out);
    }
    along = warp_sum(along);
    if (threadIdx.x == 0) dweights[slot] = along;
}

// more: (tokens, width), or null.
extern "C" __global__ void __launch_bounds__(256) sum_of_rows(
    T *y, const T *rows, const int *places, const T *more, int tokens, int width, int active
) {
    const int n = blockIdx.x * 8 + threadIdx.y;
    if (n >= tokens) return;
    const int *mine = places + i64(n) * active;
    for (int c = threadIdx.x * VEC; c < width; c += 32 * VEC) {
        A sum[VEC] = {};
        for (int j = 0; j < active; j++) {
            const Vector p = load<VEC>(rows + i64(mine[j]) * width + c);
#pragma unroll
            for (int i = 0; i < VEC; i++) sum[i] += widen(p.v[i]);
        }
        Vector out = {};
        if (more) out = load<VEC>(more + i64(n) * width + c);
#pragma unroll
        for (int i = 0; i < VEC; i++) narrow(sum[i] + (more ? widen(out.v[i]) : A(0)), out.v[i]);
        store(y + i64(n) * width + c, out);
    }
}
