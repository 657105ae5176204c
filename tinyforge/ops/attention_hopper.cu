// FlashAttention in bf16 for Hopper (sm_90a): attention.cu's tensor-core kernels with wgmma in place of mma.sync.
//
//   PART=FORWARD       attention_fwd_wgmma       out, lse                   one warpgroup: 64 queries of one head
//   PART=BACKWARD_Q    attention_bwd_q_wgmma     dq, and the statistics     one warpgroup: 64 queries of one head
//   PART=BACKWARD_KV   attention_bwd_kv_wgmma    dk, dv                     one warpgroup: 64 keys of one kv head
//
// The algorithm, the units of work, the statistics and the order of sums are those of attention.cu; read it first. What
// differs is where operands come from. wgmma reads them from shared memory, once for the 64 rows of a warpgroup; with
// mma.sync each warp loads the same fragments into its own registers for 16 or 32 rows. Head size 64 only: a row is
// then 128 bytes, the width of wgmma's swizzle, which is that of `swizzled`.
//
// A block is one warpgroup. Blocks do not wait for each other, so that one takes exponentials while another multiplies.
// Shared memory 40 KB (forward), 48.5 KB (backward_q), 49 KB (backward_kv). Registers, none spilled: 115, 125, 168;
// hence four, four and three blocks on a multiprocessor.
//
// With TURN=1, dq and dk are the gradients before RoPE: their rows are rotated back by cosines and sines, (queries,
// 32), as they are stored, and rounded before and after as in rope.cu.
//
// Tried, at 16 x 1024 tokens, 12/4 heads of 64, on an H200, in us:
//   forward       one warpgroup a block 82; two 85; three, the heads of a group on the same keys, 105: the barrier at
//                 each tile costs more than the shared loads save. Tiles of 128 keys 84 to 89
//   backward_q    one warpgroup, four blocks 95; three blocks 105; three warpgroups a block 130
//   backward_kv   P kept in float beside its bf16 pairs: 200 registers, two blocks, 130; unpacked from the pairs, as
//                 here, three blocks, 115. Three warpgroups a block 145
//   left operands in registers from before the loop: the assembler of CUDA 13.0 reuses their registers for P inside the
//                 loop, and the second tile's scores are wrong. Read from shared memory they also leave 16 to 32
//                 registers free, enough for one more block.
//
// compile: arch=sm_90a PART=FORWARD|BACKWARD_Q HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=4
// compile: arch=sm_90a PART=BACKWARD_KV HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=3
// compile: arch=sm_90a PART=FORWARD|BACKWARD_Q HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=4 DOCS=1
// compile: arch=sm_90a PART=BACKWARD_KV HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=3 DOCS=1
// compile: arch=sm_90a PART=BACKWARD_Q HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=4 TURN=1
// compile: arch=sm_90a PART=BACKWARD_KV HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=3 TURN=1
// compile: arch=sm_90a PART=BACKWARD_Q HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=4 DOCS=1 TURN=1
// compile: arch=sm_90a PART=BACKWARD_KV HEAD_DIM=64 WORKERS=1 TILE=64 BLOCKS=3 DOCS=1 TURN=1
// spills: none

#define WORKER_WARPS 4
#define ROW_TILES 1
#include "ops/attention.cuh"
#include "ops/hopper.cuh"
#include "ops/rope.cuh"

#ifdef TURN
#define TURN_ARGUMENTS , const float *cosines, const float *sines
#define TURN_ANGLES , cosines, sines
#define store_gradient store_rotated_rows
#else
#define TURN_ARGUMENTS
#define TURN_ANGLES
#define store_gradient store_rows
#endif

static_assert(D == 64, "a row is one line of the 128-byte swizzle");
static_assert(TILE % 64 == 0, "a piece is 64 rows");

// d = a b^T over the row: 64 rows of one tile and 64 of another.
__device__ inline void scores(float (&d)[8][4], u32 a_tile, u32 b_tile) {
    const u64 a = matrix(a_tile), b = matrix(b_tile);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) multiply_wide<0, 0>(d, columns(a, step), columns(b, step), step > 0);
}
// d += p b over the 64 rows of a tile, p being rounded scores.
__device__ inline void accumulate(float (&d)[8][4], const Rounded &p, u32 tile) {
    const u64 b = matrix(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_held(d, p[step], rows(b, step));
}

#ifdef TURN
// store_rows with RoPE undone. A thread has 16 bytes of a row's left half, and their partners in its right half.
__device__ inline void store_rotated_rows(bf16 *to, i64 token, int first, int stop,
                                          const float (&x)[ROW_TILES][D / 8][4], const RowValues &scale, u32 tile,
                                          int lane, const float *cosines, const float *sines) {
    typedef Pack<bf16, 8> Eight;
    stage_rows(x, scale, tile, lane);
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS / 2; ++i) {
        const int row = i * 8 + lane / 4, chunk = lane % 4;
        const uint4 l = load_chunk(tile + swizzled(row, chunk)), r = load_chunk(tile + swizzled(row, chunk + 4));
        if (first + row >= stop) continue;
        const i64 angle = i64(first + row) * (D / 2) + chunk * 8;
        Eight left = reinterpret_cast<const Eight &>(l), right = reinterpret_cast<const Eight &>(r);
        rotate(left, right, load<8>(cosines + angle), load<8>(sines + angle));
        bf16 *const line = to + (first + row) * token + chunk * 8;
        store(line, left);
        store(line + D / 2, right);
    }
}
#endif

