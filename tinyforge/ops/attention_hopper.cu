// FlashAttention in bf16 for Hopper (sm_90a): attention.cu's tensor-core kernels with wgmma in place of mma.sync.
//
//   PART=FORWARD       attention_fwd_wgmma       out, lse                   one warpgroup: 64 queries of one head
//   PART=BACKWARD_Q    attention_bwd_q_wgmma     dq, and the statistics     one warpgroup: 64 queries of one head
//   PART=BACKWARD_KV   attention_bwd_kv_wgmma    dk, dv                     one warpgroup: 64 keys of one kv head
//
// The idea, the units of work, the statistics and the order of sums are those of attention.cu; read it first. The
// difference is how operands are fetched. wgmma reads them from shared memory, once for the 64 rows of a warpgroup;
// with mma.sync every warp of 16 or 32 rows brings the same fragments through its registers. Head size 64 only: a row
// is then 128 bytes, the width of wgmma's swizzle, which is the one of `swizzled`.
//
// A block is one warpgroup. Blocks do not wait for each other, so one computes exponentials while another multiplies.
// Shared memory 40 KB (forward), 48.5 KB (backward_q), 49 KB (backward_kv). Registers, none spilled: 115, 125, 168; so
// four, four and three blocks per multiprocessor.
//
// With TURN=1 dq and dk are those before RoPE: their rows are turned by cosines and sines, (queries, 32), on the way out,
// rounded before and after as by rope.cu.
//
// Tried, at 16 x 1024 tokens, 12/4 heads of 64, on an H200, in us:
//   forward       one warpgroup a block 82; two 85; three, the heads of a group on the same keys, 105: the barrier at
//                 each tile costs more than the shared fetches save. Tiles of 128 keys 84 to 89
//   backward_q    one warpgroup, four blocks 95; three blocks 105; three warpgroups a block 130
//   backward_kv   P kept in float beside its bf16 pairs: 200 registers, two blocks, 130; unpacked from the pairs, as
//                 here, three blocks, 115. Three warpgroups a block 145
//   left operands in registers from before the loop: the assembler of CUDA 13.0 takes their registers for P inside the
//                 loop, and the second tile's scores are wrong. Read from shared memory they also leave 16 to 32
//                 registers free, which is a block more.
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
#define store_gradient store_turned_rows
#else
#define TURN_ARGUMENTS
#define TURN_ANGLES
#define store_gradient store_rows
#endif

static_assert(D == 64, "a row is one line of the 128-byte swizzle");
static_assert(TILE % 64 == 0, "a piece is 64 rows");

// The 32 accumulators of a thread as operands of one instruction.
#define ACCUMULATORS SIXTEEN(0), SIXTEEN(4)
#define ACCUMULATOR_NAMES                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// d (+)= a b^T for one warpgroup: d is 64 x 64, a and b 64 x 16 in shared memory. `add` 0 overwrites d. Asynchronous:
// operands are not to be touched before `multiply_wait`.
__device__ inline void multiply_rows(float (&d)[8][4], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        ACCUMULATOR_NAMES ", %32, %33, p, 1, 1, 0, 0;}"
        : ACCUMULATORS
        : "l"(a), "l"(b), "r"(add));
}
// d += a b: a 64 x 16 in registers, b 16 x 64 in shared memory.
__device__ inline void multiply_add(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        ACCUMULATOR_NAMES ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
        : ACCUMULATORS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// d = a b^T over the row: 64 rows of one tile and 64 of another.
__device__ inline void scores(float (&d)[8][4], u32 a_tile, u32 b_tile) {
    const u64 a = matrix(a_tile), b = matrix(b_tile);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) multiply_rows(d, columns(a, step), columns(b, step), step > 0);
}
// d += p b over the 64 rows of a tile, p being rounded scores.
__device__ inline void accumulate(float (&d)[8][4], const u32 (&p)[4][4], u32 tile) {
    const u64 b = matrix(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_add(d, p[step], rows(b, step));
}
// The accumulators of 64 columns as four left operands of 16.
__device__ inline void pack_scores(u32 (&p)[4][4], const Scores &s) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 2 * step + i / 2, pair = i % 2 * 2;
            p[step][i] = pack(s[0][n][pair], s[0][n][pair + 1]);
        }
}

