// selective_scan: h[t] = exp(dt[t] A) h[t-1] + dt[t] u[t] B[t],  y[t] = (C[t] . h[t] + D u[t]) silu(z[t]), with
// dt = softplus(delta + bias) and A = -exp(a_log), for each channel e, with N numbers of state each.
//
// Kernels:  selective_scan_fwd          y; with `kept`, the states before each tile; with `state`, the last one
//           selective_scan_bwd          du, ddelta, dz, and partial sums of db, dc, da_log, dD and dbias
//           selective_scan_sum          db and dc from their partial sums
//           selective_scan_fwd_naive, selective_scan_bwd_naive, selective_scan_sum_naive
//                                       read them first; tests compare the pairs
//
// Idea. Time is sequential, channels are not. QUARTERS threads share a channel, each with PER of its N states in
// registers, and walk along time together. A block takes CHANNELS channels of a row of the batch, and goes over time in
// tiles of TILE positions.
//   forward   For each tile, all threads load u, delta, B and C of the next tile, four numbers at a time, so that
//             global loads are coalesced and in flight two tiles ahead; dt, dt u, B and C are put into shared memory,
//             where softplus is computed once for the threads of a channel. Between two barriers a warp stores y of the
//             last tile, prepares the next one and walks along this one, so that warps do not all want the same unit at
//             the same time.
//   backward  Goes over the tiles from the last to the first. It recomputes the states of a tile from the one that
//             forward kept; those of the later half stay in shared memory, and it walks back in time:
//               g[t] = dout[t] C[t] + exp(dt[t+1] A) g[t+1]        e[t] = g[t] h[t-1] exp(dt[t] A)
//             Then it recomputes those of the earlier half, and walks back over the rest. With the states of half a
//             tile, three blocks fit on a multiprocessor instead of two. The sums over channels, db and dc, are taken
//             within each warp by shuffles, over the block's warps in shared memory, and over blocks by
//             selective_scan_sum: always in the same order.
//
// Who has which states. A 16-byte load by a warp takes four cycles of shared memory where neighbouring lanes read
// different addresses, and two where they read the same. So in forward a warp has one quarter of the states of 32
// channels: B and C are the same for all its lanes. The parts of C . h go to shared memory, and are added by the thread
// that stores y. In backward a warp has four quarters of 8 channels, the lanes of a quarter adjacent, because db and dc
// are sums over channels. Sums over a channel's lanes are taken for four positions at a time there: each lane passes on
// three of its four partial sums and keeps one, three shuffles instead of eight.
//
// Grid: (channels / CHANNELS, batch). Block: CHANNELS x QUARTERS threads. Shared memory: Forward and Backward below.
// Bound by instructions, and by exponentials: each of B T E N is one operation of the special function unit, 16 a cycle
// and multiprocessor, and four others; softplus and silu add three and some thirty for each of B T E.
// VEC: 4 where rows of the arrays begin at multiples of four numbers, and there are QUARTERS x PER states, else 1.

#include "ops/common.cuh"

#define TILE 32
#define HALF 16
#define CHANNELS 32
#define QUARTERS 4
#define THREADS 128
#define PADDED (CHANNELS + 8)  // the lanes of 8 channels write 4 rows at once: 32 numbers in 32 banks
#define FOURS (CHANNELS / 4)   // threads that load and store a position, four channels each
#define LINES (THREADS / FOURS)  // positions that a block loads or stores at once
#define EACH (TILE / LINES)
#define RESIDENT (sizeof(SCALAR) == 8 ? 2 : 3)
#define SUMS (2 * PER < 8 ? 8 : 2 * PER)  // of db and dc in a lane, padded so that 8 lanes can share them

typedef SCALAR T;
typedef Wide<T> A;

__device__ __forceinline__ double exp_base2(double x) { return exp2(x); }
__device__ __forceinline__ float exp_base2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log(1 + exp(x)), without overflow. In float32, log(1 + e) with e = exp(-|x|) is e times the polynomial of least
// relative error on [0, 1], 3e-8: it keeps the digits of small e, and needs no second special function.
__device__ __forceinline__ double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-abs(x))); }
__device__ __forceinline__ float softplus(float x) {
    const float e = exp_base2(fabsf(x) * -1.442695041f);
    float sum = fmaf(e, 0.0052326943f, -0.0295052389f);
    sum = fmaf(sum, e, 0.0782259521f);
    sum = fmaf(sum, e, -0.1366324581f);
    sum = fmaf(sum, e, 0.1910600677f);
    sum = fmaf(sum, e, -0.2484298222f);
    sum = fmaf(sum, e, 0.3331909681f);
    sum = fmaf(sum, e, -0.4999949314f);
    sum = fmaf(sum, e, 0.9999999699f);
    return fmaf(sum, e, fmaxf(x, 0.0f));
}

