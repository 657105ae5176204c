// The kernels on tensor cores that stream the other side through two stages of shared memory by cp.async, over the
// products of the file that includes this: attention.cu (bf16), attention_tf32.cu (both by mma.sync) and
// attention_hopper.cu (bf16 by wgmma). The algorithm is explained in attention.cu.
//
//   PART=FORWARD       attention_fwd       out, lse                   one worker: OWN queries of one head
//   PART=BACKWARD_Q    attention_bwd_q     dq, and the statistics     one worker: OWN queries of one head
//   PART=BACKWARD_KV   attention_bwd_kv    dk, dv                     one worker: OWN keys of one kv head
//
// The file defines ENTRY, the name of a kernel; Sums, the accumulators of a worker's rows; and
//   Own<COUNT>        a worker's own rows; `hold` takes the first COUNT of their fragments into registers
//   make_scores       s = a b^T of own rows and PIECE streamed rows
//   start_both        two of these; await_first and await_second wait for their scores
//   add_product       sums += s b, b being PIECE streamed rows
//   start_gradients   P's scores, and maybe those of dP, in the kernel that owns keys
//   add_gradients     what follows: P, dS, and their products
//   scale_row         scales a row of the sums; store_sums writes them to global memory
//   tile_arrived      before a tile is read; tile_read: before it may be overwritten; all_read: after the last tile
//
// Shared memory: the rows that each worker owns (q, q and dO, or k and v), two stages of two tiles, and pairs
// (lse, delta): of the rows that are owned or streamed in backward.

#include "ops/philox.cuh"

#ifndef TURN
#define TURN_ARGUMENTS
#define TURN_ANGLES
#define store_gradient store_sums
#endif

#ifndef HELD
#define HELD (2 * STEPS)
#endif
// Fragments of own rows that stay in registers: of q or k, and of dO or v.
constexpr int HELD_FIRST = HELD < STEPS ? HELD : STEPS, HELD_SECOND = HELD - HELD_FIRST;

#ifdef BY_MMA_SYNC // these products are complete at once, and loads of tiles need no fence
__device__ __forceinline__ void await_first(Scores &) {}
__device__ __forceinline__ void await_second(Scores &) {}
__device__ __forceinline__ void tile_arrived() {}
__device__ __forceinline__ void tile_read() {}
__device__ __forceinline__ void all_read() {}
__device__ __forceinline__ void settle(Sums &) {}
#endif

// Copies COUNT rows, starting at row `first`, into a swizzled tile; rows from `stop` on are zeros. By BY threads.
template <int COUNT, int BY>
__device__ inline void load_rows(u32 tile, const Number *from, int token, int first, int stop, int thread) {
    static_assert(BY % CHUNKS == 0, "whole rows");
    const int row = thread / CHUNKS, chunk = thread % CHUNKS;
    const u32 to = tile + swizzled(row, chunk);
    int offset = (first + row) * token + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < ceil_div(COUNT * CHUNKS, BY); ++i) {
        constexpr int ROWS = BY / CHUNKS; // at a time
        if (COUNT % ROWS != 0 && row + i * ROWS >= COUNT) break;
        const bool valid = first + row + i * ROWS < stop;
        // The swizzle repeats every 8 rows.
        const u32 place = ROWS % 8 == 0 ? to + i * ROWS * ROW_BYTES : tile + swizzled(row + i * ROWS, chunk);
        copy_async(place, from + (valid ? offset : 0), valid);
        offset += ROWS * token;
    }
}

// Two streamed tiles, one after the other, as one group of copies: k and v.
__device__ inline void load_pair(u32 stage, const Number *k, i64 k_token, const Number *v, i64 v_token, int first,
                                 int stop, int thread) {
    load_rows<TILE, THREADS>(stage, k, k_token, first, stop, thread);
    load_rows<TILE, THREADS>(stage + TILE_BYTES, v, v_token, first, stop, thread);
    copy_commit();
}

