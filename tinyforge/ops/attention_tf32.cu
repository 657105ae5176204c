// FlashAttention in float32 with products in TF32 (mma.sync, sm_80 and up): attention.cu's kernels for float32 numbers.
//
//   PART=FORWARD       attention_fwd_tf32       out, lse                   one warp: OWN queries of one head
//   PART=BACKWARD_Q    attention_bwd_q_tf32     dq, and the statistics     one warp: OWN queries of one head
//   PART=BACKWARD_KV   attention_bwd_kv_tf32    dk, dv                     one warp: OWN keys of one kv head
//
// The algorithm, the units of work, the statistics and the order of sums are those of attention.cu; read it first.
// Tensors are float32; the factors of products are rounded to TF32, 10 bits of mantissa, to nearest. A warp rounds its
// own rows once, in shared memory; scores once, in registers; streamed rows at each load, because rounding them once
// per block would cost a pass over the tile and a barrier. delta is computed from dO before dO is rounded.
//
// Fragments of mma.m16n8k8, with g = lane / 4 and c = lane % 4: a lane holds
//   A (16 x 8): a[0] = (g, c), a[1] = (g + 8, c), a[2] = (g, c + 4), a[3] = (g + 8, c + 4)
//   B (8 x 8):  b[0] = (c, g), b[1] = (c + 4, g)
//   C (16 x 8): c[0..1] = (g, 2c..2c + 1), c[2..3] = (g + 8, 2c..2c + 1)
//
// Scores are a product along rows. ldmatrix gives a lane one 4-byte number where it would give two 2-byte numbers, so A
// and B are loaded as in bf16.
//
// The products with scores run across rows, and ldmatrix cannot transpose 4-byte numbers. So the sums are kept
// transposed, sums^T += tile^T P^T, with the scores as the right operand, and no shuffle or move is needed:
//   B   half a C, (g, 2c..2c + 1), is where B needs the rows c and c + 4 of column g. A product does not change if the
//       columns of A and the rows of B are permuted alike: key 2c counts as row c, and key 2c + 1 as row c + 4.
//   A   reads the rows 2c and 2c + 1 of the tile to match. The order of A's own rows is free as well: the dims 2n and
//       2n + 1 count as rows n and n + 8, so that a[0..1] and a[2..3] are one 8-byte load each. Half a warp reads two
//       pieces of 16 bytes from each of four rows of one parity; the swizzle spreads these over all banks, once.
//
// At head size 64: forward 248 registers and 96 KB of shared memory, backward_q 246 and 97 KB, backward_kv 251 and 96.5
// KB (sm_90), none spilled: two blocks of four warps per multiprocessor on Hopper, one where it has 164 KB (sm_80).
// Every variant fits into 99 KB.
//
// Tried on an H200, at head size 64, 12 and 4 heads, us at 32 x 512 and 16 x 1024:
//   forward       104.3 173.6, as here. Tiles of 32: 106.4 178.4; and no fragments held 115.5 189.5, in three blocks
//                 109.9 188.5 with 48 bytes spilled. Tiles of 64 in one piece, none held: 105.6 173.7; unrolled by two
//                 110.7 182.2. Tiles of 32 in blocks of two warps, four a multiprocessor, 110.7 187.1; of eight warps,
//                 one, 117.1 188.1; warps of 16 rows, three blocks, 119.0 205.1
//   backward_q    167.8 254.1, as here. Eight fragments held 168.6 255.1, none 173.3 261.1, and unrolled by four 189.0
//                 287.9; pieces of 16, eight held, 189.2 286.0; blocks of two warps 182.2 278.8; warps of 16 rows,
//                 three blocks, 174.9 286.2
//   backward_kv   183.0 332.3, as here. Unrolled by eight 178.1 324.0, but 8 bytes spilled; by two 190.8 330.3; by one
//                 199.6 345.2. Pieces of 16, two held, 189.7 348.2; warps of 16 rows, 16 held, 188.3 338.0; blocks of
//                 two warps 214.2 376.2
// Compared by the assembler's output alone, for sm_90:
//   sums not transposed, P as A, tiles read by 16 bytes: each rounded number is moved into its pair; 823 instructions
//                 after S in the loop of backward_kv, 655 as here
//   cvt.rna       a comparison and an addition; cvt.rn, which sm_80 does not have, is one instruction
//   backward_kv   S and dP before P's product, as in bf16: 255 registers; unrolled by two, 68 bytes spilled
//
// compile: PART=FORWARD HEAD_DIM=64 ROW_TILES=2 WORKERS=4 TILE=64 PIECE=32 HELD=8 UNROLL=8 BLOCKS=2
// compile: PART=FORWARD HEAD_DIM=32 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=8 UNROLL=8 BLOCKS=2
// compile: PART=FORWARD HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=32 PIECE=32 HELD=16 UNROLL=16 BLOCKS=2
// compile: PART=BACKWARD_Q HEAD_DIM=32|64 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=4 UNROLL=8 BLOCKS=2
// compile: PART=BACKWARD_Q HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=16 PIECE=16 HELD=0 UNROLL=4 BLOCKS=2
// compile: PART=BACKWARD_KV HEAD_DIM=32|64 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=0 UNROLL=4 BLOCKS=2
// compile: PART=BACKWARD_KV HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=16 PIECE=16 HELD=0 UNROLL=4 BLOCKS=2
// compile: PART=FORWARD HEAD_DIM=64 ROW_TILES=2 WORKERS=4 TILE=64 PIECE=32 HELD=8 UNROLL=8 BLOCKS=2 DOCS=1
// compile: PART=FORWARD HEAD_DIM=32 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=8 UNROLL=8 BLOCKS=2 DOCS=1
// compile: PART=FORWARD HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=32 PIECE=32 HELD=16 UNROLL=16 BLOCKS=2 DOCS=1
// compile: PART=BACKWARD_Q HEAD_DIM=32|64 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=4 UNROLL=8 BLOCKS=2 DOCS=1
// compile: PART=BACKWARD_Q HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=16 PIECE=16 HELD=0 UNROLL=4 BLOCKS=2 DOCS=1
// compile: PART=BACKWARD_KV HEAD_DIM=32|64 ROW_TILES=2 WORKERS=4 TILE=32 PIECE=32 HELD=0 UNROLL=4 BLOCKS=2 DOCS=1
// compile: PART=BACKWARD_KV HEAD_DIM=128 ROW_TILES=1 WORKERS=4 TILE=16 PIECE=16 HELD=0 UNROLL=4 BLOCKS=2 DOCS=1
// spills: none

