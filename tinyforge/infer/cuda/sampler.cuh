// Sampling the next token: a block reads the logits of one row, and all of its threads return the token.
//
//   keys        each logit becomes a sort key: larger logits have larger keys, and of equal ones the smaller id
//   greedy      temperature 0: the largest key
//   masks       a logit of -infinity: the token is never sampled, whatever the top k
//   top k       the k-th largest key, found bit by bit; only the tokens from it on are sorted (bitonic sort)
//   masses      prefix sums of exp((z - z_max) / temperature), in float64, most likely token first
//   cut         to the top k, to the nucleus of mass top_p, and to min_p times the largest probability
//   draw        a uniform number times the mass that is left; the token whose interval holds it
//
// Needs: common.cuh; THREADS of a block; VOCAB and VOCAB_ROWS (padded with -infinity); `A`, the type of logits;
// `Parcel`, the Pack of PARCEL of them that a thread reads at once.

// How the tokens of a row are drawn; for a batch, an array of them (SAMPLER in arguments.py).
struct Sampler {
    float temperature, top_p, min_p;
    int top_k;
    u32 key0, key1;
};

__device__ constexpr int power_of_2(int n) { return n <= 1 ? 1 : 2 * power_of_2((n + 1) / 2); }
constexpr int SORTED = power_of_2(VOCAB_ROWS) < THREADS ? THREADS : power_of_2(VOCAB_ROWS), RUN = SORTED / THREADS;

constexpr u32 FINITE = 1u << 23;  // upper halves of the keys of all logits above -infinity reach this

// Larger logits have larger keys; of equal logits the smaller id has the larger key.
__device__ __forceinline__ u64 sort_key(float logit, int id) {
    const u32 bits = __float_as_uint(logit + 0.0f);
    return u64(bits ^ (bits >> 31 ? ~0u : 1u << 31)) << 32 | (~0u - id);
}
__device__ __forceinline__ float logit_of(u64 key) {
    const u32 bits = key >> 32;
    return __uint_as_float(bits ^ (bits >> 31 ? 1u << 31 : ~0u));
}
__device__ __forceinline__ int id_of(u64 key) { return ~0u - u32(key); }

// Number `index` of the stream with this key, in [0, 1): Philox 4x32-10, as tinyforge/rng.py draws it.
__device__ __forceinline__ double uniform(u32 index, u32 key0, u32 key1) {
    u32 c0 = index, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 p0 = u64(c0) * 0xD2511F53u, p1 = u64(c2) * 0xCD9E8D57u;
        c0 = u32(p1 >> 32) ^ c1 ^ key0, c1 = u32(p1), c2 = u32(p0 >> 32) ^ c3 ^ key1, c3 = u32(p0);
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return double(u64(c0 >> 5) << 26 | c1 >> 6) * (1.0 / 9007199254740992.0);
}

// block_sum over the threads that compute.
__device__ __forceinline__ int sum_of_block(int x, int *scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync();
    x = warp_sum(threadIdx.x % 32 < THREADS / 32 ? scratch[threadIdx.x % 32] : 0);
    sync();
    return x;
}