#ifdef TURN
// As store_rows. A thread has 16 bytes of a row's left half, and those beside them of its right half.
__device__ inline void store_turned_rows(bf16 *to, i64 token, int first, int stop, const float (&x)[ROW_TILES][D / 8][4],
                                         const RowValues &scale, u32 tile, int lane, const float *cosines,
                                         const float *sines) {
    typedef Pack<bf16, 8> Eight;
    stage_rows(x, scale, tile, lane);
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS / 2; ++i) {
        const int row = i * 8 + lane / 4, chunk = lane % 4;
        const uint4 l = load_chunk(tile + swizzled(row, chunk)), r = load_chunk(tile + swizzled(row, chunk + 4));
        if (first + row >= stop) continue;
        const i64 angle = i64(first + row) * (D / 2) + chunk * 8;
        Eight left = reinterpret_cast<const Eight &>(l), right = reinterpret_cast<const Eight &>(r);
        turn(left, right, load<8>(cosines + angle), load<8>(sines + angle));
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
    // The first keys that the block's first row, and the worker's first and last, see.
    int from = 0, first_start = 0, last_start = 0;
    RowBounds starts;
    if (docs) {
        const int *const own = DOCS_BOUNDS + unit.batch * queries;
        from = bound_of(own, Unit(queries, heads, kv_heads, 0).first, queries) / TILE * TILE;
        first_start = bound_of(own, unit.first, queries), last_start = bound_of(own, unit.first + OWN - 1, queries);
        load_bounds(starts, own, unit.first + at.row, queries);
    }

    if (!unit.idle)
        load_rows<WARP_ROWS, 32>(q_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries, at.lane);
    load_pair(stages, k, k_token, v, v_token, from, keys, at.thread);

    const float scale = rsqrtf(float(D)) * LOG2E; // exponentials are powers of two
    Scores sums = {};
    RowValues top = {{-INFINITY, -INFINITY}}, total = {};
    u32 stage = 0;
    for (int key = from; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        shared_fence();
        __syncthreads(); // this tile has arrived, and no thread reads the other stage any more
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, keys, at.thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll
        for (int part = 0; part < TILE; part += 64) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= first_start) continue;
            Scores s;
            multiply_fence();
            scores(s[0], q_tile, k_tile + part * ROW_BYTES);
            multiply_commit();
            multiply_wait<0>(); // the last piece's product too
            settled(s[0]);
            if (key + part + PIECE > seen_by_all) hide_future(s, key + part, seen_by_all, at.row, at.column);
            if (docs && key + part < last_start) hide_before(s, key + part, starts, at.column);
            settled(sums[0]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float shrink = raise_top(top[0][half], s, 0, half, scale), base = top[0][half];
                if (docs && base == -INFINITY) base = shrink = 0; // the row has seen no key yet
                float sum = 0;
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        sum += s[0][n][i] = exp2_fast(fmaf(s[0][n][i], scale, -base));
                total[0][half] = total[0][half] * shrink + sum; // of this thread's columns; the four meet at the end
#pragma unroll
                for (int n = 0; n < 8; ++n) sums[0][n][2 * half] *= shrink, sums[0][n][2 * half + 1] *= shrink;
            }
            u32 p[4][4];
            pack_scores(p, s);
            multiply_fence();
            accumulate(sums[0], p, v_tile + part * ROW_BYTES);
            multiply_commit();
        }
        multiply_wait<0>(); // before others may overwrite the tile
    }
    __syncthreads(); // q's place is the output's now
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
    int from = 0, first_start = 0, last_start = 0;
    RowBounds starts;
    if (docs) {
        const int *const own = DOCS_BOUNDS + unit.batch * queries;
        from = bound_of(own, Unit(queries, heads, kv_heads, 0).first, queries) / TILE * TILE;
        first_start = bound_of(own, unit.first, queries), last_start = bound_of(own, unit.first + OWN - 1, queries);
        load_bounds(starts, own, unit.first + at.row, queries);
    }

    uint4 out_part[OWN_CHUNKS] = {}; // in flight together with the copies
    if (!unit.idle) {
        load_rows<WARP_ROWS, 32>(q_rows, q + unit.batch * q_batch + unit.head * D, q_token, first, queries, at.lane);
        load_rows<WARP_ROWS, 32>(dy_rows, dy + first_output, row_of_outputs, first, queries, at.lane);
        load_out(out_part, out + first_output, row_of_outputs, first, queries, at.lane);
    }
    copy_commit();
    load_pair(stages, k, k_token, v, v_token, from, queries, at.thread);
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
    for (int key = from; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        shared_fence();
        __syncthreads();
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, queries, at.thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll
        for (int part = 0; part < TILE; part += 64) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= first_start) continue;
            Scores s, dp;
            multiply_fence();
            scores(s[0], q_tile, k_tile + part * ROW_BYTES);
            multiply_commit();
            scores(dp[0], dy_tile, v_tile + part * ROW_BYTES);
            multiply_commit();
            multiply_wait<1>();
            settled(s[0]);
            if (key + part + PIECE > seen_by_all) hide_future(s, key + part, seen_by_all, at.row, at.column);
            if (docs && key + part < last_start) hide_before(s, key + part, starts, at.column);
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[0][n][i] = exp2_fast(fmaf(s[0][n][i], scale * LOG2E, -row_lse[0][i / 2]));
            multiply_wait<0>();
            settled(dp[0]);
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[0][n][i] *= dp[0][n][i] - delta[0][i / 2];
            u32 ds[4][4];
            pack_scores(ds, s);
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
// (lse, delta) of two queries.
__device__ inline float4 stats_of_two(u32 place) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(place)
                 : "memory");
    return x;
}

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
    // Behind the last queries that see any of the block's keys, the worker's first and its last.
    int stop = queries, first_end = queries, last_end = queries;
    RowBounds ends;
    if (docs) {
        const int *const own = DOCS_BOUNDS + batch * queries;
        stop = bound_of(own, first_of_block + WORKERS * OWN - 1, queries);
        first_end = bound_of(own, first_of_worker, queries);
        last_end = bound_of(own, first_of_worker + OWN - 1, queries);
        load_bounds(ends, own, first_of_worker + at.row, queries);
    }
    QueryTiles tiles(q + batch * q_batch + kv_head * group * D, dy + (batch * queries * heads + kv_head * group) * D,
                     stats + (batch * heads + kv_head * group) * queries, q_token, heads * D, queries, start,
                     docs ? stop : queries);
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
        for (int query = start; query < (docs ? stop : queries); query += TILE, stage ^= 1) {
            copy_wait<0>();
            shared_fence();
            __syncthreads();
            if (tiles.head < group) load_next(stage ^ 1);
            const u32 q_tile = stages + stage * 2 * TILE_BYTES, dy_tile = q_tile + TILE_BYTES;
#pragma unroll
            for (int part = 0; part < TILE; part += 64) {
                if (query + part + 64 <= first_of_worker) continue; // all of them before these keys
                if (query + part >= (docs ? last_end : queries)) break;
                // Rows are keys, columns queries: P^T and dS^T are left operands as they come. For dS, P is unpacked
                // from the bf16 pairs that dV's product reads: 32 registers less, and a third warpgroup fits.
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
                if (docs && query + part + PIECE > first_end) hide_behind(p, query + part, ends, at.column);
                const u32 row_stats = all_stats + (stage * TILE + part + at.column) * 8;
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const float4 two = stats_of_two(row_stats + n * 64);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        p[0][n][i] = exp2_fast(fmaf(p[0][n][i], scale * LOG2E, i % 2 ? -two.z : -two.x));
                }
                u32 a[4][4], c[4][4];
                pack_scores(a, p);
                multiply_fence();
                accumulate(dv_sums[0], a, dy_tile + part * ROW_BYTES);
                multiply_commit();
                multiply_wait<1>();
                settled(ds[0]);
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const float4 two = stats_of_two(row_stats + n * 64); // reloaded: registers are scarcer than time
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 pair = a[n / 2][n % 2 * 2 + i / 2];
                        ds[0][n][i] = (i % 2 ? high(pair) : low(pair)) * (ds[0][n][i] - (i % 2 ? two.w : two.y));
                    }
                }
                pack_scores(c, ds);
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
