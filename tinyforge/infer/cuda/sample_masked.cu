// sample_masked: a token for each row of a batch from the logits of a pass, of those that its mask allows
//
// Kernel:  sample_masked     a block reads the logits of a row, and samples as decode_batch does
//
// Texts by a grammar: the mask of a token depends on the one before, which the host has to read first. It computes the
// masks while decode_batch computes the logits (`samplers` null), so that this kernel does not wait for them. Rows
// without a mask get the tokens that decode_batch would give them.
// Grid: batch. Block: WARPS x 32 threads.

#include "infer/cuda/decode.cuh"
#include "infer/cuda/sampler.cuh"

constexpr int WORDS = ceil_div(VOCAB, 32);

// logits: (batch, VOCAB_ROWS). masks: WORDS words each, a bit for each token. mask_of: the mask of a row, -1 for none.
// samplers, first, ids, drawn: as in `Arguments` of decode_batched.cu, of one pass.
extern "C" __global__ void __launch_bounds__(THREADS) sample_masked(
    const A *logits, const u32 *masks, const int *mask_of, const Sampler *samplers, const u32 *first, int *ids,
    int *drawn
) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const int row = blockIdx.x, number = mask_of[row];
    const A *const from = logits + i64(row) * VOCAB_ROWS;
    const u32 *const mask = masks + i64(number) * WORDS;
    const auto take = [&](auto &x, auto at) {
#pragma unroll
        for (int i = 0; i < sizeof(x) / sizeof(Parcel); i++) {
            const int begin = at(i);
            if (begin < 0) continue;
            x[i] = load<PARCEL>(from + begin);
            if (number < 0) continue;
            const u32 allowed = mask[begin / 32] >> begin % 32;
#pragma unroll
            for (int j = 0; j < PARCEL; j++)
                if (!(allowed >> j & 1)) x[i].v[j] = A(-INFINITY);
        }
    };
    const int id = next_token(shared_memory, take, samplers[row], first[row]);
    if (threadIdx.x == 0) ids[row] = id, drawn[row] = id;
}
