// decode_batch: a decoder with a key/value cache for many sequences, the rows of a batch; one launch generates many
// tokens of each.
//
// Kernel:  decode_batch     `passes` passes over all layers, a new position of each row in each; logits, tokens drawn
//
// Idea. The rows of a batch do not depend on each other. A team of TEAM blocks serves sixteen of them, as many as a
// tensor-core product takes, goes through all layers with them, and waits for no other team. A batch of 64 is four
// teams. Each team reads all weights; the first one to read them brings them into the L2 cache for the others.
//   weights       They do not depend on tokens, so they are prefetched. Each lane has a queue of 16-byte pieces in
//                 shared memory (`Queue`). cp.async fills it up to DEPTH pieces ahead, across all barriers and from one
//                 token into the next. A piece as stored is the right operand of two products.
//   activations   They are the left operand, stored in the layout of its registers (`place`): the epilogue of a product
//                 writes what the next one loads, 16 bytes per lane. Each warp of a block holds its part of the columns
//                 in registers and multiplies it with all tiles of the block. The warps' partial sums meet in shared
//                 memory, in a fixed order.
//   steps         Between two steps all blocks of a team meet at a counter (`arrive`, `wait`). A norm is no step of its
//                 own: its gain is applied to what the step before writes, and 1 / rms after the product. The residual
//                 stream stays in the shared memory of the block that owns its columns.
//   attention     CREW warps compute a row and a kv head, whose query heads share each key and value. The first keys
//                 and values of earlier tokens are loaded before the queries arrive.
//   occupancy     RESIDENT blocks of different teams share a multiprocessor: one computes while the other waits.
// bf16 runs on tensor cores. float and double use multiply-adds on the same queue and layout; they are the reference.
// The order of sums depends only on shapes and the number of blocks: the same bits every time. What was tried and
// dropped, with times: docs/kernels/decode-batch.md.
//
// Grid: teams x TEAM blocks, at most what fits at once (cooperative launch). Block: WARPS x 32 threads.

#include "infer/cuda/decode.cuh"

// How the work is spread, unless the launcher defines it.
#ifndef RESIDENT  // blocks per multiprocessor
#define RESIDENT 1
#endif

constexpr int ROWS = 16;  // of a team
// Tiles are 8 rows of a matrix; of gate and up, 4 of each.
constexpr int DIM_TILES = DIM / 8, HIDDEN_TILES = (HIDDEN + 3) / 4, UNITS = ROWS * KV_HEADS, HALF = HEAD_DIM / 2;
constexpr int CREW = UNITS <= TEAM ? WARPS : WARPS / 2, CREWS = WARPS / CREW;

typedef Pack<A, 2> Pair;

#include "infer/cuda/sampler.cuh"

// The index of number k of a row, in activations that are the input of a product. For tensor cores (m16n8k16) a lane
// loads 16 bytes, the four registers of a left operand; 32 lanes hold 16 numbers of each row. k + 1 follows an even k.
template <int COLUMNS>
__device__ __forceinline__ int place(int row, int k) {
    if constexpr (TENSOR_CORES) {
        return (k / 16 * 32 + row % 8 * 4 + k % 8 / 2) * 8 + (k % 16 / 8 * 2 + row / 8) * 2 + k % 2;
    } else {
        return row * padded(COLUMNS) + k;
    }
}
// The k of hidden unit i of a tile, chosen so that four tiles fill the 16 bytes of a lane.
__device__ __forceinline__ int hidden_place(int tile, int i) {
    return tile / 4 * 16 + i / 2 * 8 + tile % 4 * 2 + i % 2;
}

// What the blocks of a team exchange. squares: the squared norm of the residual stream, one part for each tile.
struct Exchange {
    T *normed, *attended, *gated, *queries;  // ROWS x padded(DIM), padded(DIM), padded(HIDDEN), DIM
    A *squares;                              // ROWS x DIM_TILES