// 1 / (1 + exp(-x)): where exp overflows to infinity, the result is 0, as it should be.
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + exp_base2(x * -1.442695041f));
}

// A pitch is the number of elements from one position to the next.
struct Sizes {
    int length, channels, states, u_pitch, delta_pitch, b_pitch, c_pitch, z_pitch;
};
#define SIZES \
    int length, int channels, int states, int u_pitch, int delta_pitch, int b_pitch, int c_pitch, int z_pitch
#define SIZE_NAMES length, channels, states, u_pitch, delta_pitch, b_pitch, c_pitch, z_pitch

// An array from a thread's own position and column on. With the pitch in bytes, an address takes one instruction.
template <class S>
struct Wave {
    char *at;
    int pitch;

    __device__ __forceinline__ Wave(S *x, int pitch, i64 position, int column)
        : at((char *)(x + position * pitch + column)), pitch(pitch * int(sizeof(S))) {}
    __device__ __forceinline__ S *operator()(int t) const { return (S *)(at + i64(t) * pitch); }
};

// A thread's share of the work. channel, quarter: the states that it has. column: the first of the four channels whose
// numbers it loads and stores, at the positions line, line + LINES, ... of a tile; side: the same within the block. Of
// B and C it loads the states from `part` on, at position `narrow`.
struct Place {
    int row, channel, quarter, column, line, side, narrow, part, over;
    i64 start;
    bool valid;

    __device__ Place(const Sizes &s, int channel_of_block, int quarter) : quarter(quarter) {
        row = blockIdx.y;
        start = i64(row) * s.length;
        channel = blockIdx.x * CHANNELS + channel_of_block;
        side = threadIdx.x % FOURS * 4;
        column = blockIdx.x * CHANNELS + side;
        line = threadIdx.x / FOURS;
        narrow = threadIdx.x / QUARTERS;
        part = threadIdx.x % QUARTERS * PER;
        valid = channel < s.channels;
        over = VEC > 1 ? max(column + 4 - s.channels, 0) : 0;  // moves back to four channels that exist
    }
    __device__ int state(int i) const { return quarter * PER + i; }
    template <class S>
    __device__ __forceinline__ Wave<S> of_channels(S *x, int pitch) const {
        return {x, pitch, start + line, column - over};
    }
    __device__ __forceinline__ Wave<const T> of_states(const T *x, int pitch) const {
        return {x, pitch, start + narrow, part};
    }
};

typedef Pack<T, 4> Four;
typedef Pack<A, 4> Sum;

// N numbers, of which `there` exist; the others are read as 0, or not written.
template <int N, class S>
__device__ __forceinline__ Pack<S, N> read(const S *from, int there) {
    if (VEC > 1 && there > 0) return load<N>(from);
    Pack<S, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) {
        narrow(A(0), x.v[j]);
        if (VEC == 1 && j < there) x.v[j] = from[j];
    }
    return x;
}
template <int N, class S>
__device__ __forceinline__ void write(S *to, const Pack<S, N> &x, int there) {
    if (VEC > 1) {
        if (there > 0) store(to, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j < there) to[j] = x.v[j];
    }
}

// A thread's numbers of the tile that begins at `first`. Past the last position, single loads give zeros; loads of four
// repeat the last position, without a branch, and results for it must be dropped.
struct Loaded {
    Four v[EACH];

    __device__ __forceinline__ void read(const Wave<const T> &x, const Place &at, const Sizes &s, int first) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = first + LINES * i;
            if (VEC > 1) v[i] = load<4>(x(min(t, s.length - 1 - at.line)));
            else v[i] = ::read<4>(x(t), t + at.line < s.length ? s.channels - at.column : 0);
        }
    }
};

