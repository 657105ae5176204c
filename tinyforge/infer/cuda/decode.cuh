// What decode_single.cu and decode_batched.cu share: the queues of weights, and attention over slabs of 16 positions.
//
// Macros: SCALAR, HEADS, KV_HEADS, HEAD_DIM, VOCAB, and DEPTH, the pieces in a lane's queue. WEIGHT: how weights are
// stored, where that is not SCALAR: int8, e4m3, or four_bits, which needs PRODUCERS. SPAN, with four_bits: steps of a
// unit of weights, 2 or 4.

#include "ops/common.cuh"
#include "ops/barriers.cuh"
#include "infer/cuda/codes.cuh"

// How the work is spread, unless the launcher defines it.
#ifndef WARPS
#define WARPS 8
#endif
#ifndef TILES  // tiles whose sums are in shared memory at one time, at most
#define TILES 4
#endif
#ifndef ONCE  // 1: the weights of a pass do not fit in the L2 cache
#define ONCE 0
#endif
#ifndef PRODUCERS  // warps that copy weights, numbered after those that compute (sm_90)
#define PRODUCERS 0
#endif
#ifndef SPIN  // nanoseconds of sleep between two polls
#define SPIN 0
#endif

#ifndef WEIGHT
#define WEIGHT SCALAR
#endif

#ifndef SPAN
#define SPAN 1
#endif
#ifndef COPIED  // units of weights that producers copy together: a thread starts few copies in a microsecond
#define COPIED 1
#endif

typedef SCALAR T;
typedef Wide<T> A;
typedef WEIGHT W;
template <class Code>
struct Wider {
    typedef Code Type;
};
template <>
struct Wider<four_bits> {
    typedef int8 Type;
};
typedef Wider<W>::Type OfHeads;  // codes of heads have at least a byte

template <class>
constexpr bool FOUR_BITS = false;
template <>
constexpr bool FOUR_BITS<four_bits> = true;
constexpr bool TENSOR_CORES = sizeof(T) == 2, CODES = sizeof(W) == 1, GROUPED = FOUR_BITS<W>;
constexpr int THREADS = WARPS * 32;
constexpr int GROUP = HEADS / KV_HEADS, WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int PIECE = 16 / sizeof(T);   // numbers in 16 bytes, what a lane loads at once
constexpr int STEP = 4 * PIECE;         // columns of 8 rows of a matrix that a warp takes at once
constexpr int PARCEL = 16 / sizeof(A);  // numbers of the wider type that a thread loads at once
constexpr int VOCAB_TILES = (VOCAB + 7) / 8, VOCAB_ROWS = VOCAB_TILES * 8;

typedef Pack<T, PIECE> Piece;
// A piece of weights in memory. Codes of four bits: one word for each of SPAN steps, eight columns in each.
typedef Pack<W, GROUPED ? SPAN * 4 : PIECE> Stored;
typedef Pack<u32, (SPAN + 1) / 2> Scales;  // of a row's groups in a unit, each of half precision
typedef Pack<A, PARCEL> Parcel;

// Steps of a tile, and the columns of a product, padded to whole pieces.
__device__ constexpr int steps(int columns) { return ceil_div(columns, WARPS * STEP * SPAN) * SPAN; }
__device__ constexpr int padded(int columns) { return steps(columns) * WARPS * STEP; }

// 1 / sqrt(x); in bf16 the hardware's approximation.
__device__ __forceinline__ A inverse_root(A x) {
    if constexpr (TENSOR_CORES) {
        return rsqrtf(x);
    } else {
        return A(1) / sqrt(x);
    }
}

// A barrier of the threads that compute.
__device__ __forceinline__ void sync() {
    if constexpr (PRODUCERS) {
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    } else {
        __syncthreads();
    }
}

// Between two polls. A number that never arrives is a bug of the kernel: an error is better than a hung device.
__device__ __forceinline__ void pause(u32 &polls) {
    if (++polls == 1u << 24) __trap();
    if (SPIN) __nanosleep(SPIN);
}