    static constexpr int NUMBERS = ROWS * (2 * padded(DIM) + padded(HIDDEN) + DIM);
    static constexpr int BYTES = (NUMBERS * int(sizeof(T)) + ROWS * DIM_TILES * int(sizeof(A)) + 127) / 128 * 128;

    __device__ explicit Exchange(unsigned char *memory) {
        normed = reinterpret_cast<T *>(memory);
        attended = normed + ROWS * padded(DIM);
        gated = attended + ROWS * padded(DIM);
        queries = gated + ROWS * padded(HIDDEN);
        squares = reinterpret_cast<A *>(queries + ROWS * DIM);
    }
};

__device__ __forceinline__ void store_pair(T *to, A a, A b) {
    Pack<T, 2> pair;
    narrow(a, pair.v[0]);
    narrow(b, pair.v[1]);
    store(to, pair);
}

// Loads what other blocks have written in this launch, bypassing the L1 cache.
template <int N, class X>
__device__ __forceinline__ Pack<X, N> fetch(const X *from) {
    if constexpr (sizeof(Pack<X, N>) % 16 == 0) {
        return load_from_l2(reinterpret_cast<const Pack<X, N> *>(from));
    } else {
        static_assert(sizeof(Pack<X, N>) == 8, "what is fetched at once has 8 bytes, or a multiple of 16");
        const uint2 both = __ldcg(reinterpret_cast<const uint2 *>(from));
        return reinterpret_cast<const Pack<X, N> &>(both);
    }
}

template <class X>
__device__ __forceinline__ Wide<X> fetch_one(const X *from) {
    if constexpr (sizeof(X) == 2) {
        return widen(X{__ldcg(&from->bits)});
    } else {
        return __ldcg(from);
    }
}

__device__ __forceinline__ void count_up(u32 *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ u32 poll(const u32 *counter) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
__device__ __forceinline__ void sync_crew(int crew) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + crew), "n"(CREW * 32) : "memory");
}

// What the threads of a block share.
struct Shared {
    A *sums;        // of a product, a part of each warp: 2 x WARPS x TILES x 128
    A *stream;      // this block's columns of the residual stream, in the layout of its tiles' sums
    A *gains;       // of all norms, for these columns: (2 * layers + 1) x OWN
    A *turns;       // of each row's position: HALF cosines, HALF sines
    A *scale;       // 1 / rms of each row
    int *position;  // of each row's new token
    int *token;     // the new token itself
    unsigned char *scratch;  // the memory of `sums`, reused by attention and sampling
};

// The warps' partial results of attention: `outputs` are not yet divided by `totals`; scores are relative to `tops`.
struct Scratch {
    A *outputs, *tops, *totals;  // WARPS x GROUP x HEAD_DIM; WARPS x GROUP

    __device__ explicit Scratch(unsigned char *memory) {
        outputs = reinterpret_cast<A *>(memory);
        tops = outputs + WARPS * GROUP * HEAD_DIM;
        totals = tops + WARPS * GROUP;
    }
};

constexpr int OWN = ceil_div(DIM_TILES, TEAM) * 8;  // columns of the residual stream that a block owns, at most

struct Block {
    Shared shared;
    Queue queue;
    int rank;      // of this block in its team
    int parity;    // of the buffer for sums
    u32 *counter;  // of the team: arrivals so far, at all barriers
    u32 meeting;   // the counter when all blocks have arrived at the next barrier

    // A barrier of the team's blocks, in two halves, called by all threads: after `wait`, what the blocks wrote before
    // `arrive` can be read. A block must `wait` before it arrives at the next barrier, or the counter would take its
    // second arrival for that of another block.
    __device__ __forceinline__ void arrive() {
        __syncthreads();
        if (threadIdx.x == 0) count_up(counter);
        meeting += TEAM;
    }
    // Only one thread polls: thousands that poll one L2 line would delay the arrivals.
    __device__ __forceinline__ void wait() {
        if (threadIdx.x == 0) {
            for (u32 polls = 0; int(poll(counter) - meeting) < 0;) pause(polls);
        }
        __syncthreads();
    }

