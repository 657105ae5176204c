// cross_entropy: logits into softmax - onehot, in place, and -log p(target) of each row.
//
// Kernels:  softmax_residual     a row of V logits: nll and, where asked, its residual in place
//           softmax_residual_naive   the same: read it first; tests compare the two
//           soft_residual        the same with a teacher's distribution beside the target; soft_residual_naive
//           sum_heads            nll[k] = sum over tokens of the rows' nll, in float64
//           scale_heads          y = c[k] x for the part of x that belongs to head k
//           add_scaled_heads     y += c[k] x
//
// Idea. Logits of a language model are the largest array of a step. They are read once and written once: a block takes
// maximum and sum of its row, and writes the residual over the logits. Nothing else of that size exists. Each warp sums
// exp(z - its own maximum); sums are brought to the maximum of the row when they are added, so that one barrier does
// for both. The loss is never averaged here: see tinyforge/ops/cross_entropy.py. Where the row is between the two
// passes:
//   PER > 0  in registers, PER vectors a thread
//   PER = 0  in memory, for any vocabulary: maximum and sum are found in one pass by rescaling (the online softmax),
//            and the row is read a second time
//   HELD = 1 in shared memory, for rows too long for registers: the pass that finds maximum and sum leaves the row
//            there, and each thread reads its own vectors back. Two rows of GPT-2's 100 kB fit on a multiprocessor, so
//            that one is read while the other is written.
// EDGE = 1 is for a vocabulary that is not a whole number of vectors (GPT-2's 50,257): rows are `pitch` apart, so that
// each begins at 16 bytes; numbers past the vocabulary count as -inf and get a residual of 0. HELD = 1 takes either.
//
// CAP = 1 is for logits z = cap tanh(u / cap), u the product: u is capped where it is read, and the residual is times
// 1 - tanh^2. With PER > 0 a thread keeps u too, in storage precision, for that.
//
// sum_heads: one block for each head, threads over tokens in a fixed stride, then a fixed tree. The two scale kernels
// are elementwise. An upstream gradient that is the same for all tokens is applied to the small matrices, W and dW, and
// not to the large one; one number per token scales the rows of residuals in place (a head is then a row).
//
// Grid: a block for each row (token and head). Block: up to 256 threads, as many as the row has vectors. Shared memory:
// 64 numbers; HELD = 1 a row more. Bound by memory: the row read and written.
//
// Tried on an H200 (65,536 rows of 4,096 in bf16: 1.07 GB): two reductions with a barrier each and exp in full 392 us;
// one barrier and the hardware's exponential 327 us; the same held to 32 registers, so that eight blocks fit on a
// multiprocessor, 291 us, 86 % of a copy. 128 threads with twice the numbers each: 338 us. 512 threads: 358 us.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#ifndef EDGE
#define EDGE 0
#endif

#ifndef HELD
#define HELD 0
#endif

#ifdef CAP
#define CAP_ARGUMENTS , A cap
#define CAP_NUMBERS , cap
#else
#define CAP_ARGUMENTS
#define CAP_NUMBERS
#endif

#define HELD_THREADS 512  // of a block where a row is in shared memory
#define BATCH 4           // vectors that such a thread has in flight

#if HELD
#define RESIDENT (sizeof(T) > 4 ? 1 : 2)
extern __shared__ uint4 held[];  // the row
#else
// Blocks of 256 threads that must fit on a multiprocessor: the most that it can hold, where a thread keeps few numbers.
#ifdef CAP
#define RESIDENT (PER * VEC > 16 ? 3 : PER ? 5 : 4)
#else
#define RESIDENT (PER && PER * VEC <= 16 ? 8 : 4)
#endif
#endif

// A thread for each row. Numbers past the vocabulary, up to `pitch`, become 0.
extern "C" __global__ void softmax_residual_naive(
    A *nll, T *logits, const int *targets, int rows, int vocab, int pitch
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    T *const z = logits + i64(row) * pitch;
    const int target = targets[row];
    A top = -INFINITY, sum = 0;
    for (int v = 0; v < vocab; v++) top = largest(top, widen(z[v]));
    for (int v = 0; v < vocab; v++) sum += exp(widen(z[v]) - top);
    nll[row] = target < 0 ? A(0) : log(sum) + top - widen(z[target]);
    for (int v = 0; v < pitch; v++) {
        const A probability = v < vocab ? exp(widen(z[v]) - top) / sum : A(0);
        narrow(target < 0 ? A(0) : probability - (v == target ? A(1) : A(0)), z[v]);
    }
}

