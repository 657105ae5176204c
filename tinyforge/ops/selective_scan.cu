// selective_scan: h[t] = exp(dt[t] A) h[t-1] + dt[t] u[t] B[t],  y[t] = (C[t] . h[t] + D u[t]) silu(z[t]), with
// dt = softplus(delta + bias) and A = -exp(a_log), for each channel e, with N numbers of state each.
//
// Kernels:  selective_scan_fwd          y; with `kept`, the states before each tile; with `state`, the one at the end
//           selective_scan_bwd          du, ddelta, dz, and partial sums of db, dc, da_log, dD and dbias
//           selective_scan_sum          db and dc from their partial sums
//           selective_scan_fwd_naive, selective_scan_bwd_naive, selective_scan_sum_naive
//                                       read them first; tests compare the pairs
//
// Idea. Time is sequential, channels are not: QUARTERS lanes share a channel, each with PER of its N states in
// registers, and walk down time together. A block takes CHANNELS channels of a row of the batch. It goes over time in
// tiles of TILE positions: u, delta and z are loaded a tile ahead by all threads, so that global reads are coalesced and
// under way during the tile before; dt, dt u, B and C lie in shared memory, where softplus is computed once for the lanes
// of a channel. The sums over a channel's lanes are taken four positions at a time: of four partial sums each lane hands
// over three and keeps one, three shuffles in place of eight.
//
// Backward goes over the tiles from the last to the first. It computes the states of a tile again, from the one that
// forward kept, into shared memory, and then walks up:
//   g[t] = dout[t] C[t] + exp(dt[t+1] A) g[t+1]        e[t] = g[t] h[t-1] exp(dt[t] A)
// The sums over channels, db and dc, are taken within each warp by shuffles, over the block's warps in shared memory, and
// over blocks by selective_scan_sum: always in the same order.
//
// Grid: (channels / CHANNELS, batch). Block: CHANNELS x QUARTERS threads. Shared memory: Forward and Backward below.
// Bound: the exponentials. Each of B T E N is one operation of the special function unit, 16 a cycle and
// multiprocessor; softplus and silu add four for each of B T E. In float32 that takes longer than moving the 4 arrays of
// B T E; in bf16, half as many bytes, more than twice as long.
//
// compile: SCALAR=double|float|bf16 PER=1|2|4
// spills: none

#include "ops/common.cuh"

#define TILE 32
#define CHANNELS 32
#define QUARTERS 4
#define THREADS 128
#define PADDED (CHANNELS + 8)  // the lanes of 8 channels write 4 rows at once: 32 numbers in 32 banks
#define EACH 8  // of a tile's TILE x CHANNELS numbers, for each thread
#define RESIDENT (sizeof(SCALAR) == 8 ? 2 : 4)
#define SUMS (2 * PER < 8 ? 8 : 2 * PER)  // of db and dc in a lane, filled up so that 8 lanes can share them

typedef SCALAR T;
typedef Wide<T> A;

__device__ __forceinline__ double exp_base2(double x) { return exp2(x); }
__device__ __forceinline__ float exp_base2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log(1 + exp(x)), without overflow.
template <class S>
__device__ __forceinline__ Wide<S> softplus(Wide<S> x) {
    return (x > 0 ? x : 0) + log1p(exp(-abs(x)));
}
template <>
__device__ __forceinline__ float softplus<bf16>(float x) {
    return fmaxf(x, 0.0f) + __logf(1.0f + __expf(-fabsf(x)));
}

__device__ __forceinline__ A sigmoid(A x) { return inverse_for<T>(A(1) + exp_for<T>(-x)); }

// A pitch is the number of elements from one position to the next.
struct Sizes {
    int length, channels, states, u_pitch, delta_pitch, b_pitch, c_pitch, z_pitch;
};
#define SIZES \
    int length, int channels, int states, int u_pitch, int delta_pitch, int b_pitch, int c_pitch, int z_pitch
