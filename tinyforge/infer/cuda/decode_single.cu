// decode: a decoder with a key/value cache for one sequence; one launch generates many tokens.
//
// Kernel:  decode     `passes` passes over all layers, ROWS new positions in each; logits, and the next token sampled,
//                     or drafts verified and new ones made
//
// Idea. A token reads every weight once, and takes five dependent steps per layer: at batch 1 decoding is
// latency-bound. With 16 layers that is 80 waits per token, and a launch or a grid barrier at each would cost more than
// the bytes. So this is a persistent kernel: one block per multiprocessor stays resident for many tokens.
//   weights       They do not depend on tokens, so they are prefetched. Each lane has a queue of 16-byte pieces in
//                 shared memory, filled up to DEPTH pieces ahead, across all waits and from one token into the next;
//                 `weights` is stored in the order in which lanes read it. On Hopper, threads of a warpgroup of its own
//                 fill the queues of all lanes by TMA (`SharedQueue`), and take no issue slots from the threads that
//                 compute. Elsewhere each lane fills its own by cp.async (`LaneQueue`).
//   activations   They are their own flags. Every number that one block computes for another has a place of its own in
//                 `exchange`, filled beforehand with a bit pattern that no result has (`absent`). The reader polls the
//                 place until the number arrives: one trip to the L2 cache, no fence, no counter. Only single words
//                 need to be atomic, because each word shows by itself whether it has arrived.
//   products      A tile is 8 rows of a matrix. Tiles are dealt to blocks round-robin through all layers. The warps of
//                 a block split the columns, and each reads the inputs of its own columns, so a product has one
//                 barrier: between the warps' partial sums and the total. bf16 runs on tensor cores, and up to four
//                 rows of activations cost as much as one; a lane polls for exactly the numbers that it passes to them.
//                 What is known before an input arrives is computed before. float and double use multiply-adds on the
//                 same queue. A norm's gain is applied before the product and 1 / rms after it, so there is no barrier
//                 between them.
//   attention     Position p belongs to split p % SPLITS of its kv head. One block owns the query heads of that group
//                 and split in every pass. It writes the keys and values that it later reads, so they need no flag. The
//                 readers merge the splits, in order.
//   speculation   All blocks find the most likely tokens, so all know which drafts are accepted and where the next pass
//                 begins.
//   codes         Weights may have one byte (WEIGHT). A lane's piece then has 8 bytes instead of 16, and is decoded to
//                 bf16 once it is in registers; the scale of a row is applied to its sum. Of four bits: four steps
//                 of a tile in 16 bytes of a lane, a step being a group in each row, whose scale is applied to its sum;
//                 the heads' codes have one byte.
// The order of sums depends only on shapes and the number of blocks: the same bits every time, for any ROWS. What was
// tried and dropped, with times: docs/kernels/decode.md.
//
// Grid: at most what fits at once (cooperative launch). Block: (WARPS + PRODUCERS) x 32 threads, one block per
// multiprocessor.

#include "infer/cuda/decode.cuh"

// How the work is spread, unless the launcher defines it.
#ifndef BLOCKS
#define BLOCKS 132
#endif
#ifndef SPLITS  // of the positions of a kv head
#define SPLITS 3
#endif
// Whether one row may be sampled with a temperature: there must be room to sort the vocabulary.
#ifndef DRAWS
#define DRAWS 1
#endif
// Whether a product takes its weights into registers before its input arrives. With four rows that spills on Ampere.
#if ROWS < 4 || __CUDA_ARCH__ >= 900
#define EARLY TENSOR_CORES
#else
#define EARLY false
#endif
// Pieces that a lane requests between two polls during attention. Used pieces are not replaced at once, because many
// copies in flight delay the numbers that blocks wait for. The rest are requested after attention's projection.
#ifndef REFILL
#define REFILL 8
#endif
// Cycles, after the queries have arrived, in which blocks without a unit of attention do not poll: polls slow down the
// numbers that attention waits for and publishes.
constexpr u32 QUIET = 1500;

// Units of attention that are dealt, the same for any ROWS, so that weights have one layout. At `base`, 36 on 132
// blocks: the 96 tiles of attention's projection go to blocks without one.
constexpr int ATTENTION = KV_HEADS * SPLITS * 3;
constexpr int HIDDEN_TILES = (HIDDEN + 7) / 8 * 2, HIDDEN_ROWS = HIDDEN_TILES * 4;  // a tile: 4 rows of gate, 4 of up

// Columns of a product per warp.
__device__ constexpr int slice(int columns) { return steps(columns) * STEP; }
// A row of input in shared memory: padded with zeros to whole steps, plus one step, so that rows differ in banks.
__device__ constexpr int pitch(int columns) { return padded(columns) + STEP; }

// Arrays of a layer in `exchange`, in words. Numbers that the next product rounds to a T are sent as T, SHARED_BY of
// them in a word. Eight words of a row are followed by the same eight words of the other rows (`place`), with room for
// four rows. Each L2 line then has one writer: lines that several blocks write while all poll them are slower.
constexpr int SHARED_BY = sizeof(A) / sizeof(T), STATS_WORDS = (SPLITS * HEADS + 7) / 8 * 8;
constexpr int QKV = 0, PARTS = QKV + 4 * WIDTH, STATS = PARTS + 4 * SPLITS * DIM / SHARED_BY;
constexpr int MIDDLE = STATS + 4 * STATS_WORDS, GATED = MIDDLE + 4 * DIM;
constexpr int AFTER = GATED + 4 * ((HIDDEN_ROWS / SHARED_BY + 7) / 8 * 8), LAYER = AFTER + 4 * DIM;
__device__ __forceinline__ u32 place(u32 n, u32 word) { return word / 8 * 32 + n * 8 + word % 8; }

// Forces x, which is known early, into a register before a wait. The compiler would compute it at its use, after the
// wait.
__device__ __forceinline__ u32 settled(u32 x) { return __shfl_sync(~0u, x, threadIdx.x % 32); }

typedef Pack<A, PARCEL / SHARED_BY> Words;  // these hold PARCEL numbers, each a T

// The first hidden unit of a tile: the hidden units of a block's tiles are adjacent.
__device__ __forceinline__ u32 first_unit(u32 tile) {
    const u32 block = tile % BLOCKS;
    return (block * (HIDDEN_TILES / BLOCKS) + min(block, u32(HIDDEN_TILES % BLOCKS)) + tile / BLOCKS) * 4;
}

__device__ __forceinline__ A log_for(A x) {
    if constexpr (TENSOR_CORES) {
        return __logf(x);
    } else {
        return log(x);
    }
}

// A bit pattern that no arithmetic yields: a NaN that arithmetic makes is 0x7FFF...
__device__ __forceinline__ float absent(float) { return __int_as_float(-1); }
__device__ __forceinline__ double absent(double) { return __longlong_as_double(-1); }
__device__ __forceinline__ bool there(float x) { return __float_as_int(x) != -1; }
__device__ __forceinline__ bool there(double x) { return __double_as_longlong(x) != -1; }
template <int N>
__device__ __forceinline__ bool there(const Pack<A, N> &p) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; i++) all &= there(p.v[i]);
    return all;
}

__device__ __forceinline__ void publish(float *to, float x) {
    if (!there(x)) x = NAN;
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void publish(double *to, double x) {
    if (!there(x)) x = NAN;
    asm volatile("st.relaxed.gpu.global.f64 [%0], %1;" ::"l"(to), "d"(x) : "memory");
}
// Publishes a number of an array of T: the word at `to` holds the numbers of an even lane and of the next one. Adjacent
// lanes of a warp have adjacent indices; all of them call this.
__device__ __forceinline__ void publish_narrow(A *to, A x, bool mine) {
    if constexpr (SHARED_BY == 1) {
        if (mine) publish(to, x);
    } else {
        const A next = __shfl_down_sync(~0u, x, 1);
        Pack<T, 2> pair;
        narrow(x, pair.v[0]);
        narrow(next, pair.v[1]);
        if (mine && threadIdx.x % 2 == 0) publish(to, reinterpret_cast<const A &>(pair));
    }
}
// Reads what may not have arrived yet, if it is needed: a predicated load, without a branch.
__device__ __forceinline__ void peek(const float *from, Pack<float, 4> &to, bool needed = true) {
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];}"
                 : "+f"(to.v[0]), "+f"(to.v[1]), "+f"(to.v[2]), "+f"(to.v[3])
                 : "l"(from), "r"(u32(needed))
                 : "memory");
}
__device__ __forceinline__ void peek(const float *from, Pack<float, 2> &to, bool needed = true) {
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];}"
                 : "+f"(to.v[0]), "+f"(to.v[1])
                 : "l"(from), "r"(u32(needed))
                 : "memory");
}
__device__ __forceinline__ void peek(const float *from, Pack<float, 1> &to, bool needed = true) {
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.f32 %0, [%1];}"
                 : "+f"(to.v[0])
                 : "l"(from), "r"(u32(needed))
                 : "memory");
}
__device__ __forceinline__ void peek(const double *from, Pack<double, 2> &to, bool needed = true) {
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.f64 {%0, %1}, [%2];}"
                 : "+d"(to.v[0]), "+d"(to.v[1])
                 : "l"(from), "r"(u32(needed))
                 : "memory");
}
__device__ __forceinline__ void peek(const double *from, Pack<double, 1> &to, bool needed = true) {
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.f64 %0, [%1];}"
                 : "+d"(to.v[0])
                 : "l"(from), "r"(u32(needed))
                 : "memory");
}

