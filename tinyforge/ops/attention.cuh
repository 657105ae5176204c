// What the attention kernels share: the plain ones only the options; those on tensor cores, which are attention_tma.cu
// and the three files of attention_stream.cuh, all of it.
//
// A worker is one warp (mma.sync) or a warpgroup of four warps (wgmma). It owns OWN rows, WARP_ROWS in each of its
// warps, and streams the rows of the other side past them. In the order of this file: options, the layout of rows in
// shared memory, loads of fragments, masks, the online softmax, factors, stores, the gradients of scores.
//
// Macros: PART (FORWARD, BACKWARD_Q, BACKWARD_KV); HEAD_DIM; WORKERS of a block; WORKER_WARPS; ROW_TILES, the tiles of
// 16 rows that a warp owns; TILE, the rows streamed at a time; PIECE, the rows of a tile whose scores a warp holds at a
// time, TILE if undefined; TF32 for float numbers in place of bf16; DOCS, BAND, DROP: see attention.cu. The plain
// kernels define REAL.

#include "ops/common.cuh"

__device__ inline int min_int(int a, int b) { return a < b ? a : b; }

constexpr int D = HEAD_DIM;

// Rows of several documents: each owned row has a bound, and bounds ascend along a sequence. The bound of a query is
// the first key that it sees, where its document begins. The bound of a key is one past the last query that sees it,
// where its document ends. bounds: (batch, rows).
#ifdef DOCS
#define DOCS_ARGUMENTS , const int *bounds
#define DOCS_BOUNDS bounds
enum : bool { docs = true };
#else
#define DOCS_ARGUMENTS
#define DOCS_BOUNDS static_cast<const int *>(nullptr) // never read
enum : bool { docs = false }; // not a constexpr variable, which would be stored in the cubin
#endif

#ifdef BAND
#define BAND_ARGUMENTS , i64 back, i64 forth, const int *lengths
enum : bool { band = true };
#else
#define BAND_ARGUMENTS
enum : bool { band = false };
constexpr int back = 0, forth = 0; // `back` is never read
constexpr const int *lengths = nullptr;
#endif

// The number of keys of a sequence, without its padding.
__device__ inline int unpadded(const int *lengths, int batch, int keys) {
    return band && lengths ? min_int(keys, lengths[batch]) : keys;
}

// The first key, rounded down to a multiple of `tile`, of a block whose first query is at `position`.
__device__ inline int first_key(int position, int back, int tile) {
    return band && position > back ? (position - back) / tile * tile : 0;
}

#ifdef REAL
typedef Wide<REAL> A; // the type of arithmetic and of shared memory
#else
typedef float A;
#endif

#ifdef DROP
#define DROP_ARGUMENTS , const u32 *words, u32 key0, u32 key1, u32 threshold, A drop_scale
#if DROP == 2
#define DROP_KEY key0 = words[0], key1 = words[1];
#else
#define DROP_KEY (void)words;
#endif
enum : bool { drop = true };
#else
#define DROP_ARGUMENTS
#define DROP_KEY
enum : bool { drop = false };
constexpr u32 key0 = 0, key1 = 0, threshold = 0; // never read
constexpr A drop_scale = 1;
#endif

// Scores with a scale of their own, and with cap > 0 bounded: s = cap tanh(s / cap). Plain kernels alone.
#ifdef CAP
#define CAP_ARGUMENTS , A score_scale, A cap
#define SCORE_SCALE score_scale
enum : bool { caps = true };
#else
#define CAP_ARGUMENTS
#define SCORE_SCALE (1 / sqrt(A(D)))
enum : bool { caps = false };
constexpr A cap = 0; // never read
#endif

// The bound of a row; past the end, that of the last of `rows`.
__device__ inline int bound_of(const int *bounds, int row, int rows) { return bounds[min_int(row, rows - 1)]; }

#ifndef REAL
#define FORWARD 1
#define BACKWARD_Q 2
#define BACKWARD_KV 3

