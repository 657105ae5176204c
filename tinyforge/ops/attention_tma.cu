// FlashAttention in bf16 for Hopper (sm_90a), warp-specialised: a producer thread that copies by TMA, and warpgroups
// that multiply by wgmma. Head sizes 96 and 128.
//
//   PART=FORWARD       attention_fwd_tma       out, lse
//   PART=BACKWARD_Q    attention_bwd_q_tma     dq, and the statistics
//   PART=BACKWARD_KV   attention_bwd_kv_tma    dk, dv
//
// The algorithm, the statistics and the order of sums are those of attention.cu; read it first, then
// attention_hopper.cu for products by wgmma. At head size 128 the scheme of that file does not fit: a warpgroup's 64
// rows and two stages of 64 streamed rows take 80 KB, so that two blocks fit on a multiprocessor, and each loads all
// keys for only 64 queries.
//
// Here a block has the multiprocessor to itself and stays on it (a persistent kernel). It has WORKERS + 1 warpgroups.
//   producer   one thread of the first warpgroup. It copies the rows that the workers own, then tiles of TILE rows of
//              the other side into a ring of STAGES pairs of buffers, and runs ahead into the next unit of work while
//              the workers finish this one.
//   workers    warpgroups of 64 rows each. In forward, a worker starts the scores of the next tile and this tile's P V
//              before it takes the exponentials of the next tile: both products run meanwhile.
//   barriers   each buffer has two in shared memory: full, which counts TMA's bytes, and empty, at which every warp of
//              every worker arrives after reading. No barrier is for the whole block, so the workers drift apart, and
//              one takes exponentials while another multiplies.
//
// A unit of work is WORKERS x 64 rows. In the kernels that own queries these are positions of the heads of a group, as
// in attention.cuh, so that workers share keys and values; in the kernel that owns keys, keys of one kv head. The
// lengths of causal units differ by up to the number of tiles. `schedule` assigns units to blocks: a row for each
// round, a number for each block, -1 for none. The launcher deals out the longest units first, each to the block that
// is free first, and a few kv heads at a time, so that what is streamed stays in the L2 cache.
//
// A row in shared memory has HALVES lines of 128 bytes, under the 128-byte swizzle: a tile's first 64 columns, then the
// next 64. At head size 96 the second line is half of the next head's: products along rows do not read it, and what
// products across rows make of it is not stored. Rows past the end are zeros. The statistics are padded to a multiple
// of 64 rows for each head, with zeros, as they are copied by TMA too.
//
// Grid: a block for each multiprocessor, or for each unit, where documents decide how long a unit takes. Block: 128
// (WORKERS + 1) threads. Shared memory: see Ring. Registers of a worker: 240.

#define WORKER_WARPS 4
#define ROW_TILES 1
#include "ops/attention.cuh"
#include "ops/hopper.cuh"

#define LINE 128      // bytes of a line: 64 numbers of a row
#define BARRIERS 256  // bytes

constexpr int HALVES = ceil_div(D, 64), WIDE = HALVES * 64;     // lines of a row, numbers in them
constexpr int OWNED = PART == FORWARD ? 1 : 2;                  // tensors of which a worker owns rows
constexpr int OWN_TILE = OWN * HALVES * LINE, STREAMED = TILE * HALVES * LINE;
constexpr int PAIRS = PART == BACKWARD_KV ? TILE * 8 : 0;       // bytes of a tile's statistics
constexpr int BLOCK_THREADS = THREADS + 128;
constexpr int COPIER_REGISTERS = 24, WORKER_REGISTERS = 240;

static_assert(WORKERS == 2, "three warpgroups share the registers");
static_assert((4 * STAGES + 2) * 8 <= BARRIERS, "");
static_assert(PART != BACKWARD_KV || TILE == 64, "statistics are there for a multiple of 64 rows");

extern __shared__ __align__(1024) unsigned char room[]; // the workers' own rows, the stages, their statistics, barriers