    // This block's share of `count` items, from `first` to `end` - 1; the next block's share follows.
    __device__ __forceinline__ int first(int count) const { return count * rank / TEAM; }
    __device__ __forceinline__ int end(int count) const { return count * (rank + 1) / TEAM; }

    // This warp's part of the products of up to MOST tiles with ROWS rows of x. Fewer tiles are multiplied as MOST,
    // with whatever is in the queue; the extra sums are ignored.
    template <int STEPS, int MOST>
    __device__ __forceinline__ void multiply(const uint4 (&x)[2 * STEPS], A *sums) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float sum[MOST][4] = {};
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                const uint4 w = reinterpret_cast<const uint4 &>(queue[i * STEPS + j]);
                const uint4 a = x[2 * j], b = x[2 * j + 1];
                multiply_add(sum[i], a.x, a.y, a.z, a.w, w.x, w.y);
                multiply_add(sum[i], b.x, b.y, b.z, b.w, w.z, w.w);
            }
        }
#pragma unroll
        for (int i = 0; i < MOST; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Pair pair = {sum[i][half * 2], sum[i][half * 2 + 1]};
                store(sums + ((warp * MOST + i) * 2 + half) * 64 + lane * 2, pair);
            }
        }
    }
    // The same in float and double: a lane has PIECE columns of a row of w.
    template <int COLUMNS, int STEPS, int MOST>
    __device__ __forceinline__ void multiply_plainly(const T *x, int count, A *sums) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
        for (int i = 0; i < count; i++) {
            A sum[ROWS] = {};
#pragma unroll 1
            for (int j = 0; j < STEPS; j++) {
                const Piece w = queue[i * STEPS + j];
                const T *const from = x + (warp * STEPS + j) * STEP + lane % 4 * PIECE;
#pragma unroll
                for (int n = 0; n < ROWS; n++) {
                    const Piece part = fetch<PIECE>(from + n * padded(COLUMNS));
#pragma unroll
                    for (int e = 0; e < PIECE; e++) sum[n] += widen(part.v[e]) * widen(w.v[e]);
                }
            }
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
                sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
                const int at = ((warp * MOST + i) * 2 + n / 8) * 64 + n % 8 * 8 + g;
                if (n % 4 == lane % 4) sums[at] = sum[n];
            }
        }
    }

    // x, ROWS x COLUMNS, times this block's share of COUNT tiles. Calls finish(tile, row, c, sum), by whole warps, for
    // rows 2 c and 2 c + 1 of a tile; c is the lane modulo 4. With `squares`, `shared.scale` holds 1 / rms of each row
    // of the residual stream by then.
    template <int COLUMNS, int COUNT, class Finish>
    __device__ __forceinline__ void product(const T *x, const A *squares, A eps, Finish finish) {
        constexpr int STEPS = steps(COLUMNS), EACH = ceil_div(COUNT, TEAM);
        constexpr int LIMIT = DEPTH / STEPS < TILES ? DEPTH / STEPS : TILES;
        static_assert(LIMIT > 0, "the queue holds no tile");
        constexpr int MOST = ceil_div(EACH, ceil_div(EACH, LIMIT)), LANES = THREADS / ROWS;
        const int thread = threadIdx.x, row = thread / LANES, begin = first(COUNT), behind = end(COUNT);
        A square = 0;
        if (squares && begin < behind) {
            for (int i = thread % LANES; i < DIM_TILES; i += LANES) square += __ldcg(squares + row * DIM_TILES + i);
        }
        uint4 input[TENSOR_CORES ? 2 * STEPS : 1];
        if constexpr (TENSOR_CORES) {
            const uint4 *const from = reinterpret_cast<const uint4 *>(x) + thread / 32 * (2 * STEPS * 32) + thread % 32;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++) input[j] = __ldcg(from + j * 32);
        }
        for (int tile = begin; tile < behind; tile += MOST) {
            const int count = min(MOST, behind - tile);
            A *const sums = shared.sums + parity * (WARPS * TILES * 128);
            queue.wait(count * STEPS);
            if constexpr (TENSOR_CORES) {
                multiply<STEPS, MOST>(input, sums);
            } else {
                multiply_plainly<COLUMNS, STEPS, MOST>(x, count, sums);
            }
            queue.taken += count * STEPS;
            queue.refill();
            if (squares && tile == begin) {
#pragma unroll
                for (int gap = LANES / 2; gap; gap /= 2) square += __shfl_xor_sync(~0u, square, gap);
                if (thread % LANES == 0) shared.scale[row] = inverse_root(square * (A(1) / A(DIM)) + eps);
            }
            __syncthreads();
            for (int task = thread; task < count * 64; task += THREADS) {
                const A *const from = sums + task / 32 * 64 + task % 32 * 2;
                Pair sum = load<2>(from);
#pragma unroll
                for (int w = 1; w < WARPS; w++) {
                    const Pair part = load<2>(from + w * (MOST * 128));
                    sum.v[0] += part.v[0], sum.v[1] += part.v[1];
                }
                finish(tile + task / 64, task / 32 % 2 * 8 + task % 32 / 4, task % 4, sum);
            }
            parity ^= 1;
        }
    }

    // Stores x as two columns of the residual stream and, times the gain of norm `norm`, as input of the next product.
    __device__ __forceinline__ void put(const Exchange &exchange, int norm, int tile, int row, int c, Pair x) {
        store(residual(tile, row, c), x);
        const Pair g = load<2>(shared.gains + norm * OWN + (tile - first(DIM_TILES)) * 8 + c * 2);
        store_pair(exchange.normed + place<DIM>(row, tile * 8 + c * 2), x.v[0] * g.v[0], x.v[1] * g.v[1]);
        A square = x.v[0] * x.v[0] + x.v[1] * x.v[1];
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (c == 0) exchange.squares[row * DIM_TILES + tile] = square;
    }
    // The same, with `sum` added to the two columns.
    __device__ __forceinline__ void add(const Exchange &exchange, int norm, int tile, int row, int c, Pair sum) {
        const Pair x = load<2>(residual(tile, row, c));
        put(exchange, norm, tile, row, c, Pair{{x.v[0] + sum.v[0], x.v[1] + sum.v[1]}});
    }
    __device__ __forceinline__ A *residual(int tile, int row, int c) const {
        return shared.stream + ((tile - first(DIM_TILES)) * ROWS + row) * 8 + c * 2;
    }
};