// The work of a worker in the kernels that own queries: OWN positions of one head. Units run through the heads of a
// group at the same positions, then to the next positions. The workers of a block therefore need nearly the same keys,
// whatever the size of the group: little is wasted at the diagonal, and keys and values are loaded once for all heads
// of a group.
struct Unit {
    int batch, kv_head, head, first; // first: its first position
    int last_of_block;               // the highest position in the block
    bool idle;                       // more workers than units: this one only helps with loads
    __device__ Unit(int queries, int heads, int kv_heads, int worker) {
        const int group = heads / kv_heads, units = ceil_div(queries, OWN) * group;
        const int start = (gridDim.y - 1 - blockIdx.y) * WORKERS; // longest blocks first
        batch = blockIdx.x / kv_heads;
        kv_head = blockIdx.x % kv_heads;
        head = kv_head * group + (start + worker) % group;
        first = (start + worker) / group * OWN;
        last_of_block = min_int(queries, (min_int(start + WORKERS, units) - 1) / group * OWN + OWN) - 1;
        idle = start + worker >= units;
    }
};

// Where the documents begin of the queries that a worker owns: the first keys that these see, in the kernels that
// stream keys. 0 without documents.
struct FirstKeys {
    int of_block = 0;              // the block's first query, rounded down to a multiple of TILE
    int of_first = 0, of_last = 0; // the worker's first query, and its last
    __device__ __forceinline__ FirstKeys(const Unit &unit, const int *bounds, i64 queries, i64 heads, i64 kv_heads) {
        if (!docs) return;
        const int *const own = bounds + unit.batch * queries;
        of_block = bound_of(own, Unit(queries, heads, kv_heads, 0).first, queries) / TILE * TILE;
        of_first = bound_of(own, unit.first, queries), of_last = bound_of(own, unit.first + OWN - 1, queries);
    }
};
// Where the documents end of the keys that a worker owns: one past the last queries that see these, in the kernels that
// stream queries. The number of queries without documents.
struct LastQueries {
    int of_block, of_first, of_last; // the block's last key; the worker's first key, and its last
    __device__ __forceinline__ LastQueries(const int *bounds, int batch, i64 queries, int first_of_block, int first)
        : of_block(queries), of_first(queries), of_last(queries) {
        if (!docs) return;
        const int *const own = bounds + batch * queries;
        of_block = bound_of(own, first_of_block + WORKERS * OWN - 1, queries);
        of_first = bound_of(own, first, queries), of_last = bound_of(own, first + OWN - 1, queries);
    }
};

// Computes (lse in powers of two, delta) of each of a warp's rows, and stores it in `stats` for the kernel that owns
// keys, and by way of shared memory (`mine`) in this lane's registers. delta_of(i, row, chunk): delta of a row, in all
// lanes that hold chunks of it.
template <class Delta>
__device__ inline void make_statistics(float2 *mine, float2 *stats, const float *lse, i64 first_row, int first,
                                       i64 stop, int lane, RowValues &row_lse, RowValues &delta, Delta delta_of) {
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; ++i) {
        const int row = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS, t = first + row;
        const float sum = delta_of(i, row, chunk);
        if (chunk == 0) {
            const float2 stat = {t < stop ? lse[first_row + t] * LOG2E : 0, sum};
            mine[row] = stat;
            if (t < stop) stats[first_row + t] = stat;
        }
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 stat = mine[m * 16 + half * 8 + lane / 4];
            row_lse[m][half] = stat.x, delta[m][half] = stat.y;
        }
}

// For the kernel that owns keys: the next tile of q and dO to load, with its rows' statistics; head after head of a
// group.
struct QueryTiles {
    const Number *q, *dy; // of the group's first head
    const float2 *stats;
    i64 q_token, dy_token, queries;
    int start, query, head; // start: the first query that sees any of the block's keys
    i64 stop;               // one past the last