// The rows that a worker owns: q, or q and dO, or k and v.
__device__ __forceinline__ u32 own_tile(int worker, int which) {
    return shared_address(room) + (worker * OWNED + which) * OWN_TILE;
}

enum Signal { FIRST_FULL, FIRST_EMPTY, SECOND_FULL, SECOND_EMPTY }; // of the two buffers of a stage

// A thread's position in the ring. In backward the first buffer's barriers stand for both buffers of a stage.
struct Ring {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ u32 tile(int which) const {
        return own_tile(WORKERS, 0) + (stage * 2 + which) * STREAMED;
    }
    __device__ __forceinline__ u32 pairs() const { return own_tile(WORKERS, 0) + STAGES * 2 * STREAMED + stage * PAIRS; }
    __device__ __forceinline__ static u32 barriers() {
        return own_tile(WORKERS, 0) + STAGES * (2 * STREAMED + PAIRS);
    }
    __device__ __forceinline__ u32 barrier(Signal signal) const { return barriers() + (signal * STAGES + stage) * 8; }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};
// Barriers of the rows that the workers own.
__device__ __forceinline__ u32 own_full() { return Ring::barriers() + 4 * STAGES * 8; }
__device__ __forceinline__ u32 own_empty() { return own_full() + 8; }

__device__ __forceinline__ void make_barriers() {
    if (threadIdx.x == 0) {
        Ring ring;
        for (int stage = 0; stage < STAGES; ++stage, ring.next()) {
            barrier_make(ring.barrier(FIRST_FULL), 1), barrier_make(ring.barrier(SECOND_FULL), 1);
            barrier_make(ring.barrier(FIRST_EMPTY), 4 * WORKERS), barrier_make(ring.barrier(SECOND_EMPTY), 4 * WORKERS);
        }
        barrier_make(own_full(), 1), barrier_make(own_empty(), 4 * WORKERS);
        barriers_made();
    }
    __syncthreads();
}

// The assembler hoists a wait for products above the exponentials that were meant to overlap with them. It keeps in
// place what an instruction with side effects depends on. This one does, and never runs: no exponential has all bits
// set.
__device__ __forceinline__ void stay_before(u32 bits) {
    if (bits == ~0u) asm volatile("nanosleep.u32 64;");
}

// By a worker's warp that has read what this barrier guards.
__device__ __forceinline__ void release(u32 empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Starts the copies of ROWS rows of a head, from `row` on; the heads of `x` are adjacent.
template <int ROWS>
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap *x, int batch, int head, int row, u32 barrier) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        copy_box(to + half * ROWS * LINE, x, head * D + half * 64, row, batch, barrier);
}

// A unit of work: an item for each worker. An item is OWN rows of one head; items run through the heads of a group,
// then to the next rows. `share`: how many heads they run through, those of the group in the kernels that own queries,
// else 1.
struct Unit {
    int batch, kv_head, share, item;
    __device__ __forceinline__ Unit(int number, int rows, int kv_heads, int share) : share(share) {
        const int in_column = ceil_div(ceil_div(rows, OWN) * share, WORKERS), column = number / in_column;
        batch = column / kv_heads, kv_head = column % kv_heads;
        item = number % in_column * WORKERS;
    }
    __device__ __forceinline__ int head(int worker) const { return kv_head * share + (item + worker) % share; }
    __device__ __forceinline__ int first(int worker) const { return (item + worker) / share * OWN; }
};

// The tiles of keys that a unit's queries see: `count` of them from key `from` on.
struct Keys {
    int from = 0, count;
    __device__ __forceinline__ Keys(const Unit &unit, int queries, int ahead, const int *bounds) {
        if (docs) from = bound_of(bounds + unit.batch * queries, unit.first(0), queries) / TILE * TILE;
        const int behind = min_int(queries, unit.first(WORKERS - 1) + OWN) + ahead; // keys that its last query sees
        count = ceil_div(behind - from, TILE);
    }
};
// The tiles of queries that see a unit's keys: those from `start` to `stop`, of each head of the group.
struct Queries {
    int start, stop;
    __device__ __forceinline__ Queries(const Unit &unit, int queries, const int *bounds) {
        start = unit.first(0) / TILE * TILE, stop = queries;
        if (docs) stop = bound_of(bounds + unit.batch * queries, unit.first(WORKERS - 1) + OWN - 1, queries);
    }
};