struct Thread {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, worker = warp / 4;
    int slab = warp % 4 * WARP_ROWS; // the first of the warp's rows among the worker's 64
    int row = slab + lane / 4;       // this thread holds row and row + 8 of them
    int column = lane % 4 * 2;       // of every 8: column and column + 1
};

#if PART == FORWARD
// Grid (batch * kv heads, ceil(units / WORKERS)); shared: two stages of k and v, q of each warp (later its output).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_fwd_wgmma(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, i64 q_batch, i64 q_token,
                    i64 k_batch, i64 k_token, i64 v_batch, i64 v_token, i64 queries, i64 keys, i64 heads,
                    i64 kv_heads DOCS_ARGUMENTS) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const u32 stages = shared_address(shared);
    const u32 q_tile = stages + 4 * TILE_BYTES + at.worker * OWN_BYTES, q_rows = q_tile + at.slab * ROW_BYTES;
    const Unit unit(queries, heads, kv_heads, at.worker);
    const int ahead = keys - queries, seen_by_block = unit.last_of_block + ahead + 1;
    const int seen_by_all = unit.first + ahead + 1; // keys that the first row sees
    const int seen = unit.idle ? 0 : min_int(keys, seen_by_all + OWN - 1);
    const int first = unit.first + at.slab;
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;
    const FirstKeys starts(unit, DOCS_BOUNDS, queries, heads, kv_heads);
    RowBounds row_starts;
    load_bounds(row_starts, DOCS_BOUNDS + unit.batch * queries, unit.first + at.row, queries);

    if (!unit.idle)
        load_rows<WARP_ROWS, 32>(q_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries, at.lane);
    load_pair(stages, k, k_token, v, v_token, starts.of_block, keys, at.thread);

    const float scale = rsqrtf(float(D)) * LOG2E; // exponentials are powers of two
    Scores sums = {};
    RowValues top = {{-INFINITY, -INFINITY}}, total = {};
    u32 stage = 0;
    for (int key = starts.of_block; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        shared_fence();
        __syncthreads(); // this tile has arrived, and no thread still reads the other stage
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, keys, at.thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll
        for (int part = 0; part < TILE; part += 64) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= starts.of_first) continue;
            Scores s;
            multiply_fence();
            scores(s[0], q_tile, k_tile + part * ROW_BYTES);
            multiply_commit();
            multiply_wait<0>(); // for the previous piece's product too
            settled(s[0]);
            if (key + part + PIECE > seen_by_all) hide_future(s, key + part, seen_by_all, at.row, at.column);
            if (docs && key + part < starts.of_last) hide_before(s, key + part, row_starts, at.column);
            settled(sums[0]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float shrink = softmax_step<docs>(s, 0, half, scale, top[0][half], total[0][half]);
#pragma unroll
                for (int n = 0; n < 8; ++n) sums[0][n][2 * half] *= shrink, sums[0][n][2 * half + 1] *= shrink;
            }
            Rounded p;
            round_scores(p, s);
            multiply_fence();
            accumulate(sums[0], p, v_tile + part * ROW_BYTES);
            multiply_commit();
        }
        multiply_wait<0>(); // before the tile may be overwritten
    }
    __syncthreads(); // the output is staged in q's place
    if (unit.idle) return;
    settled(sums[0]);
    lse += (unit.batch * heads + unit.head) * queries;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        total[0][half] = finish_row(total[0][half], top[0][half], lse, unit.first, queries, half * 8, at.row,
                                    at.column);
    store_rows(out + (unit.batch * queries * heads + unit.head) * D, heads * D, first, queries, sums, total, q_rows,
               at.lane);
}
#endif