    __device__ QueryTiles(const Number *q, const Number *dy, const float2 *stats, i64 q_token, i64 dy_token,
                          i64 queries, int start, i64 stop)
        : q(q), dy(dy), stats(stats), q_token(q_token), dy_token(dy_token), queries(queries), start(start), head(0),
          query(start), stop(stop) {}

    __device__ inline void load_next(u32 tiles, u32 pairs, int first_pair, int thread) {
        static_assert(TILE <= THREADS, "a thread for each pair of statistics");
        load_rows<TILE, THREADS>(tiles, q + head * D, q_token, query, queries, thread);
        load_rows<TILE, THREADS>(tiles + TILE_BYTES, dy + head * D, dy_token, query, queries, thread);
        if (thread < TILE) {
            const bool valid = query + thread < queries;
            const float2 *const from = stats + head * queries + query + thread;
            copy_async_8(pairs + (first_pair + thread) * 8, valid ? from : stats, valid);
        }
        copy_commit();
        query += TILE;
        if (query >= stop) query = start, ++head;
    }
};

// The masks of a band, as hide_future and hide_past. The first query sees keys low .. seen - 1, each next query one key
// further; no query sees `end` or a later key.
__device__ inline void hide_outside(Scores &s, int key, int low, int seen, int end, int row, int column) {
    EACH_SCORE(m, n, i) {
        const int at = key + n * 8 + column + i % 2, r = m * 16 + i / 2 * 8 + row;
        if (at < low + r || at >= seen + r || at >= end) s[m][n][i] = -INFINITY;
    }
}
__device__ inline void hide_outside_transposed(Scores &s, int key, int query, int back, int forth, int there, int row,
                                               int column) {
    EACH_SCORE(m, n, i) {
        const int t = query + n * 8 + column + i % 2, at = key + m * 16 + i / 2 * 8 + row;
        if (at > t + forth || at < t - back || at >= there) s[m][n][i] = -INFINITY;
    }
}

// Dropout: bit 4 n + i says whether the lane's score [n][i] in the 16 x 16 square at (row, column) is kept.
template <bool ROWS_ARE_KEYS>
__device__ inline u32 kept_bits(int row, int column, int head, int batch, int lane, u32 key0, u32 key1, u32 threshold) {
    u32 bits = 0;
    asm volatile("" : "+r"(row)); // keeps the compiler from hoisting parts of it out of a loop, into registers
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 r = row / 2 + lane / 4, c = column / 2 + lane % 4 * 2 + i;
        const uint4 words = philox(ROWS_ARE_KEYS ? r : c, ROWS_ARE_KEYS ? c : r, head, batch, key0, key1);
        const u32 next_row = ROWS_ARE_KEYS ? words.y : words.z, next_column = ROWS_ARE_KEYS ? words.z : words.y;
        bits |= u32(words.x >= threshold) << i | u32(next_row >= threshold) << (2 + i) |
                u32(next_column >= threshold) << (4 + i) | u32(words.w >= threshold) << (6 + i);
    }
    return bits;
}

struct Thread {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, worker = warp / WORKER_WARPS;
    int slab = warp % WORKER_WARPS * WARP_ROWS; // the first of the warp's rows among the worker's
    int row = slab + lane / 4;                  // of every 16 of the warp's rows this thread holds row and row + 8
    int column = lane % 4 * 2;                  // and of every 8 columns, column and column + 1
};

// Takes fragments of the worker's own rows, once these have arrived; the first tiles may still be under way.
template <class Rows> __device__ __forceinline__ void hold_arrived(Rows &own, int lane) {
    if (HELD == 0 && WORKER_WARPS > 1) return; // they are read where they are, later
    copy_wait<1>();
    __syncwarp();
    own.hold(lane);
}

constexpr int OWNED = PART == FORWARD ? 1 : 2; // tensors of which a worker owns rows

