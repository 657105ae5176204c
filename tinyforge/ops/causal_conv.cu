// causal_conv: y[t, c] = silu(s[t, c]), s[t, c] = b[c] + sum over k of w[c, k] x[t - (TAPS - 1) + k, c].
//
// Kernels:  causal_conv_fwd           y
//           causal_conv_bwd           dx, and partial sums of dw and db
//           causal_conv_bwd_naive     dx, dw and db: read it first; tests compare the two
//
// Idea. A thread takes VEC channels and walks down STRIP positions with the last TAPS inputs in registers, so that each
// input is read once, but for the TAPS - 1 before a strip. Neighbouring threads have neighbouring channels. Backward
// computes s again, and needs it TAPS - 1 positions further than its strip: dx[t] has a share of each ds that saw x[t].
//   ds = dy sigmoid(s) (1 + s (1 - sigmoid(s)))     dx[t] = sum of w[k] ds[t + TAPS - 1 - k]
// Sums over positions: each strip leaves its own, and add_columns adds those in order.
// Grid: a thread for each VEC channels of each strip. Block: 128 threads. No shared memory.
// Bound by memory: forward 2 arrays of traffic, backward 3.

#include "ops/common.cuh"

#define STRIP 32

typedef SCALAR T;
typedef Wide<T> A;

// The strip of a thread. pitch: elements from one position of x to the next; x may be a part of wider rows.
struct Strip {
    int channel, row, start, stop;
    bool valid;

    __device__ Strip(int batch, int length, int channels) {
        const int vectors = channels / VEC, strips = ceil_div(length, STRIP);
        const i64 i = i64(blockIdx.x) * 128 + threadIdx.x;
        valid = i < i64(batch) * strips * vectors;
        channel = int(i % vectors) * VEC;
        const int strip = int(i / vectors);
        row = strip / strips;
        start = strip % strips * STRIP;
        stop = min(start + STRIP, length);
    }
};

// Position t of x, that of tail where t is before the first, zeros where there is no tail.
__device__ __forceinline__ Pack<T, VEC> input_at(
    const T *x, const T *tail, const Strip &s, int t, int length, int channels, int pitch
) {
    if (t >= 0) return load<VEC>(x + (i64(s.row) * length + t) * pitch + s.channel);
    if (tail) return load<VEC>(tail + (i64(s.row) * (TAPS - 1) + TAPS - 1 + t) * channels + s.channel);
    return Pack<T, VEC>{};
}

extern "C" __global__ void __launch_bounds__(128) causal_conv_fwd(
    T *y, const T *tail, const T *x, const T *weight, const T *bias, int batch, int length, int channels, int pitch
) {
    const Strip s(batch, length, channels);
    if (!s.valid) return;
    A w[TAPS][VEC], window[TAPS][VEC];
    const Pack<T, VEC> b = load<VEC>(bias + s.channel);
#pragma unroll
    for (int k = 0; k < TAPS; k++) {
        const Pack<T, VEC> in = k ? input_at(x, tail, s, s.start - TAPS + k, length, channels, pitch) : Pack<T, VEC>{};
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            w[k][j] = widen(weight[(s.channel + j) * TAPS + k]);
            window[k][j] = widen(in.v[j]);
        }
    }
    for (int t = s.start; t < s.stop; t++) {
        const Pack<T, VEC> in = load<VEC>(x + (i64(s.row) * length + t) * pitch + s.channel);
        Pack<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            A sum = widen(b.v[j]);
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                window[k][j] = k + 1 < TAPS ? window[k + 1][j] : widen(in.v[j]);
                sum += w[k][j] * window[k][j];
            }
            narrow(sum * sigmoid<T>(sum), out.v[j]);
        }
        store(y + (i64(s.row) * length + t) * channels + s.channel, out);
    }
}

// partial: a row of channels x TAPS, then channels, for each strip: of dw, then of db.
extern "C" __global__ void __launch_bounds__(128) causal_conv_bwd(
    T *dx, A *partial, const T *dy, const T *x, const T *weight, const T *bias, int batch, int length, int channels,
    int dx_pitch, int pitch
) {
    const Strip s(batch, length, channels);
    if (!s.valid) return;
    A w[TAPS][VEC], window[TAPS][VEC], ds[TAPS][VEC] = {}, dw[TAPS][VEC] = {}, db[VEC] = {};
    const Pack<T, VEC> b = load<VEC>(bias + s.channel);
#pragma unroll
    for (int k = 0; k < TAPS; k++) {
        const Pack<T, VEC> in =
            k ? input_at(x, nullptr, s, s.start - TAPS + k, length, channels, pitch) : Pack<T, VEC>{};
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            w[k][j] = widen(weight[(s.channel + j) * TAPS + k]);
            window[k][j] = widen(in.v[j]);
        }
    }
    for (int t = s.start; t < s.stop + TAPS - 1; t++) {
        Pack<T, VEC> in{}, up{}, out;
        if (t < length) {
            in = load<VEC>(x + (i64(s.row) * length + t) * pitch + s.channel);
            up = load<VEC>(dy + (i64(s.row) * length + t) * channels + s.channel);
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            A sum = widen(b.v[j]);
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                window[k][j] = k + 1 < TAPS ? window[k + 1][j] : widen(in.v[j]);
                ds[k][j] = k + 1 < TAPS ? ds[k + 1][j] : A(0);
                sum += w[k][j] * window[k][j];
            }
            const A d = widen(up.v[j]) * silu_slope(sum, sigmoid<T>(sum));
            ds[TAPS - 1][j] = d;
            A dsum = 0;
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                dsum += w[k][j] * ds[TAPS - 1 - k][j];
                if (t < s.stop) dw[k][j] += d * window[k][j];
            }
            if (t < s.stop) db[j] += d;
            narrow(dsum, out.v[j]);
        }
        const int done = t - (TAPS - 1);
        if (done >= s.start) store(dx + (i64(s.row) * length + done) * dx_pitch + s.channel, out);
    }
    A *mine = partial + i64(s.row * ceil_div(length, STRIP) + s.start / STRIP) * channels * (TAPS + 1);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
#pragma unroll
        for (int k = 0; k < TAPS; k++) mine[(s.channel + j) * TAPS + k] = dw[k][j];
        mine[channels * TAPS + s.channel + j] = db[j];
    }
}

// A thread for each channel.
extern "C" __global__ void causal_conv_bwd_naive(
    T *dx, A *dweight, A *dbias, const T *dy, const T *x, const T *weight, const T *bias, int batch, int length,
    int channels
) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    for (int row = 0; row < batch; row++) {
        const auto at = [&](int t) { return (i64(row) * length + t) * channels + c; };
        const auto in = [&](int t, int k) { return t - (TAPS - 1) + k; };
        const auto ds = [&](int t) {
            A s = widen(bias[c]);
            for (int k = 0; k < TAPS; k++) {
                if (in(t, k) >= 0) s += widen(weight[c * TAPS + k]) * widen(x[at(in(t, k))]);
            }
            const A gate = A(1) / (A(1) + exp(-s));
            return widen(dy[at(t)]) * gate * (A(1) + s * (A(1) - gate));
        };
        for (int t = 0; t < length; t++) {
            const A d = ds(t);
            dbias[c] += d;
            A sum = 0;
            for (int k = 0; k < TAPS; k++) {
                if (in(t, k) >= 0) dweight[c * TAPS + k] += d * widen(x[at(in(t, k))]);
                const int seen_by = t + TAPS - 1 - k;
                if (seen_by < length) sum += widen(weight[c * TAPS + k]) * ds(seen_by);
            }
            narrow(sum, dx[at(t)]);
        }
    }
}