#define SIZE_NAMES length, channels, states, u_pitch, delta_pitch, b_pitch, c_pitch, z_pitch

// Where a thread stands. channel, quarter: whose states it has. column: the channel whose numbers it loads and stores, at
// the positions line, line + 4, ... of a tile.
struct Place {
    int row, channel, quarter, column, line;
    bool valid, loads;

    __device__ Place(const Sizes &s) {
        row = blockIdx.y;
        channel = blockIdx.x * CHANNELS + threadIdx.x / QUARTERS;
        quarter = threadIdx.x % QUARTERS;
        column = blockIdx.x * CHANNELS + threadIdx.x % CHANNELS;
        line = threadIdx.x / CHANNELS;
        valid = channel < s.channels, loads = column < s.channels;
    }
    __device__ int state(int i) const { return quarter * PER + i; }
};

// A thread's EACH numbers of the tile that begins at `first`.
struct Loaded {
    T v[EACH];

    __device__ __forceinline__ void read(const T *x, int pitch, const Place &at, const Sizes &s, int first) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = first + at.line + 4 * i;
            if (at.loads && t < s.length) v[i] = x[(i64(at.row) * s.length + t) * pitch + at.column];
            else narrow(A(0), v[i]);
        }
    }
};

__device__ __forceinline__ void store_tile(T *to, int pitch, const Place &at, const Sizes &s, int t, A value) {
    if (at.loads && t < s.length) narrow(value, to[(i64(at.row) * s.length + t) * pitch + at.column]);
}

// B or C of a tile, (TILE, QUARTERS x PER), zeros where there is none.
__device__ __forceinline__ void read_narrow(
    A (*to)[QUARTERS * PER], const T *from, int pitch, const Place &at, const Sizes &s, int first
) {
    for (int i = threadIdx.x; i < TILE * QUARTERS * PER; i += THREADS) {
        const int t = i / (QUARTERS * PER), n = i % (QUARTERS * PER);
        const bool there = n < s.states && first + t < s.length;
        to[t][n] = there ? widen(from[(i64(at.row) * s.length + first + t) * pitch + n]) : A(0);
    }
}

// A = -exp(a_log) log2(e), so that a decay is a power of 2.
__device__ __forceinline__ void read_rates(A (&a)[PER], const T *a_log, const Place &at, const Sizes &s) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool there = at.valid && at.state(i) < s.states;
        a[i] = there ? -exp(widen(a_log[i64(at.channel) * s.states + at.state(i)])) * A(1.4426950408889634) : A(0);
    }
}

// The sums over a channel's four lanes of four numbers each: lane q gets that of p[q].
__device__ __forceinline__ A share(const A (&p)[4], int q) {
    const bool odd = q & 1, high = q & 2;
    const A even = (odd ? p[1] : p[0]) + __shfl_xor_sync(~0u, odd ? p[0] : p[1], 1);
    const A other = (odd ? p[3] : p[2]) + __shfl_xor_sync(~0u, odd ? p[2] : p[3], 1);
    return (high ? other : even) + __shfl_xor_sync(~0u, high ? even : other, 2);
}

struct Step {
    A dt, dtu;
};

struct alignas(16) Forward {
    Step steps[TILE][CHANNELS];
    A y[TILE][PADDED];
    A b[TILE][QUARTERS * PER], c[TILE][QUARTERS * PER];
};

// Positions past the end have dt = 0: a decay of 1 and nothing added.
__device__ __forceinline__ void write_steps(
    Step (*steps)[CHANNELS], const Loaded &u, const Loaded &delta, A bias, const Place &at, const Sizes &s, int first
) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int t = at.line + 4 * i;
        const A dt = first + t < s.length ? softplus<T>(widen(delta.v[i]) + bias) : A(0);
        steps[t][threadIdx.x % CHANNELS] = {dt, dt * widen(u.v[i])};
    }
}

