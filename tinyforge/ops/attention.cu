// Grouped-query attention, forward and backward (FlashAttention): no T x T matrix in memory, no atomics.
//
// This file has two families of kernels, chosen by macros. Three more are in files of their own: attention_hopper.cu
// and attention_tma.cu (bf16, Hopper's wgmma), attention_tf32.cu (float32 with TF32 products).
//
//   REAL=float, double or bf16, HEAD_DIM up to 128     no tensor cores. Read these first: gradient checks run them, and
//                                                      bf16 at head sizes that the tensor-core kernels lack
//     attention_fwd_plain      out, lse                     one block: ROWS queries of one head
//     attention_bwd_q_plain    dq, and the statistics       one block: ROWS queries of one head
//     attention_bwd_kv_plain   dk, dv                       one block: ROWS keys of one kv head
//   PART=FORWARD, BACKWARD_Q or BACKWARD_KV, HEAD_DIM 32, 64 or 128     bf16, mma.sync, sm_80 and up
//     attention_fwd_mma        out, lse                     one warp: OWN queries of one head
//     attention_bwd_q_mma      dq, and the statistics       one warp: OWN queries of one head
//     attention_bwd_kv_mma     dk, dv                       one warp: OWN keys of one kv head
//
// Algorithm. A block keeps its own rows on the chip and streams the rows of the other side past them, one tile at a
// time.
//   forward        owns queries. For each tile of keys: S = Q K^T / sqrt(D), the online softmax (a running maximum and
//                  a running sum for each row), O += P V. At the end it writes O / sum, and lse = log of the sum of
//                  exp(S).
//   backward, q    owns queries. First delta = rowsum(dO * O); (lse, delta) of each row are stored for the next kernel.
//                  For each tile of keys: P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), dQ += dS K.
//   backward, kv   owns keys, and streams the queries of every head that reads them, so that the sum over the group
//                  stays in registers. For each tile of queries: P^T and dS^T as above, dV += P^T dO, dK += dS^T Q.
// Backward recomputes S in both kernels: seven products instead of five. Five would need atomics to add up dQ in
// memory; with seven, every sum has a fixed order, and two runs give the same bits.
//
// Masks, each compiled in by a macro:
//   (none)    causal. The query at position t of the last T of S positions sees keys 0 .. t + (S - T).
//   BAND=1    a query sees the keys from `back` before its own position to `forth` after it: a sliding window, or full
//             attention in both directions. `lengths`, if not null, is the number of keys of each sequence; the padding
//             after them is seen by no query, and its gradients are 0. The kernel that owns keys also loads queries
//             past the band, but skips their products.
//   DOCS=1    rows that pack several documents; `bounds` holds what each owned row sees of the other side: see
//             attention.cuh.
//   DROP=1    dropout: each probability is multiplied by 0 or 1 / (1 - rate). lse and delta do not change. The mask is
//             not stored: it is a function of (sequence, head, query, key), by Philox. One block of four words serves
//             queries t and t + 8 and keys s and s + 8 of a 16 x 16 square of scores; one lane of the tensor-core
//             kernels holds these four scores, in P and in P^T alike.
//   DROP=2    the same with the key read from `words`, so that a captured graph draws a new mask at each launch. Costs
//             some 20 registers, and a few spills in the plain kernels.
// Tiles that the mask hides entirely are skipped. With BAND or DOCS, the first tile is the first that any row of the
// block sees, so another row may have seen no key yet: its maximum is -inf, and 0 is used in its place.
//
// Layout. Tensors are (batch, token, head, dim) with the heads of a token adjacent. Strides of token and batch are
// arguments, so that q, k and v can be views of one packed tensor. Grid, block and shared memory are stated above each
// kernel. blockIdx.y counts the blocks of one sequence and kv head, longest first: short blocks fill the gaps at the
// end.
//
// Registers (sm_90), none spilled: plain 118 to 128 in float at head size 64; mma.sync at 64: forward 246 (two blocks
// of four warps on a multiprocessor), backward_q 128 (four), backward_kv 252 (two); with DROP 242, 140 (three), 254;
// with DOCS 253, 144 (three), 241; with both 246, 146 (three), 243.
//
// Tried, at 16 x 1024 tokens, 12/4 heads of 64, on an H200, in us:
//   forward       32 rows a warp 101; 16 rows, three blocks 107; 16 rows, eight warps 110; tiles of 128 keys 122
//   backward_q    16 rows a warp, four blocks, pieces of 16 keys 133, of 32 keys with three blocks 141; 32 rows a warp
//                 142: twice the fragments from shared memory are cheaper than half the warps; loading `out` for delta
//                 only after dO had arrived: 20 more
//   backward_kv   32 keys a warp 164, of 16 keys in pieces of 32 queries 177. All eight fragments of k and v of a row
//                 tile in registers: 167, spills; k's four: 164, spills on sm_80; three: 168; none: 175. Pieces
//                 unrolled twice: 174
//   A tile of dO and q streamed as 32 rows instead of 64: 173. The stalls are then the fixed latencies between
//   dependent instructions (ncu: 2.4 of 5.7 cycles an instruction), with the tensor pipe at 52 %: it needs more warps,
//   not more bandwidth.