// B or C of a tile, (TILE, QUARTERS x PER): a thread has a quarter of a position.
__device__ __forceinline__ Pack<T, PER> read_narrow(const Wave<const T> &x, const Place &at, const Sizes &s, int first) {
    if (VEC > 1) return load<PER>(x(min(first, s.length - 1 - at.narrow)));
    return read<PER>(x(first), first + at.narrow < s.length ? s.states - at.part : 0);
}
__device__ __forceinline__ void write_narrow(A (*to)[QUARTERS * PER], const Pack<T, PER> &x, const Place &at) {
#pragma unroll
    for (int i = 0; i < PER; i++) to[at.narrow][at.part + i] = widen(x.v[i]);
}

// A = -exp(a_log) log2(e), so that a decay is a power of 2.
__device__ __forceinline__ void read_rates(A (&a)[PER], const T *a_log, const Place &at, const Sizes &s) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool there = at.valid && at.state(i) < s.states;
        a[i] = there ? -exp(widen(a_log[i64(at.channel) * s.states + at.state(i)])) * A(1.4426950408889634) : A(0);
    }
}

// D or bias of a thread's four channels.
__device__ __forceinline__ Sum read_vector(const T *x, const Place &at, const Sizes &s) {
    Sum sum;
#pragma unroll
    for (int j = 0; j < 4; j++) sum.v[j] = at.column + j < s.channels ? widen(x[at.column + j]) : A(0);
    return sum;
}

// The sums over a channel's four lanes, 8 apart, of four numbers each: lane q gets the sum of p[q].
__device__ __forceinline__ A share(const A (&p)[4], int q) {
    const bool odd = q & 1, high = q & 2;
    const A even = (odd ? p[1] : p[0]) + __shfl_xor_sync(~0u, odd ? p[0] : p[1], 8);
    const A other = (odd ? p[3] : p[2]) + __shfl_xor_sync(~0u, odd ? p[2] : p[3], 8);
    return (high ? other : even) + __shfl_xor_sync(~0u, high ? even : other, 16);
}

struct Step {
    A dt, dtu;
};

struct alignas(16) Forward {
    struct {
        Step steps[TILE][CHANNELS];
        A y[QUARTERS][TILE][CHANNELS];  // the parts of C . h
        A b[TILE][QUARTERS * PER], c[TILE][QUARTERS * PER];
    } tile[2];
};

// Positions past the end have dt = 0: a decay of 1 and nothing added.
__device__ __forceinline__ void write_steps(
    Step (*steps)[CHANNELS], const Loaded &u, const Loaded &delta, const Sum &bias, const Place &at, const Sizes &s,
    int first
) {
    Pack<A, 8> fours[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const A dt = softplus(widen(delta.v[i].v[j]) + bias.v[j]);
            fours[i].v[2 * j] = dt, fours[i].v[2 * j + 1] = dt * widen(u.v[i].v[j]);
        }
    }
    if (first + TILE > s.length) {  // the last tile only. With a condition in the loop above, the compiler would compute
#pragma unroll                      // one softplus after the other
        for (int i = 0; i < EACH; i++) {
            if (first + at.line + LINES * i >= s.length) fours[i] = {};
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) store(&steps[at.line + LINES * i][at.side].dt, fours[i]);
}

// Four positions from t on, in registers. They are loaded before the results of the last four are stored: the compiler
// cannot know that the addresses differ, and would make the loads wait for the stores.
struct Group {
    Step step[4];
    Pack<A, PER> b[4], c[4];

