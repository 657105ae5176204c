// groupnorm: z = w xhat + b, xhat = (v - mean(v)) r, r = 1 / sqrt(var(v) + eps), v = x + shift (SHIFT = 1) or x, the
// mean over the positions and the channels of a group; y = z, or z s(z) (SILU = 1).
//
// Kernels:  groupnorm_fwd    y, mean and r
//           groupnorm_bwd    dx; a row of partial sums of dw and db for each image; with SHIFT dshift
//
// Idea. A block takes a group of an image: it is read two or three times, and after the first time from the L1 cache,
// as 784 positions of 16 channels in bf16 are 25 KB. A thread keeps to one vector of channels and walks over positions,
// so that sums for a channel are sums over threads, by shuffles where the vectors of a group are a power of two. The
// variance is taken of v - mean(v): E[v^2] - E[v]^2 loses all digits where the mean is large.
//   dz = dy, or dy s (1 + z (1 - s))     g = dz w     dx = r (g - mean(g) - xhat mean(g xhat))
// Backward computes z from x again. Grid: (groups, images). Block: 256 threads. Shared memory: sums of the threads.
// Bound by memory: two arrays of traffic forward, three backward. No atomics: the same bits every time.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;
typedef Pack<A, VEC> Sums;

#define THREADS 256

// The threads of a block over `span` of a group's vectors of channels, from `first` on.
struct Threads {
    int first, span, vector, lane, lanes;
    __device__ __forceinline__ Threads(int first, int vectors)
        : first(first), span(vectors - first < THREADS ? vectors - first : THREADS),
          vector(first + int(threadIdx.x) % span), lane(int(threadIdx.x) / span), lanes(THREADS / span) {}

    // Calls use(p) for each position that is this thread's.
    template <class Use>
    __device__ __forceinline__ void each(int positions, Use use) const {
        if (lane < lanes) {
            for (int p = lane; p < positions; p += lanes) use(p);
        }
    }

    // Calls use(channel of the group, total over the threads) in some thread, for each channel. scratch: THREADS x VEC.
    template <class Use>
    __device__ __forceinline__ void totals(Sums sum, A *scratch, Use use) const {
        int count = lanes;
        if (32 % span == 0) {
            for (int gap = 16; gap >= span; gap /= 2) {
#pragma unroll
                for (int j = 0; j < VEC; j++) sum.v[j] += __shfl_xor_sync(~0u, sum.v[j], gap);
            }
            const int warp = threadIdx.x / 32, in = threadIdx.x % 32;
            if (in < span) {
#pragma unroll
                for (int j = 0; j < VEC; j++) scratch[(warp * span + in) * VEC + j] = sum.v[j];
            }
            count = THREADS / 32;
        } else if (lane < lanes) {
#pragma unroll
            for (int j = 0; j < VEC; j++) scratch[threadIdx.x * VEC + j] = sum.v[j];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < span * VEC; c += THREADS) {
            A total = scratch[c];
            for (int k = 1; k < count; k++) total += scratch[k * span * VEC + c];
            use(first * VEC + c, total);
        }
        __syncthreads();
    }
};

// v of a vector of channels at a position.
__device__ __forceinline__ Sums value(const T *x, i64 at, const Sums &shift) {
    const Vector p = load<VEC>(x + at);
    Sums v;
#pragma unroll
    for (int j = 0; j < VEC; j++) v.v[j] = widen(p.v[j]) + shift.v[j];
    return v;
}

__device__ __forceinline__ Sums widened(const T *from) {
    const Vector p = load<VEC>(from);
    Sums v;
#pragma unroll
    for (int j = 0; j < VEC; j++) v.v[j] = widen(p.v[j]);
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) groupnorm_fwd(
    T *y, A *means, A *rstds, const T *x, const T *shift, const T *weight, const T *bias, int positions, int channels,
    A eps
) {
    __shared__ A scratch[32];
    const int width = channels / gridDim.x, vectors = width / VEC, start = blockIdx.x * width;
    const i64 image = i64(blockIdx.y) * positions * channels + start;
    const T *shifts = shift + i64(blockIdx.y) * channels + start;
    const A count = A(positions) * A(width);
    A sum = 0, square = 0;
    for (int first = 0; first < vectors; first += THREADS) {
        const Threads on(first, vectors);
        const Sums more = SHIFT ? widened(shifts + on.vector * VEC) : Sums{};
        on.each(positions, [&](int p) {
            const Sums v = value(x, image + i64(p) * channels + on.vector * VEC, more);
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += v.v[j];
        });
    }
    const A mean = block_sum(sum, scratch) / count;
    for (int first = 0; first < vectors; first += THREADS) {
        const Threads on(first, vectors);
        const Sums more = SHIFT ? widened(shifts + on.vector * VEC) : Sums{};
        on.each(positions, [&](int p) {
            const Sums v = value(x, image + i64(p) * channels + on.vector * VEC, more);
#pragma unroll
            for (int j = 0; j < VEC; j++) square += (v.v[j] - mean) * (v.v[j] - mean);
        });
    }
    const A rstd = A(1) / sqrt(block_sum(square, scratch) / count + eps);
    if (threadIdx.x == 0) {
        means[blockIdx.y * gridDim.x + blockIdx.x] = mean;
        rstds[blockIdx.y * gridDim.x + blockIdx.x] = rstd;
    }
    for (int first = 0; first < vectors; first += THREADS) {
        const Threads on(first, vectors);
        const Sums more = SHIFT ? widened(shifts + on.vector * VEC) : Sums{};
        const Sums w = widened(weight + start + on.vector * VEC), b = widened(bias + start + on.vector * VEC);
        on.each(positions, [&](int p) {
            const i64 at = image + i64(p) * channels + on.vector * VEC;
            const Sums v = value(x, at, more);
            Vector out;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A z = (v.v[j] - mean) * rstd * w.v[j] + b.v[j];
                narrow(SILU ? z * sigmoid<T>(z) : z, out.v[j]);
            }
            store(y + at, out);
        });
    }
}