// A worker's and a block's places in shared memory.
struct Places {
    u32 first, second, first_rows, second_rows; // the rows that the worker owns, and those of the warp
    u32 stages, pairs;
    __device__ __forceinline__ Places(u32 base, const Thread &at) {
        first = base + at.worker * OWNED * OWN_BYTES, second = first + OWN_BYTES;
        first_rows = first + at.slab * ROW_BYTES, second_rows = second + at.slab * ROW_BYTES;
        stages = base + WORKERS * OWNED * OWN_BYTES, pairs = stages + 4 * TILE_BYTES;
    }
};

// The keys that a worker's queries see, in the kernels that own queries; `ahead` keys come before the first query.
struct SeenKeys {
    int from, stop_of_block; // of any query of the block
    int stop, stop_of_first; // of any query of the worker, and of its first
    int low;                 // in a band, the first key that its first query sees
    FirstKeys starts;
    RowBounds row_starts;

    __device__ __forceinline__ SeenKeys(const Unit &unit, const Thread &at, i64 queries, i64 keys, i64 heads,
                                        i64 kv_heads, i64 back, i64 forth, const int *lengths, const int *bounds)
        : starts(unit, bounds, queries, heads, kv_heads) {
        const int ahead = keys - queries, there = unpadded(lengths, unit.batch, keys);
        stop_of_block = unit.last_of_block + ahead + 1 + forth, stop_of_first = unit.first + ahead + 1 + forth;
        if (band) stop_of_block = min_int(there, stop_of_block);
        stop = unit.idle ? 0 : min_int(there, stop_of_first + OWN - 1);
        low = unit.first + ahead - back;
        from = band ? first_key(Unit(queries, heads, kv_heads, 0).first + ahead, back, TILE) : starts.of_block;
        load_bounds(row_starts, bounds + unit.batch * queries, unit.first + at.row, queries);
    }
    // Whether no query of the worker sees any of the PIECE keys from `key` on, but some see later ones.
    __device__ __forceinline__ bool skips(int key) const {
        return band && key + PIECE <= low || docs && key + PIECE <= starts.of_first;
    }
    // Masks the scores of these keys, if the diagonal or another border crosses them.
    __device__ __forceinline__ void hide(Scores &s, int key, const Thread &at) const {
        if (band) {
            if (key < low + OWN - 1 || key + PIECE > min_int(stop, stop_of_first))
                hide_outside(s, key, low, stop_of_first, stop, at.row, at.column);
        } else if (key + PIECE > stop_of_first) {
            hide_future(s, key, stop_of_first, at.row, at.column);
        }
        if (docs && key < starts.of_last) hide_before(s, key, row_starts, at.column);
    }
};