    template <class Tile>
    __device__ __forceinline__ Group(const Tile &from, int t, int channel, const Place &at) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            step[j] = from.steps[t + j][channel];
            b[j] = load<PER>(&from.b[t + j][at.state(0)]), c[j] = load<PER>(&from.c[t + j][at.state(0)]);
        }
    }
    // Moves the states h on to position j, and returns this lane's part of C . h.
    __device__ __forceinline__ A advance(Pack<A, PER> &h, const A (&a)[PER], int j) const {
        A sum;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            h.v[i] = exp_base2(step[j].dt * a[i]) * h.v[i] + step[j].dtu * b[j].v[i];
            sum = i ? sum + h.v[i] * c[j].v[i] : h.v[i] * c[j].v[i];
        }
        return sum;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) selective_scan_fwd(
    T *y, A *kept, A *state, const T *u, const T *delta, const T *b, const T *c, const T *z, const T *a_log,
    const T *skip, const T *bias, SIZES
) {
    const Sizes s{SIZE_NAMES};
    extern __shared__ __align__(16) char memory[];
    Forward &sh = *reinterpret_cast<Forward *>(memory);
    const int channel = threadIdx.x % CHANNELS;
    const Place at(s, channel, threadIdx.x / CHANNELS);
    A a[PER];
    Pack<A, PER> h;
    read_rates(a, a_log, at, s);
    const int mine = at.valid ? s.states - at.state(0) : 0;  // states from this lane's first on, later lanes' included
    A *const end = state + (i64(at.row) * s.channels + at.channel) * s.states + at.state(0);
    h = read<PER>(end, state ? mine : 0);
    const Sum d = read_vector(skip, at, s), shift = read_vector(bias, at, s);
    const int tiles = ceil_div(s.length, TILE), there = s.channels - at.column;
    const auto of_u = at.of_channels(u, s.u_pitch), of_delta = at.of_channels(delta, s.delta_pitch),
               of_z = at.of_channels(z, s.z_pitch);
    const auto of_b = at.of_states(b, s.b_pitch), of_c = at.of_states(c, s.c_pitch);
    const auto of_y = at.of_channels(y, s.channels);

    // us, deltas, bs, cs: of the tile after the current one. zs, and u again: of the current one. u is then loaded from
    // the L2 cache, with fewer registers and moves than if it were kept for two tiles.
    Loaded us, deltas, walked_us, zs;
    Pack<T, PER> bs, cs;
    const auto load_tile = [&](int first) {
        us.read(of_u, at, s, first);
        deltas.read(of_delta, at, s, first);
        bs = read_narrow(of_b, at, s, first);
        cs = read_narrow(of_c, at, s, first);
    };
    const auto prepare = [&](int tile) {
        auto &to = sh.tile[tile % 2];
        write_steps(to.steps, us, deltas, shift, at, s, tile * TILE);
        write_narrow(to.b, bs, at);
        write_narrow(to.c, cs, at);
    };
    const auto finish = [&](int tile) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = tile * TILE + LINES * i;
            Sum sum = load<4>(&sh.tile[tile % 2].y[0][LINES * i + at.line][at.side]);
#pragma unroll
            for (int q = 1; q < QUARTERS; q++) {
                const Sum more = load<4>(&sh.tile[tile % 2].y[q][LINES * i + at.line][at.side]);
#pragma unroll
                for (int j = 0; j < 4; j++) sum.v[j] += more.v[j];
            }
            Four out;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const A gate = widen(zs.v[i].v[j]);
                narrow((sum.v[j] + d.v[j] * widen(walked_us.v[i].v[j])) * gate * sigmoid(gate), out.v[j]);
            }
            write<4>(of_y(t), out, t + at.line < s.length ? there : 0);
        }
    };

    load_tile(0);
    prepare(0);
    load_tile(TILE);
    for (int tile = 0; tile < tiles; tile++) {
        __syncthreads();  // this tile is prepared, and the last one walked
        if (tile) finish(tile - 1);
        if (tile + 1 < tiles) prepare(tile + 1);
        walked_us.read(of_u, at, s, tile * TILE);
        zs.read(of_z, at, s, tile * TILE);
        load_tile((tile + 2) * TILE);
        if (kept) {
            write<PER>(kept + ((i64(at.row) * tiles + tile) * s.channels + at.channel) * s.states + at.state(0), h, mine);
        }
        auto &now = sh.tile[tile % 2];
        Group group(now, 0, channel, at);
#pragma unroll (PER > 4 ? 1 : TILE / 4)
        for (int t = 0; t < TILE; t += 4) {
            A p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) p[j] = group.advance(h, a, j);
            group = Group(now, t + 4 < TILE ? t + 4 : 0, channel, at);
#pragma unroll
            for (int j = 0; j < 4; j++) now.y[at.quarter][t + j][channel] = p[j];
        }
    }
    __syncthreads();
    finish(tiles - 1);
    if (state) write<PER>(end, h, mine);
}

struct alignas(16) Backward {
    Pack<A, PER> h[HALF][THREADS];  // the states after each position of half a tile
    A sums[THREADS / 32][HALF][QUARTERS][SUMS];  // of each warp: db, then dc
    Step steps[TILE][CHANNELS];
    A up[TILE][CHANNELS];  // the gradient of the output before the gate
    A y[TILE][PADDED];  // that output without D u
    A along[TILE][PADDED];  // e . A, without the ln 2
    A product[TILE][PADDED];  // the gradient of dt u
    A b[TILE][QUARTERS * PER], c[TILE][QUARTERS * PER];
};