// One position: the states h move on, and a lane's part of C . h is returned.
__device__ __forceinline__ A advance(A (&h)[PER], const Step &step, const A (&a)[PER], const A *b, const A *c) {
    A sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        h[i] = exp_base2(step.dt * a[i]) * h[i] + step.dtu * b[i];
        sum += h[i] * c[i];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) selective_scan_fwd(
    T *y, A *kept, A *state, const T *u, const T *delta, const T *b, const T *c, const T *z, const T *a_log,
    const T *skip, const T *bias, SIZES
) {
    __shared__ Forward sh;
    const Sizes s{SIZE_NAMES};
    const Place at(s);
    A a[PER], h[PER];
    read_rates(a, a_log, at, s);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool there = state && at.valid && at.state(i) < s.states;
        h[i] = there ? state[(i64(at.row) * s.channels + at.channel) * s.states + at.state(i)] : A(0);
    }
    const A d = at.loads ? widen(skip[at.column]) : A(0), shift = at.loads ? widen(bias[at.column]) : A(0);
    const int tiles = ceil_div(s.length, TILE), channel = threadIdx.x / QUARTERS;
    Loaded us, deltas, zs;
    us.read(u, s.u_pitch, at, s, 0);
    deltas.read(delta, s.delta_pitch, at, s, 0);
    zs.read(z, s.z_pitch, at, s, 0);
    for (int tile = 0; tile < tiles; tile++) {
        const int first = tile * TILE;
        if (kept && at.valid) {
            A *to = kept + ((i64(at.row) * tiles + tile) * s.channels + at.channel) * s.states;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                if (at.state(i) < s.states) to[at.state(i)] = h[i];
            }
        }
        write_steps(sh.steps, us, deltas, shift, at, s, first);
        read_narrow(sh.b, b, s.b_pitch, at, s, first);
        read_narrow(sh.c, c, s.c_pitch, at, s, first);
        __syncthreads();
        const Loaded this_u = us, this_z = zs;
        us.read(u, s.u_pitch, at, s, first + TILE);
        deltas.read(delta, s.delta_pitch, at, s, first + TILE);
        zs.read(z, s.z_pitch, at, s, first + TILE);
#pragma unroll 2
        for (int t = 0; t < TILE; t += 4) {
            A p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[j] = advance(h, sh.steps[t + j][channel], a, &sh.b[t + j][at.state(0)], &sh.c[t + j][at.state(0)]);
            }
            sh.y[t + at.quarter][channel] = share(p, at.quarter);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = at.line + 4 * i;
            const A gate = widen(this_z.v[i]), out = sh.y[t][threadIdx.x % CHANNELS] + d * widen(this_u.v[i]);
            store_tile(y, s.channels, at, s, first + t, out * gate * sigmoid(gate));
        }
    }
    if (state && at.valid) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (at.state(i) < s.states) {
                state[(i64(at.row) * s.channels + at.channel) * s.states + at.state(i)] = h[i];
            }
        }
    }
}

struct alignas(16) Backward {
    Pack<A, PER> h[TILE][THREADS];  // the states after each position
    A sums[THREADS / 32][TILE][QUARTERS][SUMS];  // of each warp: db, then dc
    Step steps[TILE][CHANNELS];
    A up[TILE][CHANNELS];  // the gradient of the output before the gate
    A y[TILE][PADDED];  // that output without D u
    A along[TILE][PADDED];  // e . A, without the ln 2
    A product[TILE][PADDED];  // the gradient of dt u
    A b[TILE][QUARTERS * PER], c[TILE][QUARTERS * PER];
};