#define WORKER_WARPS 1
#define TF32
#include "ops/attention.cuh"

static_assert(HELD == 0 || UNROLL * 8 >= D, "registers are not counted through");
static_assert(TILE % PIECE == 0 && PIECE % 16 == 0, "a tile is whole pieces");

__device__ inline void load_two(float &x, float &y, u32 from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory");
}
__device__ inline void store_rounded(u32 to, const float (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(rounded(x[0])), "r"(rounded(x[1])),
                 "r"(rounded(x[2])), "r"(rounded(x[3]))
                 : "memory");
}

__device__ inline void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Fragments of a warp's own rows that stay in registers: of q or k, then of dO or v.
constexpr int HELD_OF_FIRST = HELD < STEPS ? HELD : STEPS, HELD_OF_SECOND = HELD - HELD_OF_FIRST;

typedef float Sums[D / 16][2 * ROW_TILES][4]; // transposed: 16 dims by 8 rows
typedef u32 Held[ROW_TILES][STEPS][4];

// Rounds a warp's own rows in place.
__device__ inline void round_rows(u32 tile, int lane) {
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; ++i) {
        float x[4];
        load_four(x, tile + (i * 32 + lane) * 16);
        store_rounded(tile + (i * 32 + lane) * 16, x);
    }
    __syncwarp();
}

// The first COUNT left operands of a warp's own rows.
template <int COUNT> __device__ inline void hold(Held &held, u32 own, int lane) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int step = 0; step < COUNT; ++step)
            load_matrix(held[m][step], piece(own + step / 4 * 128, m * 16, step % 4, lane));
}