#if PART == FORWARD
// Grid (batch * kv heads, ceil(units / WORKERS)).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
ENTRY(attention_fwd)(const Number *q, const Number *k, const Number *v, Number *out, float *lse, i64 q_batch,
                     i64 q_token, i64 k_batch, i64 k_token, i64 v_batch, i64 v_token, i64 queries, i64 keys,
                     i64 heads, i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const Places places(shared_address(shared), at);
    const Unit unit(queries, heads, kv_heads, at.worker);
    const SeenKeys seen(unit, at, queries, keys, heads, kv_heads, back, forth, lengths, DOCS_BOUNDS);
    const int first = unit.first + at.slab;
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;

    if (!unit.idle)
        load_rows<WARP_ROWS, 32>(places.first_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries,
                                 at.lane);
    copy_commit();
    load_pair(places.stages, k, k_token, v, v_token, seen.from, keys, at.thread);
    Own<HELD_FIRST> own_q{places.first};
    hold_arrived(own_q, at.lane);

    const float scale = rsqrtf(float(D)) * LOG2E; // exponentials are powers of two
    Sums sums = {};
    RowValues top, total;
    set_rows(top, -INFINITY), set_rows(total, 0);
    u32 stage = 0;
    for (int key = seen.from; key < seen.stop_of_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        tile_arrived();
        __syncthreads(); // this tile has arrived, and no thread still reads the other stage
        if (key + TILE < seen.stop_of_block)
            load_pair(places.stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, keys,
                      at.thread);
        const u32 k_tile = places.stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll 1
        for (int part = 0; part < TILE; part += PIECE) {
            if (key + part >= seen.stop) break;
            if (seen.skips(key + part)) continue;
            Scores s;
            make_scores(s, own_q, k_tile + part * ROW_BYTES, at.lane);
            seen.hide(s, key + part, at);
            settle(sums);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float shrink = softmax_step<band || docs>(s, m, half, scale, top[m][half], total[m][half]);
                    scale_row(sums, m, half, shrink, at.lane);
                }
            if (drop) {
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                    for (int n = 0; n < PIECE / 8; n += 2) {
                        const u32 kept = kept_bits<false>(unit.first + m * 16, key + part + n * 8, unit.head,
                                                          unit.batch, at.lane, key0, key1, threshold);
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            if (!(kept >> i & 1)) s[m][n + i / 4][i % 4] = 0;
                    }
            }
            add_product(sums, s, v_tile + part * ROW_BYTES, at.lane);
        }
        tile_read();
    }
    all_read();
    if (unit.idle) return;
    settle(sums);
    lse += (unit.batch * heads + unit.head) * queries;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            total[m][half] = finish_row(total[m][half], top[m][half], lse, unit.first, queries, m * 16 + half * 8,
                                        at.row, at.column) * drop_scale;
    store_sums(out + (unit.batch * queries * heads + unit.head) * D, heads * D, first, queries, sums, total,
               places.first_rows, at.lane);
}
#endif

#if PART == BACKWARD_Q
// Grid as in forward. stats: (batch, head, query) pairs (lse in powers of two, delta), for the other kernel.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
ENTRY(attention_bwd_q)(const Number *dy, const Number *q, const Number *k, const Number *v, const Number *out,
                       const float *lse, float2 *stats, Number *dq, i64 q_batch, i64 q_token, i64 k_batch,
                       i64 k_token, i64 v_batch, i64 v_token, i64 dq_batch, i64 dq_token, i64 queries, i64 heads,
                       i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS TURN_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const Places places(shared_address(shared), at);
    const Unit unit(queries, heads, kv_heads, at.worker);
    const SeenKeys seen(unit, at, queries, queries, heads, kv_heads, back, forth, lengths, DOCS_BOUNDS);
    const int first = unit.first + at.slab;
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;
    const i64 row_of_outputs = heads * D, first_output = (unit.batch * queries * heads + unit.head) * D;

    uint4 out_part[OWN_CHUNKS] = {}; // in flight while the copies are
    if (!unit.idle) {
        load_rows<WARP_ROWS, 32>(places.first_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries,
                                 at.lane);
        load_rows<WARP_ROWS, 32>(places.second_rows, dy + first_output, row_of_outputs, first, queries, at.lane);
        load_out(out_part, out + first_output, row_of_outputs, first, queries, at.lane);
    }
    copy_commit();
    load_pair(places.stages, k, k_token, v, v_token, seen.from, queries, at.thread);
    copy_wait<1>();
    __syncwarp();

    Own<HELD_FIRST> own_q{places.first};
    Own<HELD_SECOND> own_dy{places.second};
    RowValues row_lse, delta;
    if (!unit.idle) {
        float2 *const row_stats = reinterpret_cast<float2 *>(shared + WORKERS * 2 * OWN_BYTES + 4 * TILE_BYTES);
        make_statistics(row_stats + at.warp * WARP_ROWS, stats, lse, (unit.batch * heads + unit.head) * queries, first,
                        queries, at.lane, row_lse, delta, [&](int i, int row, int chunk) {
                            return row_product(places.second_rows + swizzled(row, chunk), out_part[i]);
                        });
        own_q.hold(at.lane), own_dy.hold(at.lane);
    }

    const float scale = rsqrtf(float(D));
    Sums sums = {};
    u32 stage = 0;
    for (int key = seen.from; key < seen.stop_of_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        tile_arrived();
        __syncthreads();
        if (key + TILE < seen.stop_of_block)
            load_pair(places.stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, queries,
                      at.thread);
        const u32 k_tile = places.stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll 1
        for (int part = 0; part < TILE; part += PIECE) {
            if (key + part >= seen.stop) break;
            if (seen.skips(key + part)) continue;
            Scores s, dp;
            start_both(s, own_q, k_tile + part * ROW_BYTES, dp, own_dy, v_tile + part * ROW_BYTES, at.lane);
            await_first(s);
            seen.hide(s, key + part, at);
#pragma unroll
            for (int m = 0; drop && m < ROW_TILES; ++m)
#pragma unroll
                for (int n = 0; n < PIECE / 8; n += 2) {
                    const u32 kept = kept_bits<false>(unit.first + m * 16, key + part + n * 8, unit.head, unit.batch,
                                                      at.lane, key0, key1, threshold);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float &x = dp[m][n + i / 4][i % 4];
                        x = kept >> i & 1 ? x * drop_scale : 0;
                    }
                }
            EACH_SCORE(m, n, i) s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale * LOG2E, -row_lse[m][i / 2]));
            await_second(dp);
            EACH_SCORE(m, n, i) s[m][n][i] = as_factor(s[m][n][i] * (dp[m][n][i] - delta[m][i / 2]));
            add_product(sums, s, k_tile + part * ROW_BYTES, at.lane);
        }
        tile_read();
    }
    all_read();
    if (unit.idle) return;
    settle(sums);
    store_gradient(dq + unit.batch * dq_batch + unit.head * D, dq_token, first, queries, sums, scale,
                   places.first_rows, at.lane TURN_ANGLES);
}
#endif