// copy_weights of codes: pieces of 8 bytes, or of 4 where T is float.
__device__ __forceinline__ void copy_codes(u32 to, const void *from) {
    if constexpr (ONCE) {
        asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(sizeof(Stored)), "l"(evict_first())
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(sizeof(Stored)) : "memory");
    }
}

// copy_async of weights. Weights that do not fit in the L2 cache are evicted first, so that they evict nothing else.
__device__ __forceinline__ void copy_weights(u32 to, const void *from) {
    if constexpr (CODES) {
        copy_codes(to, from);
    } else if constexpr (ONCE) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "l"(evict_first())
                     : "memory");
    } else {
        copy_async(to, from);
    }
}

// Weights are prefetched into queues in shared memory, of DEPTH places for each lane: piece i + DEPTH takes the place
// of piece i once that is used. A kernel calls await(n), reads pieces 0 to n - 1, and calls used(n).

// The queue of a lane that copies for itself. A lane reads only what it copied, so no barrier is needed. STRIDE:
// numbers from a piece to this lane's next one.
template <int STRIDE>
struct LaneQueue {
    Stored *slots;
    const W *source;
    u32 taken, requested, early;  // pieces so far: used; requested; requested before the last group of copies
    int next, length;             // index in `source` of the next piece to request; pieces of a pass
    int left;                     // pieces still to be requested

    // Requests up to `most` pieces, as room allows, as one group of copies.
    __device__ __forceinline__ void refill(int most = 0x7FFFFFFF) {
        early = requested;
        for (int pieces = min(min(most, int(taken + DEPTH - requested)), left); pieces > 0; pieces -= 4) {
            if (pieces >= 4 && next + 4 <= length) {
                const W *const from = source + next * STRIDE;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    copy_weights(shared_address(slots + (requested + i) % DEPTH * THREADS), from + i * STRIDE);
                }
                advance(4);
            } else {
#pragma unroll 1
                for (int i = min(pieces, 4); i > 0; i--) {
                    copy_weights(shared_address(slots + requested % DEPTH * THREADS), source + next * STRIDE);
                    advance(1);
                }
            }
        }
        copy_commit();
    }
    __device__ __forceinline__ void advance(int pieces) {
        requested += pieces, left -= pieces, next += pieces;
        if (next >= length) next = 0;
    }

    // Waits for the next `pieces`, and requests them first where that has not been done.
    __device__ __forceinline__ void await(int pieces) {
        if (int(requested - taken) < pieces) refill(DEPTH);
        wait(pieces);
    }
    __device__ __forceinline__ void used(int pieces) { taken += pieces; }
    __device__ __forceinline__ void end_pass() {}

    // Waits until the next `pieces`, all requested, have arrived.
    __device__ __forceinline__ void wait(int pieces) {
        if (int(early - taken) >= pieces) {
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
    }

    // Piece `index` of those that have arrived.
    __device__ __forceinline__ const Stored &operator[](int index) const {
        return slots[(taken + index) % DEPTH * THREADS];
    }
    __device__ __forceinline__ Scales scales(int) const { return {}; }
};
static_assert((DEPTH & (DEPTH - 1)) == 0, "the queue's places are counted modulo a power of 2");
typedef LaneQueue<32 * PIECE> Queue;

// Bytes of a unit of weights: a piece for each thread that computes. Codes of four bits are followed by the scales of
// their groups in half precision: SPAN for each row of each warp.
constexpr int UNIT = THREADS * sizeof(Stored) + GROUPED * THREADS / 4 * SPAN * 2;
constexpr int QUEUE_BARRIERS = 2048;  // bytes in front of a block's queue, as in decode_single_plan.py

// The queues of all lanes of a block, in units, filled by threads that do nothing else, a line of COPIED units at a time. A
// line has two barriers: `full`, which counts its bytes, and `empty`, at which each warp arrives after taking its
// pieces. A pass begins with a line of its own. The first QUEUE_BARRIERS bytes of `memory` are the barriers; the units
// follow.
struct SharedQueue {
    static constexpr u32 LINES = DEPTH / COPIED;
    const unsigned char *pieces;  // this thread's piece of the first place
    volatile int *stop;   // set when no more units will be taken
    u32 full, empty;      // addresses of the barriers
    u32 taken;            // units