#define WORKER_WARPS 1
#include "ops/attention.cuh"

#ifdef REAL
#include "ops/philox.cuh"

// ------------------------------------------------------------------------------------------------- the plain kernels
//
// 256 threads as 16 x 16. A thread computes PER x PER scores of a tile: rows ty + 16 i, columns tx + 16 j. The 16
// threads of a row then read 16 different rows of the other operand at once, 16 bytes each. Rows are padded by VEC
// elements, so that these reads fall into different banks.

constexpr int THREADS = 256;
constexpr int PLAIN_BLOCKS = sizeof(A) == 8 && D > 64 ? 1 : 2;     // on a multiprocessor; limited by shared memory
constexpr int PER = ROWS / 16;
constexpr int VEC = 16 / sizeof(A);
constexpr int PADDED = ceil_div(D, 16) * 16;                                   // dims, padded with zeros
constexpr int DIMS = PADDED / 16;                                              // dims that a thread accumulates
constexpr int WIDE = DIMS % VEC == 0 ? VEC : DIMS % 2 == 0 ? 2 : 1;            // of these, adjacent ones
constexpr int LINE = PADDED + VEC;                                             // a row of q, k, v, dO in shared memory
constexpr int SCORE_LINE = ROWS + VEC;                                         // a row of scores
constexpr int TILE = ROWS * LINE;

typedef Pack<A, VEC> Vector;
typedef Pack<A, WIDE> Dims;
typedef A Scores[PER][PER];
typedef A Sums[PER][DIMS];

struct Place {
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    __device__ int row(int i) const { return ty + 16 * i; }
    __device__ int column(int j) const { return tx + 16 * j; }
    __device__ int dim(int c) const { return (c / WIDE * 16 + tx) * WIDE + c % WIDE; }
};

// cap tanh(s / cap), s itself for a cap of 0, and its derivative from the result.
__device__ inline A capped(A s, A cap) { return cap > 0 ? cap * tanh(s / cap) : s; }
__device__ inline A slope_of(A score, A cap) { return cap > 0 ? 1 - score / cap * (score / cap) : A(1); }

// Loads ROWS rows from global memory, starting at row `first`; rows from `stop` on are zeros.
__device__ void load_tile(A *tile, const REAL *from, i64 token, int first, int stop, A scale = 1) {
    constexpr int STEP = D * sizeof(REAL) % 16 == 0 ? VEC : 1; // else rows are not aligned
    constexpr int PER_ROW = PADDED / STEP;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, d = i % PER_ROW * STEP;
        const bool there = first + row < stop && d < D;
        if constexpr (STEP == VEC) {
            Pack<REAL, VEC> x = {};
            if (there) x = load<VEC>(from + (first + row) * token + d);
            Vector y;
            for (int e = 0; e < VEC; ++e) y.v[e] = widen(x.v[e]) * scale;
            store(tile + row * LINE + d, y);
        } else {
            tile[row * LINE + d] = there ? widen(from[(first + row) * token + d]) * scale : 0;
        }
    }
}