#ifndef PIECE
#define PIECE TILE
#endif

#ifdef TF32
typedef float Number;
#else
typedef bf16 Number;
#endif

constexpr int THREADS = WORKERS * WORKER_WARPS * 32;
constexpr int WARP_ROWS = ROW_TILES * 16;              // rows that a warp owns
constexpr int OWN = WORKER_WARPS * WARP_ROWS;          // rows that a worker owns
constexpr int ROW_BYTES = D * sizeof(Number);
constexpr int STEPS = ROW_BYTES / 32;                  // products along a row, of 32 bytes each
constexpr int CHUNKS = ROW_BYTES / 16;                 // 16-byte chunks in a row
constexpr int CHUNK = 16 / sizeof(Number);             // numbers in a chunk
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int WARP_BYTES = WARP_ROWS * ROW_BYTES;
constexpr int OWN_BYTES = OWN * ROW_BYTES;
constexpr int OWN_CHUNKS = WARP_ROWS * CHUNKS / 32;    // chunks of a warp's rows, per lane
constexpr float LOG2E = 1.4426950408889634f;

// Scores of a warp's rows and PIECE streamed rows, as the accumulators of a product: of every 8 columns a lane holds
// columns c and c + 1, c = 2 (lane % 4), of rows g and g + 8, g = lane / 4.
typedef float Scores[ROW_TILES][PIECE / 8][4];
// One number for each of the rows of which a lane holds scores.
typedef float RowValues[ROW_TILES][2];

__device__ inline void clear(Scores &s) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < PIECE / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
}

// The bounds of their documents.
typedef int RowBounds[ROW_TILES][2];

// bounds: of this row of the batch; first: the lane's first row.
__device__ inline void load_bounds(RowBounds &x, const int *bounds, int first, int rows) {
    if (!docs) return;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) x[m][half] = bound_of(bounds, first + m * 16 + half * 8, rows);
}

__device__ inline void set_rows(RowValues &x, float value) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) x[m][0] = x[m][1] = value;
}

// The byte of a 16-byte chunk in a swizzled tile. ldmatrix reads the same chunk of 8 rows; the exclusive or with the
// row spreads these over all banks, for stores too, without padding. At 128 bytes a row this is the 128-byte swizzle of
// wgmma.
__device__ inline u32 swizzled(int row, int chunk) {
    const int turn = ROW_BYTES == 64 ? row / 2 % 4 : row % 8;
    return row * ROW_BYTES + ((chunk ^ turn) << 4);
}

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#ifdef TF32
// x as TF32, to nearest. One instruction since sm_90; before, two, and ties go away from zero.
__device__ inline u32 rounded(float x) {
    u32 y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}