// COUNT packs computed by other blocks, pack i at the address at(i), if needed(i). All loads are issued before the
// first is checked.
template <int COUNT, int N>
struct Awaited {
    u32 missing[COUNT];  // 0 or 1 in a register; a bool would be a byte

    template <class Needed>
    __device__ __forceinline__ explicit Awaited(Needed needed) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) missing[i] = needed(i);
    }
    template <class At>
    __device__ __forceinline__ void request(Pack<A, N> (&got)[COUNT], At at) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) peek(at(i), got[i], missing[i]);
    }
    // Whether a pack is still missing.
    __device__ __forceinline__ u32 check(const Pack<A, N> (&got)[COUNT]) {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (there(got[i])) missing[i] = 0;
            any |= missing[i];
        }
        return any;
    }
};
template <int COUNT, int N, class At, class Needed>
__device__ __forceinline__ void await(Pack<A, N> (&got)[COUNT], At at, Needed needed) {
    Awaited<COUNT, N> awaited(needed);
    for (u32 polls = 0;; pause(polls)) {
        awaited.request(got, at);
        if (!awaited.check(got)) return;
    }
}
// The same by whole warps, whose lanes stay together.
template <int COUNT, int N, class At, class Needed>
__device__ __forceinline__ void await_together(Pack<A, N> (&got)[COUNT], At at, Needed needed) {
    Awaited<COUNT, N> awaited(needed);
    for (u32 polls = 0;; pause(polls)) {
        awaited.request(got, at);
        if (!__any_sync(~0u, awaited.check(got))) return;
    }
}

__device__ __forceinline__ void rest(u32 cycles) {
    const u32 begin = clock();
    while (u32(clock()) - begin < cycles) continue;
}

// The number of the residual stream that a thread adds to its sum. It is awaited together with the product's input, so
// that there is one wait and not two.
struct Residual {
    Pack<A, 1> word[1];
    const A *from;
    Awaited<1, 1> awaited;

    __device__ __forceinline__ Residual(const A *from, bool needed) : from(from), awaited([&](int) { return needed; }) {}
    __device__ __forceinline__ void await() {
        for (u32 polls = 0;; pause(polls)) {
            request();
            if (!check()) return;
        }
    }
    __device__ __forceinline__ void request() {
        awaited.request(word, [&](int) { return from; });
    }
    __device__ __forceinline__ u32 check() { return awaited.check(word); }
    template <int COUNT, int N, class At, class Needed>
    __device__ __forceinline__ void await_with(Pack<A, N> (&got)[COUNT], At at, Needed needed) {
        Awaited<COUNT, N> others(needed);
        for (u32 polls = 0;; pause(polls)) {
            others.request(got, at);
            request();
            const u32 missing = check();
            if (!__any_sync(~0u, others.check(got) | missing)) return;
        }
    }
};

// The token of row n; 0 where there is no draft.
__device__ __forceinline__ int id_of_row(const int (&ids)[ROWS], u32 n) {
    int id = ids[0];
#pragma unroll
    for (u32 m = 1; m < ROWS; m++)
        if (m == n) id = ids[m];
    return max(id, 0);
}

// What the threads of a block share.
struct Shared {
    T *by_dim, *by_hidden;  // inputs of a product: ROWS of pitch(DIM), ROWS of pitch(HIDDEN)
    A *squares;             // the squared norm of the residual stream, a part of each warp: ROWS x WARPS
    A *sums;                // of a product, a part of each warp: 2 x TILES x ROWS x 8 x WARPS
    unsigned char *scratch;
};

static_assert(TILES * ROWS * 8 <= THREADS, "a thread finishes one number at most");

#if PRODUCERS
typedef SharedQueue Weights;
#else
typedef LaneQueue<THREADS * PIECE> Weights;
#endif

// The numbers of a product's input that a lane passes to the tensor cores: of row lane / 4 % 4, four adjacent columns
// in each step.
template <int COLUMNS>
struct Input {
    static constexpr int STEPS = steps(COLUMNS);
    u32 x[STEPS][2];

    __device__ static u32 row() { return threadIdx.x / 4 % 4; }
    __device__ static u32 column(int j) {
        return threadIdx.x / 32 * slice(COLUMNS) + threadIdx.x % 4 * PIECE + threadIdx.x % 32 / 16 * 4 + j * STEP;
    }
    // HAVE: columns that exist.
    template <int HAVE = COLUMNS>
    __device__ static bool mine(int j) {
        return row() < ROWS && (HAVE >= padded(COLUMNS) || column(j) < HAVE);
    }
    // The address of a step's numbers. PER_WORD: numbers in a word.
    template <int PER_WORD>
    __device__ static const A *at(const A *from, int j) {
        return from + place(row(), column(0) / PER_WORD) + j * (STEP / PER_WORD * 4);
    }
};

// At most so many pieces of weights are in a lane's registers before the input arrives, unless one tile has more: with
// more, registers spill.
#ifndef HELD
#define HELD 12
#endif
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int least_one(int a) { return a < 1 ? 1 : a; }

// A tile of more steps is multiplied in parts, as its units arrive.
constexpr int AT_ONCE = 24;
// Units of such a part.
constexpr int PART = 4;

__device__ __forceinline__ void add_eights(float (&sum)[4], u32 x0, u32 x1) {
    multiply_add(sum, EIGHT_OFF, EIGHT_OFF_HIGH, EIGHT_OFF, EIGHT_OFF_HIGH, x0, x1);
}

// A product's input, with which tiles are multiplied in parts. FOUR: with weights of four bits, whose codes count from 0
// and their numbers from -8.
template <int STEPS, bool FOUR>
struct PartsInput {
    static constexpr int EIGHTS = ROWS > 1 ? 2 : 1;
    static constexpr bool HAS_EIGHTS = FOUR && STEPS <= AT_ONCE;  // else they are added anew for each tile
    u32 x[STEPS][2];
    float eights[HAS_EIGHTS ? STEPS : 1][EIGHTS];  // -8 times the sum of a step's columns, of the row and half that a lane adds

    __device__ __forceinline__ void take(const u32 (&from)[STEPS][2]) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            x[j][0] = FOUR ? enlarged(from[j][0]) : from[j][0], x[j][1] = FOUR ? enlarged(from[j][1]) : from[j][1];
            if constexpr (HAS_EIGHTS) {
                float sum[4] = {};
                add_eights(sum, x[j][0], x[j][1]);
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) eights[j][e] = threadIdx.x % 4 < 2 ? sum[e] : sum[2 + e];
            }
        }
    }
};

// A block's share of the product with a matrix of COUNT tiles: what is known before the input arrives. FOUR: whether its
// weights have four bits; where those of layers do, the heads' have a byte.
template <int COLUMNS, int COUNT, bool FOUR = GROUPED>
struct Matrix {
    static constexpr int STEPS = steps(COLUMNS), EACH = ceil_div(COUNT, BLOCKS);
    static constexpr int SPANNED = FOUR ? SPAN : GROUPED ? SPAN / 2 : 1, UNITS = STEPS / SPANNED;  // steps of a unit
    typedef PartsInput<STEPS, FOUR> X;
    static constexpr bool OF_GROUPS = FOUR;
    static constexpr int CHAINS = FOUR ? 2 : least(STEPS, 4);
    static constexpr float LOW = FOUR ? LOW_UNIT : 1, HIGH = FOUR ? HIGH_UNIT : 1;  // of sums
    static constexpr bool IN_PARTS = TENSOR_CORES && (GROUPED || STEPS > AT_ONCE), HOLDS = EARLY && !IN_PARTS;
    static constexpr int MOST = least(EACH, least(TILES, HOLDS ? least_one(HELD / STEPS) : TILES));
    Piece held[HOLDS ? MOST * STEPS : 1];  // weights
    int first, count;                      // first tile, and number, of those multiplied at one time
    int row;                               // row that this thread finishes, -1 for none
    u32 at;                                // its place in an array of `exchange`
    const float *scales;                   // of the matrix's rows, where weights are codes
    A scale;                               // of that row

    __device__ __forceinline__ bool mine() const { return first < COUNT; }
    __device__ static u32 input_row() { return threadIdx.x / 8 % ROWS; }
};

// Whether a product's weights are taken a step ahead, while the block waits for the input of the product before it.
// They must be all tiles that the block has of the matrix, and fit into registers together with those of the other
// product.
constexpr int MOST_TILES = ceil_div(HIDDEN_TILES > WIDTH / 8 ? HIDDEN_TILES : WIDTH / 8, BLOCKS);
constexpr bool AHEAD =
    PRODUCERS && EARLY && !GROUPED && MOST_TILES <= TILES && DIM / 8 <= BLOCKS &&
    (MOST_TILES + 1) * steps(DIM) + steps(HIDDEN) <= (DEPTH < 32 ? DEPTH : 32);
// Threads that start copies. One thread starts three in a microsecond; large models and several rows have to wait for
// them. One row of a small model waits for other blocks' numbers instead, and more copies in flight delay these.
constexpr int FILLERS = AHEAD && ROWS == 1 ? 1 : least_one(least(PRODUCERS, DEPTH / COPIED));

struct Block {
    Shared shared;
    Weights queue;
    int dealt;   // tiles and units dealt so far, modulo BLOCKS
    int parity;  // of the buffer for sums
    const float *scales;  // where weights are codes: of the rows dealt next
    A eps;
    A square;    // squared norm of this lane's part of the residual stream