// s += a b^T: the warp's own rows and PIECE rows of a streamed tile. The first COUNT fragments of a are in registers.
template <int COUNT>
__device__ inline void add_scores(Scores &s, const Held &held, u32 own, u32 rows, int lane) {
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            if (step >= COUNT) load_matrix(a[m], piece(own + step / 4 * 128, m * 16, step % 4, lane));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (step < COUNT) a[m][i] = held[m][step][i];
        }
#pragma unroll
        for (int n = 0; n < PIECE / 16; ++n) {
            u32 b[4];
            load_matrix(b, piece_of_rows(rows + step / 4 * 128, n * 16, step % 4, lane));
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = rounded(__uint_as_float(b[i]));
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                multiply_add(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// sums += b^T p^T over PIECE rows b of a streamed tile, with rows permuted as the head of the file explains. p:
// rounded.
__device__ inline void add_product(Sums &sums, const Scores &p, u32 rows, int lane) {
    const int row = lane % 4 * 2, column = lane / 4 % 2 * 8;
    const u32 even = rows + swizzled(row, lane / 8) + column, odd = rows + swizzled(row + 1, lane / 8) + column;
#pragma unroll
    for (int step = 0; step < PIECE / 8; ++step)
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            const u32 at = step * 8 * ROW_BYTES + n / 2 * 128;
            float x[4]; // two dims of two rows
            load_two(x[0], x[1], (even ^ n % 2 * 64) + at);
            load_two(x[2], x[3], (odd ^ n % 2 * 64) + at);
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = rounded(x[i]);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    multiply_add(sums[n][2 * m + half], a, __float_as_uint(p[m][step][2 * half]),
                                 __float_as_uint(p[m][step][2 * half + 1]));
        }
}

// Scales 8 own rows, which are columns of the sums, by a number that the four lanes of a row of scores hold.
__device__ inline void scale_columns(Sums &sums, int i, float by, int lane) {
    const float even = __shfl_sync(~0u, by, lane % 4 * 8), odd = __shfl_sync(~0u, by, lane % 4 * 8 + 4);
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
        sums[n][i][0] *= even, sums[n][i][1] *= odd, sums[n][i][2] *= even, sums[n][i][3] *= odd;
}

// Stores the sums of a warp's rows, scaled, without staging: 8 lanes write 64 bytes of a row.
__device__ inline void store_rows(float *to, i64 token, int first, int stop, const Sums &x, float scale, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int t = first + i * 8 + lane % 4 * 2 + odd;
            if (t >= stop) continue;
#pragma unroll
            for (int n = 0; n < D / 16; ++n)
                reinterpret_cast<float2 *>(to + t * token)[n * 8 + lane / 4] =
                    make_float2(x[n][i][odd] * scale, x[n][i][2 + odd] * scale);
        }
}