// Vector v of a row.
__device__ __forceinline__ Pack<T, VEC> logits_at(const T *z, int v, int vocab) {
    Pack<T, VEC> p = load<VEC>(z + v * VEC);
#if EDGE || HELD
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        if (v * VEC + j >= vocab) narrow(A(-INFINITY), p.v[j]);
    }
#endif
    return p;
}

// tanh(x), for results that are stored as a T. exp(2 x) is infinite or 0 where tanh is 1 or -1.
__device__ __forceinline__ A tanh_for(A x) {
    if constexpr (sizeof(T) > 2) return tanh(x);
    return A(1) - A(2) * inverse_for<T>(exp_for<T>(A(2) * x) + A(1));
}

// The logit of the product u, and its derivative. What is past the vocabulary stays -inf.
__device__ __forceinline__ A logit_of(const T &u CAP_ARGUMENTS) {
    const A x = widen(u);
#ifdef CAP
    return x == A(-INFINITY) ? x : cap * tanh_for(x / cap);
#else
    return x;
#endif
}
__device__ __forceinline__ A slope_of(const T &u CAP_ARGUMENTS) {
#ifdef CAP
    const A t = tanh_for(widen(u) / cap);
    return A(1) - t * t;
#else
    return A(1);
#endif
}

// pitch: numbers from row to row, those past the vocabulary included. write: 0 for inference, where the logits are
// dropped.
extern "C" __global__ void __launch_bounds__(HELD ? HELD_THREADS : 256, RESIDENT) softmax_residual(
    A *nll, T *logits, const int *targets, int vocab, int pitch, int write CAP_ARGUMENTS
) {
    __shared__ A tops[32], sums[32];
    const i64 row = blockIdx.x;
    const int target = targets[row], lane = threadIdx.x % 32;
    // Vectors with at least one number of the vocabulary are read; the whole row is written.
    const int vectors = EDGE || HELD ? (vocab + VEC - 1) / VEC : pitch / VEC, all = pitch / VEC;
    T *z = logits + row * pitch;
    if (target < 0) {  // the same for the whole block
        if (threadIdx.x == 0) nll[row] = 0;
        Pack<T, VEC> zero;
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(A(0), zero.v[j]);
        if (write) {
            for (int v = threadIdx.x; v < all; v += blockDim.x) store(z + v * VEC, zero);
        }
        return;
    }
    const T product = z[target];  // before it is overwritten: all writes come after the barrier
    const A picked = logit_of(product CAP_NUMBERS);
    // top and sum of a warp's part: sum of exp(z - top). A warp without an element has top = -inf and sum = 0.
    A top = -INFINITY, sum = 0;
#if PER
    A kept[PER][VEC];
#ifdef CAP
    Pack<T, VEC> products[PER];
#endif
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * blockDim.x + threadIdx.x;
        if (v < vectors) {
            const Pack<T, VEC> p = logits_at(z, v, vocab);
#pragma unroll
            for (int j = 0; j < VEC; j++) top = largest(top, kept[i][j] = logit_of(p.v[j] CAP_NUMBERS));
#ifdef CAP
            products[i] = p;
#endif
        }
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (i * blockDim.x + threadIdx.x < vectors) {
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += kept[i][j] = exp_for<T>(kept[i][j] - top);
        }
    }
    sum = warp_sum(sum);
#else
#if HELD
    Pack<T, VEC> *const row_held = reinterpret_cast<Pack<T, VEC> *>(held);
    for (int first = threadIdx.x; first < vectors; first += BATCH * blockDim.x) {
        Pack<T, VEC> p[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int v = first + k * blockDim.x;
            if (v < vectors) p[k] = load<VEC>(z + v * VEC);
        }
        A highest = top;
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int v = first + k * blockDim.x;
            if (v >= vectors) break;
            if (v == vectors - 1) p[k] = logits_at(z, v, vocab);
            row_held[v] = p[k];
#pragma unroll
            for (int j = 0; j < VEC; j++) highest = largest(highest, logit_of(p[k].v[j] CAP_NUMBERS));
        }
        sum *= exp_for<T>(top - highest);  // exp(-inf) = 0 the first time
        top = highest;
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (first + k * blockDim.x >= vectors) break;
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += exp_for<T>(logit_of(p[k].v[j] CAP_NUMBERS) - top);
        }
    }
#else
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        const Pack<T, VEC> p = logits_at(z, v, vocab);
        A highest = top;
#pragma unroll
        for (int j = 0; j < VEC; j++) highest = largest(highest, logit_of(p.v[j] CAP_NUMBERS));
        sum *= exp_for<T>(top - highest);  // exp(-inf) = 0 the first time
        top = highest;
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += exp_for<T>(logit_of(p.v[j] CAP_NUMBERS) - top);
    }