    // This block's first tile of the next `count`; it also has every BLOCKS-th tile after it.
    __device__ __forceinline__ int deal(int count) {
        const int first = int(blockIdx.x) - dealt;
        dealt += count % BLOCKS;
        if constexpr (CODES) scales += count * 8;
        if (dealt >= BLOCKS) dealt -= BLOCKS;
        return first < 0 ? first + BLOCKS : first;
    }
    template <int COLUMNS, int COUNT, bool FOUR>
    __device__ __forceinline__ void deal(Matrix<COLUMNS, COUNT, FOUR> &p) {
        p.scales = scales;
        p.first = deal(COUNT);
    }

    // This warp's part of the sums of up to MOST tiles. Each tile has several chains of sums, because a tensor-core
    // product has a long latency and the next of its chain waits for it. A piece as stored is a left operand: words 0
    // and 2 are row g, words 1 and 3 row g + 8. The right operand holds the columns of the first two in its rows 0 to 3
    // (x has at most four), those of the other two in rows 4 to 7; half of the result is used. Fewer than MOST tiles
    // are multiplied as MOST, with whatever is in the queue; the extra sums are ignored.
    template <int STEPS, int MOST, class At>
    __device__ __forceinline__ void multiply(At piece, const u32 (&x)[STEPS][2], A *sums) {
        constexpr int CHAINS = STEPS < 4 ? STEPS : 4;
        float sum[MOST][CHAINS][4] = {};
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                const Piece &weights = piece(i * STEPS + j);
                const uint4 w = reinterpret_cast<const uint4 &>(weights);
                multiply_add(sum[i][j % CHAINS], w.x, w.y, w.z, w.w, x[j][0], x[j][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < MOST; i++) leave(sum[i], sums, i);
    }

    // Leaves this warp's part of the sums of tile i in shared memory. low, high: factors of both halves of the columns.
    template <int CHAINS>
    __device__ __forceinline__ static void leave(const float (&sum)[CHAINS][4], A *sums, int i, float low = 1,
                                                 float high = 1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (e >= ROWS) continue;
            float all = 0;
#pragma unroll
            for (int k = 0; k < CHAINS; k++) all += c < 2 ? sum[k][e] : sum[k][2 + e];
            all *= c < 2 ? low : high;
            all += __shfl_xor_sync(~0u, all, 2);
            const int n = c * 2 + e;
            if (n < ROWS) sums[((i * ROWS + n) * 8 + g) * WARPS + warp] = all;
        }
    }

    // The same tile after tile, with at most PART units of weights at a time, which are taken from the queue and given
    // back: for any number of columns.
    template <class Product>
    __device__ __forceinline__ void multiply_in_parts(const Product &p, const typename Product::X &x, A *sums) {
        constexpr int UNITS = Product::UNITS;
#pragma unroll 1
        for (int i = 0; i < p.count; i++) {
            float sum[Product::CHAINS][4] = {};
#pragma unroll
            for (int first = 0; first < UNITS; first += PART) {
                const int units = least(PART, UNITS - first);
                Taken taken[PART];
                queue.await(units);
#pragma unroll
                for (int unit = 0; unit < PART; unit++)
                    if (unit < units) taken[unit] = {bits_of(queue[unit]), queue.scales(unit)};
                queue.used(units);
#pragma unroll
                for (int unit = 0; unit < PART; unit++)
                    if (unit < units) add_unit<Product>(taken[unit], (first + unit) * Product::SPANNED, x, sum);
            }
            if constexpr (Product::OF_GROUPS) {
#pragma unroll
                for (int e = 0; e < 2; e++) sum[1][2 + e] = sum[1][e];
            }
            leave(sum, sums, i, Product::LOW, Product::HIGH);
        }
    }
    // A unit in registers.
    typedef Pack<u32, sizeof(Stored) / 4> Bits;
    struct Taken {
        Bits words;
        Scales scales;
    };
    __device__ __forceinline__ static const Bits &bits_of(const Stored &stored) {
        return reinterpret_cast<const Bits &>(stored);
    }
    // Adds the products with a unit, whose first step is `step`.
    template <class Product, int CHAINS>
    __device__ __forceinline__ static void add_unit(const Taken &taken, int step, const typename Product::X &x,
                                                    float (&sum)[CHAINS][4]) {
        if constexpr (Product::OF_GROUPS) {
#pragma unroll
            for (int s = 0; s < SPAN; s++) {
                const Codes codes(taken.words.v[s]);
                const float scale = half_of(taken.scales.v[s / 2], s % 2);
                const u32 x0 = x.x[step + s][0], x1 = x.x[step + s][1];
                float of_group[4] = {};
                if constexpr (!Product::X::HAS_EIGHTS) add_eights(of_group, x0, x1);
                multiply_add(of_group, codes.low[0], codes.high[0], codes.low[1], codes.high[1], x0, x1);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (e % 2 < ROWS) sum[0][e] += scale * of_group[e];
                    if (Product::X::HAS_EIGHTS && e < 2 && e < ROWS) sum[1][e] += scale * x.eights[step + s][e];
                }
            }
        } else {
            constexpr int SPANNED = Product::SPANNED;
            typedef Pack<Pack<OfHeads, PIECE>, SPANNED> Pieces;
            const Pieces pieces = reinterpret_cast<const Pieces &>(taken.words);
#pragma unroll
            for (int s = 0; s < SPANNED; s++) {
                const Piece piece = decoded<T>(pieces.v[s]);
                const uint4 w = reinterpret_cast<const uint4 &>(piece);
                multiply_add(sum[(step + s) % CHAINS], w.x, w.y, w.z, w.w, x.x[step + s][0], x.x[step + s][1]);
            }
        }
    }

    // Waits for the weights of the tiles from p.first on, and takes them; p.at = aim(row).
    template <int COLUMNS, int COUNT, bool FOUR, class Aim>
    __device__ __forceinline__ void prepare(Matrix<COLUMNS, COUNT, FOUR> &p, Aim aim) {
        using Product = Matrix<COLUMNS, COUNT, FOUR>;
        constexpr int MOST = Product::MOST, STEPS = Product::STEPS;
        // Also without a share: if `held` were not written on every path, its registers would be live throughout.
        p.count = 0;
#pragma unroll
        for (int i = 0; i < MOST; i++) p.count += p.first + i * BLOCKS < COUNT;
        const u32 tile = p.first + threadIdx.x / (ROWS * 8) * BLOCKS;
        p.row = int(threadIdx.x) < p.count * ROWS * 8 ? int(tile * 8 + threadIdx.x % 8) : -1;
        p.at = settled(aim(u32(max(p.row, 0))));
        if constexpr (CODES && !FOUR) p.scale = p.row < 0 ? 0 : p.scales[p.row];
        if constexpr (!Product::IN_PARTS) queue.await(p.count * STEPS);
        if constexpr (Product::HOLDS) {
#pragma unroll
            for (int i = 0; i < MOST * STEPS; i++) p.held[i] = decoded<T>(queue[i]);
            queue.used(p.count * STEPS);
        }
    }

    // A product is prepared a step ahead, or when its turn comes.
    template <class Product, class Aim>
    __device__ __forceinline__ void prepare_ahead(Product &p, Aim aim) {
        if constexpr (AHEAD) prepare(p, aim);
    }
    template <class Product, class Aim>
    __device__ __forceinline__ void prepare_late(Product &p, Aim aim) {
        if constexpr (!AHEAD) prepare(p, aim);
    }

    // Runs a product that was prepared. Calls take(x), which waits for the input, then finish(row, n, sum) for each row
    // of this block's share and each row n of the input; with NORM the sum is divided by the rms of the residual
    // stream. `finish` is called by whole warps; row is -1 for threads without one.
    // There is one barrier, between the warps' sums and the total. What a warp leaves in shared memory for `finish`
    // (`squares`) is overwritten only after numbers have arrived that depend on `finish`.
    // again(): called before the sums of further tiles, where a block has more of them than it multiplies at one time.
    template <bool NORM, int COLUMNS, int COUNT, bool FOUR, class Take, class Aim, class Finish, class Again>
    __device__ __forceinline__ void run(Matrix<COLUMNS, COUNT, FOUR> &p, const T *input, Take take, Aim aim,
                                        Finish finish, Again again) {
        using Product = Matrix<COLUMNS, COUNT, FOUR>;
        constexpr int EACH = Product::EACH, MOST = Product::MOST;
        constexpr int STEPS = steps(COLUMNS), PITCH = pitch(COLUMNS);
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, n = p.input_row();
        const T *const part = input + warp * slice(COLUMNS) + lane % 4 * PIECE;
        Input<TENSOR_CORES ? COLUMNS : 1> x;
        take(x);
        typename Product::X full;
        if constexpr (Product::IN_PARTS) full.take(x.x);
        while (p.mine()) {
            const int count = p.count, row = p.row;
            A *const sums = shared.sums + parity * (TILES * ROWS * 8 * WARPS);
            if constexpr (Product::IN_PARTS) {
                multiply_in_parts(p, full, sums);
            } else if constexpr (TENSOR_CORES) {
                const auto piece = [&](int i) -> decltype(auto) {
                    if constexpr (Product::HOLDS) {
                        return (p.held[i]);
                    } else {
                        return decoded<T>(queue[i]);
                    }
                };
                multiply<STEPS, MOST>(piece, x.x, sums);
            } else {
                for (int i = 0; i < count; i++) {
                    A sum[ROWS] = {};
                    for (int j = 0; j < STEPS; j++) {
                        const auto w = decoded<T>(queue[i * STEPS + j]);
#pragma unroll
                        for (int n = 0; n < ROWS; n++) {
                            const Piece x = load<PIECE>(part + n * PITCH + j * STEP);
#pragma unroll
                            for (int e = 0; e < PIECE; e++) sum[n] += widen(x.v[e]) * widen(w.v[e]);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < ROWS; n++) {
                        sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
                        sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
                        if (lane % 4 == 0) sums[((i * ROWS + n) * 8 + lane / 4) * WARPS + warp] = sum[n];
                    }
                }
            }
            if (NORM) share_squares();
            sync();
            if (thread - lane < count * ROWS * 8) {
                A sum = total(sums + thread * WARPS);
                if constexpr (CODES && !FOUR) sum *= p.scale;
                if (NORM) sum *= inverse_rms(n);
                finish(row, n, sum);
            }
            if constexpr (!Product::HOLDS && !Product::IN_PARTS) queue.used(count * STEPS);
            parity ^= 1;
            if constexpr (EACH <= MOST) break;
            p.first += MOST * BLOCKS;
            prepare(p, aim);
            again();
        }
    }

    // The sum of the warps' partial sums.
    __device__ __forceinline__ static A total(const A *from) {
        Pack<A, WARPS> parts = load<WARPS>(from);
#pragma unroll
        for (int gap = WARPS / 2; gap; gap /= 2) {
#pragma unroll
            for (int w = 0; w < gap; w++) parts.v[w] += parts.v[w + gap];
        }
        return parts.v[0];
    }

    // Waits until one of the `count` words at `from` has arrived; each warp polls a different one. A block that needs
    // the results of a later step waits here first: polling many places too early slows down their writers.
    __device__ __forceinline__ void poll(const A *from, int count) {
        const int warp = threadIdx.x / 32;
        Pack<A, 1> word[1];
        const A *const at = from + place(0, (blockIdx.x * WARPS + warp) * 8 % count);
        word[0].v[0] = absent(A());
        for (u32 polls = 0;; pause(polls)) {
            peek(at, word[0], threadIdx.x % 32 == 0);
            if (__any_sync(~0u, there(word[0]))) return;
            queue.refill(REFILL);
        }
    }

    // The functions below read only this warp's columns of an input, so they need no barrier. Products on tensor cores
    // take the input from registers, others from shared memory. For the latter, lanes read an array of WORDS words, of
    // which SLICE are this warp's, SIZE at a time: whole lines with all their rows. A lane always reads the same row.
    template <int WORDS, int SLICE, int SIZE>
    struct Share {
        static constexpr int BESIDE = 8 / SIZE;  // lanes that read the eight words of a row
        static constexpr int LANES = ROWS == 3 ? 4 : ROWS;  // x BESIDE lanes read a line; the fourth row may be empty
        static constexpr int EACH = ceil_div(LANES * SLICE / SIZE, 32);  // for each lane

        __device__ static u32 task(int i) { return threadIdx.x % 32 + i * 32; }
        __device__ static u32 row() { return threadIdx.x % 32 / BESIDE % LANES; }
        __device__ static u32 word(int i) {
            return threadIdx.x / 32 * SLICE + task(i) / (BESIDE * LANES) * 8 + task(i) % BESIDE * SIZE;
        }
        __device__ static bool mine(int i) {
            return row() < ROWS && task(i) < LANES * SLICE / SIZE && word(i) < WORDS;
        }
        __device__ static const A *at(const A *from, int i) { return from + place(row(), word(i)); }
    };
    using Stream = Share<DIM, slice(DIM), PARCEL>;

    // Reads the residual stream from `from`, or, if that is null, the embeddings of `ids`, and multiplies it by the
    // gain.
    template <class X>
    __device__ __forceinline__ void take_stream(X &input, const A *from, const T *embedding, const int (&ids)[ROWS],
                                                const A *gain) {
        constexpr int EACH = TENSOR_CORES ? steps(DIM) : Stream::EACH;
        const u32 n = TENSOR_CORES ? X::row() : Stream::row();
        const auto column = [&](int i) { return TENSOR_CORES ? X::column(i) : u32(Stream::word(i)); };
        const auto mine = [&](int i) { return TENSOR_CORES ? X::mine(i) : Stream::mine(i); };
        Parcel gains[EACH], x[EACH] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) gains[i] = load<PARCEL>(gain + (column(i) < DIM ? column(i) : 0));
        if (from) {
            const auto at = [&](int i) { return TENSOR_CORES ? X::template at<1>(from, i) : Stream::at(from, i); };
            await_together(x, at, mine);
        } else {
            const i64 id = id_of_row(ids, n);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (!mine(i)) continue;
                const Pack<T, PARCEL> row = load<PARCEL>(embedding + id * DIM + column(i));
#pragma unroll
                for (int j = 0; j < PARCEL; j++) x[i].v[j] = widen(row.v[j]);
            }
        }
        A squares[EACH] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            Pack<T, PARCEL> scaled;