#if PART == FORWARD
// Grid (batch * kv heads, ceil(units / WORKERS)); shared: q of each warp, two stages of k and v. HELD: how many of q's
// STEPS fragments stay in registers; the others are loaded again for every piece of keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_fwd_tf32(const float *q, const float *k, const float *v, float *out, float *lse, i64 q_batch, i64 q_token,
                   i64 k_batch, i64 k_token, i64 v_batch, i64 v_token, i64 queries, i64 keys, i64 heads,
                   i64 kv_heads DOCS_ARGUMENTS) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 base = shared_address(shared);
    const u32 q_tile = base + warp * WARP_BYTES, stages = base + WORKERS * WARP_BYTES;
    const Unit unit(queries, heads, kv_heads, warp);
    const int ahead = keys - queries, seen_by_block = unit.last_of_block + ahead + 1;
    const int seen_by_all = unit.first + ahead + 1; // keys that the first row sees
    const int seen = unit.idle ? 0 : min_int(keys, seen_by_all + OWN - 1);
    const FirstKeys starts(unit, DOCS_BOUNDS, queries, heads, kv_heads);
    RowBounds row_starts;
    load_bounds(row_starts, DOCS_BOUNDS + unit.batch * queries, unit.first + lane / 4, queries);
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;

    if (!unit.idle)
        load_rows<OWN, 32>(q_tile, q + unit.batch * q_batch + unit.head * D, q_token, unit.first, queries, lane);
    copy_commit();
    load_pair(stages, k, k_token, v, v_token, starts.of_block, keys, thread);
    copy_wait<1>();
    __syncwarp();
    round_rows(q_tile, lane);
    Held q_held;
    hold<HELD_OF_FIRST>(q_held, q_tile, lane);

    const float scale = rsqrtf(float(D)) * LOG2E; // exponentials are powers of two
    Sums sums = {};
    RowValues top, total;
    set_rows(top, -INFINITY), set_rows(total, 0);

    u32 stage = 0;
    for (int key = starts.of_block; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        __syncthreads(); // this tile has arrived, and no thread still reads the other stage
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, keys, thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll 1
        for (int part = 0; part < TILE; part += PIECE) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= starts.of_first) continue;
            Scores s = {};
            add_scores<HELD_OF_FIRST>(s, q_held, q_tile, k_tile + part * ROW_BYTES, lane);
            // The diagonal crosses this piece.
            if (key + part + PIECE > seen_by_all) hide_future(s, 0, seen_by_all - key - part, lane / 4, lane % 4 * 2);
            if (docs && key + part < starts.of_last) hide_before(s, key + part, row_starts, lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float shrink = softmax_step<docs>(s, m, half, scale, top[m][half], total[m][half]);
                    scale_columns(sums, 2 * m + half, shrink, lane);
                }
            add_product(sums, s, v_tile + part * ROW_BYTES, lane);
        }
    }
    if (unit.idle) return;
    lse += (unit.batch * heads + unit.head) * queries;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inverse = finish_row(total[m][half], top[m][half], lse, unit.first, queries, m * 16 + half * 8,
                                             lane / 4, lane % 4 * 2);
            scale_columns(sums, 2 * m + half, inverse, lane);
        }
    store_rows(out + (unit.batch * queries * heads + unit.head) * D, heads * D, unit.first, queries, sums, 1, lane);
}
#endif