struct Thread {
    int lane = threadIdx.x % 32, worker = threadIdx.x / 128 - 1;
    int slab = threadIdx.x % 128 / 32 * 16; // the first of the warp's rows among the worker's 64
    int row = slab + lane / 4;              // this thread holds row and row + 8 of them
    int column = lane % 4 * 2;              // and, of every 8 columns, column and column + 1
};

// d = a b^T: the worker's own 64 rows and the rows of a tile.
__device__ __forceinline__ void scores(Scores &d, u32 own, u32 tile) {
    multiply_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        multiply_wide<0, 0>(d[0], columns(matrix(own + step / 4 * OWN * LINE), step % 4),
                            columns(matrix(tile + step / 4 * TILE * LINE), step % 4), step > 0);
    multiply_commit();
}

typedef float Sums[WIDE / 8][4];

// d += p b, b being the rows of a tile.
__device__ __forceinline__ void accumulate(Sums &d, const Rounded &p, u32 tile) {
    const u64 b = matrix(tile, TILE * LINE);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) multiply_held(d, p[step], rows(b, step));
    multiply_commit();
}
__device__ __forceinline__ void scale_sums(Sums &d, float above, float below) {
#pragma unroll
    for (int n = 0; n < WIDE / 8; ++n) d[n][0] *= above, d[n][1] *= above, d[n][2] *= below, d[n][3] *= below;
}

// Starts the copies of the rows that a unit's workers own: of q, of q and dO, or of k and v.
__device__ __forceinline__ void copy_own(const Unit &unit, const TensorMap *own, const TensorMap *second, u32 phase) {
    barrier_wait(own_empty(), phase ^ 1);
    barrier_expect(own_full(), WORKERS * OWNED * OWN_TILE);
    for (int w = 0; w < WORKERS; ++w) {
        copy_rows<OWN>(own_tile(w, 0), own, unit.batch, unit.head(w), unit.first(w), own_full());
        if (OWNED > 1) copy_rows<OWN>(own_tile(w, 1), second, unit.batch, unit.head(w), unit.first(w), own_full());
    }
    barrier_arrive(own_full());
}

// The thread that copies keys and values for workers that own queries: `own` and, in backward, `second` are their rows.
__device__ __forceinline__ void copy_keys(const TensorMap *own, const TensorMap *second, const TensorMap *k,
                                          const TensorMap *v, const int *schedule, int rounds, int queries, int ahead,
                                          int kv_heads, int group, const int *bounds) {
    Ring ring;
    u32 phase = 0;
    for (int round = 0; round < rounds; ++round, phase ^= 1) {
        const int number = schedule[round * gridDim.x + blockIdx.x];
        if (number < 0) break;
        const Unit unit(number, queries, kv_heads, group);
        const Keys keys(unit, queries, ahead, bounds);
        for (int tile = 0; tile < keys.count; ++tile, ring.next()) {
            const int key = keys.from + tile * TILE;
            const u32 full = ring.barrier(FIRST_FULL), both = PART == FORWARD ? ring.barrier(SECOND_FULL) : full;
            barrier_wait(ring.barrier(FIRST_EMPTY), ring.phase ^ 1);
            barrier_expect(full, PART == FORWARD ? STREAMED : 2 * STREAMED);
            copy_rows<TILE>(ring.tile(0), k, unit.batch, unit.kv_head, key, full);
            if (PART == FORWARD) {
                barrier_arrive(full);
                barrier_wait(ring.barrier(SECOND_EMPTY), ring.phase ^ 1);
                barrier_expect(both, STREAMED);
            }
            copy_rows<TILE>(ring.tile(1), v, unit.batch, unit.kv_head, key, both);
            barrier_arrive(both);
            if (tile > 0) continue;
            copy_own(unit, own, second, phase);
        }
    }
}