#pragma unroll
            for (int j = 0; j < PARCEL; j++) {
                if (!mine(i)) x[i].v[j] = 0;
                squares[i] += x[i].v[j] * x[i].v[j];
                narrow(x[i].v[j] * gains[i].v[j], scaled.v[j]);
            }
            if constexpr (TENSOR_CORES) {
                const uint2 two = reinterpret_cast<const uint2 &>(scaled);
                input.x[i][0] = two.x, input.x[i][1] = two.y;
            } else if (mine(i)) {
                store(shared.by_dim + n * pitch(DIM) + column(i), scaled);
            }
        }
        // In the order in which lanes are added afterwards, so that the sum is the same for any number of lanes per
        // row.
        static_assert(EACH <= 32, "a lane's share of a row");
#pragma unroll
        for (int gap = 16; gap; gap /= 2) {
#pragma unroll
            for (int i = 0; i < gap; i++)
                if (i + gap < EACH) squares[i] += squares[i + gap];
        }
        square = squares[0];
        if constexpr (!TENSOR_CORES) __syncwarp();
    }

    // This warp's part of the squared norm of the residual stream, computed while a product is in flight.
    __device__ __forceinline__ void share_squares() {
        constexpr int BESIDE = TENSOR_CORES ? 4 : Stream::BESIDE, LANES = TENSOR_CORES ? 4 : Stream::LANES;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        A sum = square;
#pragma unroll
        for (int gap = 16; gap; gap /= 2)
            if (gap < BESIDE || gap >= BESIDE * LANES) sum += __shfl_xor_sync(~0u, sum, gap);  // of this row
        if (lane % BESIDE == 0 && lane < BESIDE * ROWS) shared.squares[lane / BESIDE * WARPS + warp] = sum;
    }

    // 1 / rms of row n of the residual stream.
    __device__ __forceinline__ A inverse_rms(int n) const {
        return inverse_root(total(shared.squares + n * WARPS) * (A(1) / A(DIM)) + eps);
    }

    // Reads the output of SwiGLU, and the residual: see `Residual`.
    template <class X>
    __device__ __forceinline__ void take_gated(X &input, const A *from, Residual &residual) {
        if constexpr (TENSOR_CORES) {
            constexpr int MOST = X::STEPS > AT_ONCE ? AT_ONCE / 2 : X::STEPS;  // more at one time would spill
#pragma unroll
            for (int first = 0; first < X::STEPS; first += MOST) {
                Pack<A, 4 / SHARED_BY> x[MOST];
                const auto mine = [&](int j) {
                    return first + j < X::STEPS && X::template mine<HIDDEN_ROWS>(first + j);
                };
                residual.await_with(x, [&](int j) { return X::template at<SHARED_BY>(from, first + j); }, mine);
#pragma unroll
                for (int j = 0; j < MOST && first + j < X::STEPS; j++) {
                    const uint2 two = reinterpret_cast<const uint2 &>(x[j]);
                    input.x[first + j][0] = mine(j) ? two.x : 0, input.x[first + j][1] = mine(j) ? two.y : 0;
                }
            }
        } else {
            using Mine = Share<HIDDEN_ROWS / SHARED_BY, slice(HIDDEN) / SHARED_BY, PARCEL>;
            Parcel x[Mine::EACH];
            residual.await_with(x, [&](int i) { return Mine::at(from, i); }, Mine::mine);
#pragma unroll
            for (int i = 0; i < Mine::EACH; i++) {
                T *const to = shared.by_hidden + Mine::row() * pitch(HIDDEN) + Mine::word(i) * SHARED_BY;
                if (Mine::mine(i)) store(to, reinterpret_cast<const Piece &>(x[i]));
            }
            __syncwarp();
        }
    }

    // Merges the splits of attention, in order: a split's output has the weight exp(log-sum-exp of its scores).
    template <class X>
    __device__ __forceinline__ void take_attended(X &input, const A *parts, const A *stats, Residual &residual) {
        using Mine = Share<DIM / SHARED_BY, slice(DIM) / SHARED_BY, PARCEL / SHARED_BY>;
        Words x[Mine::EACH * SPLITS];
        Pack<A, 1> lse[Mine::EACH * SPLITS];
        // Part i % SPLITS of number i / SPLITS.
        const auto mine = [](int i) { return Mine::mine(i / SPLITS); };
        const auto at_x = [&](int i) { return Mine::at(parts, i / SPLITS) + i % SPLITS * (4 * DIM / SHARED_BY); };
        const auto at_lse = [&](int i) {
            const int head = Mine::word(i / SPLITS) * SHARED_BY / HEAD_DIM;
            return stats + place(Mine::row(), i % SPLITS * HEADS + head);
        };
        Awaited<Mine::EACH * SPLITS, 1> awaited_lse(mine);
        Awaited<Mine::EACH * SPLITS, PARCEL / SHARED_BY> awaited_x(mine);
        for (u32 polls = 0;; pause(polls)) {
            awaited_lse.request(lse, at_lse);
            awaited_x.request(x, at_x);
            residual.request();
            const u32 missing = awaited_lse.check(lse) | residual.check();
            if (!__any_sync(~0u, awaited_x.check(x) | missing)) break;
            queue.refill(REFILL);
        }
#pragma unroll
        for (int i = 0; i < Mine::EACH * SPLITS; i += SPLITS) {
            if (!Mine::mine(i / SPLITS)) continue;
            A top = lse[i].v[0], total = 0, sum[PARCEL] = {};
#pragma unroll
            for (int s = 1; s < SPLITS; s++) top = largest(top, lse[i + s].v[0]);
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
                const A share = exp_for<T>(lse[i + s].v[0] - top);
                const Pack<T, PARCEL> &part = reinterpret_cast<const Pack<T, PARCEL> &>(x[i + s]);
                total += share;
#pragma unroll
                for (int j = 0; j < PARCEL; j++) sum[j] += share * widen(part.v[j]);
            }
            const A scale = inverse_for<T>(total);
            Pack<T, PARCEL> rounded;
#pragma unroll
            for (int j = 0; j < PARCEL; j++) narrow(sum[j] * scale, rounded.v[j]);
            store(shared.by_dim + Mine::row() * pitch(DIM) + Mine::word(i / SPLITS) * SHARED_BY, rounded);
        }
        __syncwarp();
        if constexpr (TENSOR_CORES) {
#pragma unroll
            for (int j = 0; j < X::STEPS; j++) {
                const bool mine = X::mine(j);
                const T *const from = shared.by_dim + (mine ? X::row() : 0) * pitch(DIM) + X::column(j);
                const uint2 two = reinterpret_cast<const uint2 &>(static_cast<const Pack<T, 4> &>(load<4>(from)));
                input.x[j][0] = mine ? two.x : 0, input.x[j][1] = mine ? two.y : 0;
            }
        }
    }
};