// v summed over the 8 lanes of a quarter: lane k of them ends with the sums number k SUMS / 8 and those behind it.
__device__ __forceinline__ void share_over_channels(A (&v)[SUMS], int lane) {
    int left = SUMS;
#pragma unroll
    for (int gap = 16; gap >= 4; gap /= 2) {
        left /= 2;
        const bool upper = lane & gap;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            if (i < left) {
                const A mine = upper ? v[i + left] : v[i], theirs = upper ? v[i] : v[i + left];
                v[i] = mine + __shfl_xor_sync(~0u, theirs, gap);
            }
        }
    }
}

// parts: (2, gridDim.x, batch, length, states), of db and dc. da_parts: (batch, channels, states); vector_parts: (batch,
// 2, channels), of dD and dbias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) selective_scan_bwd(
    T *du, T *ddelta, T *dz, A *parts, A *da_parts, A *vector_parts, const T *dy, const T *u, const T *delta, const T *b,
    const T *c, const T *z, const T *a_log, const T *skip, const T *bias, const A *kept, SIZES, int dz_pitch
) {
    const Sizes s{SIZE_NAMES};
    extern __shared__ __align__(16) char memory[];
    Backward &sh = *reinterpret_cast<Backward *>(memory);
    const Place at(s);
    const int tiles = ceil_div(s.length, TILE), channel = threadIdx.x / QUARTERS, lane = threadIdx.x % 32;
    const int column = threadIdx.x % CHANNELS;
    A a[PER], carry[PER] = {}, da[PER] = {};
    read_rates(a, a_log, at, s);
    const A d = at.loads ? widen(skip[at.column]) : A(0), shift = at.loads ? widen(bias[at.column]) : A(0);
    A dskip = 0, dbias = 0;
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int first = tile * TILE;
        Loaded us, deltas, zs, ups;
        us.read(u, s.u_pitch, at, s, first);
        deltas.read(delta, s.delta_pitch, at, s, first);
        zs.read(z, s.z_pitch, at, s, first);
        ups.read(dy, s.channels, at, s, first);
        Pack<A, PER> start;  // the states before the tile
        const A *from = kept + ((i64(at.row) * tiles + tile) * s.channels + at.channel) * s.states;
#pragma unroll
        for (int i = 0; i < PER; i++) start.v[i] = at.valid && at.state(i) < s.states ? from[at.state(i)] : A(0);
        write_steps(sh.steps, us, deltas, shift, at, s, first);
        read_narrow(sh.b, b, s.b_pitch, at, s, first);
        read_narrow(sh.c, c, s.c_pitch, at, s, first);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const A gate = widen(zs.v[i]);
            sh.up[at.line + 4 * i][column] = widen(ups.v[i]) * gate * sigmoid(gate);
        }
        __syncthreads();

        Pack<A, PER> h = start;
#pragma unroll 1
        for (int t = 0; t < TILE; t += 4) {
            A p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[j] = advance(h.v, sh.steps[t + j][channel], a, &sh.b[t + j][at.state(0)], &sh.c[t + j][at.state(0)]);
                sh.h[t + j][threadIdx.x] = h;
            }
            sh.y[t + at.quarter][channel] = share(p, at.quarter);
        }
        // h is the state at t; the one before it is read a position ahead.