// out += a b^T over the dims.
__device__ void add_scores(Scores &out, const A *a, const A *b, Place at) {
#pragma unroll 1
    for (int d = 0; d < PADDED; d += VEC) {
        Vector x[PER], y[PER];
        for (int i = 0; i < PER; ++i) x[i] = *reinterpret_cast<const Vector *>(a + at.row(i) * LINE + d);
        for (int j = 0; j < PER; ++j) y[j] = *reinterpret_cast<const Vector *>(b + at.column(j) * LINE + d);
        for (int e = 0; e < VEC; ++e)
            for (int i = 0; i < PER; ++i)
                for (int j = 0; j < PER; ++j) out[i][j] += x[i].v[e] * y[j].v[e];
    }
}

// out += p m, p being (rows, ROWS) in shared memory and m (ROWS, dims).
__device__ void add_product(Sums &out, const A *p, const A *m, Place at) {
#pragma unroll 1
    for (int n = 0; n < ROWS; n += VEC) {
        Vector x[PER];
        for (int i = 0; i < PER; ++i) x[i] = *reinterpret_cast<const Vector *>(p + at.row(i) * SCORE_LINE + n);
        for (int e = 0; e < VEC; ++e)
            for (int c = 0; c < DIMS; c += WIDE) {
                const Dims y = *reinterpret_cast<const Dims *>(m + (n + e) * LINE + at.dim(c));
                for (int i = 0; i < PER; ++i)
                    for (int w = 0; w < WIDE; ++w) out[i][c + w] += x[i].v[e] * y.v[w];
            }
    }
}

// The 16 threads of a row are half a warp and read only what they wrote themselves: a warp barrier is enough.
__device__ void store_scores(A *p, const Scores &x, Place at) {
    __syncwarp();
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < PER; ++j) p[at.row(i) * SCORE_LINE + at.column(j)] = x[i][j];
    __syncwarp();
}

