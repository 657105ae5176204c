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

typedef float Sums[D / 16][2 * ROW_TILES][4]; // transposed: 16 dims by 8 rows

// A warp's own rows, rounded in place. The first COUNT of their fragments stay in registers; the others are loaded for
// each piece.
template <int COUNT> struct Own {
    u32 tile, part[ROW_TILES][STEPS][4];

    __device__ __forceinline__ explicit Own(u32 tile) : tile(tile) {}
    __device__ __forceinline__ void hold(int lane) {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; ++i) {
            float x[4];
            load_four(x, tile + (i * 32 + lane) * 16);
            store_rounded(tile + (i * 32 + lane) * 16, x);
        }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int step = 0; step < COUNT; ++step)
                load_matrix(part[m][step], piece(tile + step / 4 * 128, m * 16, step % 4, lane));
    }
};

// s = a b^T: the warp's own rows and PIECE rows of a streamed tile.
template <int COUNT>
__device__ __forceinline__ void make_scores(Scores &s, const Own<COUNT> &own, u32 rows, int lane) {
    clear(s);
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            if (step >= COUNT) load_matrix(a[m], piece(own.tile + step / 4 * 128, m * 16, step % 4, lane));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (step < COUNT) a[m][i] = own.part[m][step][i];
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
template <int FIRST, int SECOND>
__device__ __forceinline__ void start_both(Scores &s, const Own<FIRST> &first, u32 rows, Scores &t,
                                           const Own<SECOND> &second, u32 others, int lane) {
    make_scores(s, first, rows, lane);
    make_scores(t, second, others, lane);
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
__device__ inline void scale_row(Sums &sums, int m, int half, float by, int lane) {
    const float even = __shfl_sync(~0u, by, lane % 4 * 8), odd = __shfl_sync(~0u, by, lane % 4 * 8 + 4);
    const int i = 2 * m + half;
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
        sums[n][i][0] *= even, sums[n][i][1] *= odd, sums[n][i][2] *= even, sums[n][i][3] *= odd;
}

// Stores the sums of a warp's rows, scaled, without staging: 8 lanes write 64 bytes of a row.
__device__ inline void store_sums(float *to, i64 token, int first, int stop, const Sums &x, float scale, u32,
                                  int lane) {
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
__device__ inline void store_sums(float *to, i64 token, int first, int stop, Sums &x, const RowValues &scale, u32 tile,
                                  int lane) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) scale_row(x, m, half, scale[m][half], lane);
    store_sums(to, token, first, stop, x, 1, tile, lane);
}

template <int FIRST, int SECOND>
__device__ __forceinline__ void start_gradients(Scores &p, const Own<FIRST> &k, u32 q_rows, Scores &,
                                                const Own<SECOND> &, u32, int lane) {
    make_scores(p, k, q_rows, lane);
}
// The scores of dP come after P's product: fewer registers.
template <int SECOND>
__device__ __forceinline__ void add_gradients(Sums &dk, Sums &dv, Scores &p, const Own<SECOND> &v, Scores &ds,
                                              u32 q_rows, u32 dy_rows, u32 pairs, float scale, u32, float, int lane) {
    make_probabilities(p, pairs, scale);
    add_product(dv, p, dy_rows, lane);
    make_scores(ds, v, dy_rows, lane);
    make_gradients(ds, pairs, [&](int m, int n, int i) { return p[m][n][i]; });
    add_product(dk, ds, q_rows, lane);
}

#define ENTRY(name) name##_tf32
#define BY_MMA_SYNC
#include "ops/attention_stream.cuh"