// Attention. A unit is a kv head, a split, and UNIT_ROWS new rows, whose query heads share each key and value. Its
// QUERIES rows fill at most half of an operand, if possible: using the other half would double the cost in one block.
constexpr int UNIT_ROWS = sizeof(T) > 2 || GROUP > 8 ? 1 : 8 / GROUP < ROWS ? 8 / GROUP : ROWS;
constexpr int UNITS = KV_HEADS * SPLITS * ((ROWS + UNIT_ROWS - 1) / UNIT_ROWS), QUERIES = UNIT_ROWS * GROUP;
constexpr int Q_PITCH = HEAD_DIM + STEP, QUERY_ROWS = (QUERIES + 7) / 8 * 8, FRESH = QUERY_ROWS * Q_PITCH;
// Each warp reads its own queries, keys and values, without a barrier. With several rows each warp would poll too many.
constexpr bool BY_WARP = TENSOR_CORES && ROWS == 1;
static_assert(GROUP <= 16, "a unit is 16 rows of queries at most");

// In shared memory: each warp's partial result. `outputs` are not yet divided by `totals`; scores are relative to
// `tops`.
struct Scratch {
    A *outputs, *tops, *totals;  // WARPS x QUERIES x HEAD_DIM; QUERIES x WARPS
    T *queries, *fresh;          // rotated, QUERY_ROWS x Q_PITCH; ROWS x (key, value) x HEAD_DIM; of each warp in bf16

    __device__ explicit Scratch(unsigned char *memory) {
        outputs = reinterpret_cast<A *>(memory);
        tops = outputs + WARPS * QUERIES * HEAD_DIM;
        totals = tops + QUERIES * WARPS;
        queries = reinterpret_cast<T *>(totals + QUERIES * WARPS);
        if (BY_WARP) queries += threadIdx.x / 32 * (FRESH + ROWS * 2 * HEAD_DIM);
        fresh = queries + FRESH;
    }
};

// A slab of a split. Number i of the split is position i * SPLITS + split.
struct SplitSlab : Slab {
    // As Slab::scores, with two sums for each score: chains of dependent products are half as long.
    __device__ __forceinline__ void scores(const uint4 (&q)[2][CHUNKS], float (&score)[2][4]) const {
        float other[2][4] = {};
#pragma unroll
        for (int s = 0; s < CHUNKS; s++) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const uint4 k = keys[u][s];
                multiply_add(score[u], q[0][s].x, q[1][s].x, q[0][s].y, q[1][s].y, k.x, k.y);
                multiply_add(other[u], q[0][s].z, q[1][s].z, q[0][s].w, q[1][s].w, k.z, k.w);
            }
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
#pragma unroll
            for (int i = 0; i < 4; i++) score[u][i] += other[u][i];
        }
    }
    // The position of key u (0, 1) or value i (0 .. 3) among the 16.
    __device__ static int key(int u) { return u * 8 + threadIdx.x % 32 / 4; }
    __device__ static int value(int i) { return threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2; }

    // Loads the positions before `past` from the cache. The others are masked by `attend_slabs`; position 0 is loaded
    // in their place, so that no load depends on a branch or on another load.
    __device__ __forceinline__ void load_old(const T *cache_keys, const T *cache_values, int base, int split,
                                             int past) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int at = (base + key(u)) * SPLITS + split, position = at < past ? at : 0;
#pragma unroll
            for (int s = 0; s < CHUNKS; s++) {
                keys[u][s] = *reinterpret_cast<const uint4 *>(cache_keys + position * HEAD_DIM + s * 32 + c * 8);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = (base + value(i)) * SPLITS + split, position = at < past ? at : 0;
            values[i] = load<WIDE>(cache_values + position * HEAD_DIM + g * WIDE);
        }
    }

    // Loads the positions of this pass.
    __device__ __forceinline__ void load_fresh(const T *fresh, int base, int split, int past) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int n = (base + key(u)) * SPLITS + split - past;
#pragma unroll
            for (int s = 0; s < CHUNKS; s++) {
                const bool mine = n >= 0 && n < ROWS;
                const T *const from = fresh + (mine ? n : 0) * 2 * HEAD_DIM + s * 32 + c * 8;
                const uint4 key = *reinterpret_cast<const uint4 *>(from);
                keys[u][s] = mine ? key : keys[u][s];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = (base + value(i)) * SPLITS + split - past;
            const bool mine = n >= 0 && n < ROWS;
            typedef Pack<u32, WIDE / 2> Pairs;
            const Pairs value = *reinterpret_cast<const Pairs *>(fresh + ((mine ? n : 0) * 2 + 1) * HEAD_DIM + g * WIDE);
            Pairs &held = reinterpret_cast<Pairs &>(values[i]);
#pragma unroll
            for (int j = 0; j < WIDE / 2; j++) held.v[j] = mine ? value.v[j] : held.v[j];
        }
    }
};

template <bool VALUE>
struct Constant {
    __device__ constexpr bool operator()() const { return VALUE; }
};

// This warp's partial result. slab: its first 16 positions, those before `past`.
__device__ __forceinline__ void attend_slabs(const Scratch &scratch, SplitSlab slab, const T *keys, const T *values,
                                             int split, int first_row, int past) {
    constexpr int HALVES = QUERIES > 8 ? 2 : 1, CHUNKS = Slab::CHUNKS, WIDE = Slab::WIDE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint4 q[2][CHUNKS] = {};
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int s = 0; s < CHUNKS; s++) {
            q[h][s] = *reinterpret_cast<const uint4 *>(scratch.queries + (h * 8 + g) * Q_PITCH + s * 32 + c * 8);
        }
    }
    const float scale = 1.0f / sqrtf(float(HEAD_DIM));
    float top[2] = {LOWEST, LOWEST}, total[2] = {}, output[WIDE][4] = {};
    const auto take = [&](int base, auto is_first) {
        if ((base + 15) * SPLITS + split >= past) slab.load_fresh(scratch.fresh, base, split, past);
        float score[2][4] = {};
        slab.scores(q, score);
        u32 shares[2][2] = {};
        float shrink[2] = {1, 1};
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int last = past + first_row + (h * 8 + g) / GROUP;
            const auto seen = [&](int i) { return (base + i) * SPLITS + split <= last; };
            take_scores(score, h, scale, seen, top, total, shrink, shares);
        }
        if constexpr (is_first()) {
            slab.add_values(shares, output);
        } else {
            slab.add_values(shares, shrink, output);
        }
    };
    // The first slab is peeled off: up to WARPS * 16 * SPLITS positions there is no other.
    if (warp * 16 * SPLITS + split < past + ROWS) take(warp * 16, Constant<true>());
    for (int base = (warp + WARPS) * 16; base * SPLITS + split < past + ROWS; base += WARPS * 16) {
        slab.load_old(keys, values, base, split, past);
        take(base, Constant<false>());
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        const int query = h * 8 + g;
        if (query >= QUERIES) continue;
        if (c == 0) scratch.tops[query * WARPS + warp] = top[h], scratch.totals[query * WARPS + warp] = total[h];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<A, WIDE> part;
#pragma unroll
            for (int t = 0; t < WIDE; t++) part.v[t] = output[t][h * 2 + i];
            store(scratch.outputs + (warp * QUERIES + query) * HEAD_DIM + (c * 2 + i) * WIDE, part);
        }
    }
}