#pragma unroll 1
        for (int t = TILE - 4; t >= 0; t -= 4) {
            A along[4], product[4];
#pragma unroll
            for (int j = 3; j >= 0; j--) {
                const Step step = sh.steps[t + j][channel];
                const A up = sh.up[t + j][channel], *bt = &sh.b[t + j][at.state(0)], *ct = &sh.c[t + j][at.state(0)];
                const Pack<A, PER> before = t + j ? sh.h[t + j - (t + j > 0)][threadIdx.x] : start;
                A v[SUMS] = {};
                along[j] = product[j] = 0;
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    const A g = up * ct[i] + carry[i];
                    v[i] = g * step.dtu;
                    v[SUMS / 2 + i] = up * h.v[i];
                    carry[i] = exp_base2(step.dt * a[i]) * g;
                    const A e = carry[i] * before.v[i];
                    along[j] += e * a[i];
                    da[i] += step.dt * e;
                    product[j] += g * bt[i];
                }
                h = before;
                share_over_channels(v, lane);
                const int mine = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
#pragma unroll
                for (int i = 0; i < SUMS / 8; i++) {
                    sh.sums[threadIdx.x / 32][t + j][at.quarter][mine * (SUMS / 8) + i] = v[i];
                }
            }
            sh.along[t + at.quarter][channel] = share(along, at.quarter);
            sh.product[t + at.quarter][channel] = share(product, at.quarter);
        }
        __syncthreads();

        const i64 positions = i64(gridDim.y) * s.length;
        for (int i = threadIdx.x; i < 2 * TILE * s.states; i += THREADS) {
            const int n = i % s.states, t = i / s.states % TILE, which = i / (s.states * TILE);
            if (first + t >= s.length) continue;
            A sum = 0;
#pragma unroll
            for (int w = 0; w < THREADS / 32; w++) sum += sh.sums[w][t][n / PER][which * (SUMS / 2) + n % PER];
            const i64 position = i64(at.row) * s.length + first + t;
            parts[((i64(which) * gridDim.x + blockIdx.x) * positions + position) * s.states + n] = sum;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = at.line + 4 * i;
            const A gate = widen(zs.v[i]), open = sigmoid(gate), in = widen(us.v[i]), up = sh.up[t][column];
            const A product = sh.product[t][column], out = sh.y[t][column] + d * in;
            const A slope = sigmoid(widen(deltas.v[i]) + shift);
            const A dstep = (in * product + sh.along[t][column] * A(0.6931471805599453)) * slope;
            store_tile(du, s.channels, at, s, first + t, d * up + sh.steps[t][column].dt * product);
            store_tile(ddelta, s.channels, at, s, first + t, dstep);
            store_tile(dz, dz_pitch, at, s, first + t, widen(ups.v[i]) * out * open * (A(1) + gate * (A(1) - open)));
            if (first + t < s.length) dskip += up * in, dbias += dstep;
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (at.valid && at.state(i) < s.states) {
            da_parts[(i64(at.row) * s.channels + at.channel) * s.states + at.state(i)] =
                da[i] * a[i] * A(0.6931471805599453);
        }
    }
    // The four lines of threads have a share each of a channel's sums.
    sh.up[at.line][column] = dskip, sh.y[at.line][column] = dbias;
    __syncthreads();
    if (at.line == 0 && at.loads) {
        for (int line = 1; line < 4; line++) dskip += sh.up[line][column], dbias += sh.y[line][column];
        vector_parts[i64(at.row) * 2 * s.channels + at.column] = dskip;
        vector_parts[i64(at.row) * 2 * s.channels + s.channels + at.column] = dbias;
    }
}

// out: (2, count), db and dc; parts: (2, blocks, count). A thread for each number.
extern "C" __global__ void __launch_bounds__(THREADS) selective_scan_sum(
    T *db, T *dc, const A *parts, i64 count, int blocks
) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= 2 * count) return;
    const i64 which = i / count, at = i % count;
    A sum = 0;
#pragma unroll 8
    for (int k = 0; k < blocks; k++) sum += parts[(which * blocks + k) * count + at];
    narrow(sum, (which ? dc : db)[at]);
}

// --- the same, the plainest way: a thread for each channel of each row, arrays without gaps, no state before the first

#define STATES (QUARTERS * PER)

__device__ __forceinline__ A plain_step(A x) { return (x > 0 ? x : 0) + log1p(exp(-abs(x))); }