    __device__ explicit SharedQueue(unsigned char *memory)
        : pieces(memory + QUEUE_BARRIERS + threadIdx.x * sizeof(Stored)),
          stop(reinterpret_cast<volatile int *>(memory + DEPTH * 16)), full(shared_address(memory)),
          empty(full + DEPTH * 8), taken(0) {
        static_assert(DEPTH * 16 + 4 <= QUEUE_BARRIERS, "room for the barriers");
    }
    // By one thread, before a barrier of all.
    __device__ void make() const {
        for (int i = 0; i < LINES; i++) barrier_make(full + i * 8, 1), barrier_make(empty + i * 8, WARPS);
        *stop = 0;
        barriers_made();
    }
    // By each of FILLERS threads: copies every FILLERS-th line, starting at `line`, of the `length` units at `source`,
    // which are repeated `times` times; until `stop`.
    template <int FILLERS>
    __device__ void fill(const unsigned char *source, u32 length, u32 times, u32 line) const {
        static_assert(LINES % FILLERS == 0, "a place is always filled by the same thread");
        const u32 to = full + QUEUE_BARRIERS, first = line, lines = (length + COPIED - 1) / COPIED;
        const auto wrapped = [&](u32 next) {
            if constexpr (FILLERS == 1) return next < lines ? next : 0;
            for (; next >= lines; next -= lines) continue;
            return next;
        };
        for (u32 next = FILLERS > 1 && line < lines * times ? wrapped(line) : 0; line < lines * times && !*stop;
             line += FILLERS, next = wrapped(next + FILLERS)) {
            const u32 place = line % LINES, barrier = full + place * 8;
            const u32 bytes = COPIED == 1 || (next + 1) * COPIED <= length ? COPIED * UNIT : length % COPIED * UNIT;
            for (u32 polls = 0; line >= LINES && !barrier_passed(empty + place * 8, line / LINES % 2 ^ 1); pause(polls))
                if (*stop) goto end;
            barrier_expect(barrier, bytes);
            barrier_arrive(barrier);
            if constexpr (ONCE) {
                copy_line_once(to + place * COPIED * UNIT, source + i64(next) * COPIED * UNIT, bytes, barrier);
            } else {
                copy_line(to + place * COPIED * UNIT, source + i64(next) * COPIED * UNIT, bytes, barrier);
            }
        }
    end:  // no copy may be in flight when the block ends
        for (u32 i = line < first + LINES ? first : line - LINES; i < line; i += FILLERS)
            barrier_wait(full + i % LINES * 8, i / LINES % 2);
    }

    __device__ __forceinline__ void refill(int = 0) {}
    // Waits for the next `units`; each lane of the warp tests the barrier of a different line.
    __device__ __forceinline__ void await(int units) {
        const u32 first = taken / COPIED, lines = (taken + units + COPIED - 1) / COPIED - first;
#pragma unroll
        for (u32 i = threadIdx.x % 32; i - threadIdx.x % 32 < LINES; i += 32) {
            const u32 line = first + i, barrier = full + line % LINES * 8, parity = line / LINES % 2;
            for (u32 polls = 0; !__all_sync(~0u, i >= lines || barrier_passed(barrier, parity)); pause(polls)) continue;
        }
    }
    __device__ __forceinline__ const Stored &operator[](int index) const {
        return *reinterpret_cast<const Stored *>(pieces + (taken + index) % DEPTH * UNIT);
    }
    // The scales of this lane's row in unit `index`, two of half precision in a word.
    __device__ __forceinline__ Scales scales(int index) const {
        if constexpr (!GROUPED) return {};
        const u32 row = THREADS * sizeof(Stored) + threadIdx.x / 4 * (SPAN * 2) - threadIdx.x * sizeof(Stored);
        return *reinterpret_cast<const Scales *>(pieces + (taken + index) % DEPTH * UNIT + row);
    }
    // The next `units` have been read, or are not needed.
    __device__ __forceinline__ void used(int units) {
        const u32 lane = threadIdx.x % 32, first = taken / COPIED, lines = (taken + units) / COPIED - first;
        __syncwarp();
#pragma unroll
        for (u32 i = lane; i - lane < LINES; i += 32)
            if (i < lines) barrier_arrive(empty + (first + i) % LINES * 8);
        taken += units;
    }
    // All units of a pass have been used.
    __device__ __forceinline__ void end_pass() {
        if (COPIED > 1 && taken % COPIED) used(COPIED - taken % COPIED);
    }
};