__device__ A row_sum(A x) {
    for (int lane = 1; lane < 16; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
__device__ A row_max(A x) {
    for (int lane = 1; lane < 16; lane *= 2) x = fmax(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// Dropout: bit PER * i + j says whether score [i][j] is kept. Of each block of four words that it draws it uses one.
template <bool ROWS_ARE_KEYS>
__device__ u32 kept_bits(int row, int column, int head, int batch, Place at, u32 key0, u32 key1, u32 threshold) {
    u32 bits = 0;
#pragma unroll 1 // for fewer registers
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < PER; ++j) {
            const int r = row + at.row(i), c = column + at.column(j);
            const int query = ROWS_ARE_KEYS ? c : r, key = ROWS_ARE_KEYS ? r : c;
            const uint4 w = philox(key / 16 * 8 + key % 8, query / 16 * 8 + query % 8, head, batch, key0, key1);
            const bool second_query = query / 8 % 2, second_key = key / 8 % 2;
            const u32 word = second_query ? second_key ? w.w : w.z : second_key ? w.y : w.x;
            bits |= u32(word >= threshold) << (PER * i + j);
        }
    return bits;
}

__device__ void store_rows(REAL *to, i64 token, int first, int stop, const Sums &x, A scale, Place at) {
    for (int i = 0; i < PER; ++i)
        for (int c = 0; c < DIMS; ++c)
            if (first + at.row(i) < stop && at.dim(c) < D)
                narrow(x[i][c] * scale, to[(first + at.row(i)) * token + at.dim(c)]);
}

// Grid (batch * heads, tiles of queries); shared: q, k, v, scores. Longest blocks first: they are the last queries.
extern "C" __global__ void __launch_bounds__(THREADS, PLAIN_BLOCKS)
attention_fwd_plain(const REAL *q, const REAL *k, const REAL *v, REAL *out, A *lse, i64 q_batch, i64 q_token,
                    i64 k_batch, i64 k_token, i64 v_batch, i64 v_token, i64 queries, i64 keys, i64 heads,
                    i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS CAP_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(16) unsigned char shared[];
    A *const q_tile = reinterpret_cast<A *>(shared);
    A *const k_tile = q_tile + TILE, *const v_tile = k_tile + TILE, *const p_tile = v_tile + TILE;
    const Place at;
    const int batch = blockIdx.x / heads, head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS, ahead = keys - queries;
    const int there = unpadded(lengths, batch, keys), seen = min_int(there, first + ROWS + ahead + forth);
    q += batch * q_batch + head * D;
    k += batch * k_batch + kv_head * D;
    v += batch * v_batch + kv_head * D;
    out += batch * queries * heads * D + head * D;
    lse += (batch * heads + head) * queries;

    load_tile(q_tile, q, q_token, first, queries, SCORE_SCALE);
    Sums sums = {};
    A top[PER], total[PER];
    for (int i = 0; i < PER; ++i) top[i] = -INFINITY, total[i] = 0;
    int starts[PER], from = first_key(first + ahead, back, ROWS);
    if (docs) {
        const int *const own = DOCS_BOUNDS + batch * queries;
        from = bound_of(own, first, queries) / ROWS * ROWS;
        for (int i = 0; i < PER; ++i) starts[i] = bound_of(own, first + at.row(i), queries);
    }
    for (int key = from; key < seen; key += ROWS) {
        __syncthreads(); // the last tile has been read
        load_tile(k_tile, k, k_token, key, keys);
        load_tile(v_tile, v, v_token, key, keys);
        __syncthreads();
        const u32 kept = drop ? kept_bits<false>(first, key, head, batch, at, key0, key1, threshold) : 0;
        Scores s = {};
        add_scores(s, q_tile, k_tile, at);
        for (int i = 0; i < PER; ++i) {
            // Without a band or documents every row sees key 0, which is in the first tile: top is then finite.
            A most = top[i], sum = 0;
            const int position = first + at.row(i) + ahead;
            for (int j = 0; j < PER; ++j) {
                const int column = key + at.column(j);
                if (caps) s[i][j] = capped(s[i][j], cap);
                if (column > position + forth || band && (column < position - back || column >= there) ||
                    docs && column < starts[i])
                    s[i][j] = -INFINITY;
                most = fmax(most, s[i][j]);
            }
            most = row_max(most);
            const A base = (band || docs) && most == -INFINITY ? A(0) : most;
            const A shrink = exp(top[i] - base); // rescales the sums taken under the old maximum
            for (int j = 0; j < PER; ++j) sum += s[i][j] = exp(s[i][j] - base);
            total[i] = total[i] * shrink + row_sum(sum);
            top[i] = most;
            for (int c = 0; c < DIMS; ++c) sums[i][c] *= shrink;
            for (int j = 0; drop && j < PER; ++j)
                if (!(kept >> (PER * i + j) & 1)) s[i][j] = 0;
        }
        store_scores(p_tile, s, at);
        add_product(sums, p_tile, v_tile, at);
    }
    for (int i = 0; i < PER; ++i) {
        for (int c = 0; c < DIMS; ++c) sums[i][c] /= total[i];
        if (at.tx == 0 && first + at.row(i) < queries) lse[first + at.row(i)] = top[i] + log(total[i]);
    }
    store_rows(out, heads * D, first, queries, sums, drop_scale, at);
}

// Grid (batch * heads, tiles of queries); shared: q, dO, k, v, dS. stats: (batch, head, query) pairs (lse, delta).
extern "C" __global__ void __launch_bounds__(THREADS, PLAIN_BLOCKS)
attention_bwd_q_plain(const REAL *dy, const REAL *q, const REAL *k, const REAL *v, const REAL *out, const A *lse,
                      A *stats, REAL *dq, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch,
                      i64 v_token, i64 dq_batch, i64 dq_token, i64 queries, i64 heads,
                      i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS CAP_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(16) unsigned char shared[];
    A *const q_tile = reinterpret_cast<A *>(shared);
    A *const dy_tile = q_tile + TILE, *const k_tile = dy_tile + TILE, *const v_tile = k_tile + TILE;
    A *const ds_tile = v_tile + TILE;
    const Place at;
    const int batch = blockIdx.x / heads, head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    const int there = unpadded(lengths, batch, queries);
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS, seen = min_int(there, first + ROWS + forth);
    const A scale = SCORE_SCALE;
    q += batch * q_batch + head * D;
    k += batch * k_batch + kv_head * D;
    v += batch * v_batch + kv_head * D;
    dq += batch * dq_batch + head * D;
    dy += batch * queries * heads * D + head * D;
    out += batch * queries * heads * D + head * D;
    lse += (batch * heads + head) * queries;
    stats += (batch * heads + head) * queries * 2;

    load_tile(q_tile, q, q_token, first, queries, scale);
    load_tile(dy_tile, dy, heads * D, first, queries);
    load_tile(k_tile, out, heads * D, first, queries); // in the place of keys, which come later
    __syncthreads();
    A row_lse[PER], delta[PER];
    for (int i = 0; i < PER; ++i) {
        const int row = at.row(i), t = first + row;
        A sum = 0;
        for (int d = at.tx; d < D; d += 16) sum += dy_tile[row * LINE + d] * k_tile[row * LINE + d];
        delta[i] = row_sum(sum);
        row_lse[i] = t < queries ? lse[t] : 0;
        if (at.tx == 0 && t < queries) stats[2 * t] = row_lse[i], stats[2 * t + 1] = delta[i];
    }
    Sums sums = {};
    int starts[PER], from = first_key(first, back, ROWS);
    if (docs) {
        const int *const own = DOCS_BOUNDS + batch * queries;
        from = bound_of(own, first, queries) / ROWS * ROWS;
        for (int i = 0; i < PER; ++i) starts[i] = bound_of(own, first + at.row(i), queries);
    }
    for (int key = from; key < seen; key += ROWS) {
        __syncthreads();
        load_tile(k_tile, k, k_token, key, queries);
        load_tile(v_tile, v, v_token, key, queries);
        __syncthreads();
        const u32 kept = drop ? kept_bits<false>(first, key, head, batch, at, key0, key1, threshold) : 0;
        Scores s = {}, dp = {};
        add_scores(s, q_tile, k_tile, at);
        add_scores(dp, dy_tile, v_tile, at);
        for (int i = 0; i < PER; ++i)
            for (int j = 0; j < PER; ++j) {
                const int column = key + at.column(j), t = first + at.row(i);
                const bool seen_by_row = column <= t + forth && !(band && (column < t - back || column >= there)) &&
                                         !(docs && column < starts[i]);
                if (drop) dp[i][j] = kept >> (PER * i + j) & 1 ? dp[i][j] * drop_scale : 0;
                const A score = caps ? capped(s[i][j], cap) : s[i][j];
                s[i][j] = seen_by_row ? exp(score - row_lse[i]) * (dp[i][j] - delta[i]) : 0;
                if (caps) s[i][j] *= slope_of(score, cap);
            }
        store_scores(ds_tile, s, at);
        add_product(sums, ds_tile, k_tile, at);
    }
    store_rows(dq, dq_token, first, queries, sums, scale, at);
}

// Grid (batch * kv heads, tiles of keys); shared: k, v, q, dO, P^T and dS^T. Longest blocks first: the first keys.
extern "C" __global__ void __launch_bounds__(THREADS, PLAIN_BLOCKS)
attention_bwd_kv_plain(const REAL *dy, const REAL *q, const REAL *k, const REAL *v, const A *stats, REAL *dk,
                       REAL *dv, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch, i64 v_token,
                       i64 dk_batch, i64 dk_token, i64 dv_batch, i64 dv_token, i64 queries, i64 heads,
                       i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS CAP_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(16) unsigned char shared[];
    A *const k_tile = reinterpret_cast<A *>(shared);
    A *const v_tile = k_tile + TILE, *const q_tile = v_tile + TILE, *const dy_tile = q_tile + TILE;
    A *const p_tile = dy_tile + TILE;
    const Place at;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    const int first = blockIdx.y * ROWS;
    const int from = band ? first_key(first, forth, ROWS) : first; // the queries that see any of these keys
    const int there = unpadded(lengths, batch, queries);
    i64 stop = !band ? queries : first < there ? min_int(queries, first + ROWS + back) : 0;
    int ends[PER];
    if (docs) {
        const int *const own = DOCS_BOUNDS + batch * queries;
        stop = bound_of(own, first + ROWS - 1, queries);
        for (int i = 0; i < PER; ++i) ends[i] = bound_of(own, first + at.row(i), queries);
    }
    const A scale = SCORE_SCALE;
    k += batch * k_batch + kv_head * D;
    v += batch * v_batch + kv_head * D;

    load_tile(k_tile, k, k_token, first, queries, scale);
    load_tile(v_tile, v, v_token, first, queries);
    Sums dk_sums = {}, dv_sums = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int query = from; query < stop; query += ROWS) {
            __syncthreads();
            load_tile(q_tile, q + batch * q_batch + head * D, q_token, query, queries);
            load_tile(dy_tile, dy + (batch * queries * heads + head) * D, heads * D, query, queries);
            __syncthreads();
            const u32 kept = drop ? kept_bits<true>(first, query, head, batch, at, key0, key1, threshold) : 0;
            Scores p = {}, ds = {};
            add_scores(p, k_tile, q_tile, at); // rows are keys, columns queries
            add_scores(ds, v_tile, dy_tile, at);
            for (int j = 0; j < PER; ++j) {
                const int t = query + at.column(j);
                const A *const stat = stats + 2 * ((batch * heads + head) * queries + min_int(t, queries - 1));
                for (int i = 0; i < PER; ++i) {
                    const int key = first + at.row(i);
                    const bool seen_by_query = key <= t + forth && t < queries &&
                                               !(band && (key < t - back || key >= there)) && !(docs && t >= ends[i]);
                    const A score = caps ? capped(p[i][j], cap) : p[i][j];
                    p[i][j] = seen_by_query ? exp(score - stat[0]) : 0;
                    const bool stays = !drop || kept >> (PER * i + j) & 1;
                    if (drop) ds[i][j] = stays ? ds[i][j] * drop_scale : 0;
                    ds[i][j] = p[i][j] * (ds[i][j] - stat[1]);
                    if (caps) ds[i][j] *= slope_of(score, cap);
                    if (!stays) p[i][j] = 0;
                }
            }
            store_scores(p_tile, p, at);
            add_product(dv_sums, p_tile, dy_tile, at);
            store_scores(p_tile, ds, at);
            add_product(dk_sums, p_tile, q_tile, at);
        }
    store_rows(dk + batch * dk_batch + kv_head * D, dk_token, first, queries, dk_sums, scale, at);
    store_rows(dv + batch * dv_batch + kv_head * D, dv_token, first, queries, dv_sums, drop_scale, at);
}

#else
// ------------------------------------------------------------------------------------------ the tensor-core kernels
//
// Fragments of mma.m16n8k16, with g = lane / 4 and c = 2 (lane % 4): a thread holds
//   A (16 x 16): a[0] = (g, c..c+1), a[1] = (g + 8, c..), a[2] = (g, c + 8..), a[3] = (g + 8, c + 8..)
//   B (16 x 8):  b[0] = (c..c+1, g), b[1] = (c + 8.., g)
//   C (16 x 8):  c[0..1] = (g, c..c+1), c[2..3] = (g + 8, c..c+1)
// Two C side by side have the layout of an A: scores become the left operand of the next product without leaving
// registers. A warp owns OWN = 16 ROW_TILES rows: each fragment of the streamed side that it loads from shared memory
// feeds ROW_TILES products. With two row tiles ldmatrix moves half the bytes; with one there are registers for twice
// the warps. Which is better depends on the kernel, see above.

// c[0] and c[1], side by side, += a b: b holds two B, as one ldmatrix loads them.
__device__ inline void multiply_two(float (*c)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    multiply_add(c[0], a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply_add(c[1], a[0], a[1], a[2], a[3], b[2], b[3]);
}

typedef float Sums[ROW_TILES][D / 8][4];

// A warp's own rows, the first COUNT of their fragments in registers; the others are loaded for each piece.
template <int COUNT> struct Own {
    u32 tile, part[ROW_TILES][STEPS][4];

    __device__ __forceinline__ explicit Own(u32 tile) : tile(tile) {}
    __device__ __forceinline__ void load(int step, int lane) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) load_matrix(part[m][step], piece(tile, m * 16, step, lane));
    }
    __device__ __forceinline__ void hold(int lane) {
#pragma unroll
        for (int step = 0; step < COUNT; ++step) load(step, lane);
    }
};

// s = a b^T: the warp's own rows and PIECE rows of a streamed tile.
template <int COUNT>
__device__ __forceinline__ void make_scores(Scores &s, Own<COUNT> &own, u32 rows, int lane) {
    clear(s);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step >= COUNT) own.load(step, lane);
#pragma unroll
        for (int n = 0; n < PIECE / 16; ++n) {
            u32 b[4];
            load_matrix(b, piece_of_rows(rows, n * 16, step, lane));
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) multiply_two(s[m] + 2 * n, own.part[m][step], b);
        }
    }
}
// Two products at once.
template <int FIRST, int SECOND>
__device__ __forceinline__ void start_both(Scores &s, Own<FIRST> &first, u32 rows, Scores &t, Own<SECOND> &second,
                                           u32 others, int lane) {
    clear(s), clear(t);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step >= FIRST) first.load(step, lane);
        if (step >= SECOND) second.load(step, lane);