// dz of a vector of channels at a position, and xhat.
__device__ __forceinline__ Sums upstream(
    Sums &xhat, const T *dy, const T *x, i64 at, const Sums &more, const Sums &w, const Sums &b, A mean, A rstd
) {
    Sums d = widened(dy + at);
    xhat = value(x, at, more);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        xhat.v[j] = (xhat.v[j] - mean) * rstd;
        if (SILU) {
            const A z = xhat.v[j] * w.v[j] + b.v[j];
            d.v[j] *= silu_slope(z, sigmoid<T>(z));
        }
    }
    return d;
}

// partial: (images, 2 channels), dw and then db.
extern "C" __global__ void __launch_bounds__(THREADS) groupnorm_bwd(
    T *dx, T *dshift, A *partial, const T *dy, const T *weight, const T *bias, const T *x, const T *shift,
    const A *means, const A *rstds, int positions, int channels
) {
    __shared__ A scratch[THREADS * VEC];
    const int width = channels / gridDim.x, vectors = width / VEC, start = blockIdx.x * width;
    const i64 image = i64(blockIdx.y) * positions * channels + start;
    const i64 row = i64(blockIdx.y) * channels + start;
    const A mean = means[blockIdx.y * gridDim.x + blockIdx.x], rstd = rstds[blockIdx.y * gridDim.x + blockIdx.x];
    const A count = A(positions) * A(width);
    A *dweight = partial + i64(blockIdx.y) * 2 * channels + start, *dbias = dweight + channels;
    A sum = 0, along = 0;
    for (int first = 0; first < vectors; first += THREADS) {
        const Threads on(first, vectors);
        const Sums more = SHIFT ? widened(shift + row + on.vector * VEC) : Sums{};
        const Sums w = widened(weight + start + on.vector * VEC), b = widened(bias + start + on.vector * VEC);
        Sums dw = {}, db = {};
        on.each(positions, [&](int p) {
            Sums xhat;
            const i64 at = image + i64(p) * channels + on.vector * VEC;
            const Sums dz = upstream(xhat, dy, x, at, more, w, b, mean, rstd);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                dw.v[j] += dz.v[j] * xhat.v[j];
                db.v[j] += dz.v[j];
            }
        });
        on.totals(dw, scratch, [&](int c, A total) {
            dweight[c] = total;
            along += total * widen(weight[start + c]);
        });
        on.totals(db, scratch, [&](int c, A total) {
            dbias[c] = total;
            sum += total * widen(weight[start + c]);
        });
    }
    sum = block_sum(sum, scratch) / count;
    along = block_sum(along, scratch) / count;
    for (int first = 0; first < vectors; first += THREADS) {
        const Threads on(first, vectors);
        const Sums more = SHIFT ? widened(shift + row + on.vector * VEC) : Sums{};
        const Sums w = widened(weight + start + on.vector * VEC), b = widened(bias + start + on.vector * VEC);
        Sums shifted = {};
        on.each(positions, [&](int p) {
            Sums xhat;
            const i64 at = image + i64(p) * channels + on.vector * VEC;
            const Sums dz = upstream(xhat, dy, x, at, more, w, b, mean, rstd);
            Vector out;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A d = rstd * (dz.v[j] * w.v[j] - sum - xhat.v[j] * along);
                if (SHIFT) shifted.v[j] += d;
                narrow(d, out.v[j]);
            }
            store(dx + at, out);
        });
        if (SHIFT) on.totals(shifted, scratch, [&](int c, A total) { narrow(total, dshift[row + c]); });
    }
}
