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
//   backward_kv   P kept in float next to its bf16 pairs: 200 registers, two blocks, 130; unpacked from the pairs, as
//                 here, three blocks, 115. Three warpgroups a block 145
//   left operands in registers from before the loop: the assembler of CUDA 13.0 reuses their registers for P inside the
//                 loop, and the second tile's scores are wrong. Read from shared memory they also leave 16 to 32
//                 registers free, enough for one more block.

#define WORKER_WARPS 4
#define ROW_TILES 1
#include "ops/attention.cuh"
#include "ops/hopper.cuh"
#include "ops/rope.cuh"

#ifdef TURN
#define TURN_ARGUMENTS , const float *cosines, const float *sines
#define TURN_ANGLES , cosines, sines
#define store_gradient store_rotated_rows
#endif

static_assert(D == 64, "a row is one line of the 128-byte swizzle");
static_assert(TILE == 64, "a piece is a tile");

typedef float Sums[ROW_TILES][D / 8][4];

// A warpgroup's own rows: wgmma reads them from shared memory.
template <int COUNT> struct Own {
    u32 tile;
    __device__ __forceinline__ explicit Own(u32 tile) : tile(tile) {}
    __device__ __forceinline__ void hold(int) const {}
};

// Starts s = a b^T: 64 rows of one tile and 64 of another.
__device__ __forceinline__ void start_scores(Scores &s, u32 own, u32 rows) {
    const u64 a = matrix(own), b = matrix(rows);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) multiply_wide<0, 0>(s[0], columns(a, step), columns(b, step), step > 0);
    multiply_commit();
}
// Waits for scores, with PENDING later products still under way.
template <int PENDING> __device__ __forceinline__ void await_scores(Scores &s) {
    multiply_wait<PENDING>();
    settled(s[0]);
}
__device__ __forceinline__ void make_scores(Scores &s, const Own<0> &own, u32 rows, int) {
    multiply_fence();
    start_scores(s, own.tile, rows);
    await_scores<0>(s); // and the previous piece's product
}
__device__ __forceinline__ void start_both(Scores &s, const Own<0> &first, u32 rows, Scores &t, const Own<0> &second,
                                           u32 others, int) {
    multiply_fence();
    start_scores(s, first.tile, rows);
    start_scores(t, second.tile, others);
}
__device__ __forceinline__ void await_first(Scores &s) { await_scores<1>(s); }
__device__ __forceinline__ void await_second(Scores &s) { await_scores<0>(s); }

// Starts sums += p b over the 64 rows of a tile.
__device__ __forceinline__ void add_rounded(Sums &sums, const Rounded &p, u32 rows_of_b) {
    const u64 b = matrix(rows_of_b);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_held(sums[0], p[step], rows(b, step));
    multiply_commit();
}
__device__ __forceinline__ void add_product(Sums &sums, const Scores &s, u32 rows, int) {
    Rounded p;
    round_scores(p, s);
    add_rounded(sums, p, rows);
}

__device__ __forceinline__ void scale_row(Sums &sums, int, int half, float by, int) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sums[0][n][2 * half] *= by, sums[0][n][2 * half + 1] *= by;
}

__device__ __forceinline__ void start_gradients(Scores &p, const Own<0> &k, u32 q_rows, Scores &ds, const Own<0> &v,
                                                u32 dy_rows, int lane) {
    start_both(p, k, q_rows, ds, v, dy_rows, lane);
    await_first(p);
}
// For dS, P is unpacked from the bf16 pairs that dV's product reads: 32 registers fewer, and a third warpgroup fits.
__device__ __forceinline__ void add_gradients(Sums &dk, Sums &dv, Scores &p, const Own<0> &, Scores &ds, u32 q_rows,
                                              u32 dy_rows, u32 pairs, float scale, u32, float, int) {
    make_probabilities(p, pairs, scale);
    Rounded a, c;
    round_scores(a, p);
    add_rounded(dv, a, dy_rows);
    await_scores<1>(ds);
    make_gradients(ds, pairs, [&](int, int n, int i) {
        const u32 pair = a[n / 2][n % 2 * 2 + i / 2];
        return i % 2 ? high(pair) : low(pair);
    });
    round_scores(c, ds);
    add_rounded(dk, c, q_rows);
    multiply_wait<0>();
}

// The tile has arrived by cp.async, and wgmma reads it. A product still reads it until it has ended.
__device__ __forceinline__ void tile_arrived() { shared_fence(); }
__device__ __forceinline__ void tile_read() { multiply_wait<0>(); }
__device__ __forceinline__ void all_read() { __syncthreads(); } // sums are staged in the place of own rows
__device__ __forceinline__ void settle(Sums &sums) { settled(sums[0]); }

#ifdef TURN
// store_sums with RoPE undone. A thread has 16 bytes of a row's left half, and their partners in its right half.
__device__ inline void store_rotated_rows(bf16 *to, i64 token, int first, int stop,
                                          const float (&x)[ROW_TILES][D / 8][4], float scale, u32 tile, int lane,
                                          const float *cosines, const float *sines) {
    typedef Pack<bf16, 8> Eight;
    RowValues scales;
    set_rows(scales, scale);
    stage_rows(x, scales, tile, lane);
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

#define ENTRY(name) name##_wgmma
#define HELD 0
#include "ops/attention_stream.cuh"