// Two numbers as one register of an operand.
__device__ __forceinline__ u32 pair(T low, T high) {
    const Pack<T, 2> both = {{low, high}};
    return reinterpret_cast<const u32 &>(both);
}

// Attention.

constexpr float LOWEST = -1e30f;  // finite, so that the difference of two of them is not NaN

// Keys and values of 16 positions, in registers. Queries are the left operand of a product, keys the right one. The
// scores come out in the layout of the left operand of the product with the values, of which a lane holds WIDE adjacent
// columns.
struct Slab {
    static constexpr int CHUNKS = HEAD_DIM / 32 ? HEAD_DIM / 32 : 1, WIDE = HEAD_DIM / 8;
    uint4 keys[2][CHUNKS];
    Pack<T, WIDE> values[4];

    // Adds the products of queries and keys to `score`: of query g + 8 h and position 8 u + 2 c + e in score[u][2 h +
    // e], where g = lane / 4 and c = lane % 4. q[h]: this lane's part of row g + 8 h, as it is in memory.
    __device__ __forceinline__ void scores(const uint4 (&q)[2][CHUNKS], float (&score)[2][4]) const {
#pragma unroll
        for (int u = 0; u < 2; u++) {
#pragma unroll
            for (int s = 0; s < CHUNKS; s++) {
                const uint4 k = keys[u][s];
                multiply_add(score[u], q[0][s].x, q[1][s].x, q[0][s].y, q[1][s].y, k.x, k.y);
                multiply_add(score[u], q[0][s].z, q[1][s].z, q[0][s].w, q[1][s].w, k.z, k.w);
            }
        }
    }
    // output = shrink output + shares values: of query g + 8 h and column (2 c + e) WIDE + t in output[t][2 h + e].
    __device__ __forceinline__ void add_values(const u32 (&shares)[2][2], const float (&shrink)[2],
                                               float (&output)[WIDE][4]) const {
#pragma unroll
        for (int t = 0; t < WIDE; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) output[t][i] *= shrink[i / 2];
        }
        add_values(shares, output);
    }
    // The same for the first slab, where there is nothing to rescale.
    __device__ __forceinline__ void add_values(const u32 (&shares)[2][2], float (&output)[WIDE][4]) const {
#pragma unroll
        for (int t = 0; t < WIDE; t++) {
            const u32 low = pair(values[0].v[t], values[1].v[t]);
            const u32 high = pair(values[2].v[t], values[3].v[t]);
            multiply_add(output[t], shares[0][0], shares[0][1], shares[1][0], shares[1][1], low, high);
        }
    }
};

// One step of the online softmax of query g + 8 h: scales its scores, masks them, and turns them into `shares`,
// exp(score - top), as a left operand. seen(i): whether the query sees position i of the slab. top: the largest score
// so far. total: this lane's sum of the shares. shrink: the factor for sums over earlier positions.
template <class Seen>
__device__ __forceinline__ void take_scores(float (&score)[2][4], int h, float scale, Seen seen, float (&top)[2],
                                            float (&total)[2], float (&shrink)[2], u32 (&shares)[2][2]) {
    float new_top = top[h];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float &x = score[i / 2][h * 2 + i % 2];
        x = seen(i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2) ? x * scale : 2 * LOWEST;
        new_top = largest(new_top, x);
    }
    new_top = largest(new_top, __shfl_xor_sync(~0u, new_top, 1));
    new_top = largest(new_top, __shfl_xor_sync(~0u, new_top, 2));
    shrink[h] = __expf(top[h] - new_top);
    total[h] *= shrink[h];
    top[h] = new_top;
#pragma unroll
    for (int u = 0; u < 2; u++) {
        T p[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float share = __expf(score[u][h * 2 + i] - new_top);
            total[h] += share;
            narrow(A(share), p[i]);
        }
        shares[u][h] = pair(p[0], p[1]);
    }
}