// The same in float and double: KEY_LANES lanes share a key, a warp has KEYS keys at once.
constexpr int KEY_LANES = HEAD_DIM / PIECE, KEYS = 32 / KEY_LANES;
static_assert(HEAD_DIM % PIECE == 0 && KEY_LANES <= 32 && 32 % KEY_LANES == 0, "a key must fill a power of 2 of lanes");

__device__ __forceinline__ void attend_keys(const Scratch &scratch, const T *keys, const T *values, int split, int row,
                                            int past) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % KEY_LANES * PIECE, last = past + row;
    const A scale = A(1) / sqrt(A(HEAD_DIM));
    A top[GROUP], total[GROUP] = {}, output[GROUP][PIECE] = {};
#pragma unroll
    for (int i = 0; i < GROUP; i++) top[i] = LOWEST;
    for (int base = warp * KEYS; base * SPLITS + split <= last; base += WARPS * KEYS) {
        const int position = (base + lane / KEY_LANES) * SPLITS + split;
        const bool seen = position <= last;
        Piece k{}, v{};
        if (seen) {
            const T *const fresh = scratch.fresh + (position - past) * 2 * HEAD_DIM;
            k = load<PIECE>((position < past ? keys + position * HEAD_DIM : fresh) + column);
            v = load<PIECE>((position < past ? values + position * HEAD_DIM : fresh + HEAD_DIM) + column);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            A score = 0;
#pragma unroll
            for (int j = 0; j < PIECE; j++) score += widen(scratch.queries[i * Q_PITCH + column + j]) * widen(k.v[j]);
#pragma unroll
            for (int gap = 1; gap < KEY_LANES; gap *= 2) score += __shfl_xor_sync(~0u, score, gap);
            score = seen ? score * scale : A(2 * LOWEST);
            const A new_top = largest(warp_max(score), top[i]);
            const A shrink = exp(top[i] - new_top), p = exp(score - new_top);
            top[i] = new_top;
            total[i] = total[i] * shrink + p;
#pragma unroll
            for (int j = 0; j < PIECE; j++) output[i][j] = output[i][j] * shrink + p * widen(v.v[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
#pragma unroll
        for (int gap = KEY_LANES; gap < 32; gap *= 2) {
            total[i] += __shfl_xor_sync(~0u, total[i], gap);
#pragma unroll
            for (int j = 0; j < PIECE; j++) output[i][j] += __shfl_xor_sync(~0u, output[i][j], gap);
        }
#pragma unroll
        for (int j = 0; j < PIECE; j++) {
            if (lane < KEY_LANES) scratch.outputs[(warp * GROUP + i) * HEAD_DIM + column + j] = output[i][j];
        }
        if (lane == 0) scratch.tops[i * WARPS + warp] = top[i], scratch.totals[i * WARPS + warp] = total[i];
    }
}

// Attention of the rows of this pass from `first_row` on, over split `split` of one kv head. Writes the keys and values
// of the pass that belong to the split. Every block of the split writes the same numbers, so that each later reads its
// own.
struct Attention {
    // A task is a vector of both halves of a head: of the unit's queries, and of each row's key and value. RoPE rotates
    // all but values, which have angles of 0.
    static constexpr int HALF = HEAD_DIM / 2, LINE = HALF / PARCEL;
    static constexpr u32 TOGETHER = BY_WARP ? 32 : THREADS;
    static constexpr u32 TASKS = (QUERIES + 2 * ROWS) * LINE, TURNS = ceil_div(TASKS, TOGETHER);
    // Each thread merges the warps' results for EACH words of `parts`.
    static constexpr u32 WORDS = QUERIES * HEAD_DIM / SHARED_BY, EACH = ceil_div(WORDS, THREADS);
    struct Task {
        u32 head, column, n;
        bool is_query, is_value;
    };

    SplitSlab slab;
    u32 kv_head, split, first_row;
    u32 from[TURNS];    // a task's first half in `exchange`; the other half is HALF / 8 lines further
    u32 to[TURNS];      // its place in `scratch`
    u32 needed[TURNS];  // whether this thread has the task
    Parcel cosines[TURNS], sines[TURNS];
    u32 part[EACH], stat[EACH];

    __device__ __forceinline__ Task task(u32 turn) const {
        const u32 i = threadIdx.x % TOGETHER + turn * TOGETHER, head = i / LINE, column = i % LINE * PARCEL;
        if (head < QUERIES) return {head, column, first_row + head / GROUP, true, false};
        return {head, column, (head - QUERIES) / 2, false, (head - QUERIES) % 2 != 0};
    }
    __device__ static u32 query_of(u32 word) { return word / (HEAD_DIM / SHARED_BY); }
    __device__ static u32 column_of(u32 word) { return word % (HEAD_DIM / SHARED_BY) * SHARED_BY; }

    __device__ __forceinline__ void choose(int unit) {
        kv_head = unit / SPLITS % KV_HEADS, split = unit % SPLITS, first_row = unit / (SPLITS * KV_HEADS) * UNIT_ROWS;
    }
    // Starts the loads of keys and values of old positions. keys, values: of the layer.
    __device__ __forceinline__ void load_old(int unit, const T *keys, const T *values, int capacity, int past) {
        choose(unit);
        const i64 cache = i64(kv_head) * capacity * HEAD_DIM;
        if constexpr (TENSOR_CORES) slab.load_old(keys + cache, values + cache, threadIdx.x / 32 * 16, split, past);
    }
    // Everything else that is known before the queries arrive.
    __device__ __forceinline__ void prepare(int unit, const A *all_cosines, const A *all_sines, int past) {
        choose(unit);
        const u32 thread = threadIdx.x, warp = thread / 32;
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            const Task t = task(turn);
            const u32 position = past + t.n;
            needed[turn] = t.is_query ? t.n < ROWS : t.n < ROWS && position % SPLITS == split;
            if (BY_WARP && !t.is_query) needed[turn] &= position / SPLITS / 16 % WARPS == warp;
            const u32 n = needed[turn] ? t.n : 0;
            const u32 line = t.is_query ? kv_head * GROUP + t.head % GROUP : HEADS + t.is_value * KV_HEADS + kv_head;
            from[turn] = settled(place(n, line * HEAD_DIM + t.column));
            to[turn] = settled((t.is_query ? t.head * Q_PITCH : FRESH + (t.n * 2 + t.is_value) * HEAD_DIM) + t.column);
            cosines[turn] = load<PARCEL>(all_cosines + (past + n) * HALF + t.column);
            sines[turn] = load<PARCEL>(all_sines + (past + n) * HALF + t.column);
#pragma unroll
            for (int j = 0; j < PARCEL; j++)
                if (t.is_value) cosines[turn].v[j] = 1, sines[turn].v[j] = 0;
        }
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 word = thread + i * THREADS, query = query_of(word), n = first_row + query / GROUP;
            const u32 head = kv_head * GROUP + query % GROUP;
            part[i] = settled(place(n, (split * DIM + head * HEAD_DIM + column_of(word)) / SHARED_BY));
            stat[i] = settled(place(n, split * HEADS + head));
        }
    }

    // qkv, parts, stats: the layer's places in `exchange`. keys, values: of the layer. past: positions before the pass.
    __device__ __forceinline__ void run(const Scratch &scratch, const A *qkv, T *keys, T *values, A *parts, A *stats,
                                        int capacity, int past) {
        const u32 thread = threadIdx.x;
        keys += i64(kv_head) * capacity * HEAD_DIM, values += i64(kv_head) * capacity * HEAD_DIM;
        Pack<T, PARCEL> rotated[TURNS][2];
        Parcel x[TURNS * 2] = {};
        await_together(
            x, [&](int i) { return qkv + from[i / 2] + i % 2 * (HALF * 4); }, [&](int i) { return needed[i / 2]; }
        );
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
#pragma unroll
            for (int j = 0; j < PARCEL; j++) {
                const A a = x[turn * 2].v[j], b = x[turn * 2 + 1].v[j], c = cosines[turn].v[j], s = sines[turn].v[j];
                narrow(a * c - b * s, rotated[turn][0].v[j]);
                narrow(b * c + a * s, rotated[turn][1].v[j]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (needed[turn]) store(scratch.queries + to[turn] + half * HALF, rotated[turn][half]);
        }
        if constexpr (BY_WARP) {
            __syncwarp();
        } else {
            sync();
        }
        if constexpr (TENSOR_CORES) {
            attend_slabs(scratch, slab, keys, values, split, first_row, past);
        } else {
            attend_keys(scratch, keys, values, split, first_row, past);
        }
        sync();
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 word = thread + i * THREADS, query = query_of(word), d = column_of(word);
            if (word >= WORDS || first_row + query / GROUP >= ROWS) continue;
            const Pack<A, WARPS> tops = load<WARPS>(scratch.tops + query * WARPS);
            const Pack<A, WARPS> totals = load<WARPS>(scratch.totals + query * WARPS);
            A weight = 0, mean[SHARED_BY] = {};
            Pack<A, WARPS> most = tops;
#pragma unroll
            for (int gap = WARPS / 2; gap; gap /= 2) {
#pragma unroll
                for (int w = 0; w < gap; w++) most.v[w] = largest(most.v[w], most.v[w + gap]);
            }
            const A all = most.v[0];
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const A share = exp_for<T>(tops.v[w] - all);
                const auto output = load<SHARED_BY>(scratch.outputs + (w * QUERIES + query) * HEAD_DIM + d);
                weight += share * totals.v[w];
#pragma unroll
                for (int j = 0; j < SHARED_BY; j++) mean[j] += share * output.v[j];
            }
            const bool empty = weight == 0;  // no position of this split yet
            const A scale = empty ? A(0) : inverse_for<T>(weight);
            Pack<T, SHARED_BY> both;
#pragma unroll
            for (int j = 0; j < SHARED_BY; j++) narrow(mean[j] * scale, both.v[j]);
            publish(parts + part[i], reinterpret_cast<const A &>(both));
            if (d == 0) publish(stats + stat[i], empty ? A(LOWEST) : all + log_for(weight));
        }
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {  // stored for later passes
            const Task t = task(turn);
            if (!needed[turn] || t.is_query) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T *const cache = t.is_value ? values : keys;
                store(cache + (past + t.n) * HEAD_DIM + t.column + half * HALF, rotated[turn][half]);
            }
        }
    }
};