// v summed over the 8 channels of a warp: lane k of a quarter ends with the sums number k SUMS / 8 and those behind it.
__device__ __forceinline__ void share_over_channels(A (&v)[SUMS], int lane) {
    int left = SUMS;
#pragma unroll
    for (int gap = 4; gap; gap /= 2) {
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

// parts: (2, gridDim.x, batch, length, states), of db and dc. da_parts: (batch, channels, states); vector_parts:
// (batch, 2, channels), of dD and dbias.
extern "C" __global__ void __launch_bounds__(THREADS, sizeof(SCALAR) == 8 ? 1 : 3) selective_scan_bwd(
    T *du, T *ddelta, T *dz, A *parts, A *da_parts, A *vector_parts, const T *dy, const T *u, const T *delta, const T *b,
    const T *c, const T *z, const T *a_log, const T *skip, const T *bias, const A *kept, SIZES, int dz_pitch
) {
    const Sizes s{SIZE_NAMES};
    extern __shared__ __align__(16) char memory[];
    Backward &sh = *reinterpret_cast<Backward *>(memory);
    const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * 8 + lane % 8;
    const Place at(s, channel, lane / 8);
    const int tiles = ceil_div(s.length, TILE);
    const int there = s.channels - at.column, mine = at.valid ? s.states - at.state(0) : 0;
    const i64 positions = i64(gridDim.y) * s.length;
    const auto of_u = at.of_channels(u, s.u_pitch), of_delta = at.of_channels(delta, s.delta_pitch),
               of_z = at.of_channels(z, s.z_pitch), of_dy = at.of_channels(dy, s.channels);
    const auto of_b = at.of_states(b, s.b_pitch), of_c = at.of_states(c, s.c_pitch);
    const auto of_du = at.of_channels(du, s.channels), of_ddelta = at.of_channels(ddelta, s.channels),
               of_dz = at.of_channels(dz, dz_pitch);
    A a[PER], carry[PER] = {}, da[PER] = {};
    read_rates(a, a_log, at, s);
    const Sum d = read_vector(skip, at, s), shift = read_vector(bias, at, s);
    Sum dskip = {}, dbias = {};
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int first = tile * TILE;
        Loaded us, deltas, zs, ups;
        us.read(of_u, at, s, first);
        deltas.read(of_delta, at, s, first);
        zs.read(of_z, at, s, first);
        ups.read(of_dy, at, s, first);
        const Pack<T, PER> bs = read_narrow(of_b, at, s, first), cs = read_narrow(of_c, at, s, first);
        // The states before the tile, and before its later half.
        const Pack<A, PER> start =
            read<PER>(kept + ((i64(at.row) * tiles + tile) * s.channels + at.channel) * s.states + at.state(0), mine);
        Pack<A, PER> h = start, middle;
        write_steps(sh.steps, us, deltas, shift, at, s, first);
        write_narrow(sh.b, bs, at);
        write_narrow(sh.c, cs, at);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int some = first + LINES * i + at.line < s.length ? there : 0;
            Sum up;  // 0 past the end, which makes the gradients of states, and their parts of all sums, 0
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const A gate = widen(zs.v[i].v[j]);
                up.v[j] = (j < some ? widen(ups.v[i].v[j]) : A(0)) * gate * sigmoid(gate);
            }
            store(&sh.up[at.line + LINES * i][at.side], up);
        }
        __syncthreads();

#pragma unroll 1
        for (int t = 0; t < TILE; t += 4) {
            const Group group(sh, t, channel, at);
            A p[4];
            if (t == HALF) middle = h;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[j] = group.advance(h, a, j);
                if (t >= HALF) sh.h[t - HALF + j][threadIdx.x] = h;
            }
            sh.y[t + at.quarter][channel] = share(p, at.quarter);
        }
#pragma unroll 1
        for (int half = HALF; half >= 0; half -= HALF) {
            const Pack<A, PER> ahead = half ? middle : start;
            if (half == 0) {  // recompute the earlier half's states
                h = start;
#pragma unroll 1
                for (int t = 0; t < HALF; t += 4) {
                    const Group group(sh, t, channel, at);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        group.advance(h, a, j);
                        sh.h[t + j][threadIdx.x] = h;
                    }
                }
            }
            // h is the state at t; the one before it is loaded a position ahead.