// Sums, attention and sampling share one part of shared memory, one after the other.
constexpr int SUMS = 2 * WARPS * TILES * 128 * sizeof(A), PARTS = WARPS * GROUP * (HEAD_DIM + 2) * sizeof(A);
constexpr int DRAW = SORTED * 8 + 512, SCRATCH = SUMS > PARTS && SUMS > DRAW ? SUMS : PARTS > DRAW ? PARTS : DRAW;
static_assert(THREADS % (ROWS * 4) == 0 && THREADS / ROWS <= 32, "a row's squares are summed by lanes of one warp");

// Attention.

// A slab of 16 positions that follow each other in the cache.
struct CacheSlab : Slab {
    // Loads the slab at `base`, but only positions in from .. end - 1; the others are left unchanged.
    __device__ __forceinline__ void take(const T *cache_keys, const T *cache_values, int base, int from, int end) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const T *const key = cache_keys + (base + g) * HEAD_DIM + c * 8;
        const T *const value = cache_values + (base + c * 2) * HEAD_DIM + g * WIDE;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int position = base + g + u * 8;
#pragma unroll
            for (int s = 0; s < CHUNKS; s++) {
                if (position < from || position >= end) continue;
                keys[u][s] = __ldcg(reinterpret_cast<const uint4 *>(key + u * 8 * HEAD_DIM + s * 32));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = base + c * 2 + i / 2 * 8 + i % 2;
            if (position < from || position >= end) continue;
            values[i] = fetch<WIDE>(value + (i / 2 * 8 + i % 2) * HEAD_DIM);
        }
    }
};