// h: (batch, length, channels, states), every state. z is not applied where it is a null pointer.
extern "C" __global__ void selective_scan_fwd_naive(
    T *y, A *h, const T *u, const T *delta, const T *b, const T *c, const T *z, const T *a_log, const T *skip,
    const T *bias, int batch, int length, int channels, int states
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / channels, e = i % channels;
    if (row >= batch) return;
    for (int t = 0; t < length; t++) {
        const i64 position = i64(row) * length + t, at = position * channels + e;
        const A dt = plain_step(widen(delta[at]) + widen(bias[e]));
        A sum = widen(skip[e]) * widen(u[at]);
        for (int n = 0; n < states; n++) {
            const A before = t ? h[(at - channels) * states + n] : A(0);
            const A now = exp(-dt * exp(widen(a_log[e * states + n]))) * before +
                          dt * widen(u[at]) * widen(b[position * states + n]);
            h[at * states + n] = now;
            sum += widen(c[position * states + n]) * now;
        }
        const A gate = widen(z[at]);
        narrow(sum * gate / (A(1) + exp(-gate)), y[at]);
    }
}

// g: as h, every state's gradient; up: (batch, length, channels), the gradient before the gate. da_parts, vector_parts: as
// in selective_scan_bwd.
extern "C" __global__ void selective_scan_bwd_naive(
    T *du, T *ddelta, T *dz, A *g, A *up, A *da_parts, A *vector_parts, const T *dy, const T *u, const T *delta,
    const T *b, const T *c, const T *z, const T *a_log, const T *skip, const T *bias, const A *h, int batch, int length,
    int channels, int states
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / channels, e = i % channels;
    if (row >= batch) return;
    A da[STATES] = {}, carry[STATES] = {}, dskip = 0, dbias = 0;
    for (int t = length - 1; t >= 0; t--) {
        const i64 position = i64(row) * length + t, at = position * channels + e;
        const A in = widen(u[at]), x = widen(delta[at]) + widen(bias[e]), dt = plain_step(x);
        const A gate = widen(z[at]), open = A(1) / (A(1) + exp(-gate)), before_gate = widen(dy[at]) * gate * open;
        A out = widen(skip[e]) * in, product = 0, ddt = 0;
        for (int n = 0; n < states; n++) {
            const A rate = -exp(widen(a_log[e * states + n]));
            const A now = before_gate * widen(c[position * states + n]) + carry[n];
            const A before = t ? h[(at - channels) * states + n] : A(0);
            g[at * states + n] = now;
            carry[n] = exp(dt * rate) * now;
            da[n] += carry[n] * before * dt;
            ddt += carry[n] * before * rate;
            product += now * widen(b[position * states + n]);
            out += widen(c[position * states + n]) * h[at * states + n];
        }
        ddt = (ddt + product * in) / (A(1) + exp(-x));
        up[at] = before_gate;
        dskip += before_gate * in, dbias += ddt;
        narrow(widen(skip[e]) * before_gate + dt * product, du[at]);
        narrow(ddt, ddelta[at]);
        narrow(widen(dy[at]) * out * open * (A(1) + gate * (A(1) - open)), dz[at]);
    }
    for (int n = 0; n < states; n++) {
        da_parts[(i64(row) * channels + e) * states + n] = -da[n] * exp(widen(a_log[e * states + n]));
    }
    vector_parts[i64(row) * 2 * channels + e] = dskip;
    vector_parts[i64(row) * 2 * channels + channels + e] = dbias;
}

// The sums over channels. A thread for each number of db and of dc.
extern "C" __global__ void selective_scan_sum_naive(
    T *db, T *dc, const A *g, const A *up, const T *u, const T *delta, const T *bias, const A *h, int positions,
    int channels, int states
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, position = i / states, n = i % states;
    if (position >= positions) return;
    A to_b = 0, to_c = 0;
    for (int e = 0; e < channels; e++) {
        const i64 at = i64(position) * channels + e;
        to_b += g[at * states + n] * plain_step(widen(delta[at]) + widen(bias[e])) * widen(u[at]);
        to_c += up[at] * h[at * states + n];
    }
    narrow(to_b, db[i]);
    narrow(to_c, dc[i]);
}