// A worker's part of a unit: tiles `first` to `stop` of its keys, none if it is idle.
struct Part {
    int head, position, seen_by_all, first = 0, stop; // seen_by_all: keys that the worker's first row sees
    int last_start = 0;                               // where the document of its last row begins
    RowBounds starts;
    __device__ __forceinline__ Part(const Unit &unit, const Keys &keys, int worker, int row, int queries, int all,
                                    const int *bounds) {
        head = unit.head(worker), position = unit.first(worker);
        seen_by_all = position + all - queries + 1;
        stop = position < queries ? ceil_div(min_int(all, seen_by_all + OWN - 1) - keys.from, TILE) : 0;
        if (docs) {
            const int *const own = bounds + unit.batch * queries;
            first = min_int(stop, (bound_of(own, position, queries) - keys.from) / TILE);
            last_start = bound_of(own, position + OWN - 1, queries);
            load_bounds(starts, own, position + row, queries);
        }
    }
    // Masks the tile at `key`.
    __device__ __forceinline__ void hide(Scores &s, int key, const Thread &at) const {
        if (key + TILE > seen_by_all) hide_future(s, key, seen_by_all, at.row, at.column);
        if (docs && key < last_start) hide_before(s, key, starts, at.column);
    }
};

#if PART == FORWARD
// Skips tiles that this worker does not need. It must wait for them: a buffer may only be released after it was filled.
__device__ __forceinline__ void skip(Ring &ring, int tiles) {
    for (; tiles > 0; --tiles, ring.next()) {
        barrier_wait(ring.barrier(FIRST_FULL), ring.phase);
        release(ring.barrier(FIRST_EMPTY));
        barrier_wait(ring.barrier(SECOND_FULL), ring.phase);
        release(ring.barrier(SECOND_EMPTY));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attention_fwd_tma(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    bf16 *out, float *lse, const int *schedule, i64 rounds, i64 queries, i64 keys, i64 heads,
    i64 kv_heads DOCS_ARGUMENTS
) {
    make_barriers();
    const int group = heads / kv_heads, ahead = keys - queries;
    if (threadIdx.x < 128) {
        fewer_registers<COPIER_REGISTERS>();
        if (threadIdx.x == 0)
            copy_keys(&q, &q, &k, &v, schedule, rounds, queries, ahead, kv_heads, group, DOCS_BOUNDS);
        return;
    }
    more_registers<WORKER_REGISTERS>();
    const Thread at;
    const u32 q_tile = own_tile(at.worker, 0);
    const float scale = rsqrtf(float(D)) * LOG2E; // exponentials are powers of two
    Ring ring;
    u32 phase = 0;
    int number = schedule[blockIdx.x];
    for (int round = 1; number >= 0; ++round, phase ^= 1) {
        const Unit unit(number, queries, kv_heads, group);
        const Keys all(unit, queries, ahead, DOCS_BOUNDS);
        const Part part(unit, all, at.worker, at.row, queries, keys, DOCS_BOUNDS);
        number = round < rounds ? schedule[round * gridDim.x + blockIdx.x] : -1;
        barrier_wait(own_full(), phase);
        if (part.first == part.stop) {
            release(own_empty());
            skip(ring, all.count);
            continue;
        }
        if (docs) skip(ring, part.first);
        Sums sums = {};
        Scores s;
        Rounded p;
        RowValues top = {{-INFINITY, -INFINITY}}, total = {};
        float shrink[2];
        const auto exponentials = [&](int tile) {
            part.hide(s, all.from + tile * TILE, at);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                shrink[half] = softmax_step<docs>(s, 0, half, scale, top[0][half], total[0][half]);
        };
        barrier_wait(ring.barrier(FIRST_FULL), ring.phase);
        scores(s, q_tile, ring.tile(0));
        multiply_wait<0>();
        settled(s[0]);
        release(ring.barrier(FIRST_EMPTY));
        exponentials(part.first);
        round_scores(p, s);
        Ring behind = ring; // at the tile that p belongs to
        for (int tile = part.first + 1; tile < part.stop; ++tile) {
            ring.next();
            barrier_wait(ring.barrier(FIRST_FULL), ring.phase);
            scores(s, q_tile, ring.tile(0));
            barrier_wait(behind.barrier(SECOND_FULL), behind.phase);
            accumulate(sums, p, behind.tile(1));
            multiply_wait<1>(); // the scores; P V goes on
            settled(s[0]);
            release(ring.barrier(FIRST_EMPTY));
            exponentials(tile);
            stay_before(__float_as_uint(total[0][0]) | __float_as_uint(total[0][1]));
            multiply_wait<0>();
            settled(sums);
            held(p);
            release(behind.barrier(SECOND_EMPTY));
            scale_sums(sums, shrink[0], shrink[1]);
            round_scores(p, s);
            behind = ring;
        }
        release(own_empty());
        barrier_wait(behind.barrier(SECOND_FULL), behind.phase);
        accumulate(sums, p, behind.tile(1));
        multiply_wait<0>();
        settled(sums);
        held(p);
        release(behind.barrier(SECOND_EMPTY));
        ring.next();
        skip(ring, all.count - part.stop);

        float *const row_lse = lse + (i64(unit.batch) * heads + part.head) * queries;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            total[0][half] = finish_row(total[0][half], top[0][half], row_lse, part.position, queries, half * 8, at.row,
                                        at.column);
        scale_sums(sums, total[0][0], total[0][1]);
        write_sums(out + ((i64(unit.batch) * queries + part.position) * heads + part.head) * D, sums, at.row, heads * D,
                   queries - part.position, D);
    }
}
#endif

#if PART == BACKWARD_Q
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attention_bwd_q_tma(
    const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const bf16 *dy_rows, const bf16 *out, const float *lse, float2 *stats, bf16 *dq,
    const int *schedule, i64 rounds, i64 dq_batch, i64 dq_token, i64 queries, i64 padded, i64 heads,
    i64 kv_heads DOCS_ARGUMENTS
) {
    make_barriers();
    const int group = heads / kv_heads;
    if (threadIdx.x < 128) {
        fewer_registers<COPIER_REGISTERS>();
        if (threadIdx.x == 0)
            copy_keys(&q, &dy, &k, &v, schedule, rounds, queries, 0, kv_heads, group, DOCS_BOUNDS);
        return;
    }
    more_registers<WORKER_REGISTERS>();
    const Thread at;
    const u32 q_tile = own_tile(at.worker, 0), dy_tile = own_tile(at.worker, 1);
    const float scale = rsqrtf(float(D));
    Ring ring;
    u32 phase = 0;
    int number = schedule[blockIdx.x];
    for (int round = 1; number >= 0; ++round, phase ^= 1) {
        const Unit unit(number, queries, kv_heads, group);
        const Keys all(unit, queries, 0, DOCS_BOUNDS);
        const Part part(unit, all, at.worker, at.row, queries, queries, DOCS_BOUNDS);
        number = round < rounds ? schedule[round * gridDim.x + blockIdx.x] : -1;
        float row_lse[2] = {}, delta[2] = {};
        if (part.stop > 0) { // statistics: two lanes compute a row, then each lane gets those of its rows of scores
            const int t = part.position + at.slab + at.lane / 2, side = at.lane % 2;
            float log = 0, sum = 0;
            if (t < queries) {
                const i64 place = ((i64(unit.batch) * queries + t) * heads + part.head) * D + side * 8;
                uint4 x[D / 16], y[D / 16];
#pragma unroll
                for (int i = 0; i < D / 16; ++i) {
                    x[i] = *reinterpret_cast<const uint4 *>(dy_rows + place + i * 16);
                    y[i] = *reinterpret_cast<const uint4 *>(out + place + i * 16);
                }
                log = lse[(i64(unit.batch) * heads + part.head) * queries + t] * LOG2E;
#pragma unroll
                for (int i = 0; i < D / 16; ++i) sum += dot(x[i], y[i]);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            if (side == 0) stats[(i64(unit.batch) * heads + part.head) * padded + t] = {log, sum};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int from = (at.lane / 4 + 8 * half) * 2;
                row_lse[half] = __shfl_sync(~0u, log, from), delta[half] = __shfl_sync(~0u, sum, from);
            }
        }
        barrier_wait(own_full(), phase);
        Sums sums = {};
        for (int tile = 0; tile < all.count; ++tile, ring.next()) {
            barrier_wait(ring.barrier(FIRST_FULL), ring.phase);
            if (tile >= part.first && tile < part.stop) {
                const u32 k_tile = ring.tile(0), v_tile = ring.tile(1);
                Scores s, dp;
                scores(s, q_tile, k_tile);
                scores(dp, dy_tile, v_tile);
                multiply_wait<1>();
                settled(s[0]);
                part.hide(s, all.from + tile * TILE, at);
                u32 bits = 0;
                EACH_SCORE(m, n, i) {
                    s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale * LOG2E, -row_lse[i / 2]));
                    bits |= __float_as_uint(s[m][n][i]);
                }
                stay_before(bits);
                multiply_wait<0>();
                settled(dp[0]);
                EACH_SCORE(m, n, i) s[m][n][i] *= dp[m][n][i] - delta[i / 2];
                Rounded ds;
                round_scores(ds, s);
                accumulate(sums, ds, k_tile);
                multiply_wait<0>();
                held(ds);
            }
            release(ring.barrier(FIRST_EMPTY));
        }
        release(own_empty());
        if (part.stop == 0) continue;
        settled(sums);
        scale_sums(sums, scale, scale);
        write_sums(dq + unit.batch * dq_batch + part.position * dq_token + part.head * D, sums, at.row, dq_token,
                   queries - part.position, D);
    }
}
#endif