#endif
    const A highest_in_warp = warp_max(top);
    sum = warp_sum(sum == 0 ? A(0) : sum * exp_for<T>(top - highest_in_warp));
    top = highest_in_warp;
#endif
    // One barrier: every warp adds the warps' sums itself.
    if (lane == 0) {
        tops[threadIdx.x / 32] = top;
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    const bool there = lane < blockDim.x / 32;
    const A others_top = there ? tops[lane] : -INFINITY, highest = warp_max(others_top);
    sum = warp_sum(there ? sums[lane] * exp_for<T>(others_top - highest) : A(0));
    if (threadIdx.x == 0) nll[row] = log(sum) + highest - picked;
    if (!write) return;
#if HELD
    const A scale = A(1) / sum;
    for (int v = threadIdx.x; v < all; v += blockDim.x) {
        Pack<T, VEC> out = {};
        if (v < vectors) {
            const Pack<T, VEC> p = row_held[v];
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A probability = exp_for<T>(logit_of(p.v[j] CAP_NUMBERS) - highest) * scale;
                narrow(probability * slope_of(p.v[j] CAP_NUMBERS), out.v[j]);
            }
        }
        store(z + v * VEC, out);
    }
    // 1 less at the target, by the thread that wrote its vector.
    if (target / VEC % blockDim.x == threadIdx.x) {
        narrow((exp_for<T>(picked - highest) * scale - A(1)) * slope_of(product CAP_NUMBERS), z[target]);
    }
#else
    // Writes vector v of the residual. probability(j): of its number j; slope(j): what it is multiplied by.
    const auto write_vector = [&](int v, auto probability, auto slope) {
        Pack<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            narrow((probability(j) - (v * VEC + j == target ? A(1) : A(0))) * slope(j), out.v[j]);
        }
        store(z + v * VEC, out);
    };
#if PER
    const A scale = exp_for<T>(top - highest) / sum;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * blockDim.x + threadIdx.x;
#ifdef CAP
        const auto slope = [&](int j) { return slope_of(products[i].v[j] CAP_NUMBERS); };
#else
        const auto slope = [](int) { return A(1); };
#endif
        if (v < vectors) write_vector(v, [&](int j) { return kept[i][j] * scale; }, slope);
    }
#else
    const A scale = A(1) / sum;
    for (int v = threadIdx.x; v < all; v += blockDim.x) {
        const Pack<T, VEC> p = logits_at(z, v, vocab);
        const auto probability = [&](int j) { return exp_for<T>(logit_of(p.v[j] CAP_NUMBERS) - highest) * scale; };
        write_vector(v, probability, [&](int j) { return slope_of(p.v[j] CAP_NUMBERS); });
    }
#endif
#endif
}

// softmax - q in place, and nll = -sum q log softmax, with q = (1 - share) onehot(target) + share softmax(teacher).
// A thread for each row. Numbers past the vocabulary, up to `pitch`, become 0.
extern "C" __global__ void soft_residual_naive(
    A *nll, T *logits, const T *teacher, const int *targets, A share, int rows, int vocab, int pitch
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    T *const z = logits + i64(row) * pitch;
    const T *const t = teacher + i64(row) * pitch;
    const int target = targets[row];
    A top = -INFINITY, sum = 0, teacher_top = -INFINITY, teacher_sum = 0, loss = 0;
    for (int v = 0; v < vocab; v++) {
        top = largest(top, widen(z[v]));
        teacher_top = largest(teacher_top, widen(t[v]));
    }
    for (int v = 0; v < vocab; v++) {
        sum += exp(widen(z[v]) - top);
        teacher_sum += exp(widen(t[v]) - teacher_top);
    }
    for (int v = 0; v < pitch; v++) {
        if (v >= vocab || target < 0) {
            narrow(A(0), z[v]);
            continue;
        }
        const A log_p = widen(z[v]) - top - log(sum);
        const A q = share * exp(widen(t[v]) - teacher_top) / teacher_sum + (v == target ? 1 - share : A(0));
        loss -= q * log_p;
        narrow(exp(log_p) - q, z[v]);
    }
    nll[row] = loss;
}