#if PART == BACKWARD_KV
// The queries that see a worker's keys.
struct SeeingQueries {
    int first, there;             // the worker's first key; the keys that are no padding
    int start, stop;              // of any key of the block
    LastQueries ends;
    RowBounds row_ends;
    i64 back, forth;

    __device__ __forceinline__ SeeingQueries(const Thread &at, int batch, i64 queries, i64 back, i64 forth,
                                             const int *lengths, const int *bounds)
        : first((blockIdx.y * WORKERS + at.worker) * OWN), there(unpadded(lengths, batch, queries)),
          ends(bounds, batch, queries, blockIdx.y * WORKERS * OWN, first), back(back), forth(forth) {
        const int first_of_block = blockIdx.y * WORKERS * OWN;
        start = band ? first_key(first_of_block, forth, TILE) : first_of_block / TILE * TILE;
        stop = docs ? ends.of_block : queries;
        load_bounds(row_ends, bounds + batch * queries, first + at.row, queries);
    }
    // Whether none of the PIECE queries from `query` on sees a key of the worker.
    __device__ __forceinline__ bool skips(int query) const {
        return query + PIECE + forth <= first || band && query - back > first + OWN - 1 ||
               docs && query >= ends.of_last;
    }
    // Masks their scores, if the diagonal or another border crosses them.
    __device__ __forceinline__ void hide(Scores &p, int query, const Thread &at) const {
        if (band) {
            if (query + forth < first + OWN - 1 || query + PIECE - 1 - back > first || first + OWN > there)
                hide_outside_transposed(p, first, query, back, forth, there, at.row, at.column);
        } else if (query < first + OWN - 1) {
            hide_past(p, first, query, at.row, at.column);
        }
        if (docs && query + PIECE > ends.of_first) hide_behind(p, query, row_ends, at.column);
    }
};