#if PART == BACKWARD_Q
// Grid as forward's; shared: two stages of k and v, q and dO of each warp, statistics of each warp's rows.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_bwd_q_wgmma(const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out, const float *lse,
                      float2 *stats, bf16 *dq, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch,
                      i64 v_token, i64 dq_batch, i64 dq_token, i64 queries, i64 heads,
                      i64 kv_heads DOCS_ARGUMENTS TURN_ARGUMENTS) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const u32 stages = shared_address(shared);
    const u32 q_tile = stages + 4 * TILE_BYTES + at.worker * 2 * OWN_BYTES, dy_tile = q_tile + OWN_BYTES;
    const u32 q_rows = q_tile + at.slab * ROW_BYTES, dy_rows = dy_tile + at.slab * ROW_BYTES;
    float2 *const row_stats =
        reinterpret_cast<float2 *>(shared + 4 * TILE_BYTES + WORKERS * 2 * OWN_BYTES) + at.warp * WARP_ROWS;
    const Unit unit(queries, heads, kv_heads, at.worker);
    const int seen_by_block = unit.last_of_block + 1, seen_by_all = unit.first + 1;
    const int seen = unit.idle ? 0 : min_int(queries, seen_by_all + OWN - 1);
    const int first = unit.first + at.slab;
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;
    const i64 row_of_outputs = heads * D, first_output = (unit.batch * queries * heads + unit.head) * D;
    const FirstKeys starts(unit, DOCS_BOUNDS, queries, heads, kv_heads);
    RowBounds row_starts;
    load_bounds(row_starts, DOCS_BOUNDS + unit.batch * queries, unit.first + at.row, queries);

    uint4 out_part[OWN_CHUNKS] = {}; // in flight while the copies are
    if (!unit.idle) {
        load_rows<WARP_ROWS, 32>(q_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries, at.lane);
        load_rows<WARP_ROWS, 32>(dy_rows, dy + first_output, row_of_outputs, first, queries, at.lane);
        load_out(out_part, out + first_output, row_of_outputs, first, queries, at.lane);
    }
    copy_commit();
    load_pair(stages, k, k_token, v, v_token, starts.of_block, queries, at.thread);
    copy_wait<1>();
    __syncwarp();

    RowValues row_lse, delta;
    if (!unit.idle) {
        make_statistics(row_stats, stats, lse, (unit.batch * heads + unit.head) * queries, first, queries, at.lane,
                        row_lse, delta, [&](int i, int row, int chunk) {
                            return row_product(dy_rows + swizzled(row, chunk), out_part[i]);
                        });
    }

    const float scale = rsqrtf(float(D));
    Scores sums = {};
    u32 stage = 0;
    for (int key = starts.of_block; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        shared_fence();
        __syncthreads();
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, queries, at.thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll
        for (int part = 0; part < TILE; part += 64) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= starts.of_first) continue;
            Scores s, dp;
            multiply_fence();
            scores(s[0], q_tile, k_tile + part * ROW_BYTES);
            multiply_commit();
            scores(dp[0], dy_tile, v_tile + part * ROW_BYTES);
            multiply_commit();
            multiply_wait<1>();
            settled(s[0]);
            if (key + part + PIECE > seen_by_all) hide_future(s, key + part, seen_by_all, at.row, at.column);
            if (docs && key + part < starts.of_last) hide_before(s, key + part, row_starts, at.column);
            EACH_SCORE(m, n, i) s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale * LOG2E, -row_lse[m][i / 2]));
            multiply_wait<0>();
            settled(dp[0]);
            EACH_SCORE(m, n, i) s[m][n][i] *= dp[m][n][i] - delta[m][i / 2];
            Rounded ds;
            round_scores(ds, s);
            multiply_fence();
            accumulate(sums[0], ds, k_tile + part * ROW_BYTES);
            multiply_commit();
        }
        multiply_wait<0>();
    }
    __syncthreads();
    if (unit.idle) return;
    settled(sums[0]);
    const float scales[1][2] = {{scale, scale}};
    store_gradient(dq + unit.batch * dq_batch + unit.head * D, dq_token, first, queries, sums, scales, q_rows,
                   at.lane TURN_ANGLES);
}
#endif

