// value_embedding: v_h += g_h E[id]_h, g = 2 s(W x), on the value heads of a packed qkv, in place.
//
// Kernels:  value_embedding_fwd    y and g
//           value_embedding_bwd    g dv, the rows whose sum by id is dE (embedding.cu), and dz = g (1 - g / 2) dv . E[id]
//           value_gate_bwd         dx += dz W, in the channels that the gate reads
//           value_gate_dweight     partial[part, h, c] = the sum over a part's tokens of dz_h x_c
//
// Idea. `lanes` lanes of a warp, a power of 2, take a value head of a token: they add up its gate, then each adds its
// vectors. The channels that the gate reads are few, and come from cache for all heads but the first.
// Grid: `lanes` threads for each value head; value_gate_bwd a thread for each token and channel; value_gate_dweight a
// block for each head and part, a thread for each of 32 channels in every eighth token. Block: 256. Shared memory: the
// last one's sums. Bound by memory: forward reads v and E's rows and writes v, backward reads both and writes a third.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

// Over the `lanes` lanes of a head; every lane gets the result.
__device__ __forceinline__ A head_sum(A x, u32 lanes) {
    for (u32 gap = lanes / 2; gap; gap /= 2) x += __shfl_xor_sync(~0u, x, gap);
    return x;
}

// total: threads with work; those outside repeat the first head, and write nothing. v: the first value head of the first
// token; pitch: numbers from token to token. dim: of a head. x: rows of `width`.
extern "C" __global__ void __launch_bounds__(256) value_embedding_fwd(
    T *v, A *gates, const T *x, const int *ids, const T *table, const T *gate, u32 total, u32 heads, u32 dim, u32 pitch,
    u32 width, u32 reads, u32 lanes
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x, lane = i % lanes, item = i < total ? i / lanes : 0;
    const u32 h = item % heads, n = item / heads;
    A z = 0;
    for (u32 c = lane; c < reads; c += lanes) z += widen(x[i64(n) * width + c]) * widen(gate[h * reads + c]);
    const A g = A(2) * sigmoid<T>(head_sum(z, lanes));
    if (i >= total) return;
    if (lane == 0) gates[item] = g;
    T *const mine = v + i64(n) * pitch + h * dim;
    const T *const row = table + (i64(ids[n]) * heads + h) * dim;
    for (u32 c = lane * VEC; c < dim; c += lanes * VEC) {
        Vector p = load<VEC>(mine + c);
        const Vector e = load<VEC>(row + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + g * widen(e.v[j]), p.v[j]);
        store(mine + c, p);
    }
}

// rows: (tokens, heads, dim), or null if nothing reads them.
extern "C" __global__ void __launch_bounds__(256) value_embedding_bwd(
    T *rows, A *dz, const T *dv, const int *ids, const T *table, const A *gates, u32 total, u32 heads, u32 dim,
    u32 pitch, u32 lanes
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x, lane = i % lanes, item = i < total ? i / lanes : 0;
    const u32 h = item % heads, n = item / heads;
    const T *const mine = dv + i64(n) * pitch + h * dim, *const row = table + (i64(ids[n]) * heads + h) * dim;
    const A g = gates[item];
    A along = 0;
    for (u32 c = lane * VEC; c < dim; c += lanes * VEC) {
        Vector p = load<VEC>(mine + c);
        const Vector e = load<VEC>(row + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            along += widen(p.v[j]) * widen(e.v[j]);
            narrow(g * widen(p.v[j]), p.v[j]);
        }
        if (rows && i < total) store(rows + i64(item) * dim + c, p);
    }
    along = head_sum(along, lanes);
    if (i < total && lane == 0) dz[item] = g * (A(1) - g / A(2)) * along;
}

extern "C" __global__ void __launch_bounds__(256) value_gate_bwd(
    T *dx, const A *dz, const T *gate, u32 total, u32 heads, u32 width, u32 reads
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 c = i % reads, n = i / reads;
    T *const mine = dx + i64(n) * width + c;
    A sum = widen(*mine);
    for (u32 h = 0; h < heads; h++) sum += dz[i64(n) * heads + h] * widen(gate[h * reads + c]);
    narrow(sum, *mine);
}

// Grid: heads x parts.
extern "C" __global__ void __launch_bounds__(256) value_gate_dweight(
    A *partial, const A *dz, const T *x, u32 tokens, u32 width, u32 reads
) {
    __shared__ A sums[8][32];
    const u32 heads = gridDim.x, h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 first = 0; first < reads; first += 32) {
        const u32 c = first + lane;
        A sum = 0;
        if (c < reads) {
#pragma unroll 4
            for (u32 n = blockIdx.y * 8 + warp; n < tokens; n += gridDim.y * 8) {
                sum += dz[i64(n) * heads + h] * widen(x[i64(n) * width + c]);
            }
        }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < reads) {
            for (int w = 1; w < 8; w++) sum += sums[w][lane];
            partial[(i64(blockIdx.y) * heads + h) * reads + c] = sum;
        }
        __syncthreads();
    }
}