#if PART == BACKWARD_Q
// Grid as forward's; shared: q and dO of each warp, two stages of k and v, statistics of each warp's rows.
// stats: (batch, head, query) pairs (lse in powers of two, delta), for the other kernel. HELD: as above, of q's and
// then dO's fragments.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_bwd_q_tf32(const float *dy, const float *q, const float *k, const float *v, const float *out,
                     const float *lse, float2 *stats, float *dq, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token,
                     i64 v_batch, i64 v_token, i64 dq_batch, i64 dq_token, i64 queries, i64 heads,
                     i64 kv_heads DOCS_ARGUMENTS) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 base = shared_address(shared);
    const u32 q_tile = base + warp * 2 * WARP_BYTES, dy_tile = q_tile + WARP_BYTES;
    const u32 stages = base + WORKERS * 2 * WARP_BYTES;
    float2 *const row_stats =
        reinterpret_cast<float2 *>(shared + WORKERS * 2 * WARP_BYTES + 4 * TILE_BYTES) + warp * OWN;
    const Unit unit(queries, heads, kv_heads, warp);
    const int seen_by_block = unit.last_of_block + 1, seen_by_all = unit.first + 1;
    const int seen = unit.idle ? 0 : min_int(queries, seen_by_all + OWN - 1);
    const FirstKeys starts(unit, DOCS_BOUNDS, queries, heads, kv_heads);
    RowBounds row_starts;
    load_bounds(row_starts, DOCS_BOUNDS + unit.batch * queries, unit.first + lane / 4, queries);
    k += unit.batch * k_batch + unit.kv_head * D;
    v += unit.batch * v_batch + unit.kv_head * D;
    const i64 row_of_outputs = heads * D, first_output = (unit.batch * queries * heads + unit.head) * D;

    float4 out_part[OWN_CHUNKS] = {}; // in flight while the copies are
    if (!unit.idle) {
        load_rows<OWN, 32>(q_tile, q + unit.batch * q_batch + unit.head * D, q_token, unit.first, queries, lane);
        load_rows<OWN, 32>(dy_tile, dy + first_output, row_of_outputs, unit.first, queries, lane);
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; ++i) {
            const int t = unit.first + (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
            const float *const from = out + first_output + t * row_of_outputs + chunk * CHUNK;
            if (t < queries) out_part[i] = *reinterpret_cast<const float4 *>(from);
        }
    }
    copy_commit();
    load_pair(stages, k, k_token, v, v_token, starts.of_block, queries, thread);
    copy_wait<1>();
    __syncwarp();

    Held q_held, dy_held;
    RowValues row_lse, delta;
    if (!unit.idle) {
        make_statistics(row_stats, stats, lse, (unit.batch * heads + unit.head) * queries, unit.first, queries, lane,
                        row_lse, delta, [&](int i, int row, int chunk) {
                            float x[4]; // of dO, before it is rounded
                            load_four(x, dy_tile + swizzled(row, chunk));
                            float sum = x[0] * out_part[i].x + x[1] * out_part[i].y + x[2] * out_part[i].z +
                                        x[3] * out_part[i].w;
#pragma unroll
                            for (int other = 1; other < CHUNKS; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
                            return sum;
                        });
        round_rows(q_tile, lane);
        round_rows(dy_tile, lane);
        hold<HELD_OF_FIRST>(q_held, q_tile, lane);
        hold<HELD_OF_SECOND>(dy_held, dy_tile, lane);
    }

    const float scale = rsqrtf(float(D));
    Sums sums = {};
    u32 stage = 0;
    for (int key = starts.of_block; key < seen_by_block; key += TILE, stage ^= 1) {
        copy_wait<0>();
        __syncthreads();
        if (key + TILE < seen_by_block)
            load_pair(stages + (stage ^ 1) * 2 * TILE_BYTES, k, k_token, v, v_token, key + TILE, queries, thread);
        const u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
#pragma unroll 1
        for (int part = 0; part < TILE; part += PIECE) {
            if (key + part >= seen) break;
            if (docs && key + part + PIECE <= starts.of_first) continue;
            Scores s = {}, dp = {};
            add_scores<HELD_OF_FIRST>(s, q_held, q_tile, k_tile + part * ROW_BYTES, lane);
            add_scores<HELD_OF_SECOND>(dp, dy_held, dy_tile, v_tile + part * ROW_BYTES, lane);
            if (key + part + PIECE > seen_by_all) hide_future(s, 0, seen_by_all - key - part, lane / 4, lane % 4 * 2);
            if (docs && key + part < starts.of_last) hide_before(s, key + part, row_starts, lane % 4 * 2);
            EACH_SCORE(m, n, i) {
                const float p = exp2_fast(fmaf(s[m][n][i], scale * LOG2E, -row_lse[m][i / 2]));
                s[m][n][i] = as_factor(p * (dp[m][n][i] - delta[m][i / 2]));
            }
            add_product(sums, s, k_tile + part * ROW_BYTES, lane);
        }
    }
    if (unit.idle) return;
    store_rows(dq + unit.batch * dq_batch + unit.head * D, dq_token, unit.first, queries, sums, scale, lane);
}
#endif