// A score as the next product takes it.
__device__ inline float as_factor(float x) { return __uint_as_float(rounded(x)); }
#else
__device__ inline float as_factor(float x) { return x; } // pack_scores rounds
#endif
__device__ inline void load_four(float (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}

__device__ inline void store_word(u32 to, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ inline uint4 load_chunk(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

// The address that a lane passes to ldmatrix for a fragment of 16 rows x 32 bytes at (row, 32 * step). `row` must be a
// multiple of 8: the swizzle then depends on the lane alone, and a step is one exclusive or.
// As A, or transposed as two B side by side: rows by lane % 16, then the columns.
__device__ inline u32 piece(u32 tile, int row, int step, int lane) {
    return tile + row * ROW_BYTES + (swizzled(lane % 16, lane / 16) ^ (step * 32));
}
// As B of a product with the transpose: the tile's rows are the columns of two B, one after the other.
__device__ inline u32 piece_of_rows(u32 tile, int row, int step, int lane) {
    return tile + row * ROW_BYTES + (swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ (step * 32));
}


// For each score s[m][n][i] that a lane holds: that of row 16 m + i / 2 * 8 and column 8 n + i % 2, counted from the
// lane's first row, g, and its first column, c. A macro, since a function with a lambda compiles to slightly other
// code.
#define EACH_SCORE(m, n, i)                                                                                            \
    _Pragma("unroll") for (int m = 0; m < ROW_TILES; ++m)                                                              \
        _Pragma("unroll") for (int n = 0; n < PIECE / 8; ++n)                                                          \
            _Pragma("unroll") for (int i = 0; i < 4; ++i)

// The masks: minus infinity for scores of a query that must not see a key. row, column: the lane's first.
// Causal. Rows are queries, the first of which sees `seen` keys; the columns are the keys from `key` on.
__device__ inline void hide_future(Scores &s, int key, int seen, int row, int column) {
    EACH_SCORE(m, n, i) {
        if (key + n * 8 + column + i % 2 >= seen + m * 16 + i / 2 * 8 + row) s[m][n][i] = -INFINITY;
    }
}
// Causal and transposed. Rows are the keys from `key` on, columns the queries from `query` on.
__device__ inline void hide_past(Scores &s, int key, int query, int row, int column) {
    EACH_SCORE(m, n, i) {
        if (key + m * 16 + i / 2 * 8 + row > query + n * 8 + column + i % 2) s[m][n][i] = -INFINITY;
    }
}
// Documents. Keys (columns, from `key` on) before the document of a query (row).
__device__ inline void hide_before(Scores &s, int key, const RowBounds &starts, int column) {
    EACH_SCORE(m, n, i) {
        if (key + n * 8 + column + i % 2 < starts[m][i / 2]) s[m][n][i] = -INFINITY;
    }
}
// Documents, transposed. Queries (columns, from `query` on) after the document of a key (row).
__device__ inline void hide_behind(Scores &s, int query, const RowBounds &ends, int column) {
    EACH_SCORE(m, n, i) {
        if (query + n * 8 + column + i % 2 >= ends[m][i / 2]) s[m][n][i] = -INFINITY;
    }
}

// One step of the online softmax of a row (m, half). It raises the row's maximum, `top`, to that of the new scores,
// turns them into P = exp(s - top), adds their sum over this lane's columns to `total`, and returns the factor for sums
// that were taken under the old maximum. Exponentials are powers of two, and so is top: hence `scale`. Key 0 is in the
// first piece and every row sees it, so that top is finite from there on. Where MASKED, a row may have seen no key yet:
// its maximum is then -inf, and 0 takes its place.
template <bool MASKED>
__device__ inline float softmax_step(Scores &s, int m, int half, float scale, float &top, float &total) {
    float most = s[m][0][2 * half];
#pragma unroll
    for (int n = 0; n < PIECE / 8; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(top, most * scale);
    float shrink = exp2_fast(top - most), base = most, sum = 0;
    top = most;
    if (MASKED && base == -INFINITY) base = shrink = 0;
#pragma unroll
    for (int n = 0; n < PIECE / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const float p = exp2_fast(fmaf(s[m][n][i], scale, -base));
            sum += p;
            s[m][n][i] = as_factor(p);
        }
    total = total * shrink + sum;
    return shrink;
}
// The end of the softmax of a row: adds its four lanes' parts of `total`, stores its log-sum-exp if the row exists, and
// returns 1 / total. The row is first + eight + row: the lanes of a warp finish 8 rows together.
__device__ inline float finish_row(float total, float top, float *lse, int first, i64 stop, int eight, int row,
                                   int column) {
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int t = first + eight + row;
    if (column == 0 && t < stop) lse[t] = top / LOG2E + logf(total);
    return 1 / total;
}

#ifdef TF32
__device__ inline float dot(uint4 x, uint4 y) {
    return __uint_as_float(x.x) * __uint_as_float(y.x) + __uint_as_float(x.y) * __uint_as_float(y.y) +
           __uint_as_float(x.z) * __uint_as_float(y.z) + __uint_as_float(x.w) * __uint_as_float(y.w);
}
#else
__device__ inline u32 pack(float low, float high) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ inline float low(u32 x) { return __uint_as_float(x << 16); }
__device__ inline float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// The dot product of 8 numbers and 8.
__device__ inline float dot(uint4 x, uint4 y) {
    return low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y) +
           low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
}

// 16 columns of scores, as the left operand of a product: two accumulators side by side have the layout of an A.
__device__ inline void pack_scores(u32 (&a)[4], const Scores &s, int m, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int n = 2 * step + i / 2, pair = i % 2 * 2;
        a[i] = pack(s[m][n][pair], s[m][n][pair + 1]);
    }
}
// The scores of the first 16 rows, rounded to bf16, as left operands of 16 columns each.
typedef u32 Rounded[PIECE / 16][4];
__device__ inline void round_scores(Rounded &p, const Scores &s) {
#pragma unroll
    for (int step = 0; step < PIECE / 16; ++step) pack_scores(p[step], s, 0, step);
}

// Writes the sums of a warp's rows, scaled and rounded to bf16, to the warp's own part of shared memory.
__device__ inline void stage_rows(const float (&x)[ROW_TILES][D / 8][4], const RowValues &scale, u32 tile, int lane) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 pair = pack(x[m][n][2 * half] * scale[m][half], x[m][n][2 * half + 1] * scale[m][half]);
                const u32 place = tile + swizzled(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4;
                store_word(place, pair);
            }
    __syncwarp();
}
// Stores them to global memory by way of shared memory, so that each store has 16 bytes.
__device__ inline void store_sums(bf16 *to, i64 token, int first, int stop, const float (&x)[ROW_TILES][D / 8][4],
                                  const RowValues &scale, u32 tile, int lane) {
    stage_rows(x, scale, tile, lane);
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; ++i) {
        const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const uint4 line = load_chunk(tile + swizzled(row, chunk));
        if (first + row < stop) *reinterpret_cast<uint4 *>(to + (first + row) * token + chunk * 8) = line;
    }
}
__device__ inline void store_sums(bf16 *to, i64 token, int first, int stop, const float (&x)[ROW_TILES][D / 8][4],
                                  float scale, u32 tile, int lane) {
    RowValues scales;
    set_rows(scales, scale);
    store_sums(to, token, first, stop, x, scales, tile, lane);
}
#endif