#include "infer/cuda/sampler.cuh"

// Samples from `logits` once they have arrived; every block draws the same token.
__device__ __forceinline__ int sample(unsigned char *scratch, const A *logits, const Sampler &how, u32 draw) {
    const auto take = [&](auto &x, auto at) {
        await(x, [&](int i) { return logits + at(i); }, [&](int i) { return at(i) >= 0; });
    };
    return next_token(scratch, take, how, draw);
}

// Greedy decoding. Each tile of a head publishes its most likely token for each row, (logit, id): instead of the logits
// where drafts are verified; with one row, in front of them.
constexpr int BEST = ROWS == 1 ? (VOCAB_TILES * 2 + 7) / 8 * 8 : 0;

__device__ __forceinline__ int best_at(int head, int tile, int n) {
    return ((head * VOCAB_TILES + tile) * ROWS + n) * 2;
}

// The most likely token of each of COUNT sets of logits; at(k, i) is the best of tile i of set k. Every block finds the
// same. Of equal logits the smallest id wins, as in `sample`.
template <int COUNT, class At>
__device__ __forceinline__ void most_likely(unsigned char *scratch, At at, int (&ids)[COUNT]) {
    u64 *const of_warps = reinterpret_cast<u64 *>(scratch);  // COUNT x WARPS
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    constexpr int EACH = ceil_div(VOCAB_TILES, THREADS), FEW = EACH < 2 ? EACH : 2;
    u64 best[COUNT] = {};
    for (int tile = thread; tile < VOCAB_TILES; tile += FEW * THREADS) {
        Pack<A, 2> x[COUNT * FEW];
        const auto place_of = [&](int i) { return at(i % COUNT, tile + i / COUNT * THREADS); };
        await(x, place_of, [&](int i) { return tile + i / COUNT * THREADS < VOCAB_TILES; });
#pragma unroll
        for (int i = 0; i < COUNT * FEW; i++) {
            const bool mine = tile + i / COUNT * THREADS < VOCAB_TILES;
            if (mine) best[i % COUNT] = largest(best[i % COUNT], sort_key(float(x[i].v[0]), int(x[i].v[1])));
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        best[k] = warp_max(best[k]);
        if (lane == 0) of_warps[k * WARPS + warp] = best[k];
    }
    sync();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        for (int w = 0; w < WARPS; w++) best[k] = largest(best[k], of_warps[k * WARPS + w]);
        ids[k] = id_of(best[k]);
    }
    sync();
}

// What a launch is given; `single_arguments` of arguments.py has the same fields.
struct Arguments {
    const W *weights;    // for each block `stride` units, a piece for each thread, in the order of use
    const T *embedding;  // (VOCAB, DIM)
    const A *gains;      // (2 * layers + 1, DIM)
    const A *cosines, *sines;  // (positions, HEAD_DIM / 2)
    T *keys, *values;    // (layers, KV_HEADS, capacity, HEAD_DIM), `past` positions of them filled
    int *tokens;         // of all positions: a pass reads ROWS from `past` on; where `sampled`, it writes the next one
    A *exchange;         // for each pass layers * LAYER words and the logits, (ROWS, heads, VOCAB_ROWS), all absent
    const int *lengths;  // units of weights that a pass uses, for each block
    // Null, or for speculation (1 + ROWS): positions filled, in place of `past`, the token at the next one, and a draft
    // for each position after it, -1 for none. Then `heads` is ROWS. A pass accepts the drafts that head 0 would have
    // chosen itself, and adds head 0's choice after them; the other heads at the last of these positions give the next
    // drafts.
    const int *begin;
    // (passes + 1, 1 + ROWS): for each pass the number of tokens that it added, 0 where the cache had no room for it,
    // and the tokens; in the last row, the next launch's `begin`.
    int *report;
    const float *scales;  // of weights that are codes: 8 for each unit that `deal` counts, attention too, in its order
    // Null, or, for one pass after a prompt whose first layers have been computed, the residual stream of its rows in
    // the order of AFTER. gains, keys, values, scales, lengths and `layers` are then of the layers that are left.
    const A *given;
    const int *skipped;  // with `given`, for each block: the units of weights before these layers
    A eps;
    int dealt;           // with `given`: the tiles before these layers, modulo BLOCKS
    int stride, layers, heads, capacity, past, passes, sampled;
    u32 draw;            // number of the random stream that the first pass samples with
    Sampler how;
};

// One pass: ROWS new positions after `past` through all layers and the output heads. `exchange` moves on from layer to
// layer.
struct Pass {
    const Arguments &args;
    Block &block;
    int (&ids)[ROWS];  // the tokens of the pass; afterwards those of the next
    int past;
    A *exchange;
    const A *stream;  // the residual stream in `exchange`; null where it is the embeddings of `ids`
    const A *gain;    // of the layer's first norm
    const u32 n = threadIdx.x / 8 % ROWS;  // the row of the numbers that this thread finishes
    Matrix<DIM, WIDTH / 8> qkv;

    __device__ __forceinline__ auto at_row() const {
        return [n = n](u32 row) { return place(n, row); };
    }
    __device__ __forceinline__ auto at_unit() const {
        return [n = n](u32 row) { return place(n, (first_unit(row / 8) + row % 8) / SHARED_BY); };
    }

    __device__ __forceinline__ void run_layers() {
        block.deal(qkv);
        block.prepare_ahead(qkv, at_row());
        for (int layer = 0; layer < args.layers; layer++, exchange += LAYER, gain += 2 * DIM) {
            Matrix<DIM, DIM / 8> out;
            Matrix<DIM, HIDDEN_TILES> gate_up;
            Matrix<HIDDEN, DIM / 8> down;
            const int attends = block.deal(ATTENTION);
            block.deal(out);
            block.deal(gate_up);
            block.deal(down);
            attend(layer, attends);
            project(out, gate_up, attends);
            gate(gate_up, down);
            if (layer + 1 < args.layers) {
                block.deal(qkv);
            } else {
                qkv.first = WIDTH / 8;
            }
            block.prepare_ahead(qkv, at_row());
            add_hidden(down);
            stream = exchange + AFTER;
        }
    }

    // q|k|v, and attention. attends: this block's first unit of attention.
    __device__ __forceinline__ void attend(int layer, int attends) {
        block.prepare_late(qkv, at_row());
        T *const keys = args.keys + i64(layer) * KV_HEADS * args.capacity * HEAD_DIM;
        T *const values = args.values + i64(layer) * KV_HEADS * args.capacity * HEAD_DIM;
        Attention attention;
        constexpr bool EARLY_ATTENTION = AHEAD && ROWS == 1;
        if (EARLY_ATTENTION && attends < UNITS) attention.prepare(attends, args.cosines, args.sines, past);
        const auto take = [&](auto &x) { block.take_stream(x, stream, args.embedding, ids, gain); };
        block.template run<true>(qkv, block.shared.by_dim, take, at_row(), [&](int row, int, A sum) {
            if (row >= 0) publish(exchange + QKV + qkv.at, sum);
        }, [] {});
        for (int unit = attends; unit < UNITS; unit += BLOCKS) {
            attention.load_old(unit, keys, values, args.capacity, past);
            if (!EARLY_ATTENTION || unit != attends) attention.prepare(unit, args.cosines, args.sines, past);
            attention.run(Scratch(block.shared.scratch), exchange + QKV, keys, values, exchange + PARTS,
                          exchange + STATS, args.capacity, past);
            if constexpr (UNITS <= BLOCKS) break;
            sync();  // the next unit overwrites shared memory that a thread may still read
        }
    }

    // Attention's projection, and the residual.
    __device__ __forceinline__ void project(Matrix<DIM, DIM / 8> &out, Matrix<DIM, HIDDEN_TILES> &gate_up,
                                            int attends) {
        block.prepare_ahead(out, at_row());
        block.prepare_ahead(gate_up, at_unit());
        if (attends >= UNITS) {
            block.poll(exchange + QKV, WIDTH);
            if (AHEAD && ROWS == 1) rest(QUIET);  // attention takes at least as long
        }
        // One row has few words to poll: blocks that need them poll them directly.
        if (ROWS > 1 || !out.mine()) block.poll(exchange + PARTS, SPLITS * DIM / SHARED_BY);
        if (out.mine()) {
            block.prepare_late(out, at_row());
            const auto residual_of = [&] {
                Residual residual(stream + out.at, stream && out.row >= 0);
                if (!stream && out.row >= 0) {
                    residual.word[0].v[0] = widen(args.embedding[i64(id_of_row(ids, n)) * DIM + out.row]);
                }
                return residual;
            };
            Residual residual = residual_of();
            const auto take = [&](auto &x) { block.take_attended(x, exchange + PARTS, exchange + STATS, residual); };
            block.template run<false>(out, block.shared.by_dim, take, at_row(), [&](int row, int, A sum) {
                if (row >= 0) publish(exchange + MIDDLE + out.at, residual.word[0].v[0] + sum);
            }, [&] { residual = residual_of(), residual.await(); });
        }
        block.queue.refill(DEPTH);
    }