// This warp's partial result, over every CREW-th slab from the one at `base` on. `slab` holds the positions of that one
// before `position`, the new token's. queries: GROUP x HEAD_DIM.
__device__ __forceinline__ void attend_slabs(const Scratch &scratch, CacheSlab slab, const T *queries, const T *keys,
                                             const T *values, int base, int position) {
    constexpr int HALVES = GROUP > 8 ? 2 : 1, CHUNKS = Slab::CHUNKS, WIDE = Slab::WIDE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint4 q[2][CHUNKS] = {};
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int s = 0; s < CHUNKS; s++) {
            if (h * 8 + g >= GROUP) continue;
            q[h][s] = __ldcg(reinterpret_cast<const uint4 *>(queries + (h * 8 + g) * HEAD_DIM + s * 32 + c * 8));
        }
    }
    slab.take(keys, values, base, position, position + 1);
    const float scale = 1.0f / sqrtf(float(HEAD_DIM));
    float top[2] = {LOWEST, LOWEST}, total[2] = {}, output[WIDE][4] = {};
    while (base <= position) {
        const int after = base + CREW * 16;
        CacheSlab next{};
        next.take(keys, values, after, 0, position + 1);
        float score[2][4] = {};
        slab.scores(q, score);
        u32 shares[2][2] = {};
        float shrink[2] = {1, 1};
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const auto seen = [&](int i) { return base + i <= position; };
            take_scores(score, h, scale, seen, top, total, shrink, shares);
        }
        slab.add_values(shares, shrink, output);
        slab = next, base = after;
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        const int query = h * 8 + g;
        if (query >= GROUP) continue;
        if (c == 0) scratch.tops[warp * GROUP + query] = top[h], scratch.totals[warp * GROUP + query] = total[h];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<A, WIDE> part;
#pragma unroll
            for (int t = 0; t < WIDE; t++) part.v[t] = output[t][h * 2 + i];
            store(scratch.outputs + (warp * GROUP + query) * HEAD_DIM + (c * 2 + i) * WIDE, part);
        }
    }
}

// The same in float and double: a warp has one position at a time, a lane some of its numbers.
__device__ __forceinline__ void attend_plainly(const Scratch &scratch, const T *queries, const T *keys, const T *values,
                                               int member, int position) {
    constexpr int EACH = ceil_div(HEAD_DIM, 32);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const A scale = A(1) / sqrt(A(HEAD_DIM));
    A q[GROUP][EACH] = {}, top[GROUP], total[GROUP] = {}, output[GROUP][EACH] = {};
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        top[i] = LOWEST;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (lane + e * 32 < HEAD_DIM) q[i][e] = fetch_one(queries + i * HEAD_DIM + lane + e * 32);
    }
    for (int at = member; at <= position; at += CREW) {
        A k[EACH] = {}, v[EACH] = {};
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (lane + e * 32 >= HEAD_DIM) continue;
            k[e] = fetch_one(keys + at * HEAD_DIM + lane + e * 32);
            v[e] = fetch_one(values + at * HEAD_DIM + lane + e * 32);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            A score = 0;
#pragma unroll
            for (int e = 0; e < EACH; e++) score += q[i][e] * k[e];
            score = warp_sum(score) * scale;
            const A new_top = largest(score, top[i]), shrink = exp(top[i] - new_top), share = exp(score - new_top);
            top[i] = new_top, total[i] = total[i] * shrink + share;
#pragma unroll
            for (int e = 0; e < EACH; e++) output[i][e] = output[i][e] * shrink + share * v[e];
        }
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (lane == 0) scratch.tops[warp * GROUP + i] = top[i], scratch.totals[warp * GROUP + i] = total[i];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int d = lane + e * 32;
            if (d < HEAD_DIM) scratch.outputs[(warp * GROUP + i) * HEAD_DIM + d] = output[i][e];
        }
    }
}