// The next token. take(x, at): fills x[i] with the logits from number at(i) on, nothing where at(i) < 0.
template <class Take>
__device__ __forceinline__ int next_token(unsigned char *scratch, Take take, const Sampler &how, u32 draw) {
    u64 *const sorted = reinterpret_cast<u64 *>(scratch);               // SORTED
    double *const masses = reinterpret_cast<double *>(sorted + SORTED);  // 32
    double &mass = masses[32];
    int *const counts = reinterpret_cast<int *>(masses + 33);  // 32
    int &found = counts[32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    constexpr int COUNT = VOCAB_ROWS / PARCEL, EACH = ceil_div(COUNT, THREADS), FEW = EACH < 8 ? EACH : 8;
    u32 ranks[(EACH + FEW - 1) / FEW * FEW * PARCEL];  // the upper halves of the sort keys; 0 for no token
#pragma unroll
    for (int base = 0; base < EACH; base += FEW) {
        Parcel x[FEW];
        take(x, [&](int i) {
            const int at = thread + (base + i) * THREADS;
            return at < COUNT ? at * PARCEL : -1;
        });
#pragma unroll
        for (int i = 0; i < FEW; i++) {
#pragma unroll
            for (int j = 0; j < PARCEL; j++) {
                const bool token = thread + (base + i) * THREADS < COUNT;
                ranks[(base + i) * PARCEL + j] = token ? sort_key(float(x[i].v[j]), 0) >> 32 : 0;
            }
        }
    }
    const auto id_at = [&](int i) { return (thread + i / PARCEL * THREADS) * PARCEL + i % PARCEL; };
    constexpr int OWN = sizeof(ranks) / sizeof(u32);

    if (how.temperature == 0) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) best = largest(best, u64(ranks[i]) << 32 | (~0u - id_at(i)));
        best = warp_max(best);
        if (lane == 0) sorted[warp] = best;
        sync();
        for (int w = 0; w < THREADS / 32; w++) best = largest(best, sorted[w]);
        sync();
        return id_of(best);
    }

    // The rank of the last of the top k, found bit by bit: the largest that at least k tokens reach. Only these tokens
    // are sorted.
    const int limit = how.top_k ? min(how.top_k, VOCAB) : VOCAB;
    u32 least = 0;
    if (limit < VOCAB) {
        for (int bit = 31; bit >= 0; bit--) {
            const u32 trial = least | 1u << bit;
            int reach = 0;
#pragma unroll
            for (int i = 0; i < OWN; i++) reach += ranks[i] >= trial;
            reach = sum_of_block(reach, counts);
            if (reach >= limit) least = trial;
            if (reach == limit) break;
        }
    }
    least = largest(least, FINITE);
    if (thread == 0) found = 0;
    sync();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (ranks[i] < least) continue;
        sorted[atomicAdd(&found, 1)] = u64(ranks[i]) << 32 | (~0u - id_at(i));  // in any order: sorted next
    }
    sync();
    const int tokens = found;
    int length = 2;
    while (length < tokens) length *= 2;
    for (int i = tokens + thread; i < length; i += THREADS) sorted[i] = 0;
    sync();
    for (int size = 2; size <= length; size *= 2) {
        for (int gap = size / 2; gap; gap /= 2) {
            for (int pair = thread; pair < length / 2; pair += THREADS) {
                const int low = (pair & -gap) * 2 + (pair & (gap - 1)), high = low + gap;
                const u64 a = sorted[low], b = sorted[high];
                if (((low & size) == 0) == (a < b)) sorted[low] = b, sorted[high] = a;
            }
            sync();
        }
    }

    // up_to[i]: exp((z - z[0]) / temperature) summed over the tokens up to number thread * RUN + i.
    const float highest = logit_of(sorted[0]);
    double up_to[RUN], before = 0;
    int likely = 0;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const int at = thread * RUN + i;
        const float p = at < tokens ? exp((logit_of(sorted[at]) - highest) / how.temperature) : 0.0f;
        likely += at < tokens && p >= how.min_p;
        before += p;
        up_to[i] = before;
    }
    double own = before;
#pragma unroll
    for (int gap = 1; gap < 32; gap *= 2) {
        const double below = __shfl_up_sync(~0u, before, gap);
        if (lane >= gap) before += below;
    }
    if (lane == 31) masses[warp] = before;
    likely = sum_of_block(likely, counts);
    before -= own;
    for (int w = 0; w < warp; w++) before += masses[w];
    int inside = 0, below = 0;
    const auto mass_of_first = [&](int some) {
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (thread * RUN + i == some - 1) mass = before + up_to[i];
        sync();
        const double found = mass;
        sync();
        return found;
    };
    const double nucleus = how.top_p * mass_of_first(limit);
#pragma unroll
    for (int i = 0; i < RUN; i++) inside += thread * RUN + i < limit && before + up_to[i] < nucleus;
    inside = min(sum_of_block(inside, counts) + 1, limit);
    if (how.top_p >= 1) inside = limit;
    const int kept = max(min(inside, likely), 1);
    const double target = uniform(draw, how.key0, how.key1) * mass_of_first(kept);
#pragma unroll
    for (int i = 0; i < RUN; i++) below += thread * RUN + i < kept && before + up_to[i] <= target;
    below = min(sum_of_block(below, counts), kept - 1);
    const int id = largest(id_of(sorted[below]), 0);  // 0 where no token may be sampled
    sync();
    return id;
}