#pragma unroll
        for (int n = 0; n < PIECE / 16; ++n) {
            u32 b[4], c[4];
            load_matrix(b, piece_of_rows(rows, n * 16, step, lane));
            load_matrix(c, piece_of_rows(others, n * 16, step, lane));
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                multiply_two(s[m] + 2 * n, first.part[m][step], b);
                multiply_two(t[m] + 2 * n, second.part[m][step], c);
            }
        }
    }
}

// sums += s b over PIECE rows b of a streamed tile.
__device__ __forceinline__ void add_product(Sums &sums, const Scores &s, u32 rows, int lane) {
#pragma unroll
    for (int step = 0; step < PIECE / 16; ++step) {
        u32 p[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) pack_scores(p[m], s, m, step);
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            u32 b[4];
            load_matrix_transposed(b, piece(rows, step * 16, n, lane));
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) multiply_two(sums[m] + 2 * n, p[m], b);
        }
    }
}
// Both products at once.
__device__ __forceinline__ void add_both(Sums &sums, const Scores &s, u32 rows, Sums &others, const Scores &t,
                                         u32 other_rows, int lane) {
#pragma unroll
    for (int step = 0; step < PIECE / 16; ++step) {
        u32 a[ROW_TILES][4], c[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) pack_scores(a[m], s, m, step), pack_scores(c[m], t, m, step);
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            u32 b[4], d[4];
            load_matrix_transposed(b, piece(rows, step * 16, n, lane));
            load_matrix_transposed(d, piece(other_rows, step * 16, n, lane));
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                multiply_two(sums[m] + 2 * n, a[m], b);
                multiply_two(others[m] + 2 * n, c[m], d);
            }
        }
    }
}