// Grid (batch * kv heads, ceil(keys / (WORKERS * OWN))). Longest blocks first: the first keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
ENTRY(attention_bwd_kv)(const Number *dy, const Number *q, const Number *k, const Number *v, const float2 *stats,
                        Number *dk, Number *dv, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch,
                        i64 v_token, i64 dk_batch, i64 dk_token, i64 dv_batch, i64 dv_token, i64 queries, i64 heads,
                        i64 kv_heads BAND_ARGUMENTS DOCS_ARGUMENTS DROP_ARGUMENTS TURN_ARGUMENTS) {
    DROP_KEY
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const Places places(shared_address(shared), at);
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    const SeeingQueries seeing(at, batch, queries, back, forth, lengths, DOCS_BOUNDS);
    const int first = seeing.first + at.slab;
    const bool idle = WORKERS > 1 && seeing.first >= queries;
    QueryTiles tiles(q + batch * q_batch + kv_head * group * D, dy + (batch * queries * heads + kv_head * group) * D,
                     stats + (batch * heads + kv_head * group) * queries, q_token, heads * D, queries, seeing.start,
                     docs ? seeing.ends.of_block : queries);
    const auto load_next = [&](u32 stage) {
        tiles.load_next(places.stages + stage * 2 * TILE_BYTES, places.pairs, stage * TILE, at.thread);
    };

    load_rows<WARP_ROWS, 32>(places.first_rows, k + batch * k_batch + kv_head * D, k_token, first, queries, at.lane);
    load_rows<WARP_ROWS, 32>(places.second_rows, v + batch * v_batch + kv_head * D, v_token, first, queries, at.lane);
    copy_commit();
    load_next(0);
    Own<HELD_FIRST> own_k{places.first};
    Own<HELD_SECOND> own_v{places.second};
    hold_arrived(own_k, at.lane);
    own_v.hold(at.lane);

    const float scale = rsqrtf(float(D));
    Sums dk_sums = {}, dv_sums = {};
    u32 stage = 0;
    for (int head = 0; head < group; ++head)
        for (int query = seeing.start; query < seeing.stop; query += TILE, stage ^= 1) {
            copy_wait<0>();
            tile_arrived();
            __syncthreads();
            if (tiles.head < group) load_next(stage ^ 1);
            if (idle || band && seeing.first >= seeing.there) continue;
            const u32 q_tile = places.stages + stage * 2 * TILE_BYTES, dy_tile = q_tile + TILE_BYTES;
#pragma unroll 1
            for (int part = 0; part < TILE; part += PIECE) {
                if (seeing.skips(query + part)) continue;
                const u32 q_rows = q_tile + part * ROW_BYTES, dy_rows = dy_tile + part * ROW_BYTES;
                // By threadIdx.x: the compiler then computes it here, and not before the loop, into a register.
                const u32 pairs = places.pairs + (stage * TILE + part + threadIdx.x % 4 * 2) * 8;
                // Rows are keys, columns queries: P^T and dS^T come out in the layout of factors.
                Scores p, ds;
                start_gradients(p, own_k, q_rows, ds, own_v, dy_rows, at.lane);
                seeing.hide(p, query + part, at);
                static_assert(!drop || PIECE == 16, "a piece is one square for each 16 rows");
                u32 kept = 0; // 8 bits for each 16 rows
#pragma unroll
                for (int m = 0; drop && m < ROW_TILES; ++m)
                    kept |= kept_bits<true>(first + m * 16, query + part, kv_head * group + head, batch, at.lane, key0,
                                            key1, threshold)
                            << (8 * m);
                add_gradients(dk_sums, dv_sums, p, own_v, ds, q_rows, dy_rows, pairs, scale * LOG2E, kept, drop_scale,
                              at.lane);
            }
            tile_read();
        }
    all_read();
    if (idle) return;
    settle(dk_sums), settle(dv_sums);
    store_gradient(dk + batch * dk_batch + kv_head * D, dk_token, first, queries, dk_sums, scale, places.first_rows,
                   at.lane TURN_ANGLES);
    store_sums(dv + batch * dv_batch + kv_head * D, dv_token, first, queries, dv_sums, drop_scale, places.second_rows,
               at.lane);
}
#endif