#if PART == BACKWARD_KV
// Grid (batch * kv heads, ceil(keys / (WORKERS * OWN))); shared: k and v of each warp, two stages of q and dO with the
// statistics of their rows. Longest blocks first: the first keys. HELD: as above, of k's and then v's fragments.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_bwd_kv_tf32(const float *dy, const float *q, const float *k, const float *v, const float2 *stats, float *dk,
                      float *dv, i64 q_batch, i64 q_token, i64 k_batch, i64 k_token, i64 v_batch, i64 v_token,
                      i64 dk_batch, i64 dk_token, i64 dv_batch, i64 dv_token, i64 queries, i64 heads,
                      i64 kv_heads DOCS_ARGUMENTS) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int STAGE_BYTES = 2 * TILE_BYTES + TILE * 8;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 base = shared_address(shared);
    const u32 k_tile = base + warp * 2 * WARP_BYTES, v_tile = k_tile + WARP_BYTES;
    const u32 stages = base + WORKERS * 2 * WARP_BYTES;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    const int first_of_block = blockIdx.y * WORKERS * OWN, first = first_of_block + warp * OWN;
    const bool idle = first >= queries;
    const int start = first_of_block / TILE * TILE;
    const LastQueries ends(DOCS_BOUNDS, batch, queries, first_of_block, first);
    RowBounds row_ends;
    load_bounds(row_ends, DOCS_BOUNDS + batch * queries, first + lane / 4, queries);
    QueryTiles tiles(q + batch * q_batch + kv_head * group * D, dy + (batch * queries * heads + kv_head * group) * D,
                     stats + (batch * heads + kv_head * group) * queries, q_token, heads * D, queries, start,
                     docs ? ends.of_block : queries);
    const auto load_next = [&](u32 stage) { tiles.load_next(stage, stage + 2 * TILE_BYTES, 0, thread); };

    load_rows<OWN, 32>(k_tile, k + batch * k_batch + kv_head * D, k_token, first, queries, lane);
    load_rows<OWN, 32>(v_tile, v + batch * v_batch + kv_head * D, v_token, first, queries, lane);
    copy_commit();
    load_next(stages);
    copy_wait<1>();
    __syncwarp();
    round_rows(k_tile, lane);
    round_rows(v_tile, lane);
    Held k_held, v_held;
    hold<HELD_OF_FIRST>(k_held, k_tile, lane);
    hold<HELD_OF_SECOND>(v_held, v_tile, lane);

    const float scale = rsqrtf(float(D));
    Sums dk_sums = {}, dv_sums = {};
    u32 stage = 0;
    for (int head = 0; head < group; ++head)
        for (int query = start; query < (docs ? ends.of_block : queries); query += TILE, stage ^= 1) {
            copy_wait<0>();
            __syncthreads();
            if (tiles.head < group) load_next(stages + (stage ^ 1) * STAGE_BYTES);
            if (idle) continue;
            const u32 q_tile = stages + stage * STAGE_BYTES, dy_tile = q_tile + TILE_BYTES;
            const u32 stats_tile = dy_tile + TILE_BYTES;
#pragma unroll 1
            for (int part = 0; part < TILE; part += PIECE) {
                if (query + part + PIECE <= first) continue; // all of these queries come before the warp's keys
                if (docs && query + part >= ends.of_last) break;
                // Rows are keys, columns queries: P^T and dS^T.
                Scores p = {}, ds = {};
                add_scores<HELD_OF_FIRST>(p, k_held, k_tile, q_tile + part * ROW_BYTES, lane);
                // Only if the diagonal crosses this piece.
                if (query + part < first + OWN - 1) hide_past(p, first, query + part, lane / 4, lane % 4 * 2);
                if (docs && query + part + PIECE > ends.of_first) hide_behind(p, query + part, row_ends, lane % 4 * 2);
                const u32 row_stats = stats_tile + (part + lane % 4 * 2) * 8; // lse, delta, lse, delta of two queries
#pragma unroll
                for (int n = 0; n < PIECE / 8; ++n) {
                    float row[4];
                    load_four(row, row_stats + n * 64);
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            p[m][n][i] = as_factor(exp2_fast(fmaf(p[m][n][i], scale * LOG2E, -row[i % 2 * 2])));
                }
                add_product(dv_sums, p, dy_tile + part * ROW_BYTES, lane);
                add_scores<HELD_OF_SECOND>(ds, v_held, v_tile, dy_tile + part * ROW_BYTES, lane);
#pragma unroll
                for (int n = 0; n < PIECE / 8; ++n) {
                    float row[4];
                    load_four(row, row_stats + n * 64);
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            ds[m][n][i] = as_factor(p[m][n][i] * (ds[m][n][i] - row[i % 2 * 2 + 1]));
                }
                add_product(dk_sums, ds, q_tile + part * ROW_BYTES, lane);
            }
        }
    if (idle) return;
    store_rows(dk + batch * dk_batch + kv_head * D, dk_token, first, queries, dk_sums, scale, lane);
    store_rows(dv + batch * dv_batch + kv_head * D, dv_token, first, queries, dv_sums, 1, lane);
}
#endif