    // Gate, up and SwiGLU.
    __device__ __forceinline__ void gate(Matrix<DIM, HIDDEN_TILES> &gate_up, Matrix<HIDDEN, DIM / 8> &down) {
        block.prepare_late(gate_up, at_unit());
        block.prepare_ahead(down, at_row());
        const auto take = [&](auto &x) { block.take_stream(x, exchange + MIDDLE, args.embedding, ids, gain + DIM); };
        block.template run<true>(gate_up, block.shared.by_dim, take, at_unit(), [&](int row, int, A sum) {
            const A up = __shfl_down_sync(~0u, sum, 4);
            const A gated = sum * inverse_for<T>(A(1) + exp_for<T>(-sum)) * up;
            publish_narrow(exchange + GATED + gate_up.at, gated, row >= 0 && row % 8 < 4);
        }, [] {});
    }

    // Down, and the residual.
    __device__ __forceinline__ void add_hidden(Matrix<HIDDEN, DIM / 8> &down) {
        if (!down.mine()) return block.poll(exchange + GATED, HIDDEN_ROWS / SHARED_BY);
        block.prepare_late(down, at_row());
        const auto residual_of = [&] { return Residual(exchange + MIDDLE + down.at, down.row >= 0); };
        Residual residual = residual_of();
        const auto take = [&](auto &x) { block.take_gated(x, exchange + GATED, residual); };
        block.template run<false>(down, block.shared.by_hidden, take, at_row(), [&](int row, int, A sum) {
            if (row >= 0) publish(exchange + AFTER + down.at, residual.word[0].v[0] + sum);
        }, [&] { residual = residual_of(), residual.await(); });
    }

    // The output heads. Publishes all logits, unless drafts are verified; where `best`, the most likely tokens.
    __device__ __forceinline__ void run_heads(bool best) {
        const bool verifies = args.begin;
        // Blocks of different rows of a split write the same keys and values, drafts included. What another block
        // writes there in the next pass must come later; it waits for the logits that follow this fence.
        if (verifies && UNITS > KV_HEADS * SPLITS) __threadfence();
        Input<TENSOR_CORES ? DIM : 1> last;
        for (int head = 0; head < args.heads; head++) {
            const auto take = [&](auto &x) {
                if (head == 0) block.take_stream(last, stream, args.embedding, ids, gain);
                x = last;
            };
            const auto at_logit = [&](u32 row) { return BEST + u32((n * args.heads + head) * VOCAB_ROWS) + row; };
            Matrix<DIM, VOCAB_TILES, false> logits;
            block.deal(logits);
            block.prepare(logits, at_logit);
            block.template run<true>(logits, block.shared.by_dim, take, at_logit, [&](int row, int n, A logit) {
                if (!verifies) {
                    if (row >= 0) publish(exchange + logits.at, row < VOCAB ? logit : A(-INFINITY));
                    if (!best) return;
                }
                u64 top = row >= 0 && row < VOCAB ? sort_key(float(logit), row) : 0;
#pragma unroll
                for (int gap = 1; gap < 8; gap *= 2) top = largest(top, __shfl_xor_sync(~0u, top, gap));
                if (row < 0 || row % 8) return;
                A *const to = exchange + best_at(head, row / 8, n);
                publish(to, A(logit_of(top)));
                publish(to + 1, A(id_of(top)));
            }, [] {});
            block.queue.refill(DEPTH);
        }
    }

    // Samples the token after the only row.
    __device__ __forceinline__ void sample_next(bool greedy, int pass) {
        if (greedy) {
            most_likely(block.shared.scratch, [&](int, int tile) { return exchange + best_at(0, tile, 0); }, ids);
        } else if constexpr (DRAWS) {
            ids[0] = sample(block.shared.scratch, exchange + BEST, args.how, args.draw + pass);
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) args.tokens[past + 1] = ids[0];
    }

    // Speculation: accepts drafts, writes the pass's line of the report, and takes the next drafts. Returns the number
    // of tokens that the pass added.
    __device__ __forceinline__ int verify(int pass) {
        unsigned char *const scratch = block.shared.scratch;
        int choices[ROWS], drafts[ROWS - (ROWS > 1)], added = 1;
        most_likely(scratch, [&](int n, int tile) { return exchange + best_at(0, tile, n); }, choices);
#pragma unroll
        for (int n = 1; n < ROWS; n++) added += added == n && choices[n - 1] == ids[n];
        most_likely(scratch, [&](int k, int tile) { return exchange + best_at(k + 1, tile, added - 1); }, drafts);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            int *const line = args.report + pass * (1 + ROWS);
            line[0] = added;
#pragma unroll
            for (int n = 0; n < ROWS; n++) line[1 + n] = choices[n];
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            if (n == added - 1) ids[0] = choices[n];
#pragma unroll
        for (int n = 1; n < ROWS; n++) ids[n] = drafts[n - 1];
        return added;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS * 32, 1) decode(
    const __grid_constant__ Arguments args
) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int thread = threadIdx.x;
    const i64 unit = i64(blockIdx.x) * args.stride + (args.skipped ? args.skipped[blockIdx.x] : 0);
#if PRODUCERS
    Block block{{}, Weights(memory)};
    if (thread == 0) block.queue.make();
    __syncthreads();
    if (thread >= THREADS) {
        const auto *const source = reinterpret_cast<const unsigned char *>(args.weights) + unit * UNIT;
#if PRODUCERS % 4 == 0  // a warpgroup gives up registers to the others
        fewer_registers<24>();
#endif
        const u32 filler = (thread - THREADS) / 32;
        if (thread % 32 == 0 && filler < FILLERS) {
            block.queue.fill<FILLERS>(source, args.lengths[blockIdx.x], args.passes, FILLERS > 1 ? filler : 0);
        }
        return;
    }
#if PRODUCERS % 4 == 0
    more_registers<240>();
#endif
#else
    Block block;
    block.queue.slots = reinterpret_cast<Stored *>(memory + QUEUE_BARRIERS) + thread;
    static_assert(!GROUPED, "weights of four bits are copied by producers");
    block.queue.source = args.weights + (unit * THREADS + thread) * PIECE;
    block.queue.length = args.lengths[blockIdx.x];
    block.queue.left = block.queue.length * args.passes;
    block.queue.taken = block.queue.requested = block.queue.next = 0;
    block.queue.refill(DEPTH);
#endif
    Shared &shared = block.shared;
    shared.by_dim = reinterpret_cast<T *>(memory + QUEUE_BARRIERS + DEPTH * UNIT);
    shared.by_hidden = shared.by_dim + ROWS * pitch(DIM);  // tensor cores take such rows from registers
    constexpr int INPUTS = ROWS * (pitch(DIM) + (TENSOR_CORES ? 0 : pitch(HIDDEN)));
    shared.squares = reinterpret_cast<A *>(shared.by_dim + INPUTS);
    shared.sums = shared.squares + WARPS * ROWS;
    shared.scratch = reinterpret_cast<unsigned char *>(shared.sums + 2 * TILES * WARPS * ROWS * 8);
    for (int i = thread; i < INPUTS; i += THREADS) narrow(A(0), shared.by_dim[i]);
    sync();

    int ids[ROWS];
    int past = args.begin ? args.begin[0] : args.past;
    A *exchange = args.exchange;
#pragma unroll
    for (int n = 0; n < ROWS; n++) ids[n] = args.begin ? args.begin[1 + n] : args.tokens[past + n];
    block.parity = 0;
    block.eps = args.eps;
    const bool greedy = ROWS == 1 && args.sampled && args.how.temperature == 0;
    int pass = 0;
    for (; pass < args.passes && past + ROWS <= args.capacity; pass++) {
        block.dealt = args.dealt;
        block.scales = args.scales;
        Pass now{args, block, ids, past, exchange, args.given, args.gains};
        now.run_layers();
        now.run_heads(greedy);
        if (ROWS == 1 && args.sampled) now.sample_next(greedy, pass);
        if constexpr (ROWS > 1) {
            past += args.begin ? now.verify(pass) : ROWS;
        } else {
            past++;
        }
        block.queue.end_pass();
        exchange = now.exchange + BEST + i64(args.heads) * ROWS * VOCAB_ROWS;
        sync();  // the next pass overwrites shared memory that a thread may still read
    }
    if (args.begin && blockIdx.x == 0 && thread == 0) {
        for (; pass < args.passes; pass++) args.report[pass * (1 + ROWS)] = 0;
        int *const next = args.report + args.passes * (1 + ROWS);
        next[0] = past;
#pragma unroll
        for (int n = 0; n < ROWS; n++) next[1 + n] = ids[n];
    }
#if PRODUCERS
    if (thread == 0) *block.queue.stop = 1;
#else
    copy_wait<0>();
#endif
}