#pragma unroll 1
            for (int r = HALF - 4; r >= 0; r -= 4) {
                const int t = half + r;
                A along[4], product[4], sums[4][SUMS / 8];  // stored at the end, as above
#pragma unroll
                for (int j = 3; j >= 0; j--) {
                    const Step step = sh.steps[t + j][channel];
                    const A up = sh.up[t + j][channel];
                    const A *bt = &sh.b[t + j][at.state(0)], *ct = &sh.c[t + j][at.state(0)];
                    const Pack<A, PER> before = r + j ? sh.h[r + j - (r + j > 0)][threadIdx.x] : ahead;
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
#pragma unroll
                    for (int i = 0; i < SUMS / 8; i++) sums[j][i] = v[i];
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int i = 0; i < SUMS / 8; i++) {
                        sh.sums[threadIdx.x / 32][r + j][at.quarter][lane % 8 * (SUMS / 8) + i] = sums[j][i];
                    }
                }
                sh.along[t + at.quarter][channel] = share(along, at.quarter);
                sh.product[t + at.quarter][channel] = share(product, at.quarter);
            }
            __syncthreads();

            // One half of the threads adds the warps' sums of db, the other those of dc: a quarter of a position each.
            const int which = threadIdx.x / (THREADS / 2), t = threadIdx.x % (THREADS / 2) / QUARTERS;
            const int quarter = threadIdx.x % QUARTERS;
            Pack<A, PER> sum = {};
#pragma unroll
            for (int w = 0; w < THREADS / 32; w++) {
#pragma unroll
                for (int i = 0; i < PER; i++) sum.v[i] += sh.sums[w][t][quarter][which * (SUMS / 2) + i];
            }
            const int position = first + half + t;
            A *to = parts + ((i64(which) * gridDim.x + blockIdx.x) * positions + i64(at.row) * s.length + position) * s.states;
            write<PER>(to + at.part, sum, position < s.length ? s.states - at.part : 0);
            if (half) __syncthreads();  // before the sums are overwritten
        }

        if (sizeof(T) == 8) {  // load again: there are not enough registers to keep them
            us.read(of_u, at, s, first);
            deltas.read(of_delta, at, s, first);
            zs.read(of_z, at, s, first);
            ups.read(of_dy, at, s, first);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int t = first + LINES * i, l = at.line + LINES * i, some = t + at.line < s.length ? there : 0;
            const Sum up = load<4>(&sh.up[l][at.side]), products = load<4>(&sh.product[l][at.side]);
            const Sum inner = load<4>(&sh.y[l][at.side]), alongs = load<4>(&sh.along[l][at.side]);
            Four to_u, to_delta, to_z;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const A gate = widen(zs.v[i].v[j]), open = sigmoid(gate), in = widen(us.v[i].v[j]);
                const A out = inner.v[j] + d.v[j] * in, slope = sigmoid(widen(deltas.v[i].v[j]) + shift.v[j]);
                const A dstep = (in * products.v[j] + alongs.v[j] * A(0.6931471805599453)) * slope;
                narrow(d.v[j] * up.v[j] + sh.steps[l][at.side + j].dt * products.v[j], to_u.v[j]);
                narrow(dstep, to_delta.v[j]);
                narrow(widen(ups.v[i].v[j]) * out * silu_slope(gate, open), to_z.v[j]);
                if (j < some) dskip.v[j] += up.v[j] * in, dbias.v[j] += dstep;
            }
            write<4>(of_du(t), to_u, some);
            write<4>(of_ddelta(t), to_delta, some);
            write<4>(of_dz(t), to_z, some);
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (i < mine) {
            da_parts[(i64(at.row) * s.channels + at.channel) * s.states + at.state(i)] =
                da[i] * a[i] * A(0.6931471805599453);
        }
    }
    // Each line of threads has a part of a channel's sums.
    store(&sh.up[at.line][at.side], dskip);
    store(&sh.y[at.line][at.side], dbias);
    __syncthreads();
    const int which = threadIdx.x / CHANNELS, side = threadIdx.x % CHANNELS, column = blockIdx.x * CHANNELS + side;
    if (which < 2 && column < s.channels) {
        A sum = 0;
#pragma unroll
        for (int line = 0; line < LINES; line++) sum += which ? sh.y[line][side] : sh.up[line][side];
        vector_parts[(i64(at.row) * 2 + which) * s.channels + column] = sum;
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

// g: as h, every state's gradient; up: (batch, length, channels), the gradient before the gate. da_parts, vector_parts:
// as in selective_scan_bwd.
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
