// qk_norm_rope: y = s rope(x r), r = 1 / sqrt(mean(x^2) + eps), for each query and key head of a packed qkv.
//
// Kernels:  qk_norm_rope_fwd    y and r; in place where y is x
//           qk_norm_rope_bwd    dx = r R^T (s dy - y / s c / D), c = the sum of dy y over the head; c of the queries
//           qk_scale_bwd        partial[part, h] = the sum over a part's tokens of c / s[h]
//
// Idea. The rotation keeps lengths, so backward needs y alone, which attention keeps anyway: the sum of dy y over a head
// is the same before and after it. `lanes` lanes of a warp, a power of 2, take a head: vectors from its left half, and
// their partners from its right half, as in rope.cu. A lane's first pair of vectors, with heads of up to 512 bytes its
// only one, stays in registers. Values are not visited in place.
// Grid: `lanes` threads for each visited head of a token. Block: 256. No shared memory; qk_scale_bwd 8 numbers.
// Bound by memory: forward reads and writes q and k, backward reads two and writes one.

#include "ops/common.cuh"
#include "ops/rope.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

#define LEAST_GAIN 0x1p-50

// What head h is multiplied by: as `factors` in qk_norm_rope.py.
__device__ __forceinline__ A factor_of(const T *scale, A factor, u32 h, u32 queries) {
    if (h >= queries) return A(1);
    if (!scale) return factor;
    const A s = widen(scale[h]);
    return fabs(s) < A(LEAST_GAIN) ? A(LEAST_GAIN) : s;
}

// Over the `lanes` lanes of a head; every lane gets the result.
__device__ __forceinline__ A head_sum(A x, u32 lanes) {
    for (u32 gap = lanes / 2; gap; gap /= 2) x += __shfl_xor_sync(~0u, x, gap);
    return x;
}

// Where thread i works: a head of a token, and the lane's first vector of its left half.
struct Place {
    u32 lane, head, token;
    bool inside;
    i64 at, angle;  // of the head; of its angles

    __device__ __forceinline__ Place(u32 total, u32 positions, u32 heads, u32 visited, u32 half, u32 lanes) {
        const u32 i = blockIdx.x * 256 + threadIdx.x;
        inside = i < total;  // all lanes of a head, or none; those outside repeat the first head, and write nothing
        lane = i % lanes;
        const u32 item = inside ? i / lanes : 0;
        head = item % visited, token = item / visited;
        at = (i64(token) * heads + head) * 2 * half * VEC;
        angle = i64(token % positions) * half * VEC;
    }
};

struct Pair {
    Vector left, right;
    __device__ __forceinline__ Pair(const T *head, u32 j, u32 half)
        : left(load<VEC>(head + j * VEC)), right(load<VEC>(head + (half + j) * VEC)) {}
    __device__ __forceinline__ void put(T *head, u32 j, u32 half) const {
        store(head + j * VEC, left);
        store(head + (half + j) * VEC, right);
    }
};

__device__ __forceinline__ A products(const Pair &a, const Pair &b) {
    A sum = 0;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        sum += widen(a.left.v[k]) * widen(b.left.v[k]) + widen(a.right.v[k]) * widen(b.right.v[k]);
    }
    return sum;
}