// A row's logits z and its teacher's t in one pass: the largest of each, the sums of exp(z - top) and
// exp(t - teacher_top), and dot, the sum of z exp(t - teacher_top). Since the q of a row add up to 1,
//     nll = log(sum) + top - (1 - share) z[target] - share dot / teacher_sum
// A second pass reads both rows again, from a cache, and writes the residual.
extern "C" __global__ void __launch_bounds__(256) soft_residual(
    A *nll, T *logits, const T *teacher, const int *targets, A share, int vocab, int pitch
) {
    __shared__ A parts[5][32];
    const i64 row = blockIdx.x;
    const int target = targets[row], lane = threadIdx.x % 32, vectors = pitch / VEC;
    T *const z = logits + row * pitch;
    const T *const t = teacher + row * pitch;
    if (target < 0) {  // the same for the whole block
        if (threadIdx.x == 0) nll[row] = 0;
        Pack<T, VEC> zero;
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(A(0), zero.v[j]);
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) store(z + v * VEC, zero);
        return;
    }
    const A picked = widen(z[target]);  // before it is overwritten: all writes come after the barrier
    A top = -INFINITY, sum = 0, teacher_top = -INFINITY, teacher_sum = 0, dot = 0;
    // Brings the sums to larger maxima. exp(-inf) = 0 the first time, and an empty part stays 0.
    const auto rescale = [&](A highest, A teacher_highest) {
        if (sum != 0) sum *= exp_for<T>(top - highest);
        if (teacher_sum != 0) {
            const A factor = exp_for<T>(teacher_top - teacher_highest);
            teacher_sum *= factor;
            dot *= factor;
        }
        top = highest;
        teacher_top = teacher_highest;
    };
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        const Pack<T, VEC> p = load<VEC>(z + v * VEC), q = load<VEC>(t + v * VEC);
        A highest = top, teacher_highest = teacher_top;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (v * VEC + j >= vocab) break;
            highest = largest(highest, widen(p.v[j]));
            teacher_highest = largest(teacher_highest, widen(q.v[j]));
        }
        rescale(highest, teacher_highest);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (v * VEC + j >= vocab) break;
            const A weight = exp_for<T>(widen(q.v[j]) - teacher_top);
            sum += exp_for<T>(widen(p.v[j]) - top);
            teacher_sum += weight;
            dot += weight * widen(p.v[j]);
        }
    }
    // Over a warp, and with one barrier over the block: every warp adds the warps' sums itself.
    const auto add_lanes = [&]() {
        rescale(warp_max(top), warp_max(teacher_top));
        sum = warp_sum(sum);
        teacher_sum = warp_sum(teacher_sum);
        dot = warp_sum(dot);
    };
    add_lanes();
    if (lane == 0) {
        const A found[5] = {top, sum, teacher_top, teacher_sum, dot};
#pragma unroll
        for (int i = 0; i < 5; i++) parts[i][threadIdx.x / 32] = found[i];
    }
    __syncthreads();
    const bool there = lane < blockDim.x / 32;
    top = there ? parts[0][lane] : A(-INFINITY);
    sum = there ? parts[1][lane] : A(0);
    teacher_top = there ? parts[2][lane] : A(-INFINITY);
    teacher_sum = there ? parts[3][lane] : A(0);
    dot = there ? parts[4][lane] : A(0);
    add_lanes();
    if (threadIdx.x == 0) nll[row] = log(sum) + top - (1 - share) * picked - share * dot / teacher_sum;
    const A scale = A(1) / sum, teacher_scale = share / teacher_sum;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        const Pack<T, VEC> p = load<VEC>(z + v * VEC), q = load<VEC>(t + v * VEC);
        Pack<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const int at = v * VEC + j;
            const A wanted = exp_for<T>(widen(q.v[j]) - teacher_top) * teacher_scale + (at == target ? 1 - share : A(0));
            narrow(at < vocab ? exp_for<T>(widen(p.v[j]) - top) * scale - wanted : A(0), out.v[j]);
        }
        store(z + v * VEC, out);
    }
}

// Grid: heads. Block: 1024 threads.
extern "C" __global__ void sum_heads(double *out, const A *nll, int tokens, int heads) {
    __shared__ double scratch[32];
    double sum = 0;
#pragma unroll 4
    for (int n = threadIdx.x; n < tokens; n += blockDim.x) sum += nll[i64(n) * heads + blockIdx.x];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// total and part count vectors; part: those that one head has in a row.
extern "C" __global__ void __launch_bounds__(256) scale_heads(
    T *y, const T *x, const A *scale, u32 total, u32 part, u32 heads
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const A c = scale[i / part % heads];
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(c * widen(p.v[j]), p.v[j]);
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) add_scaled_heads(
    A *y, const A *x, const A *scale, u32 total, u32 part, u32 heads
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const A c = scale[i / part % heads];
    const Pack<A, VEC> p = load<VEC>(x + i64(i) * VEC);
    Pack<A, VEC> q = load<VEC>(y + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) q.v[j] += c * p.v[j];
    store(y + i64(i) * VEC, q);
}