// Merges the partial results of a crew into the output of a row's kv head.
__device__ __forceinline__ void merge(const Scratch &scratch, int crew, int row, int kv_head, T *attended) {
    for (int task = threadIdx.x % (CREW * 32); task < GROUP * HALF; task += CREW * 32) {
        const int query = task / HALF, d = task % HALF * 2;
        A top = LOWEST, weight = 0;
        Pair mean{};
#pragma unroll
        for (int w = 0; w < CREW; w++) top = largest(top, scratch.tops[(crew * CREW + w) * GROUP + query]);
#pragma unroll
        for (int w = 0; w < CREW; w++) {
            const int part = (crew * CREW + w) * GROUP + query;
            const A share = exp_for<T>(scratch.tops[part] - top);
            const Pair output = load<2>(scratch.outputs + part * HEAD_DIM + d);
            weight += share * scratch.totals[part];
            mean.v[0] += share * output.v[0], mean.v[1] += share * output.v[1];
        }
        const A scale = inverse_for<T>(weight);
        const int k = (kv_head * GROUP + query) * HEAD_DIM + d;
        store_pair(attended + place<DIM>(row, k), mean.v[0] * scale, mean.v[1] * scale);
    }
}

// Samples the next token of a row from its logits. Not inlined: the layers need the registers that it would take.
__device__ __noinline__ int draw(unsigned char *scratch, const A *logits, Sampler how, u32 number) {
    const auto take = [&](auto &x, auto at) {
#pragma unroll
        for (int i = 0; i < sizeof(x) / sizeof(Parcel); i++)
            if (at(i) >= 0) x[i] = fetch<PARCEL>(logits + at(i));
    };
    return next_token(scratch, take, how, number);
}