__device__ __forceinline__ void scale_row(Sums &sums, int m, int half, float by, int) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) sums[m][n][2 * half] *= by, sums[m][n][2 * half + 1] *= by;
}

template <int FIRST, int SECOND>
__device__ __forceinline__ void start_gradients(Scores &p, Own<FIRST> &k, u32 q_rows, Scores &ds, Own<SECOND> &v,
                                                u32 dy_rows, int lane) {
    start_both(p, k, q_rows, ds, v, dy_rows, lane);
}
// kept: for dropout, 8 bits for each 16 rows.
template <int SECOND>
__device__ __forceinline__ void add_gradients(Sums &dk, Sums &dv, Scores &p, Own<SECOND> &, Scores &ds, u32 q_rows,
                                              u32 dy_rows, u32 pairs, float scale, u32 kept, float drop_scale,
                                              int lane) {
#pragma unroll
    for (int n = 0; n < PIECE / 8; ++n) {
        float row[4]; // lse, delta, lse, delta of two queries
        load_four(row, pairs + n * 64);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[m][n][i] = exp2_fast(fmaf(p[m][n][i], scale, -row[i % 2 * 2]));
                const bool stays = !drop || kept >> (8 * m + 4 * n + i) & 1;
                if (drop) ds[m][n][i] = stays ? ds[m][n][i] * drop_scale : 0;
                ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - row[i % 2 * 2 + 1]);
                if (!stays) p[m][n][i] = 0;
            }
    }
    add_both(dv, p, dy_rows, dk, ds, q_rows, lane);
}

#define ENTRY(name) name##_mma
#define BY_MMA_SYNC
#include "ops/attention_stream.cuh"
#endif