#if PART == BACKWARD_KV
// Grid (batch * kv heads, ceil(keys / (64 * WORKERS))); shared: two stages of q and dO, k and v of each warp, two
// stages of statistics. Longest blocks first: the first keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_bwd_kv_wgmma(const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const float2 *stats, bf16 *dk,
                       bf16 *dv, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch, i64 v_token,
                       i64 dk_batch, i64 dk_token, i64 dv_batch, i64 dv_token, i64 queries, i64 heads,
                       i64 kv_heads DOCS_ARGUMENTS TURN_ARGUMENTS) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Thread at;
    const u32 stages = shared_address(shared);
    const u32 k_tile = stages + 4 * TILE_BYTES + at.worker * 2 * OWN_BYTES, v_tile = k_tile + OWN_BYTES;
    const u32 k_rows = k_tile + at.slab * ROW_BYTES, v_rows = v_tile + at.slab * ROW_BYTES;
    const u32 all_stats = stages + 4 * TILE_BYTES + WORKERS * 2 * OWN_BYTES;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    const int first_of_block = blockIdx.y * WORKERS * OWN, first_of_worker = first_of_block + at.worker * OWN;
    const int first = first_of_worker + at.slab;
    const int start = first_of_block / TILE * TILE;
    const LastQueries ends(DOCS_BOUNDS, batch, queries, first_of_block, first_of_worker);
    RowBounds row_ends;
    load_bounds(row_ends, DOCS_BOUNDS + batch * queries, first_of_worker + at.row, queries);
    QueryTiles tiles(q + batch * q_batch + kv_head * group * D, dy + (batch * queries * heads + kv_head * group) * D,
                     stats + (batch * heads + kv_head * group) * queries, q_token, heads * D, queries, start,
                     docs ? ends.of_block : queries);
    const auto load_next = [&](int stage) {
        tiles.load_next(stages + stage * 2 * TILE_BYTES, all_stats, stage * TILE, at.thread);
    };

    load_rows<WARP_ROWS, 32>(k_rows, k + batch * k_batch + kv_head * D, k_token, first, queries, at.lane);
    load_rows<WARP_ROWS, 32>(v_rows, v + batch * v_batch + kv_head * D, v_token, first, queries, at.lane);
    load_next(0);
    const float scale = rsqrtf(float(D));
    float dk_sums[1][8][4] = {}, dv_sums[1][8][4] = {};
    int stage = 0;
    for (int head = 0; head < group; ++head)
        for (int query = start; query < (docs ? ends.of_block : queries); query += TILE, stage ^= 1) {
            copy_wait<0>();
            shared_fence();
            __syncthreads();
            if (tiles.head < group) load_next(stage ^ 1);
            const u32 q_tile = stages + stage * 2 * TILE_BYTES, dy_tile = q_tile + TILE_BYTES;
#pragma unroll
            for (int part = 0; part < TILE; part += 64) {
                if (query + part + 64 <= first_of_worker) continue; // all of these queries come before the keys
                if (query + part >= (docs ? ends.of_last : queries)) break;
                // Rows are keys, columns queries: P^T and dS^T come out in the layout of left operands. For dS, P is
                // unpacked from the bf16 pairs that dV's product reads: 32 registers fewer, and a third warpgroup fits.
                Scores p, ds;
                multiply_fence();
                scores(p[0], k_tile, q_tile + part * ROW_BYTES);
                multiply_commit();
                scores(ds[0], v_tile, dy_tile + part * ROW_BYTES);
                multiply_commit();
                multiply_wait<1>();
                settled(p[0]);
                if (query + part < first_of_worker + OWN - 1)
                    hide_past(p, first_of_worker + at.row, query + part, 0, at.column);
                if (docs && query + part + PIECE > ends.of_first) hide_behind(p, query + part, row_ends, at.column);
                const u32 row_stats = all_stats + (stage * TILE + part + at.column) * 8;
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    float two[4]; // lse, delta, lse, delta of two queries
                    load_four(two, row_stats + n * 64);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        p[0][n][i] = exp2_fast(fmaf(p[0][n][i], scale * LOG2E, i % 2 ? -two[2] : -two[0]));
                }
                Rounded a, c;
                round_scores(a, p);
                multiply_fence();
                accumulate(dv_sums[0], a, dy_tile + part * ROW_BYTES);
                multiply_commit();
                multiply_wait<1>();
                settled(ds[0]);
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    float two[4];
                    load_four(two, row_stats + n * 64); // loaded again: registers are scarcer than time
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 pair = a[n / 2][n % 2 * 2 + i / 2];
                        ds[0][n][i] = (i % 2 ? high(pair) : low(pair)) * (ds[0][n][i] - (i % 2 ? two[3] : two[1]));
                    }
                }
                round_scores(c, ds);
                multiply_fence();
                accumulate(dk_sums[0], c, q_tile + part * ROW_BYTES);
                multiply_commit();
                multiply_wait<0>();
            }
        }
    __syncthreads();
    settled(dk_sums[0]);
    settled(dv_sums[0]);
    const float scales[1][2] = {{scale, scale}}, ones[1][2] = {{1, 1}};
    store_gradient(dk + batch * dk_batch + kv_head * D, dk_token, first, queries, dk_sums, scales, k_rows,
                   at.lane TURN_ANGLES);
    store_rows(dv + batch * dv_batch + kv_head * D, dv_token, first, queries, dv_sums, ones, v_rows, at.lane);
}
#endif