// Loads a warp's rows of `out`, for delta; CHUNKS lanes hold a row.
__device__ inline void load_out(uint4 (&part)[OWN_CHUNKS], const Number *out, i64 token, int first, i64 stop,
                                int lane) {
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; ++i) {
        const int t = first + (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
        if (t < stop) part[i] = *reinterpret_cast<const uint4 *>(out + t * token + chunk * CHUNK);
    }
}

// The dot product of two rows. Each of CHUNKS lanes has a chunk of both: at `place` in shared memory, and y.
__device__ inline float row_product(u32 place, uint4 y) {
    float sum = dot(load_chunk(place), y);
#pragma unroll
    for (int lane = 1; lane < CHUNKS; lane *= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}

// The kernel that owns keys: P = exp(s - lse) of scores whose columns are queries; `pairs`, in shared memory: (lse,
// delta) of the lane's first column on. scale: of the scores, to powers of two.
__device__ inline void make_probabilities(Scores &s, u32 pairs, float scale) {
#pragma unroll
    for (int n = 0; n < PIECE / 8; ++n) {
        float row[4]; // lse, delta, lse, delta of two queries
        load_four(row, pairs + n * 64);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] = as_factor(exp2_fast(fmaf(s[m][n][i], scale, -row[i % 2 * 2])));
    }
}
// dS = P (dP - delta). probability(m, n, i): of P.
template <class Probability>
__device__ inline void make_gradients(Scores &ds, u32 pairs, Probability probability) {
#pragma unroll
    for (int n = 0; n < PIECE / 8; ++n) {
        float row[4];
        load_four(row, pairs + n * 64); // loaded again: registers are scarcer than time
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ds[m][n][i] = as_factor(probability(m, n, i) * (ds[m][n][i] - row[i % 2 * 2 + 1]));
    }
}
#endif