// total: threads with work. visited: of the `heads` of a token; the first `rotated` are normalised and rotated, of which
// the first `queries` have the scale. half: vectors of half a head.
extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_fwd(
    T *y, A *rstd, const T *x, const T *scale, const A *cosines, const A *sines, A factor, A eps, u32 total,
    u32 positions, u32 heads, u32 visited, u32 rotated, u32 queries, u32 half, u32 lanes
) {
    const Place p(total, positions, heads, visited, half, lanes);
    const u32 first = p.lane < half ? p.lane : 0;
    const Pair own(x + p.at, first, half);
    A square = p.lane < half ? products(own, own) : A(0);
    for (u32 j = p.lane + lanes; j < half; j += lanes) {
        const Pair more(x + p.at, j, half);
        square += products(more, more);
    }
    const A r = A(1) / sqrt(head_sum(square, lanes) / A(2 * half * VEC) + eps);
    if (!p.inside) return;
    const bool turned = p.head < rotated;
    const A by = r * factor_of(scale, factor, p.head, queries);
    if (turned && p.lane == 0) rstd[i64(p.token) * rotated + p.head] = r;
    const auto write = [&](Pair pair, u32 j) {
        if (turned) {
            const Pack<A, VEC> c = load<VEC>(cosines + p.angle + j * VEC), s = load<VEC>(sines + p.angle + j * VEC);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const A left = by * widen(pair.left.v[k]), right = by * widen(pair.right.v[k]);
                narrow(left * c.v[k] - right * s.v[k], pair.left.v[k]);
                narrow(right * c.v[k] + left * s.v[k], pair.right.v[k]);
            }
        }
        pair.put(y + p.at, j, half);
    };
    if (p.lane < half) write(own, p.lane);
    for (u32 j = p.lane + lanes; j < half; j += lanes) write(Pair(x + p.at, j, half), j);
}

// along: c of each query head, (tokens, queries), or null. sines: negated. y: (tokens, heads, D), as dy.
extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_bwd(
    T *dx, A *along, const T *dy, const T *scale, const T *y, const A *rstd, const A *cosines, const A *sines, A factor,
    u32 total, u32 positions, u32 heads, u32 visited, u32 rotated, u32 queries, u32 half, u32 lanes
) {
    const Place p(total, positions, heads, visited, half, lanes);
    const u32 first = p.lane < half ? p.lane : 0;
    const Pair own(dy + p.at, first, half), mine(y + p.at, first, half);
    A sum = p.lane < half ? products(own, mine) : A(0);
    for (u32 j = p.lane + lanes; j < half; j += lanes) sum += products(Pair(dy + p.at, j, half), Pair(y + p.at, j, half));
    sum = head_sum(sum, lanes);
    if (!p.inside) return;
    const bool turned = p.head < rotated;
    if (along && p.head < queries && p.lane == 0) along[i64(p.token) * queries + p.head] = sum;
    const A s = factor_of(scale, factor, p.head, queries), r = turned ? rstd[i64(p.token) * rotated + p.head] : A(0);
    const A mean = sum / A(2 * half * VEC) / s;
    const auto write = [&](Pair pair, const Pair &saved, u32 j) {
        if (turned) {
            const Pack<A, VEC> c = load<VEC>(cosines + p.angle + j * VEC), t = load<VEC>(sines + p.angle + j * VEC);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const A left = r * (s * widen(pair.left.v[k]) - widen(saved.left.v[k]) * mean);
                const A right = r * (s * widen(pair.right.v[k]) - widen(saved.right.v[k]) * mean);
                narrow(left * c.v[k] - right * t.v[k], pair.left.v[k]);
                narrow(right * c.v[k] + left * t.v[k], pair.right.v[k]);
            }
        }
        pair.put(dx + p.at, j, half);
    };
    if (p.lane < half) write(own, mine, p.lane);
    for (u32 j = p.lane + lanes; j < half; j += lanes) write(Pair(dy + p.at, j, half), Pair(y + p.at, j, half), j);
}

// Grid: queries x parts. Block: 256. partial: (parts, queries).
extern "C" __global__ void __launch_bounds__(256) qk_scale_bwd(
    A *partial, const A *along, const T *scale, int tokens, int queries
) {
    __shared__ A sums[32];
    const int h = blockIdx.x;
    A sum = 0;
    for (int n = blockIdx.y * 256 + threadIdx.x; n < tokens; n += gridDim.y * 256) sum += along[i64(n) * queries + h];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) partial[i64(blockIdx.y) * queries + h] = sum / factor_of(scale, A(1), h, queries);
}