#if PART == BACKWARD_KV
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attention_bwd_kv_tma(
    const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const float2 *stats, bf16 *dk, bf16 *dv, const int *schedule, i64 rounds,
    i64 dk_batch, i64 dk_token, i64 dv_batch, i64 dv_token, i64 queries, i64 padded, i64 heads,
    i64 kv_heads DOCS_ARGUMENTS
) {
    make_barriers();
    const int group = heads / kv_heads;
    if (threadIdx.x < 128) {
        fewer_registers<COPIER_REGISTERS>();
        if (threadIdx.x > 0) return;
        Ring ring;
        u32 phase = 0;
        for (int round = 0; round < rounds; ++round, phase ^= 1) {
            const int number = schedule[round * gridDim.x + blockIdx.x];
            if (number < 0) break;
            const Unit unit(number, queries, kv_heads, 1);
            const Queries all(unit, queries, DOCS_BOUNDS);
            bool begun = false;
            for (int head = unit.kv_head * group; head < (unit.kv_head + 1) * group; ++head)
                for (int query = all.start; query < all.stop; query += TILE, ring.next()) {
                    const u32 full = ring.barrier(FIRST_FULL);
                    barrier_wait(ring.barrier(FIRST_EMPTY), ring.phase ^ 1);
                    barrier_expect(full, 2 * STREAMED + PAIRS);
                    copy_rows<TILE>(ring.tile(0), &q, unit.batch, head, query, full);
                    copy_rows<TILE>(ring.tile(1), &dy, unit.batch, head, query, full);
                    copy_line(ring.pairs(), stats + (i64(unit.batch) * heads + head) * padded + query, PAIRS, full);
                    barrier_arrive(full);
                    if (begun) continue;
                    begun = true;
                    copy_own(unit, &k, &v, phase);
                }
        }
        return;
    }
    more_registers<WORKER_REGISTERS>();
    const Thread at;
    const u32 k_tile = own_tile(at.worker, 0), v_tile = own_tile(at.worker, 1);
    const float scale = rsqrtf(float(D));
    Ring ring;
    u32 phase = 0;
    int number = schedule[blockIdx.x];
    for (int round = 1; number >= 0; ++round, phase ^= 1) {
        const Unit unit(number, queries, kv_heads, 1);
        const Queries all(unit, queries, DOCS_BOUNDS);
        const int first = unit.first(at.worker);
        number = round < rounds ? schedule[round * gridDim.x + blockIdx.x] : -1;
        // One past the last queries that see the worker's first key and its last; 0 if it has no keys.
        int first_end = queries, stop = first < queries ? queries : 0;
        RowBounds ends;
        if (docs) {
            const int *const own = DOCS_BOUNDS + unit.batch * queries;
            first_end = bound_of(own, first, queries);
            if (stop > 0) stop = bound_of(own, first + OWN - 1, queries);
            load_bounds(ends, own, first + at.row, queries);
        }
        barrier_wait(own_full(), phase);
        Sums dk_sums = {}, dv_sums = {};
        for (int head = 0; head < group; ++head)
            for (int query = all.start; query < all.stop; query += TILE, ring.next()) {
                barrier_wait(ring.barrier(FIRST_FULL), ring.phase);
                if (query + TILE > first && query < stop) {
                    const u32 q_tile = ring.tile(0), dy_tile = ring.tile(1), pairs = ring.pairs() + at.column * 8;
                    // Rows are keys, columns queries: P^T and dS^T come out in the layout of left operands. For dS, P
                    // is unpacked from the bf16 pairs that dV's product reads: fewer registers.
                    Scores p, ds;
                    scores(p, k_tile, q_tile);
                    scores(ds, v_tile, dy_tile);
                    multiply_wait<1>();
                    settled(p[0]);
                    if (query < first + OWN - 1) hide_past(p, first + at.row, query, 0, at.column);
                    if (docs && query + TILE > first_end) hide_behind(p, query, ends, at.column);
#pragma unroll
                    for (int n = 0; n < TILE / 8; ++n) {
                        float two[4]; // lse, delta, lse, delta of two queries
                        load_four(two, pairs + n * 64);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            p[0][n][i] = exp2_fast(fmaf(p[0][n][i], scale * LOG2E, i % 2 ? -two[2] : -two[0]));
                    }
                    Rounded a, c;
                    round_scores(a, p);
                    accumulate(dv_sums, a, dy_tile);
                    multiply_wait<1>();
                    settled(ds[0]);
#pragma unroll
                    for (int n = 0; n < TILE / 8; ++n) {
                        float two[4];
                        load_four(two, pairs + n * 64);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const u32 of_p = a[n / 2][n % 2 * 2 + i / 2];
                            ds[0][n][i] = (i % 2 ? high(of_p) : low(of_p)) * (ds[0][n][i] - (i % 2 ? two[3] : two[1]));
                        }
                    }
                    round_scores(c, ds);
                    accumulate(dk_sums, c, q_tile);
                    multiply_wait<0>();
                    held(a), held(c);
                }
                release(ring.barrier(FIRST_EMPTY));
            }
        release(own_empty());
        if (stop == 0) continue;
        settled(dk_sums), settled(dv_sums);
        scale_sums(dk_sums, scale, scale);
        const int there = queries - first;
        write_sums(dk + unit.batch * dk_batch + first * dk_token + unit.kv_head * D, dk_sums, at.row, dk_token, there, D);
        write_sums(dv + unit.batch * dv_batch + first * dv_token + unit.kv_head * D, dv_sums, at.row, dv_token, there, D);
    }
}
#endif