// What a launch is given; `batched_arguments` of arguments.py has the same fields.
struct Arguments {
    const T *weights;    // for each block of a team and each warp `stride` units of 32 pieces, in the order of use
    const T *embedding;  // (VOCAB, DIM)
    const A *gains;      // (2 * layers + 1, DIM)
    const A *cosines, *sines;  // (positions, HEAD_DIM / 2)
    T *keys, *values;    // (layers, batch, KV_HEADS, capacity, HEAD_DIM)
    // How many positions of a row were filled before the first pass, (batch,). A row whose cache is full stays at its
    // last position, and its further tokens mean nothing.
    const int *past;
    const int *given;       // (passes, batch): the token that a row takes in a pass, -1 for the last that it sampled
    int *ids;               // (batch,): the last token of each row, which may be of the launch before
    int *drawn;             // (passes, batch): the sampled tokens
    unsigned char *memory;  // Exchange::BYTES for each team, zeros at first
    u32 *counters;          // 32 words for each team, zeros
    A *logits;              // (teams * ROWS, heads, VOCAB_ROWS), of the last pass
    const int *lengths;     // units of weights that a pass uses, for each block of a team
    const Sampler *samplers;  // (batch,), or null: how the tokens of each row are sampled, into `drawn`
    const u32 *first;       // (batch,): the number of each row's random stream that the first pass samples with
    A eps;
    int stride, layers, heads, batch, capacity, passes;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
decode_batch(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, team = blockIdx.x / TEAM;
    const int first_row = team * ROWS;
    Block block;
    Queue &queue = block.queue;
    Shared &shared = block.shared;
    block.rank = blockIdx.x % TEAM;
    block.parity = 0;
    block.counter = args.counters + team * 32;
    block.meeting = 0;
    shared.scratch = shared_memory + DEPTH * THREADS * 16;
    shared.sums = reinterpret_cast<A *>(shared.scratch);
    shared.stream = reinterpret_cast<A *>(shared.scratch + SCRATCH);
    shared.gains = shared.stream + ROWS * OWN;
    shared.turns = shared.gains + (2 * args.layers + 1) * OWN;
    shared.scale = shared.turns + ROWS * HEAD_DIM;
    shared.position = reinterpret_cast<int *>(shared.scale + ROWS);
    shared.token = shared.position + ROWS;
    const Exchange exchange(args.memory + i64(team) * Exchange::BYTES);

    queue.slots = reinterpret_cast<Piece *>(shared_memory) + thread;
    queue.source = args.weights + (i64(block.rank) * WARPS + warp) * args.stride * (32 * PIECE) + lane * PIECE;
    queue.length = args.lengths[block.rank];
    queue.left = queue.length * args.passes;
    queue.taken = queue.requested = queue.next = 0;
    queue.refill();

    const int dim_begin = block.first(DIM_TILES), dim_end = block.end(DIM_TILES);
    for (int i = thread; i < (2 * args.layers + 1) * OWN; i += THREADS) {
        const int column = dim_begin * 8 + i % OWN;
        if (column < DIM) shared.gains[i] = args.gains[i / OWN * DIM + column];
    }
    const int crew = warp / CREW, member = warp % CREW, units_end = block.end(UNITS);
    for (int pass = 0; pass < args.passes; pass++) {
        // Tokens, angles and embeddings.
        if (thread < ROWS) {
            const int row = first_row + thread;
            int position = 0, token = 0;
            if (row < args.batch) {
                const int next = args.given[pass * args.batch + row], drawn_last = __ldcg(args.ids + row);
                position = min(args.past[row] + pass, args.capacity - 1), token = next < 0 ? drawn_last : next;
            }
            shared.position[thread] = position, shared.token[thread] = token;
        }
        __syncthreads();
        for (int i = thread; i < ROWS * HALF; i += THREADS) {
            const int at = shared.position[i / HALF] * HALF + i % HALF, to = i / HALF * HEAD_DIM + i % HALF;
            shared.turns[to] = args.cosines[at], shared.turns[to + HALF] = args.sines[at];
        }
        for (int task = thread; task < (dim_end - dim_begin) * 64; task += THREADS) {
            const int tile = dim_begin + task / 64, row = task % 64 / 4, c = task % 4;
            const Pack<T, 2> x = load<2>(args.embedding + i64(shared.token[row]) * DIM + tile * 8 + c * 2);
            block.put(exchange, 0, tile, row, c, Pair{{widen(x.v[0]), widen(x.v[1])}});
        }
        block.arrive();

        for (int layer = 0; layer < args.layers; layer++) {
            const i64 line = i64(args.capacity) * HEAD_DIM, layer_start = i64(layer) * args.batch * KV_HEADS * line;
            // q|k|v, RoPE, and the new keys and values.
            block.wait();
            block.product<DIM, WIDTH / 8>(
                exchange.normed, exchange.squares, args.eps, [&](int tile, int row, int c, Pair sum) {
                    // A tile holds the pairs that RoPE rotates: d and d + HALF of a head.
                    const int head = tile / (HEAD_DIM / 8), d = tile % (HEAD_DIM / 8) * 4 + c;
                    const A scale = shared.scale[row];
                    A a = sum.v[0] * scale, b = sum.v[1] * scale;
                    if (head < HEADS + KV_HEADS) {
                        const A cosine = shared.turns[row * HEAD_DIM + d];
                        const A sine = shared.turns[row * HEAD_DIM + HALF + d];
                        const A turned = a * cosine - b * sine;
                        b = b * cosine + a * sine, a = turned;
                    }
                    T *to = exchange.queries + row * DIM + head * HEAD_DIM;
                    if (head >= HEADS) {
                        if (first_row + row >= args.batch) return;
                        const bool is_value = head >= HEADS + KV_HEADS;
                        const int kv_head = (head - HEADS) % KV_HEADS;
                        to = (is_value ? args.values : args.keys) + layer_start +
                             (i64(first_row + row) * KV_HEADS + kv_head) * line + shared.position[row] * HEAD_DIM;
                    }
                    narrow(a, to[d]);
                    narrow(b, to[d + HALF]);
                });
            block.arrive();

            // Attention.
            bool queries_are_there = false;
            for (int unit = block.first(UNITS) + crew; unit < units_end; unit += CREWS) {
                const int row = unit / KV_HEADS, kv_head = unit % KV_HEADS, position = shared.position[row];
                if (first_row + row >= args.batch) break;
                const i64 start = layer_start + (i64(first_row) * KV_HEADS + unit) * line;
                const T *const queries = exchange.queries + row * DIM + kv_head * GROUP * HEAD_DIM;
                const Scratch scratch(shared.scratch);
                // Old positions do not depend on this pass: their first keys and values are in flight before the
                // queries arrive. Every warp waits once, here or after the loop.
                CacheSlab slab{};
                if constexpr (TENSOR_CORES) slab.take(args.keys + start, args.values + start, member * 16, 0, position);
                if (!queries_are_there) block.wait();
                queries_are_there = true;
                if constexpr (TENSOR_CORES) {
                    attend_slabs(scratch, slab, queries, args.keys + start, args.values + start, member * 16, position);
                } else {
                    attend_plainly(scratch, queries, args.keys + start, args.values + start, member, position);
                }
                sync_crew(crew);
                merge(scratch, crew, row, kv_head, exchange.attended);
                sync_crew(crew);
            }
            if (!queries_are_there) block.wait();
            block.arrive();

            // Attention's projection, and the residual.
            block.wait();
            block.product<DIM, DIM_TILES>(exchange.attended, nullptr, args.eps, [&](int tile, int row, int c, Pair sum) {
                block.add(exchange, 2 * layer + 1, tile, row, c, sum);
            });
            block.arrive();

            // Gate, up and SwiGLU.
            block.wait();
            block.product<DIM, HIDDEN_TILES>(
                exchange.normed, exchange.squares, args.eps, [&](int tile, int row, int c, Pair sum) {
                    const A scale = shared.scale[row], gate = sum.v[0] * scale, up = sum.v[1] * scale;
                    const A gated = gate * inverse_for<T>(A(1) + exp_for<T>(-gate)) * up;
                    const A next = __shfl_down_sync(~0u, gated, 1);
                    if (c % 2) return;
                    store_pair(exchange.gated + place<HIDDEN>(row, hidden_place(tile, c)), gated, next);
                });
            block.arrive();

            // Down, and the residual.
            block.wait();
            block.product<HIDDEN, DIM_TILES>(exchange.gated, nullptr, args.eps, [&](int tile, int row, int c, Pair sum) {
                block.add(exchange, 2 * layer + 2, tile, row, c, sum);
            });
            block.arrive();
        }

        // The output heads.
        block.wait();
        for (int head = 0; head < args.heads; head++) {
            block.product<DIM, VOCAB_TILES>(
                exchange.normed, head ? nullptr : exchange.squares, args.eps, [&](int tile, int row, int c, Pair sum) {
                    const int token = tile * 8 + c * 2;
                    const A scale = shared.scale[row];
                    store(args.logits + (i64(first_row + row) * args.heads + head) * VOCAB_ROWS + token,
                          Pair{{token < VOCAB ? sum.v[0] * scale : A(-INFINITY),
                                token + 1 < VOCAB ? sum.v[1] * scale : A(-INFINITY)}});
                });
        }
        // The next tokens.
        if (!args.samplers) continue;
        block.arrive();
        block.wait();
        for (int row = block.rank; row < ROWS && first_row + row < args.batch; row += TEAM) {
            const int at = first_row + row;
            const A *const from = args.logits + i64(at) * args.heads * VOCAB_ROWS;
            const int id = draw(shared.scratch, from, args.samplers[at], args.first[at] + pass);
            if (thread == 0) args.ids[at] = id, args.drawn[pass * args.batch + at] = id;
        }
        block.arrive();
        block.wait();
    }
}
